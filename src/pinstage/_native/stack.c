/* Leaves whose bytes are in several places until they are packed: samples of one field, to be
 * stacked, and rows of a tensor, to be gathered. */
#include "blocks.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    PyObject_HEAD
    PyObject *kept, *like; /* the samples, or the copied index; and a tensor of the dtype */
    long long more_work;
    int32_t ndim;
    int64_t shape[MAX_DIMS]; /* of the result */
    Stack *stack;
} StackObject;

PyObject *stack_type;

const Stack *stack_of(PyObject *object) {
    if ((PyObject *)Py_TYPE(object) == stack_type) return ((StackObject *)object)->stack;
    PyErr_Format(PyExc_TypeError, "this isn't a stack");
    return NULL;
}

static size_t sizes_bytes(int32_t ndim) { return sizeof(int64_t) * (size_t)ndim; }

/* A stack of leaves like this one, without any yet; NULL with an error. */
static Stack *stack_new(const Found *first, Py_ssize_t count) {
    Stack *stack =
        malloc(sizeof *stack + (sizeof(Leaf) + sizes_bytes(first->ndim)) * (size_t)count);
    if (stack == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    stack->count = count;
    stack->nbytes = first->nbytes * count;
    stack->dtype = first->dtype;
    stack->ndim = first->ndim;
    memcpy(stack->shape, first->shape, sizes_bytes(first->ndim));
    return stack;
}

/* Return the object of a stack, which it takes, as it does `kept`; NULL with an error. `shape`: of
 * the result. */
static StackObject *object_of(Stack *stack, PyObject *kept, PyObject *like, int32_t ndim,
                              const int64_t *shape) {
    StackObject *self = (StackObject *)PyType_GenericAlloc((PyTypeObject *)stack_type, 0);
    if (self == NULL || stack == NULL || kept == NULL) {
        free(stack);
        Py_XDECREF(kept);
        Py_CLEAR(self);
        return NULL;
    }
    self->stack = stack;
    self->kept = kept;
    self->like = Py_NewRef(like);
    self->ndim = ndim;
    memcpy(self->shape, shape, sizes_bytes(ndim));
    return self;
}

int find_stack(PyObject *object, Found *leaf) {
    const StackObject *self = (StackObject *)object;
    leaf->kind = RAW;
    leaf->dtype = self->stack->dtype;
    leaf->ndim = self->ndim;
    leaf->nbytes = self->stack->nbytes;
    leaf->data = NULL;
    memcpy(leaf->shape, self->shape, sizes_bytes(self->ndim));
    if (set_contiguous(self->ndim, self->shape, leaf->stride)) return 0;
    fail(PyExc_OverflowError, "a leaf is larger than any memory");
    return -1;
}

static void stack_dealloc(PyObject *object) {
    StackObject *self = (StackObject *)object;
    free(self->stack);
    Py_XDECREF(self->kept);
    Py_XDECREF(self->like);
    free_object(object);
}

static PyObject *stack_tensor(PyObject *object, UNUSED PyObject *nothing) {
    const StackObject *self = (StackObject *)object;
    const Stack *stack = self->stack;
    PyObject *tensor =
        PyObject_CallMethod(self->like, "new_empty", "(N)", tuple_of(self->ndim, self->shape));
    Found made;
    if (tensor == NULL || stack->nbytes == 0) return tensor;
    if (Py_TYPE(tensor) != torch.tensor) return tensor; /* in a mode that makes fake ones */
    if (find_tensor(tensor, DL_CPU, 0, &made) != 0) {
        Py_DECREF(tensor);
        return PyErr_Format(PyExc_RuntimeError, "torch made a tensor that can't be filled");
    }
    Py_BEGIN_ALLOW_THREADS
    pack_all(stack->leaves, stack->count, (char *)made.data, stack->nbytes, false);
    Py_END_ALLOW_THREADS
    return tensor;
}

static PyObject *stack_more_work(PyObject *object, UNUSED void *nothing) {
    return PyLong_FromLongLong(((StackObject *)object)->more_work);
}

static PyMethodDef stack_methods[] = {
    {"tensor", stack_tensor, METH_NOARGS,
     "tensor(): stack the samples, or gather the rows, now; a new tensor."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef stack_getters[] = {
    {"more_work", stack_more_work, NULL,
     "Packing takes as long as packing this many bytes more: rows wait for memory, and short ones "
     "longer.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot stack_slots[] = {
    {Py_tp_dealloc, stack_dealloc},
    {Py_tp_methods, stack_methods},
    {Py_tp_getset, stack_getters},
    {Py_tp_doc, "A leaf that isn't stacked, or gathered, yet. Made by `alike` and `stack_rows`."},
    {0, NULL},
};
PyType_Spec stack_spec = {"pinstage._native._core.Stack", sizeof(StackObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, stack_slots};

/* -- leaves ------------------------------------------------------------------------------------ */

static const int64_t *strides_of(const Found *leaf) {
    return leaf->kind == RAW ? leaf->stride : leaf->source_stride;
}

/* Whether a leaf has the strides of a new tensor, also in dimensions of size 1. Otherwise
 * `torch.stack` may choose other strides for the stack. `from`: the first dimension that counts. */
static bool has_usual_strides(const Found *leaf, int32_t from) {
    const int64_t *stride = strides_of(leaf);
    int64_t expected = 1;
    for (int32_t d = leaf->ndim - 1; d >= from; d--) {
        if (stride[d] != expected) return false;
        expected *= leaf->shape[d] > 1 ? leaf->shape[d] : 1;
    }
    return true;
}

/* A leaf to be packed in the order of its dimensions. A dense one may be permuted. */
static Leaf leaf_of(const Found *found, const int64_t *shape, const int64_t *strides) {
    bool is_strided =
        found->kind == STRIDED || !is_contiguous(found->ndim, found->shape, found->stride);
    return (Leaf){.source = found->data,
                  .nbytes = found->nbytes,
                  .shape = shape,
                  .strides = is_strided ? strides : NULL,
                  .ndim = found->ndim,
                  .itemsize = torch.itemsize[found->dtype]};
}

/* -- samples ----------------------------------------------------------------------------------- */

static bool is_like_first(const Stack *stack, const Found *leaf) {
    if (leaf->dtype != stack->dtype || leaf->ndim != stack->ndim) return false;
    return memcmp(leaf->shape, stack->shape, sizes_bytes(leaf->ndim)) == 0;
}

static void set_sample(Stack *stack, Py_ssize_t index, const Found *leaf) {
    int64_t *strides = (int64_t *)(stack->leaves + stack->count) + index * leaf->ndim;
    memcpy(strides, strides_of(leaf), sizes_bytes(leaf->ndim));
    stack->leaves[index] = leaf_of(leaf, stack->shape, strides);
    stack->leaves[index].offset = index * leaf->nbytes;
}

/* Describe a sample, which the caller's list keeps. Returns what `find_tensor` returns. */
static int find_sample(PyObject *samples, Py_ssize_t index, Found *leaf) {
    PyObject *sample = PySequence_GetItem(samples, index);
    if (sample == NULL) return -1;
    int result = Py_TYPE(sample) == torch.tensor ? find_tensor(sample, DL_CPU, 0, leaf) : NOT_PLAIN;
    Py_DECREF(sample);
    return result;
}

/* Add a sample; the first one makes the stack. Returns what `find_tensor` returns. */
static int add_sample(Stack **stack, PyObject *samples, Py_ssize_t index, Py_ssize_t count,
                      bool usual) {
    Found leaf;
    int result = find_sample(samples, index, &leaf);
    if (result != 0) return result;
    if (leaf.nbytes > INT64_MAX / count || leaf.ndim == MAX_DIMS ||
        (usual && !has_usual_strides(&leaf, 0)))
        return NOT_PLAIN;
    if (index == 0) *stack = stack_new(&leaf, count);
    if (*stack == NULL) return -1;
    if (!is_like_first(*stack, &leaf)) return NOT_PLAIN;
    set_sample(*stack, index, &leaf);
    return 0;
}

/* Return the object of a stack, which it takes, of samples; NULL with an error. */
static StackObject *stacked(Stack *stack, PyObject *samples) {
    int64_t shape[MAX_DIMS] = {stack->count};
    memcpy(shape + 1, stack->shape, sizes_bytes(stack->ndim));
    PyObject *first = PySequence_GetItem(samples, 0);
    if (first == NULL) {
        free(stack);
        return NULL;
    }
    StackObject *made = object_of(stack, Py_NewRef(samples), first, stack->ndim + 1, shape);
    Py_DECREF(first);
    return made;
}

/* alike(samples, usual): a stack of plain CPU tensors of one dtype and shape; None if they
 * aren't. `usual`: they also have to have the strides of new tensors. */
PyObject *alike(UNUSED PyObject *module, PyObject *args) {
    PyObject *samples;
    int usual;
    if (!PyArg_ParseTuple(args, "Op:alike", &samples, &usual)) return NULL;
    Py_ssize_t count = PySequence_Size(samples);
    if (count < 0) return NULL;
    Stack *stack = NULL;
    int result = count == 0 || may_be_dual() ? NOT_PLAIN : 0;
    for (Py_ssize_t i = 0; i < count && result == 0; i++)
        result = add_sample(&stack, samples, i, count, usual != 0);
    if (result != 0) free(stack);
    if (result == -1) return NULL;
    return result == 0 ? (PyObject *)stacked(stack, samples) : Py_NewRef(Py_None);
}

/* -- rows -------------------------------------------------------------------------------------- */

/* Describe an index; false with an error. */
static bool find_index(PyObject *index, Found *leaf) {
    bool is_tensor = Py_TYPE(index) == torch.tensor;
    int result = is_tensor ? find_tensor(index, DL_CPU, 0, leaf) : find_array(index, leaf);
    if (is_tensor && torch.handle_at == 0) { /* it isn't known where tensors are */
        PyObject *array = PyObject_CallMethod(index, "numpy", NULL);
        if (array == NULL) return false;
        result = find_array(array, leaf);
        Py_DECREF(array);
    }
    if (result == 0 && (leaf->dtype == torch.by_format['i'] || leaf->dtype == torch.by_format['q']))
        return true;
    return fail(PyExc_TypeError,
                "an index is of int32 or int64, on the CPU, with the memory for its shape");
}

static int64_t count_of(const Found *leaf) { return leaf->nbytes / torch.itemsize[leaf->dtype]; }

/* Let negative numbers count from the end, in place; false with an error if one is out of range. */
static bool count_from_start(int64_t *index, int64_t count, int64_t length) {
    uint64_t last = (uint64_t)length - 1, outside = 0; /* its highest bit, if one is */
    for (int64_t i = 0; i < count; i++) outside |= (uint64_t)index[i] | (last - (uint64_t)index[i]);
    if (outside >> 63 == 0) return true;
    for (int64_t i = 0; i < count; i++) {
        if (index[i] < -length || index[i] >= length) {
            long long rows = length;
            PyErr_Format(PyExc_IndexError,
                         "has an index out of range: %lld for %lld rows, at place %lld of the "
                         "index; pass numbers from %lld to %lld",
                         (long long)index[i], rows, (long long)i, -rows, rows - 1);
            return false;
        }
        if (index[i] < 0) index[i] += length;
    }
    return true;
}

/* Return the numbers of an index, as bytes with int64, none of them negative; NULL with an error if
 * one isn't in a dimension of `length`. */
static PyObject *copy_index(const Found *index, int64_t length) {
    int64_t count = count_of(index), nbytes = count * (int64_t)sizeof(int64_t);
    PyObject *copy = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)nbytes);
    if (copy == NULL) return NULL;
    char *numbers = PyBytes_AsString(copy), *narrow = numbers + nbytes - index->nbytes;
    Leaf leaf = leaf_of(index, index->shape, strides_of(index));
    pack_all(&leaf, 1, narrow, index->nbytes, false);
    for (int64_t i = 0; i < count && narrow != numbers; i++) {
        int32_t number;
        memcpy(&number, narrow + 4 * i, 4);
        int64_t wide = number;
        memcpy(numbers + 8 * i, &wide, 8); /* the next ones are behind it */
    }
    if (!count_from_start((int64_t *)numbers, count, length)) Py_CLEAR(copy);
    return copy;
}

/* Return the copy of an index into `length` rows; NULL with an error. `copies` has earlier ones, with
 * their indices, whose addresses are used only once so. Another thread may have resized an index
 * since. */
static PyObject *copy_once(PyObject *copies, PyObject *index, const Found *found, int64_t length) {
    PyObject *key = Py_BuildValue("(NLL)", PyLong_FromVoidPtr(index), (long long)length,
                                  (long long)count_of(found));
    if (key == NULL) return NULL;
    PyObject *known = PyDict_GetItemWithError(copies, key), *copy = NULL;
    if (known != NULL) {
        copy = Py_XNewRef(PyTuple_GetItem(known, 1));
    } else if (!PyErr_Occurred() && (copy = copy_index(found, length)) != NULL) {
        PyObject *both = PyTuple_Pack(2, index, copy);
        if (both == NULL || PyDict_SetItem(copies, key, both) != 0) Py_CLEAR(copy);
        Py_XDECREF(both);
    }
    Py_DECREF(key);
    return copy;
}

/* A stack of one leaf: `count` rows of a tensor; NULL with an error. */
static Stack *stack_of_rows(const Found *source, const int64_t *index, int64_t count) {
    Stack *stack = stack_new(source, 1);
    if (stack == NULL) return NULL;
    int64_t length = source->shape[0];
    stack->nbytes = length > 0 ? source->nbytes / length * count : 0;
    stack->rows = (Rows){.index = index};
    if (stack->nbytes > 0) { /* the strides of rows without bytes may have any size */
        stack->rows.row_bytes = stack->nbytes / count;
        stack->rows.distance = strides_of(source)[0] * torch.itemsize[source->dtype];
    }
    stack->leaves[0] =
        (Leaf){.source = source->data, .nbytes = stack->nbytes, .rows = &stack->rows};
    return stack;
}

/* Whether rows of a source can be gathered here. */
static bool is_usual(const Found *source, const Found *index, int64_t count) {
    return index->ndim + source->ndim - 1 <= MAX_DIMS && has_usual_strides(source, 1) &&
           (source->nbytes == 0 || count <= INT64_MAX / 4 / source->nbytes * source->shape[0]);
}

/* Return a stack of the rows with these numbers; NULL with an error. */
static PyObject *gathered(PyObject *tensor, const Found *source, const Found *index, PyObject *copy,
                          int64_t count) {
    int64_t shape[MAX_DIMS];
    memcpy(shape, index->shape, sizes_bytes(index->ndim));
    memcpy(shape + index->ndim, source->shape + 1, sizes_bytes(source->ndim - 1));
    Stack *stack = stack_of_rows(source, (const int64_t *)PyBytes_AsString(copy), count);
    StackObject *made =
        object_of(stack, Py_NewRef(copy), tensor, index->ndim + source->ndim - 1, shape);
    if (made != NULL && stack->nbytes > 0) {
        int64_t in_rows = count * ROW_BYTES - stack->nbytes;
        made->more_work = in_rows > stack->nbytes ? in_rows : stack->nbytes;
    }
    return (PyObject *)made;
}

/* stack_rows(tensor, index, copies): a stack of the rows with the numbers of an int32 or int64 tensor
 * or array. An IndexError, without a subject, if one is out of range. Only a copy of the index is
 * checked, and used; `copies` is a dict that shares it with later calls for the same index. If torch
 * has to gather the rows, because the tensor isn't plain, or its rows haven't the strides of new
 * tensors, that copy is returned: bytes with int64, none of them negative. */
PyObject *stack_rows(UNUSED PyObject *module, PyObject *args) {
    PyObject *tensor, *index, *copies;
    if (!PyArg_ParseTuple(args, "OOO!:stack_rows", &tensor, &index, &PyDict_Type, &copies))
        return NULL;
    Found source, numbers;
    bool is_plain = Py_TYPE(tensor) == torch.tensor && !may_be_dual() &&
                    find_tensor(tensor, DL_CPU, 0, &source) == 0 && source.ndim > 0;
    int64_t length = is_plain ? source.shape[0] : (int64_t)PyObject_Size(tensor);
    /* Last: `len` may run Python code, which may change the index. */
    if (length < 0 || !find_index(index, &numbers)) return NULL;
    int64_t count = count_of(&numbers);
    PyObject *copy = copy_once(copies, index, &numbers, length);
    if (copy == NULL) return NULL;
    if (!is_plain || !is_usual(&source, &numbers, count)) return copy;
    PyObject *made = gathered(tensor, &source, &numbers, copy, count);
    Py_DECREF(copy);
    return made;
}

/* Describing leaves, which makes the offset table. */
#include "core.h"

#include <stdlib.h>
#include <string.h>

/* -- what a leaf is ----------------------------------------------------------------------------------------------- */

static void set_contiguous(int32_t ndim, const int64_t *shape, int64_t *stride) {
    int64_t step = 1;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        stride[d] = step;
        step *= shape[d] > 1 ? shape[d] : 1;
    }
}

/* Fill in what follows from dtype, shape and the source's stride. */
static int arrange(Found *leaf, const int64_t *shape, const int64_t *stride) {
    int64_t count = 1, step = 1; /* a shape without elements may still have more steps than can be counted */
    for (int32_t d = 0; d < leaf->ndim; d++) {
        leaf->shape[d] = shape[d];
        leaf->stride[d] = stride[d];
        if (shape[d] < 0 || __builtin_mul_overflow(step, shape[d] > 1 ? shape[d] : 1, &step)) return NOT_PLAIN;
        count *= shape[d];
    }
    if (__builtin_mul_overflow(count, (int64_t)torch.itemsize[leaf->dtype], &leaf->nbytes)) return NOT_PLAIN;
    if (leaf->nbytes > INT64_MAX / 4) return NOT_PLAIN; /* Python refuses it */
    leaf->kind = count == 0 || is_dense(leaf->ndim, shape, stride) ? RAW : STRIDED;
    if (leaf->kind == RAW) return 0;
    set_contiguous(leaf->ndim, shape, leaf->stride);
    memcpy(leaf->source_stride, stride, sizeof(int64_t) * (size_t)leaf->ndim);
    return 0;
}

int dtype_of(void *handle) { /* not by DLPack, which has one name for several: int8, int4 */
    int32_t number;
    if (torch.get_dtype(handle, &number) || number < 0 || number > 255) return -1;
    return torch.by_scalar[number] == 255 ? -1 : torch.by_scalar[number];
}

static bool fits_its_storage(void *handle, const Found *leaf, const int64_t *stride) {
    int64_t size, offset, reach = 1;
    if (torch.storage_size(handle, &size) || torch.storage_offset(handle, &offset)) return false;
    for (int32_t d = 0; d < leaf->ndim; d++) {
        if (stride[d] < 0) return false;
        reach += (leaf->shape[d] - 1) * stride[d];
    }
    return (offset + reach) * torch.itemsize[leaf->dtype] <= size;
}

int find_tensor(PyObject *object, int32_t device_type, int32_t device_id, Found *leaf) {
    DLTensor tensor;
    void *handle = handle_of(object);
    if (torch.handle_at == 0) return NOT_PLAIN;
    if (torch.export_tensor(object, &tensor)) {
        PyErr_Clear(); /* sparse, nested, fake, a dtype that DLPack does not have */
        return NOT_PLAIN;
    }
    if (tensor.device_type != device_type || (device_type != DL_CPU && tensor.device_id != device_id)) return NOT_PLAIN;
    leaf->dtype = dtype_of(handle);
    if (leaf->dtype < 0 || tensor.ndim > MAX_DIMS) return NOT_PLAIN;
    if (tensor.dtype.bits * tensor.dtype.lanes != 8 * torch.itemsize[leaf->dtype]) return NOT_PLAIN;
    leaf->ndim = tensor.ndim;
    leaf->data = (const char *)tensor.data + tensor.byte_offset;
    if (arrange(leaf, tensor.shape, tensor.strides) != 0) return NOT_PLAIN;
    /* DLPack's exchange lacks these flags: */
    if (torch.requires_grad(*(void **)handle) || torch.is_neg(handle)) return NOT_PLAIN;
    if (tensor.dtype.code == DL_COMPLEX && torch.is_conj(handle)) return NOT_PLAIN;
    if (leaf->nbytes && (tensor.data == NULL || !fits_its_storage(handle, leaf, tensor.strides))) return NOT_PLAIN;
    return 0;
}

int find_array(PyObject *object, Found *leaf) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(object, &buffer, PyBUF_RECORDS_RO) != 0) {
        PyErr_Clear(); /* such as dates */
        return NOT_PLAIN;
    }
    int result = NOT_PLAIN;
    const unsigned char *format = (const unsigned char *)(buffer.format == NULL ? "B" : buffer.format);
    bool is_complex = format[0] == 'Z';
    format += is_complex;
    int dtype = format[0] && format[0] < 128 && !format[1] ? torch.by_format[format_index(format[0], is_complex)] : 255;
    if (dtype != 255 && buffer.ndim <= MAX_DIMS && buffer.itemsize == torch.itemsize[dtype]) {
        int64_t shape[MAX_DIMS], stride[MAX_DIMS];
        bool is_plain = (uintptr_t)buffer.buf % (uintptr_t)buffer.itemsize == 0;
        for (int d = 0; d < buffer.ndim && is_plain; d++) {
            shape[d] = buffer.shape[d];
            stride[d] = buffer.strides[d] / buffer.itemsize;
            is_plain = buffer.strides[d] >= 0 && buffer.strides[d] % buffer.itemsize == 0;
        }
        leaf->dtype = dtype;
        leaf->ndim = buffer.ndim;
        leaf->data = buffer.buf;
        if (is_plain) result = arrange(leaf, shape, stride);
        bool is_empty = result == 0 && leaf->nbytes == 0;
        if (is_empty) set_contiguous(leaf->ndim, leaf->shape, leaf->stride); /* the buffer's may be 0 */
    }
    PyBuffer_Release(&buffer);
    return result;
}

/* -- asking Python about a leaf -------------------------------------------------------------------------------------- */

static bool read_sizes(PyObject *tuple, int64_t *sizes, int32_t ndim) {
    for (int32_t d = 0; d < ndim; d++) {
        PyObject *size = PySequence_GetItem(tuple, d);
        if (size == NULL) return false;
        sizes[d] = PyLong_AsLongLong(size);
        Py_DECREF(size);
        if (sizes[d] == -1 && PyErr_Occurred()) return false;
    }
    return true;
}

/* Read a `pinstage._batch._describe.Described`. Tensors to keep alive are added to `kept`. */
static bool read_described(PyObject *answer, PyObject *kept, Found *leaf) {
    PyObject *sizes, *strides, *source;
    unsigned long long address;
    int kind;
    int64_t shape[MAX_DIMS], stride[MAX_DIMS];
    if (!PyArg_ParseTuple(answer, "iiOOOK:described", &kind, &leaf->dtype, &sizes, &strides, &source, &address)) return false;
    leaf->data = (const char *)(uintptr_t)address;
    leaf->nbytes = 0; /* `find_tensor` may have set it */
    Py_ssize_t ndim = PySequence_Size(sizes);
    if (ndim < 0) return false;
    if (ndim > MAX_DIMS || kind < OTHER || kind > MOVED || kind == STRIDED || leaf->dtype < 0 || leaf->dtype >= MOST_DTYPES)
        return fail(PyExc_ValueError, "a leaf was described in a way that no table can have");
    leaf->ndim = (int32_t)ndim;
    if (!read_sizes(sizes, shape, leaf->ndim) || !read_sizes(strides, stride, leaf->ndim)) return false;
    if (kind != RAW) {
        leaf->kind = kind;
        return true;
    }
    if (arrange(leaf, shape, stride) != 0) return fail(PyExc_OverflowError, "a leaf is larger than any memory");
    return PyList_Append(kept, source) == 0;
}

/* Let Python describe a leaf; -1 with an error. */
static int ask(PyObject *plainly, PyObject *object, Py_ssize_t index, PyObject *kept, Found *leaf) {
    PyObject *answer = PyObject_CallFunction(plainly, "On", object, index);
    bool is_good = answer != NULL && read_described(answer, kept, leaf);
    Py_XDECREF(answer);
    return is_good ? 0 : -1;
}

/* -- leaves that are repeated ---------------------------------------------------------------------------------------- */

typedef struct {
    struct {
        PyObject *object;
        int64_t index;
    } *places;
    size_t mask;
} Met;

static bool met_new(Met *met, Py_ssize_t count) {
    size_t size = 16;
    while (size < 2 * (size_t)count) size *= 2;
    met->mask = size - 1;
    met->places = calloc(size, sizeof *met->places);
    return met->places != NULL || no_memory();
}

/* Return the index at which an object was first met, which is this one if it is new. */
static int64_t met_first(Met *met, PyObject *object, int64_t index) {
    size_t at = (((uintptr_t)object >> 4) * 0x9E3779B97F4A7C15u >> 20) & met->mask;
    while (met->places[at].object != NULL && met->places[at].object != object) at = (at + 1) & met->mask;
    if (met->places[at].object == NULL) {
        met->places[at].object = object;
        met->places[at].index = index;
    }
    return met->places[at].index;
}

/* -- the table ------------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject *data, *addresses; /* bytes, which nothing else refers to yet */
    Header *table;              /* in `data`, with its rows behind it */
    char *sources;              /* in `addresses` */
    int64_t filled;             /* rows */
} Growing;

static int64_t *source_at(const Growing *self, int64_t index) {
    return (int64_t *)(self->sources + source_bytes(self->table->width) * (size_t)index);
}

/* Make bytes, all zeros; return where they are. */
static void *new_bytes(PyObject **bytes, size_t size) {
    *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    return *bytes == NULL ? NULL : memset(PyBytes_AsString(*bytes), 0, size);
}

static void growing_end(Growing *self) {
    Py_XDECREF(self->data);
    Py_XDECREF(self->addresses);
}

/* Make a table with room for that many dimensions, and copy the rows that are filled. */
static bool widen(Growing *self, int64_t rows, int64_t width) {
    Growing wide = {.filled = self->filled};
    wide.table = new_bytes(&wide.data, sizeof(Header) + row_bytes(width) * (size_t)rows);
    wide.sources = new_bytes(&wide.addresses, source_bytes(width) * (size_t)rows);
    if (wide.table == NULL || wide.sources == NULL) {
        growing_end(&wide);
        return false;
    }
    *wide.table = (Header){TABLE_MAGIC, rows, width, 0};
    for (int64_t i = 0; i < self->filled; i++) {
        const Row *from = row_at(self->table, i);
        Row *to = row_at(wide.table, i);
        size_t kept = (size_t)self->table->width * sizeof(int64_t);
        memcpy(to, from, sizeof(Row) + kept);
        memcpy(to->sizes + width, from->sizes + self->table->width, kept);
        memcpy(source_at(&wide, i), source_at(self, i), sizeof(int64_t) + kept);
    }
    growing_end(self);
    *self = wide;
    return true;
}

/* Prefetch the memory of the next leaves: a batch's tensors are usually scattered, and not in the caches. */
static void look_ahead(PyObject *leaves, Py_ssize_t count, Py_ssize_t index) {
    if (index + 16 < count) __builtin_prefetch(PyList_GetItem(leaves, index + 16));
    if (index + 8 >= count || torch.handle_at == 0) return;
    PyObject *object = PyList_GetItem(leaves, index + 8);
    if (Py_TYPE(object) != torch.tensor) return;
    const char *tensor = *(const char **)handle_of(object);
    __builtin_prefetch(tensor);
    __builtin_prefetch(tensor + 64);
    __builtin_prefetch(tensor + 128);
}

/* describe(leaves, atoms, plainly, (device_type, device_id), arrays): see `pinstage._batch._describe`. */
PyObject *describe(UNUSED PyObject *module, PyObject *args) {
    PyObject *leaves, *atoms, *plainly;
    int device_type, device_id, arrays;
    if (!PyArg_ParseTuple(args, "O!OO(ii)p:describe", &PyList_Type, &leaves, &atoms, &plainly, &device_type, &device_id,
                          &arrays))
        return NULL;
    bool are_plain = !may_be_dual();
    Py_ssize_t count = PyList_Size(leaves);
    Growing made = {NULL};
    Met met = {NULL, 0};
    int64_t *order = NULL;
    PyObject *kept = PyList_New(0), *result = NULL;
    Found leaf;
    Figures sum = {0};
    if (kept == NULL || !met_new(&met, count) || !widen(&made, count, 1)) goto done;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *object = PyList_GetItem(leaves, i);
        if (object == NULL) goto done;
        look_ahead(leaves, count, i);
        PyTypeObject *type = Py_TYPE(object);
        leaf.kind = leaf.dtype = leaf.ndim = 0; /* OTHER */
        leaf.nbytes = 0;
        leaf.data = NULL;
        bool is_data = type == torch.tensor || type == torch.array;
        int is_atom = is_data ? 0 : PySet_Contains(atoms, (PyObject *)type), found = is_atom == 1 ? 0 : NOT_PLAIN;
        if (is_atom < 0) goto done;
        int64_t first = is_atom ? i : met_first(&met, object, i);
        if (first != i) {
            found = 0;
        } else if (type == torch.tensor && are_plain) {
            found = find_tensor(object, device_type, device_id, &leaf);
        } else if (type == torch.array && arrays) {
            found = find_array(object, &leaf);
        }
        if (found == NOT_PLAIN) found = ask(plainly, object, i, kept, &leaf);
        if (found != 0) goto done;
        if (leaf.ndim > made.table->width && !widen(&made, count, leaf.ndim)) goto done;
        Row *row = row_at(made.table, i);
        int64_t *source = source_at(&made, i);
        made.filled = i + 1;
        row->offset = -1;
        if (first != i && row_at(made.table, first)->kind != OTHER) { /* objects that aren't tensors may repeat */
            row->kind = ALIAS;
            row->offset = first;
            continue;
        }
        row->kind = (uint8_t)leaf.kind;
        row->dtype = (uint8_t)leaf.dtype;
        row->nbytes = leaf.nbytes;
        bool is_counted = add_row(&sum, row);
        if (!is_packed(row)) continue;
        row->ndim = (uint8_t)leaf.ndim;
        memcpy(row->sizes, leaf.shape, sizeof(int64_t) * (size_t)leaf.ndim);
        memcpy(row->sizes + made.table->width, leaf.stride, sizeof(int64_t) * (size_t)leaf.ndim);
        source[0] = (int64_t)(uintptr_t)leaf.data;
        if (leaf.kind == STRIDED) memcpy(source + 1, leaf.source_stride, sizeof(int64_t) * (size_t)leaf.ndim);
        bool fits = is_counted && leaf.nbytes <= INT64_MAX / 4 && sum.payload - leaf.nbytes <= INT64_MAX / 4;
        if (!fits && !fail(PyExc_OverflowError, "batch is larger than any memory")) goto done;
    }
    order = malloc(sizeof(int64_t) * (size_t)(sum.packed + 1));
    if (order == NULL && !no_memory()) goto done;
    place_rows(made.table, order);
    result = Py_BuildValue("(NOO)", figures_of(made.data, made.table, &sum), made.addresses, kept);
done:
    Py_XDECREF(kept);
    free(order);
    free(met.places);
    growing_end(&made);
    return result;
}

/* -- samples of one field, to be stacked ------------------------------------------------------------------------------ */

typedef struct {
    int64_t count, nbytes; /* nbytes: of all */
    int64_t shape[MAX_DIMS];
    Leaf leaves[]; /* followed by the stride of each */
} Stack;

static const char STACK[] = "pinstage.Stack";

static void stack_end(PyObject *capsule) { free(PyCapsule_GetPointer(capsule, STACK)); }

/* alike(samples): what `stack` needs, for plain CPU tensors of one dtype and shape; None if they aren't. */
PyObject *alike(UNUSED PyObject *module, PyObject *samples) {
    Py_ssize_t count = PySequence_Size(samples);
    if (count < 0) return NULL;
    Found leaf;
    Stack *stack = NULL;
    int64_t *stride = NULL;
    int dtype = -1, found = may_be_dual() ? NOT_PLAIN : 0;
    for (Py_ssize_t i = 0; i < count && found == 0; i++) {
        PyObject *sample = PySequence_GetItem(samples, i);
        found = sample == NULL ? -1 : Py_TYPE(sample) == torch.tensor ? find_tensor(sample, DL_CPU, 0, &leaf) : NOT_PLAIN;
        Py_XDECREF(sample); /* the caller's list keeps it */
        if (found != 0) break;
        size_t sizes = sizeof(int64_t) * (size_t)leaf.ndim;
        if (i == 0) {
            stack = malloc(sizeof *stack + (sizeof(Leaf) + sizes) * (size_t)count);
            if (stack == NULL) return PyErr_NoMemory();
            stack->count = count;
            if (__builtin_mul_overflow(leaf.nbytes, count, &stack->nbytes)) found = NOT_PLAIN;
            memcpy(stack->shape, leaf.shape, sizes);
            stride = (int64_t *)(stack->leaves + count);
            dtype = leaf.dtype;
            stack->leaves[0].ndim = leaf.ndim;
        }
        if (leaf.dtype != dtype || leaf.ndim != stack->leaves[0].ndim || memcmp(leaf.shape, stack->shape, sizes)) {
            found = NOT_PLAIN;
        }
        if (found != 0) break;
        /* A dense sample may be permuted; in the stack it is contiguous. */
        bool strided = leaf.kind == STRIDED || !is_contiguous(leaf.ndim, leaf.shape, leaf.stride);
        stack->leaves[i] = (Leaf){.source = leaf.data,
                                  .offset = i * leaf.nbytes,
                                  .nbytes = leaf.nbytes,
                                  .ndim = leaf.ndim,
                                  .shape = stack->shape,
                                  .strides = strided ? stride : NULL,
                                  .itemsize = torch.itemsize[dtype]};
        memcpy(stride, leaf.kind == STRIDED ? leaf.source_stride : leaf.stride, sizes);
        stride += leaf.ndim;
    }
    PyObject *capsule = found == 0 && stack != NULL ? PyCapsule_New(stack, STACK, stack_end) : NULL;
    if (capsule != NULL) return capsule;
    free(stack);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* stack(found, address, nbytes): write samples one after the other; `found` is the result of `alike`. */
PyObject *stack(UNUSED PyObject *module, PyObject *args) {
    PyObject *found;
    unsigned long long address;
    long long room;
    if (!PyArg_ParseTuple(args, "OKL:stack", &found, &address, &room)) return NULL;
    const Stack *stack = PyCapsule_GetPointer(found, STACK);
    if (stack == NULL) return NULL;
    if (stack->nbytes > room) return PyErr_Format(PyExc_ValueError, "samples need more room than there is");
    Py_BEGIN_ALLOW_THREADS
    pack_all(stack->leaves, stack->count, (char *)(uintptr_t)address, stack->nbytes, true);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

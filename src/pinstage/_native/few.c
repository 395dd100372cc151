/* A few small leaves, each copied to a tensor of its own, without a slab. */
#include "blocks.h"
#include "driver.h"

#include <stdlib.h>
#include <string.h>

/* More bytes are moved as quickly from one slab. */
enum { MOST_FEW_BYTES = 1024 * 1024 };

typedef struct {
    PyObject *leaves;           /* of the batch */
    PyObject *atoms, *wrappers; /* see `move_few` */
    bool is_cuda;
    int device_index;
    void *stream;
    int count; /* tensors and arrays among the leaves */
    int made;  /* those that have a destination */
    int64_t nbytes;
    Found sources[MOST_FEW];
    Py_ssize_t index[MOST_FEW];  /* of each source in the leaves */
    PyObject *tensors[MOST_FEW]; /* the destinations, held */
    char *to[MOST_FEW];          /* their memory */
} Few;

static bool is_repeated(const Few *few, PyObject *leaf) {
    for (int i = 0; i < few->count; i++) {
        if (PyList_GetItem(few->leaves, few->index[i]) == leaf) return true;
    }
    return false;
}

/* Add a tensor or an array. Returns 0, or NOT_PLAIN, or -1 with an error. */
static int add_source(Few *few, PyObject *leaf, Py_ssize_t index) {
    if (few->count == MOST_FEW || is_repeated(few, leaf)) return NOT_PLAIN;
    Found *source = &few->sources[few->count];
    bool is_tensor = Py_TYPE(leaf) == torch.tensor;
    int result = is_tensor ? find_tensor(leaf, DL_CPU, 0, source) : find_array(leaf, source);
    if (result != 0) return result;
    few->nbytes += source->nbytes;
    bool is_small = few->nbytes <= MOST_FEW_BYTES;
    if (!is_small || source->kind != RAW || torch.scalar[source->dtype] < 0) return NOT_PLAIN;
    few->index[few->count++] = index;
    return 0;
}

/* Check that a leaf of another type stays as it is. Returns what `add_source` returns. */
static int check_stays(const Few *few, PyObject *type) {
    int is_atom = PySet_Contains(few->atoms, type),
        is_wrapper = PySet_Contains(few->wrappers, type);
    if (is_atom < 0 || is_wrapper < 0) return -1;
    return is_atom && !is_wrapper ? 0 : NOT_PLAIN;
}

/* Find the sources, which are few, small, dense, and different objects, and are read at once.
 * Returns what `add_source` returns. */
static int find_sources(Few *few) {
    int result = may_be_dual() ? NOT_PLAIN : 0;
    for (Py_ssize_t i = 0; i < PyList_Size(few->leaves) && result == 0; i++) {
        PyObject *leaf = PyList_GetItem(few->leaves, i);
        PyTypeObject *type = Py_TYPE(leaf);
        bool is_data = type == torch.tensor || type == torch.array;
        result = is_data ? add_source(few, leaf, i) : check_stays(few, (PyObject *)type);
    }
    if (result != 0) return result;
    bool is_read = !few->is_cuda || are_read_at_once(few->sources, few->count, few->stream);
    return few->count > 0 && is_read ? 0 : NOT_PLAIN;
}

/* Make the destinations; false if there is no memory. */
static bool make_tensors(Few *few) {
    for (; few->made < few->count; few->made++) {
        const Found *leaf = &few->sources[few->made];
        char **to = &few->to[few->made];
        PyObject *made = new_tensor(leaf->ndim, leaf->shape, leaf->stride, leaf->dtype,
                                    few->is_cuda, few->device_index, to);
        if (made == NULL) return false;
        few->tensors[few->made] = made;
    }
    return true;
}

/* Copy the sources to a device; return CUDA's error. `buffer`: see `copy_at_once`. */
static int copy_to_device(const Few *few, char *buffer) {
    int code = 0;
    PyThreadState *state = PyEval_SaveThread();
    for (int i = 0; i < few->count && code == 0; i++) {
        if (few->sources[i].nbytes > 0)
            code = copy_at_once(few->to[i], &few->sources[i], buffer, few->stream);
    }
    PyEval_RestoreThread(state);
    return code;
}

static void copy_on_host(const Few *few) {
    for (int i = 0; i < few->count; i++) {
        const Found *source = &few->sources[i];
        if (source->nbytes > 0) memmove(few->to[i], source->data, (size_t)source->nbytes);
    }
}

/* The leaves with the destinations in the places of the sources, and the figures that `move_few`
 * returns. */
static PyObject *moved(const Few *few) {
    long copies = 0;
    PyObject *leaves = PyList_GetSlice(few->leaves, 0, PyList_Size(few->leaves));
    for (int i = 0; leaves != NULL && i < few->count; i++) {
        copies += few->sources[i].nbytes > 0;
        if (PyList_SetItem(leaves, few->index[i], Py_XNewRef(few->tensors[i])) != 0)
            Py_CLEAR(leaves);
    }
    return leaves == NULL
               ? NULL
               : Py_BuildValue("(NiLl)", leaves, few->count, (long long)few->nbytes, copies);
}

/* Copy, and return what `move_few` returns. */
static PyObject *copy_few(const Few *few) {
    if (!few->is_cuda) {
        copy_on_host(few);
        return moved(few);
    }
    char *buffer = malloc(AT_ONCE_BYTES);
    if (buffer == NULL) Py_RETURN_NONE;
    int code = copy_to_device(few, buffer);
    free(buffer);
    return code != 0 ? PyLong_FromLong(-(long)code) : moved(few);
}

/* move_few(leaves, (atoms, wrappers), device_type, device_index, stream): move leaves as `.to()`
 * would, on torch's current stream. All leaves have been read when it returns, without waiting for
 * earlier work.
 *
 * atoms: types of leaves that stay as they are, except those of wrappers. Returns the new
 * leaves, how many were moved, their bytes, and the number of copies. Returns None if the leaves
 * are not few, small and plain, would not be read at once, or there is no memory; returns CUDA's
 * error as a negative number. */
PyObject *move_few(UNUSED PyObject *module, PyObject *args) {
    Few few; /* not all zeros: that would take as long as a small copy */
    few.count = few.made = 0;
    few.nbytes = 0;
    int device_type;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "O!(OO)iiK:move_few", &PyList_Type, &few.leaves, &few.atoms,
                          &few.wrappers, &device_type, &few.device_index, &stream))
        return NULL;
    few.is_cuda = device_type == 1;
    few.stream = (void *)(uintptr_t)stream;
    if (!makes_views() || (few.is_cuda && !has_driver())) Py_RETURN_NONE;
    int result = find_sources(&few);
    if (result == -1) return NULL;
    if (result == NOT_PLAIN) Py_RETURN_NONE;
    PyObject *answer = make_tensors(&few) ? copy_few(&few) : Py_NewRef(Py_None);
    for (int i = 0; i < few.made; i++) Py_DECREF(few.tensors[i]);
    return answer;
}

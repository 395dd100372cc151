/* A few small leaves, each copied to a tensor of its own, without a slab. */
#include "blocks.h"
#include "driver.h"

#include <stdlib.h>
#include <string.h>

/* More bytes are moved as quickly from one slab. */
enum { MOST_FEW_BYTES = 1024 * 1024 };

/* Describe leaves, and check that the tensors among them are few, small, dense, and different. Returns their number, -1
 * with an error, or NOT_PLAIN. */
static int find_few(PyObject *leaves, PyObject *atoms, PyObject *wrappers, Found *found, Py_ssize_t *indexes) {
    int count = 0;
    int64_t nbytes = 0;
    if (may_be_dual()) return NOT_PLAIN;
    for (Py_ssize_t i = 0; i < PyList_Size(leaves); i++) {
        PyObject *leaf = PyList_GetItem(leaves, i);
        PyTypeObject *type = Py_TYPE(leaf);
        if (type != torch.tensor && type != torch.array) {
            int is_atom = PySet_Contains(atoms, (PyObject *)type), is_wrapper = PySet_Contains(wrappers, (PyObject *)type);
            if (is_atom < 0 || is_wrapper < 0) return -1;
            if (!is_atom || is_wrapper) return NOT_PLAIN;
            continue;
        }
        for (int j = 0; j < count; j++) {
            if (PyList_GetItem(leaves, indexes[j]) == leaf) return NOT_PLAIN;
        }
        if (count == MOST_FEW) return NOT_PLAIN;
        int result = type == torch.tensor ? find_tensor(leaf, DL_CPU, 0, &found[count]) : find_array(leaf, &found[count]);
        if (result != 0) return result;
        nbytes += found[count].nbytes;
        if (found[count].kind != RAW || nbytes > MOST_FEW_BYTES || torch.scalar[found[count].dtype] < 0) return NOT_PLAIN;
        indexes[count++] = i;
    }
    return count;
}

/* Whether no two of a few leaves have destinations that share a byte. */
static bool are_disjoint(char *const *places, const Found *leaves, int count) {
    for (int i = 0; i < count; i++) {
        for (int j = 0; j < i; j++) {
            if (places[i] < places[j] + leaves[j].nbytes && places[j] < places[i] + leaves[i].nbytes) return false;
        }
    }
    return true;
}

/* move_few(leaves, (atoms, wrappers), device_type, device_index, stream, existing): move leaves as `.to()` would, on
 * torch's current stream, which is not captured. All leaves have been read when it returns, without waiting for earlier
 * work.
 *
 * existing: the tensors to copy to, at the places of their leaves, of at most AT_ONCE_BYTES each; None makes new tensors.
 * atoms: types of leaves that stay as they are, except those of wrappers. Returns the new leaves, how many were moved,
 * their bytes, and the number of copies. Returns None if the leaves are not few, small and plain, would not be read at
 * once, or there is no memory; returns CUDA's error as a negative number. */
PyObject *move_few(UNUSED PyObject *module, PyObject *args) {
    PyObject *leaves, *existing, *atoms, *wrappers, *tensors[MOST_FEW];
    int device_type, device_index;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "O!(OO)iiKO:move_few", &PyList_Type, &leaves, &atoms, &wrappers, &device_type, &device_index,
                          &stream, &existing))
        return NULL;
    if (existing == Py_None) existing = NULL;
    Found found[MOST_FEW];
    Py_ssize_t indexes[MOST_FEW];
    if (!makes_views() || (device_type == 1 && !has_driver())) Py_RETURN_NONE;
    if (existing != NULL && (!PyList_Check(existing) || PyList_Size(existing) != PyList_Size(leaves))) Py_RETURN_NONE;
    int count = find_few(leaves, atoms, wrappers, found, indexes), code = 0, made = 0;
    if (count == -1) return NULL;
    if (count <= 0) Py_RETURN_NONE;
    void *on = (void *)(uintptr_t)stream;
    if (device_type == 1 && !are_read_at_once(found, count, on)) Py_RETURN_NONE;
    char *memory = malloc(AT_ONCE_BYTES), *places[MOST_FEW];
    PyObject *result = NULL;
    for (; memory != NULL && made < count; made++) {
        const Found *leaf = &found[made];
        if (existing == NULL) {
            tensors[made] =
                new_tensor(leaf->ndim, leaf->shape, leaf->stride, leaf->dtype, device_type, device_index, &places[made]);
            if (tensors[made] == NULL) break;
            continue;
        }
        Bytes like = {leaf->dtype, leaf->ndim, leaf->nbytes, leaf->shape, leaf->stride};
        PyObject *place = PyList_GetItem(existing, indexes[made]);
        int there = device_type == 1 ? DL_CUDA : DL_CPU;
        if (leaf->nbytes > AT_ONCE_BYTES || !is_plain_place(place, there, device_index, &like, &places[made])) break;
        tensors[made] = Py_XNewRef(place);
    }
    if (existing != NULL && made == count && !are_disjoint(places, found, count)) Py_DECREF(tensors[--made]);
    int64_t nbytes = 0;
    long copies = 0;
    if (made == count) {
        PyThreadState *state = device_type == 1 ? PyEval_SaveThread() : NULL;
        for (int i = 0; i < count && code == 0; i++) {
            if (found[i].nbytes == 0) continue;
            if (device_type == 1) {
                code = copy_at_once(places[i], &found[i], memory, on);
            } else {
                memmove(places[i], found[i].data, (size_t)found[i].nbytes);
            }
            copies++;
            nbytes += found[i].nbytes;
        }
        if (state != NULL) PyEval_RestoreThread(state);
        if (code == 0) result = PyList_GetSlice(leaves, 0, PyList_Size(leaves));
        for (int i = 0; result != NULL && i < count; i++) {
            if (PyList_SetItem(result, indexes[i], Py_XNewRef(tensors[i])) != 0) Py_CLEAR(result);
        }
    }
    free(memory);
    for (int i = 0; i < made; i++) Py_DECREF(tensors[i]);
    if (code != 0) return PyLong_FromLong(-(long)code);
    if (made < count) Py_RETURN_NONE;
    return result == NULL ? NULL : Py_BuildValue("(NiLl)", result, count, (long long)nbytes, copies);
}

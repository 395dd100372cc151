/* Tensors over a slab, from the offset table, in one call.
 *
 * They are made by torch's stable C shim (`aoti_torch__reinterpret_tensor`), and made objects of Python's by
 * libtorch_python's `THPVariable_Wrap`; see `pinstage._torch`, which looks whether both do what is expected. They share
 * the slab's storage, so that `record_stream` works, and each has a version counter of its own. */
#include "core.h"

static PyObject *view(void *base, const Row *row, int64_t width) {
    void *made = NULL;
    int64_t offset = row->offset / torch.itemsize[row->dtype];
    if (torch.reinterpret(base, row->ndim, row->sizes, row->sizes + width, offset, &made)) {
        PyErr_SetString(PyExc_RuntimeError, "torch could not make a view of the slab");
        return NULL;
    }
    PyObject *object = torch.wrap(made);
    torch.delete_handle(made);
    return object;
}

/* slab.view(dtype) */
static PyObject *base_of(PyObject *slab, int dtype) {
    if (torch.dtype[dtype] == NULL) {
        PyErr_SetString(PyExc_ValueError, "the offset table names a dtype that this torch does not have");
        return NULL;
    }
    return PyObject_CallFunctionObjArgs(torch.view, slab, torch.dtype[dtype], NULL);
}

/* cut(table, slab, nbytes, others): all leaves of a batch, in its order.
 *
 * slab: a uint8 tensor of `nbytes`, a multiple of ALIGNMENT. others: what stands for the leaves that do not live in the
 * slab, in order. Returns None where torch
 * cannot be asked for views, and what torch made in place of a view where it makes something else. */
static PyObject *cut(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *table, *slab, *others;
    long long nbytes;
    if (!PyArg_ParseTuple(args, "OO!LO!:cut", &table, torch.tensor, &slab, &nbytes, &PyList_Type, &others)) return NULL;
    if (torch.wrap == NULL || torch.handle_at == 0) Py_RETURN_NONE;
    Py_buffer buffer;
    const Header *header;
    if (!table_of(table, &buffer, &header)) return NULL;
    PyObject *bases[MOST_DTYPES] = {NULL}; /* the slab as a tensor of a dtype, by its code */
    PyObject *strange = NULL;              /* what torch made in place of one, in a mode that makes no views */
    PyObject *leaves = PyList_New((Py_ssize_t)header->rows);
    Py_ssize_t other = 0;
    for (int64_t i = 0; leaves != NULL && i < header->rows; i++) {
        const Row *row = row_at(header, i);
        PyObject *leaf = NULL;
        if (is_packed(row)) {
            if (!lies_in_slab(row, header->width, nbytes)) {
                PyErr_SetString(PyExc_ValueError, "the offset table leads outside of its slab");
            } else if (bases[row->dtype] == NULL && (bases[row->dtype] = base_of(slab, row->dtype)) == NULL) {
                /* the error is set */
            } else if (Py_TYPE(bases[row->dtype]) != torch.tensor) {
                strange = bases[row->dtype];
                Py_INCREF(strange);
                break;
            } else {
                leaf = view(handle_of(bases[row->dtype]), row, header->width);
            }
        } else if (row->kind == ALIAS) {
            if (row->offset < 0 || row->offset >= i) {
                PyErr_SetString(PyExc_ValueError, "the offset table repeats a leaf that it does not have");
            } else {
                leaf = PyList_GetItem(leaves, (Py_ssize_t)row->offset);
                Py_XINCREF(leaf);
            }
        } else if (other < PyList_Size(others)) {
            leaf = PyList_GetItem(others, other++);
            Py_XINCREF(leaf);
        } else {
            PyErr_SetString(PyExc_ValueError, "fewer leaves were passed than the offset table says");
        }
        if (leaf == NULL || PyList_SetItem(leaves, (Py_ssize_t)i, leaf) != 0) Py_CLEAR(leaves);
    }
    if (strange == NULL && leaves != NULL && other != PyList_Size(others)) {
        PyErr_SetString(PyExc_ValueError, "more leaves were passed than the offset table says");
        Py_CLEAR(leaves);
    }
    for (int dtype = 0; dtype < MOST_DTYPES; dtype++) Py_XDECREF(bases[dtype]);
    PyBuffer_Release(&buffer);
    if (strange != NULL) {
        Py_XDECREF(leaves);
        return strange;
    }
    return leaves;
}

PyMethodDef view_methods[] = {{"cut", cut, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

/* Tensors over a slab, from the offset table, in one call.
 *
 * They are made by torch's stable C shim (`aoti_torch__alloc_from_pool`), and made objects of Python's by
 * libtorch_python's `THPVariable_Wrap`; see `pinstage._torch`, which looks whether both do what is expected. They share
 * the slab's storage, so that `record_stream` works, and each has a version counter of its own. */
#include "core.h"

typedef struct {
    void *slab, *storage; /* tensors; `storage` is over all of the slab's, and NULL until it is needed */
    int64_t start;        /* of the slab in it, in bytes */
} Base;

static PyObject *view(Base *base, const Row *row, int64_t width) {
    static const int64_t none = 0, one = 1;
    void *made = NULL;
    if (torch.scalar[row->dtype] < 0) {
        PyErr_SetString(PyExc_ValueError, "the offset table names a dtype of which this torch makes no views");
        return NULL;
    }
    if ((base->storage == NULL && torch.reinterpret(base->slab, 1, &none, &one, -base->start, &base->storage)) ||
        torch.alloc_from_pool(base->storage, base->start + row->offset, torch.scalar[row->dtype], row->ndim, row->sizes,
                              row->sizes + width, &made)) {
        PyErr_SetString(PyExc_RuntimeError, "torch could not make a view of the slab");
        return NULL;
    }
    PyObject *object = torch.wrap(made); /* which takes the tensor out of the handle */
    torch.delete_handle(made);
    return object;
}

/* Whether torch makes views now: in a mode such as FakeTensorMode it would make something else, and the C shim, which is
 * below all modes, would not see to that. */
static bool makes_views(void) {
    if (torch.wrap == NULL || torch.handle_at == 0 || torch.count_modes == NULL) return false;
    PyObject *modes = PyObject_CallNoArgs(torch.count_modes);
    bool is_off = modes != NULL && PyLong_AsLong(modes) == 0;
    Py_XDECREF(modes);
    PyErr_Clear();
    return is_off;
}

/* cut(table, slab, nbytes, others): all leaves of a batch, in its order.
 *
 * slab: a uint8 tensor of `nbytes`, a multiple of ALIGNMENT. others: what stands for the leaves that do not live in the
 * slab, in order. Returns None where torch has to be asked for views by its own methods. */
static PyObject *cut(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *table, *slab, *others;
    long long nbytes;
    if (!PyArg_ParseTuple(args, "OO!LO!:cut", &table, torch.tensor, &slab, &nbytes, &PyList_Type, &others)) return NULL;
    Base base = {.slab = handle_of(slab)};
    if (!makes_views() || torch.storage_offset(base.slab, &base.start) || base.start % ALIGNMENT != 0) Py_RETURN_NONE;
    Py_buffer buffer;
    const Header *header;
    if (!table_of(table, &buffer, &header)) return NULL;
    PyObject *leaves = PyList_New((Py_ssize_t)header->rows);
    Py_ssize_t other = 0;
    for (int64_t i = 0; leaves != NULL && i < header->rows; i++) {
        const Row *row = row_at(header, i);
        PyObject *leaf = NULL;
        if (is_packed(row)) {
            if (lies_in_slab(row, header->width, nbytes)) {
                leaf = view(&base, row, header->width);
            } else {
                PyErr_SetString(PyExc_ValueError, "the offset table leads outside of its slab");
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
    if (leaves != NULL && other != PyList_Size(others)) {
        PyErr_SetString(PyExc_ValueError, "more leaves were passed than the offset table says");
        Py_CLEAR(leaves);
    }
    if (base.storage != NULL) torch.delete_handle(base.storage);
    PyBuffer_Release(&buffer);
    return leaves;
}

PyMethodDef view_methods[] = {{"cut", cut, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

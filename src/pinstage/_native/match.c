/* Which existing tensors torch can write by one call for many: for `out=`. */
#include "blocks.h"

/* Whether a tensor's storage has this many bytes from its first element on. */
static bool has_bytes(void *handle, int dtype, int64_t nbytes) {
    int64_t size, offset;
    if (torch.storage_size(handle, &size) || torch.storage_offset(handle, &offset)) return false;
    return offset * torch.itemsize[dtype] + nbytes <= size;
}

/* The code of a destination's dtype if it is a plain tensor on a device (DLPack's), with memory,
 * of the leaf's shape and strides; else -1. */
static int plain_dtype(PyObject *object, int device_type, int device_index, const Row *row,
                       const int64_t *strides) {
    DLTensor tensor;
    void *handle = handle_of(object);
    if (Py_TYPE(object) != torch.tensor) return -1;
    if (torch.export_tensor(object, &tensor)) {
        PyErr_Clear(); /* sparse, nested, fake, a dtype that DLPack does not have */
        return -1;
    }
    int dtype = dtype_of(handle);
    bool is_there = tensor.device_type == device_type &&
                    (device_type == DL_CPU || tensor.device_id == device_index);
    if (!is_there || dtype < 0 || tensor.ndim != row->ndim) return -1;
    for (int i = 0; i < row->ndim; i++) {
        if (tensor.shape[i] != row->sizes[i]) return -1;
        if (row->sizes[i] > 1 && row->nbytes > 0 && tensor.strides[i] != strides[i]) return -1;
    }
    bool is_lazy =
        torch.is_neg(handle) || (tensor.dtype.code == DL_COMPLEX && torch.is_conj(handle));
    if (is_lazy || torch.requires_grad(*(void **)handle)) return -1;
    int64_t nbytes = row->nbytes / torch.itemsize[row->dtype] * torch.itemsize[dtype];
    bool has_memory = nbytes == 0 || (tensor.data != NULL && has_bytes(handle, dtype, nbytes));
    return has_memory ? dtype : -1;
}

/* Append a row to the group of its dtypes, which is made if there is none; false with an error. */
static bool add_to_group(PyObject *groups, int source, int destination, PyObject *row) {
    PyObject *key = Py_BuildValue("(ii)", source, destination);
    if (key == NULL) return false;
    PyObject *group = PyDict_GetItemWithError(groups, key);
    bool is_good = group != NULL;
    if (!is_good && PyErr_Occurred() == NULL && (group = PyList_New(0)) != NULL) {
        is_good = PyDict_SetItem(groups, key, group) == 0;
        Py_DECREF(group); /* the dict holds it */
    }
    Py_DECREF(key);
    return is_good && PyList_Append(group, row) == 0;
}

/* match(table, tensors, device_type, device_index): see `pinstage._batch._blocks.match`. The
 * device is DLPack's. */
PyObject *match(UNUSED PyObject *module, PyObject *args) {
    PyObject *data, *tensors;
    int device_type, device_index;
    Table table;
    if (!PyArg_ParseTuple(args, "OO!ii:match", &data, &PyList_Type, &tensors, &device_type,
                          &device_index))
        return NULL;
    if (!table_begin(&table, data)) return NULL;
    const Header *header = table.header;
    PyObject *groups = PyDict_New(), *others = PyList_New(0);
    bool is_good =
        groups != NULL && others != NULL &&
        (PyList_Size(tensors) == header->rows ||
         fail(PyExc_ValueError, "there are not as many tensors as the offset table has leaves"));
    bool can_look = torch.handle_at != 0 && makes_views() && !may_be_dual();
    for (int64_t i = 0; i < header->rows && is_good; i++) {
        const Row *row = row_at(header, i);
        if (row->kind == OTHER) continue;
        PyObject *number = PyLong_FromLongLong(i);
        int dtype = can_look && is_packed(row)
                        ? plain_dtype(PyList_GetItem(tensors, (Py_ssize_t)i), device_type,
                                      device_index, row, row->sizes + header->width)
                        : -1;
        is_good = number != NULL;
        if (is_good && dtype < 0) is_good = PyList_Append(others, number) == 0;
        if (is_good && dtype >= 0) is_good = add_to_group(groups, row->dtype, dtype, number);
        Py_XDECREF(number);
    }
    table_end(&table);
    PyObject *result = is_good ? PyTuple_Pack(2, groups, others) : NULL;
    Py_XDECREF(groups);
    Py_XDECREF(others);
    return result;
}

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

/* The list of rows with these dtypes, which is made if there is none; NULL with an error. */
static PyObject *group_of(PyObject *groups, int source, int destination) {
    PyObject *key = Py_BuildValue("(ii)", source, destination), *group = NULL;
    if (key != NULL) group = PyDict_GetItemWithError(groups, key);
    if (key != NULL && group == NULL && !PyErr_Occurred() && (group = PyList_New(0)) != NULL) {
        int status = PyDict_SetItem(groups, key, group);
        Py_DECREF(group); /* the dict holds it */
        if (status != 0) group = NULL;
    }
    Py_XDECREF(key);
    return group;
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
    PyObject *groups = PyDict_New(), *others = PyList_New(0), *group = NULL;
    int last_source = -1, last = -1; /* dtypes of the group: neighbours are mostly alike */
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
        if (dtype >= 0 && (row->dtype != last_source || dtype != last)) {
            group = group_of(groups, row->dtype, dtype);
            last_source = row->dtype, last = dtype;
        }
        PyObject *list = dtype < 0 ? others : group;
        is_good = number != NULL && list != NULL && PyList_Append(list, number) == 0;
        Py_XDECREF(number);
    }
    table_end(&table);
    PyObject *result = is_good ? PyTuple_Pack(2, groups, others) : NULL;
    Py_XDECREF(groups);
    Py_XDECREF(others);
    return result;
}

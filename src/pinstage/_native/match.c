/* Which leaves torch can copy into existing tensors by one call for many: for `out=`. */
#include "blocks.h"

typedef struct {
    PyObject *leaves, *existing;   /* lists, of as many objects */
    PyObject *atoms, *wrappers;    /* see `stays` */
    Table table;                   /* of the leaves, if they have one */
    int device_type, device_index; /* where the existing tensors have to be: DLPack's */
    bool can_look;                 /* whether tensors are what they seem */
    PyObject *groups, *others;     /* the result */
    PyObject *group;               /* the last one: neighbours are mostly alike */
    int from, to;                  /* its dtypes */
} Matching;

/* A leaf as it will be staged. */
typedef struct {
    int dtype, ndim;
    int64_t nbytes;
    const int64_t *shape, *stride;
} Source;

/* Whether a tensor's storage has this many bytes from its first element on. */
static bool has_bytes(void *handle, int dtype, int64_t nbytes) {
    int64_t size, offset;
    if (torch.storage_size(handle, &size) || torch.storage_offset(handle, &offset)) return false;
    return offset * torch.itemsize[dtype] + nbytes <= size;
}

/* The code of a destination's dtype if it is a plain tensor on the device, with memory, of the
 * leaf's shape and strides; else -1. */
static int plain_dtype(const Matching *self, PyObject *object, const Source *leaf) {
    DLTensor tensor;
    void *handle = handle_of(object);
    if (Py_TYPE(object) != torch.tensor) return -1;
    if (torch.export_tensor(object, &tensor)) {
        PyErr_Clear(); /* sparse, nested, fake, a dtype that DLPack does not have */
        return -1;
    }
    int dtype = dtype_of(handle);
    bool is_there = tensor.device_type == self->device_type &&
                    (self->device_type == DL_CPU || tensor.device_id == self->device_index);
    if (!is_there || dtype < 0 || tensor.ndim != leaf->ndim) return -1;
    for (int i = 0; i < leaf->ndim; i++) {
        if (tensor.shape[i] != leaf->shape[i]) return -1;
        if (leaf->shape[i] > 1 && leaf->nbytes > 0 && tensor.strides[i] != leaf->stride[i])
            return -1;
    }
    bool is_lazy =
        torch.is_neg(handle) || (tensor.dtype.code == DL_COMPLEX && torch.is_conj(handle));
    if (is_lazy || torch.requires_grad(*(void **)handle)) return -1;
    int64_t nbytes = leaf->nbytes;
    if (dtype != leaf->dtype) nbytes = nbytes / torch.itemsize[leaf->dtype] * torch.itemsize[dtype];
    bool has_memory = nbytes == 0 || (tensor.data != NULL && has_bytes(handle, dtype, nbytes));
    return has_memory ? dtype : -1;
}

enum { STAYS = 1 };

/* Describe a leaf by its row. Returns 0, or STAYS, or NOT_PLAIN. */
static int read_row(const Header *table, Py_ssize_t index, Source *leaf) {
    const Row *row = row_at(table, index);
    *leaf = (Source){row->dtype, row->ndim, row->nbytes, row->sizes, row->sizes + table->width};
    return row->kind == OTHER ? STAYS : is_packed(row) ? 0 : NOT_PLAIN;
}

/* Describe a leaf that has no row. Returns 0, or STAYS, or NOT_PLAIN, or -1 with an error. */
static int find_leaf(const Matching *self, Py_ssize_t index, Found *found) {
    PyObject *leaf = PyList_GetItem(self->leaves, index);
    PyTypeObject *type = Py_TYPE(leaf);
    if (type == torch.tensor)
        return self->can_look ? find_tensor(leaf, DL_CPU, 0, found) : NOT_PLAIN;
    if (type == torch.array) return find_array(leaf, found);
    int result = stays(self->atoms, self->wrappers, type);
    return result == 0 ? NOT_PLAIN : result < 0 ? -1 : STAYS;
}

/* Put a leaf that stays as it is among the existing tensors. */
static bool put(const Matching *self, Py_ssize_t index) {
    PyObject *leaf = PyList_GetItem(self->leaves, index);
    int is_wrapper = PySet_Contains(self->wrappers, (PyObject *)Py_TYPE(leaf));
    if (is_wrapper < 0) return false;
    PyObject *value = is_wrapper ? PyObject_GetAttrString(leaf, "obj") : Py_NewRef(leaf);
    return value != NULL && PyList_SetItem(self->existing, index, value) == 0;
}

/* The group of these dtypes, which is made if there is none; NULL with an error. */
static PyObject *group_of(Matching *self, int from, int to) {
    if (self->group != NULL && from == self->from && to == self->to) return self->group;
    PyObject *key = Py_BuildValue("(ii)", from, to), *group = NULL;
    if (key != NULL) group = PyDict_GetItemWithError(self->groups, key);
    if (key != NULL && group == NULL && !PyErr_Occurred() && (group = PyList_New(0)) != NULL) {
        int status = PyDict_SetItem(self->groups, key, group);
        Py_DECREF(group); /* the dict holds it */
        if (status != 0) group = NULL;
    }
    Py_XDECREF(key);
    self->from = from, self->to = to;
    return self->group = group;
}

/* Look at a leaf and its destination; false with an error. */
static bool add_pair(Matching *self, Py_ssize_t index) {
    Found found; /* not all zeros, for speed */
    Source leaf;
    int result, dtype = -1;
    if (self->table.header != NULL) {
        result = read_row(self->table.header, index, &leaf);
    } else {
        result = find_leaf(self, index, &found);
        if (result == 0)
            leaf = (Source){found.dtype, found.ndim, found.nbytes, found.shape, found.stride};
    }
    if (result == -1) return false;
    if (result == STAYS) return put(self, index);
    if (result == 0 && self->can_look)
        dtype = plain_dtype(self, PyList_GetItem(self->existing, index), &leaf);
    PyObject *list = dtype < 0 ? self->others : group_of(self, leaf.dtype, dtype),
             *number = PyLong_FromSsize_t(index);
    bool is_good = list != NULL && number != NULL && PyList_Append(list, number) == 0;
    Py_XDECREF(number);
    return is_good;
}

/* Look at all leaves; false with an error. */
static bool add_pairs(Matching *self) {
    Py_ssize_t count = PyList_Size(self->leaves);
    const Header *table = self->table.header;
    if (PyList_Size(self->existing) != count || (table != NULL && table->rows != count))
        return fail(PyExc_ValueError, "there are not as many tensors as leaves");
    for (Py_ssize_t i = 0; i < count; i++) {
        look_ahead(self->existing, count, i);
        if (!add_pair(self, i)) return false;
    }
    return true;
}

/* match(leaves, existing, table, (atoms, wrappers), device_type, device_index): see
 * `pinstage._batch._blocks.match`. The device is DLPack's. */
PyObject *match(UNUSED PyObject *module, PyObject *args) {
    Matching self = {.group = NULL};
    PyObject *data;
    if (!PyArg_ParseTuple(args, "O!O!O(OO)ii:match", &PyList_Type, &self.leaves, &PyList_Type,
                          &self.existing, &data, &self.atoms, &self.wrappers, &self.device_type,
                          &self.device_index))
        return NULL;
    if (data != Py_None && !table_begin(&self.table, data)) return NULL;
    self.groups = PyDict_New();
    self.others = PyList_New(0);
    self.can_look = torch.handle_at != 0 && makes_views() && !may_be_dual();
    bool is_good = self.groups != NULL && self.others != NULL && add_pairs(&self);
    table_end(&self.table);
    PyObject *result = is_good ? PyTuple_Pack(2, self.groups, self.others) : NULL;
    Py_XDECREF(self.groups);
    Py_XDECREF(self.others);
    return result;
}

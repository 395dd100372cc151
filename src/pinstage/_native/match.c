/* Which existing tensors can take leaves byte by byte, and in which ranges: for `out=`. */
#include "blocks.h"

#include <stdlib.h>

/* Whether a tensor's storage has this many bytes from its first element on. */
static bool has_bytes(void *handle, int dtype, int64_t nbytes) {
    int64_t size, offset;
    if (torch.storage_size(handle, &size) || torch.storage_offset(handle, &offset)) return false;
    return offset * torch.itemsize[dtype] + nbytes <= size;
}

bool is_plain_place(PyObject *object, int device_type, int device_index, const Bytes *like,
                    char **address) {
    DLTensor tensor;
    void *handle = handle_of(object);
    if (Py_TYPE(object) != torch.tensor || torch.handle_at == 0) return false;
    if (torch.export_tensor(object, &tensor)) {
        PyErr_Clear(); /* sparse, nested, fake, a dtype that DLPack does not have */
        return false;
    }
    if (tensor.device_type != device_type ||
        (device_type != DL_CPU && tensor.device_id != device_index))
        return false;
    if (tensor.ndim != like->ndim || dtype_of(handle) != like->dtype) return false;
    for (int i = 0; i < like->ndim; i++) {
        if (tensor.shape[i] != like->shape[i]) return false;
        if (like->shape[i] > 1 && like->nbytes > 0 && tensor.strides[i] != like->stride[i])
            return false;
    }
    bool is_lazy =
        torch.is_neg(handle) || (tensor.dtype.code == DL_COMPLEX && torch.is_conj(handle));
    if (is_lazy || torch.requires_grad(*(void **)handle)) return false;
    *address = (char *)tensor.data + tensor.byte_offset;
    return like->nbytes == 0 ||
           (tensor.data != NULL && has_bytes(handle, like->dtype, like->nbytes));
}

/* The memory of a destination. */
typedef struct {
    int64_t start, end; /* addresses; -1 if it isn't plain */
} Memory;

static int by_start(const void *one, const void *other) {
    const Memory *a = one, *b = other;
    return (a->start > b->start) - (a->start < b->start);
}

/* Whether all destinations of packed rows are plain, and no two share a byte. */
static bool are_apart(const Table *table, const Memory *memory) {
    Memory *sorted = malloc(sizeof(Memory) * (size_t)(table->packed + 1));
    int64_t count = 0;
    bool is_rising = true, are = sorted != NULL;
    for (int64_t i = 0; i < table->packed && are; i++) {
        const Memory *one = &memory[table->order[i]];
        are = one->start >= 0;
        if (one->start == one->end) continue;
        is_rising = is_rising && (count == 0 || one->start >= sorted[count - 1].start);
        sorted[count++] = *one;
    }
    if (are && !is_rising) qsort(sorted, (size_t)count, sizeof(Memory), by_start);
    for (int64_t i = 1; i < count && are; i++) are = sorted[i].start >= sorted[i - 1].end;
    free(sorted);
    return are;
}

/* From this many leaves per run on, copying ranges of bytes pays: the two tensors of a range
 * cost as much as the views of some leaves. */
enum { LEAVES_PER_RUN = 4 };

/* Whether a leaf is directly behind another one, in the slab and in the memory of its
 * destination. */
static bool is_next(const Table *table, const Memory *memory, int64_t before, int64_t index) {
    const Row *one = row_at(table->header, before), *other = row_at(table->header, index);
    return one->offset + one->nbytes == other->offset && memory[before].end == memory[index].start;
}

/* A list with (offset, nbytes, row) of each range that leaves form both in the slab and in
 * memory; an empty one if these are too many. */
static PyObject *runs_of(const Table *table, const Memory *memory) {
    int64_t count = 0, start = 0;
    for (int64_t i = 1; i < table->packed; i++)
        count += !is_next(table, memory, table->order[i - 1], table->order[i]);
    PyObject *runs = PyList_New(0);
    if (table->packed < LEAVES_PER_RUN * (count + 1)) return runs;
    for (int64_t i = 1; i <= table->packed && runs != NULL; i++) {
        if (i < table->packed && is_next(table, memory, table->order[i - 1], table->order[i]))
            continue;
        int64_t first = table->order[start],
                nbytes = memory[table->order[i - 1]].end - memory[first].start;
        PyObject *run = Py_BuildValue("(LLL)", row_at(table->header, first)->offset, nbytes, first);
        if (run == NULL || PyList_Append(runs, run) != 0) Py_CLEAR(runs);
        Py_XDECREF(run);
        start = i;
    }
    return runs;
}

/* The dtype of all packed rows; -1 if there are several. */
static int only_dtype(const Table *table) {
    int dtype = -1;
    for (int64_t i = 0; i < table->packed; i++) {
        const Row *row = row_at(table->header, table->order[i]);
        if (i > 0 && row->dtype != dtype) return -1;
        dtype = row->dtype;
    }
    return dtype;
}

/* match(table, tensors, device_type, device_index): see `pinstage._batch._blocks.match`. The
 * device is DLPack's. */
PyObject *match(UNUSED PyObject *module, PyObject *args) {
    PyObject *data, *tensors, *result = NULL;
    int device_type, device_index;
    Table table;
    if (!PyArg_ParseTuple(args, "OO!ii:match", &data, &PyList_Type, &tensors, &device_type,
                          &device_index))
        return NULL;
    if (!table_begin(&table, data)) return NULL;
    const Header *header = table.header;
    PyObject *made =
        PyBytes_FromStringAndSize(NULL, (Py_ssize_t)sizeof(Memory) * (Py_ssize_t)header->rows);
    bool is_good =
        made != NULL &&
        (PyList_Size(tensors) == header->rows ||
         fail(PyExc_ValueError, "there are not as many tensors as the offset table has leaves"));
    if (is_good) {
        Memory *memory = (Memory *)PyBytes_AsString(made);
        bool can_look = makes_views() && !may_be_dual();
        for (int64_t i = 0; i < header->rows; i++) {
            const Row *row = row_at(header, i);
            Bytes like = {row->dtype, row->ndim, row->nbytes, row->sizes,
                          row->sizes + header->width};
            PyObject *tensor = PyList_GetItem(tensors, (Py_ssize_t)i);
            char *address;
            bool is_plain = can_look && is_packed(row) &&
                            is_plain_place(tensor, device_type, device_index, &like, &address);
            memory[i] = is_plain ? (Memory){(intptr_t)address, (intptr_t)address + row->nbytes}
                                 : (Memory){-1, -1};
        }
        bool are = are_apart(&table, memory);
        PyObject *runs = are ? runs_of(&table, memory) : PyList_New(0);
        result = Py_BuildValue("(OOiN)", made, are ? Py_True : Py_False, only_dtype(&table), runs);
    }
    Py_XDECREF(made);
    table_end(&table);
    return result;
}

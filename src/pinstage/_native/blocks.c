/* The tensors of one batch, made from the offset table, and the copies into them.
 *
 * Torch's stable C shim makes the tensors, and libtorch_python's `THPVariable_Wrap` makes Python
 * objects of them; `pinstage._compat` probes both. A block is one tensor. A leaf that is alone
 * in its block is that tensor itself, as `.to()` would make it; leaves that share a block are
 * views of it. */
#define _GNU_SOURCE
#include "blocks.h"
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* The size from which the system is asked to use huge pages for a tensor. */
enum { HUGE_FROM_BYTES = 4 * 1024 * 1024, HUGE_PAGE_BYTES = 2 * 1024 * 1024 };

enum { ONE, SHARED, EACH }; /* one block; the table's blocks; one for each leaf */

typedef struct {
    PyObject *tensor;
    char *address;
    int64_t start, end;  /* of its leaves in the slab that the table describes */
    int64_t first, last; /* its leaves in the order of their offsets; `last` is excluded */
    bool is_leaf;        /* whether the tensor is that of its only leaf */
    void *storage;   /* for a slab that was given, a tensor over all of its storage; else NULL */
    int64_t skipped; /* where the slab begins in that storage, in bytes */
} Block;

/* Bytes that are neighbours in the host slab and in one block. */
typedef struct {
    int64_t start, end; /* in the host slab */
    char *to;
    int64_t block;
} Run;

typedef struct {
    PyObject_HEAD
    Table table;
    Block *blocks;
    int64_t count;
    int64_t *block_of; /* of each row */
    Run *runs;
    int64_t run_count;
    bool is_cuda;
    PyObject *make, *view; /* functions that make tensors and views; NULL if torch's C shim does */
} Blocks;

bool makes_views(void) {
    if (torch.wrap == NULL || torch.handle_at == 0 || torch.count_modes == NULL) return false;
    PyObject *modes = PyObject_CallNoArgs(torch.count_modes);
    bool is_off = modes != NULL && PyLong_AsLong(modes) == 0;
    Py_XDECREF(modes);
    PyErr_Clear();
    return is_off;
}

/* -- making blocks ----------------------------------------------------------------------------- */

static void blocks_dealloc(PyObject *object) {
    Blocks *self = (Blocks *)object;
    for (int64_t i = 0; self->blocks != NULL && i < self->count; i++) {
        if (self->blocks[i].storage != NULL) torch.delete_handle(self->blocks[i].storage);
        Py_XDECREF(self->blocks[i].tensor);
    }
    free(self->blocks);
    free(self->block_of);
    free(self->runs);
    Py_XDECREF(self->make);
    Py_XDECREF(self->view);
    table_end(&self->table);
    free_object(object);
}

/* Whether a row begins a block. A table from elsewhere may have any numbers. */
static bool begins(const Row *row, const Row *before, int sharing) {
    if (before == NULL || sharing == EACH) return true;
    return sharing == SHARED && (row->block != before->block || row->dtype != before->dtype);
}

/* by_shim: whether torch's C shim will make the tensors, so that it has to know the dtypes.
 * False with an error. */
static bool cut_table(Blocks *self, int sharing, bool by_shim) {
    const Row *before = NULL;
    for (int64_t i = 0; i < self->table.packed; i++) {
        const Row *row = row_at(self->table.header, self->table.order[i]);
        if (by_shim && torch.scalar[row->dtype] < 0)
            return fail(PyExc_ValueError,
                        "the offset table names a dtype that torch's C shim doesn't know");
        if (begins(row, before, sharing)) {
            self->blocks[self->count++] =
                (Block){.start = sharing == ONE ? 0 : row->offset, .end = row->offset, .first = i};
        }
        Block *block = &self->blocks[self->count - 1];
        if (row->offset + row->nbytes > block->end) block->end = row->offset + row->nbytes;
        block->last = i + 1;
        self->block_of[self->table.order[i]] = self->count - 1;
        before = row;
    }
    return true;
}

/* Ask for huge pages for a large new tensor, before it is touched: 64 MiB are filled in 1.1 ms then,
 * and in 4.0 ms without. */
static void advise_huge_pages(char *data, int64_t ndim, const int64_t *shape, int64_t nbytes) {
    for (int64_t d = 0; d < ndim; d++) nbytes *= shape[d];
    if (nbytes < HUGE_FROM_BYTES) return;
    intptr_t page = sysconf(_SC_PAGESIZE), start = ((intptr_t)data + page - 1) / page * page,
             end = ((intptr_t)data + nbytes) / page * page;
    madvise((void *)start, (size_t)(end - start), MADV_HUGEPAGE); /* a wish; it may be refused */
}

PyObject *new_tensor(int64_t ndim, const int64_t *shape, const int64_t *stride, int dtype,
                     int device_type, int device_index, char **address) {
    void *handle = NULL, *data = NULL;
    if (torch.empty_strided(ndim, shape, stride, torch.scalar[dtype], device_type, device_index,
                            &handle) ||
        torch.get_data(handle, &data)) {
        if (handle != NULL) torch.delete_handle(handle);
        return NULL;
    }
    *address = data;
    if (device_type == 0) advise_huge_pages(data, ndim, shape, torch.itemsize[dtype]);
    PyObject *tensor = torch.wrap(handle); /* which takes the tensor out of the handle */
    torch.delete_handle(handle);
    if (tensor == NULL) PyErr_Clear();
    return tensor;
}

PyObject *tuple_of(int64_t count, const int64_t *numbers) {
    PyObject *tuple = PyTuple_New((Py_ssize_t)count);
    for (int64_t i = 0; tuple != NULL && i < count; i++) {
        PyObject *number = PyLong_FromLongLong(numbers[i]);
        if (number == NULL || PyTuple_SetItem(tuple, (Py_ssize_t)i, number) != 0) Py_CLEAR(tuple);
    }
    return tuple;
}

/* Take a tensor that torch's public functions made. */
static bool use_tensor(Block *block, PyObject *tensor) {
    block->tensor = tensor;
    PyObject *address = tensor == NULL ? NULL : PyObject_CallMethod(tensor, "data_ptr", NULL);
    block->address = address == NULL ? NULL : PyLong_AsVoidPtr(address);
    Py_XDECREF(address);
    return address != NULL && !PyErr_Occurred();
}

/* Make the tensor of a block. */
static bool allocate(Blocks *self, Block *block, int sharing, int device_type, int device_index) {
    static const int64_t one = 1;
    const Row *row = row_at(self->table.header, self->table.order[block->first]);
    block->is_leaf = sharing != ONE && block->last - block->first == 1;
    int dtype = sharing == ONE ? torch.by_format['B'] : row->dtype;
    int64_t size = sharing == ONE ? self->table.header->nbytes
                                  : (block->end - block->start) / torch.itemsize[dtype];
    int64_t ndim = block->is_leaf ? row->ndim : 1;
    const int64_t *shape = block->is_leaf ? row->sizes : &size;
    const int64_t *stride = block->is_leaf ? row->sizes + self->table.header->width : &one;
    if (self->make != NULL) {
        PyObject *made = PyObject_CallFunction(self->make, "iNNii", dtype, tuple_of(ndim, shape),
                                               tuple_of(ndim, stride), device_type, device_index);
        return use_tensor(block, made);
    }
    block->tensor =
        new_tensor(ndim, shape, stride, dtype, device_type, device_index, &block->address);
    return block->tensor != NULL;
}

/* Take a tensor as the only block. */
static bool use_slab(Block *block, PyObject *slab, int64_t nbytes) {
    static const int64_t none = 0, one = 1;
    void *handle = handle_of(slab);
    DLTensor tensor;
    if (torch.export_tensor(slab, &tensor)) return false;
    if (tensor.ndim != 1 || tensor.dtype.bits != 8 || tensor.shape[0] < nbytes ||
        (nbytes > 1 && tensor.strides[0] != 1))
        return fail(
            PyExc_ValueError,
            "the slab is smaller than the offset table says, or its bytes are not in a row");
    if (torch.storage_offset(handle, &block->skipped) ||
        torch.reinterpret(handle, 1, &none, &one, -block->skipped, &block->storage))
        return fail(PyExc_RuntimeError, "torch could not make a view of the slab");
    block->tensor = Py_XNewRef(slab);
    block->address = (char *)tensor.data + tensor.byte_offset;
    return true;
}

/* Find where the bytes of the host slab go. */
static bool find_runs(Blocks *self) {
    const Table *table = &self->table;
    Run *runs = malloc(sizeof(Run) * (size_t)(table->packed + 1));
    if (runs == NULL) return no_memory();
    int64_t count = 0;
    for (int64_t i = 0; i < table->packed; i++) {
        int64_t number = self->block_of[table->order[i]];
        const Row *row = row_at(table->header, table->order[i]);
        if (row->nbytes == 0 || row->kind == LOCKED) continue;
        Run next = {row->offset, row->offset + row->nbytes,
                    self->blocks[number].address + (row->offset - self->blocks[number].start),
                    number};
        Run *run = count == 0 ? NULL : &runs[count - 1];
        bool is_behind = run != NULL && run->block == number && next.start >= run->end &&
                         next.start - run->end < ALIGNMENT;
        if (is_behind && run->to + (next.start - run->start) == next.to) {
            run->end = next.end; /* the bytes between them are padding */
        } else {
            runs[count++] = next;
        }
    }
    self->runs = runs;
    self->run_count = count;
    return true;
}

/* The blocks of a table, without tensors yet; NULL with an error. */
static Blocks *blocks_new(PyObject *type, PyObject *table, int sharing, bool is_cuda,
                          bool by_shim) {
    Blocks *self = (Blocks *)PyType_GenericAlloc((PyTypeObject *)type, 0);
    if (self == NULL) return NULL;
    self->is_cuda = is_cuda;
    bool is_good = table_begin(&self->table, table);
    if (is_good) {
        self->blocks = calloc((size_t)self->table.packed + 1, sizeof(Block));
        self->block_of = malloc(sizeof(int64_t) * (size_t)(self->table.header->rows + 1));
        is_good = (self->blocks != NULL && self->block_of != NULL) || no_memory();
    }
    if (!is_good || !cut_table(self, sharing, by_shim)) Py_CLEAR(self);
    return self;
}

/* Whether torch's C shim can make the tensors of a batch, or the views of this slab. */
static bool goes_by_shim(PyObject *slab) {
    int64_t start;
    if (!makes_views()) return false;
    if (slab == NULL) return true;
    return Py_TYPE(slab) == torch.tensor && torch.storage_offset(handle_of(slab), &start) == 0 &&
           start % ALIGNMENT == 0;
}

/* The blocks of a table, with tensors that torch's C shim makes if `make` is NULL. NULL with an
 * error, or without one if the shim finds no memory. */
static PyObject *blocks_with(PyObject *type, PyObject *table, int sharing, int device_type,
                             int device_index, PyObject *slab, PyObject *make, PyObject *cut) {
    Blocks *self = blocks_new(type, table, sharing, device_type == 1, make == NULL);
    if (self == NULL) return NULL;
    self->make = Py_XNewRef(make);
    self->view = Py_XNewRef(cut);
    bool is_good = true;
    for (int64_t i = 0; i < self->count && is_good; i++) {
        Block *block = &self->blocks[i];
        is_good = slab == NULL   ? allocate(self, block, sharing, device_type, device_index)
                  : make != NULL ? use_tensor(block, Py_XNewRef(slab))
                                 : use_slab(block, slab, self->table.header->nbytes);
    }
    if (is_good && find_runs(self)) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

/* Blocks.of(table, sharing, device_type, device_index[, slab[, make, view]]): make the tensors
 * of a batch on torch's current stream.
 *
 * sharing: 0 for one block, 1 for the table's blocks, 2 for a block for each leaf. slab: a uint8
 * tensor to use as the only block, or None. make(dtype, shape, stride, device_type,
 * device_index) and view(tensor, dtype, offset, shape, stride) are torch's public functions.
 * They are called where the C shim can't be used: in a mode, or if there is no memory, so that
 * torch raises its own error. */
static PyObject *blocks_of(PyObject *type, PyObject *args) {
    PyObject *table, *slab = NULL, *make = NULL, *cut = NULL;
    int sharing, device_type, device_index;
    if (!PyArg_ParseTuple(args, "Oiii|OOO:of", &table, &sharing, &device_type, &device_index, &slab,
                          &make, &cut))
        return NULL;
    if (slab == Py_None) slab = NULL;
    if (slab != NULL) sharing = ONE;
    if (goes_by_shim(slab)) {
        PyObject *made =
            blocks_with(type, table, sharing, device_type, device_index, slab, NULL, NULL);
        if (made != NULL || PyErr_Occurred()) return made;
    }
    if (cut == NULL)
        return PyErr_Format(PyExc_RuntimeError, "torch's C shim makes no tensors here");
    return blocks_with(type, table, sharing, device_type, device_index, slab, make, cut);
}

/* -- copies ------------------------------------------------------------------------------------ */

/* The runs that a host slab has between two of its bytes. */
static int64_t runs_between(const Blocks *self, int64_t start, int64_t end, int64_t *first) {
    *first = 0;
    while (*first < self->run_count && self->runs[*first].end <= start) ++*first;
    int64_t last = *first;
    while (last < self->run_count && self->runs[last].start < end) last++;
    return last - *first;
}

/* Send bytes `start` to `end` of the host slab. */
static PyObject *send_runs(const Blocks *self, const char *host, int64_t start, int64_t end,
                           void *stream, bool is_page_locked) {
    int64_t first, count = runs_between(self, start, end, &first);
    Copies copies;
    PyObject *result = NULL;
    if (copies_new(&copies, count)) {
        for (const Run *run = &self->runs[first]; run < &self->runs[first + count]; run++) {
            int64_t from = run->start > start ? run->start : start,
                    to = run->end < end ? run->end : end;
            copies_add(&copies, run->to + (from - run->start), host + from, to - from);
        }
        result = copies_send(&copies, self->is_cuda, stream, is_page_locked);
    }
    free(copies.to);
    return result;
}

/* copy(host, start, end, stream, is_page_locked): send bytes `start` to `end` of the host slab,
 * which begins at address `host`; return the number of copies, or CUDA's error as a negative
 * number. */
static PyObject *blocks_copy(PyObject *object, PyObject *args) {
    unsigned long long host, stream;
    long long start, end;
    int is_page_locked;
    if (!PyArg_ParseTuple(args, "KLLKp:copy", &host, &start, &end, &stream, &is_page_locked))
        return NULL;
    return send_runs((Blocks *)object, (const char *)(uintptr_t)host, start, end,
                     (void *)(uintptr_t)stream, is_page_locked);
}

/* Add a piece of a LOCKED leaf; false with an error. */
static bool add_locked(const Blocks *self, Copies *copies, const LockedPiece *piece,
                       const char *sources) {
    const Header *table = self->table.header;
    const Row *row = piece->row >= 0 && piece->row < table->rows ? row_at(table, piece->row) : NULL;
    if (row == NULL || row->kind != LOCKED || piece->start < 0 || piece->end > row->nbytes)
        return fail(PyExc_ValueError, "these are not bytes of a page-locked leaf");
    const char *source =
        *(const char *const *)(sources + source_bytes(table->width) * (size_t)piece->row);
    const Block *block = &self->blocks[self->block_of[piece->row]];
    copies_add(copies, block->address + (row->offset - block->start) + piece->start,
               source + piece->start, piece->end - piece->start);
    return true;
}

/* copy_locked(sources, pieces, stream, at_once): send the LOCKED leaves from where they are, by
 * one call of the driver. `pieces`: as `describe` returned them. `at_once`: whether their bytes
 * have been read when the call returns, which then waits for all earlier work of the stream.
 * Returns the number of copies, or -1 if the driver refuses the call, so that nothing was sent. */
static PyObject *blocks_copy_locked(PyObject *object, PyObject *args) {
    Blocks *self = (Blocks *)object;
    const char *sources, *pieces;
    Py_ssize_t length, size;
    unsigned long long stream;
    int at_once;
    if (!PyArg_ParseTuple(args, "y#y#Kp:copy_locked", &sources, &length, &pieces, &size, &stream,
                          &at_once))
        return NULL;
    const Header *table = self->table.header;
    if ((size_t)length != source_bytes(table->width) * (size_t)table->rows)
        return PyErr_Format(PyExc_ValueError, "the sources are another table's");
    int64_t count = (int64_t)((size_t)size / sizeof(LockedPiece));
    Copies copies;
    bool is_good = copies_new(&copies, count);
    for (int64_t i = 0; i < count && is_good; i++)
        is_good = add_locked(self, &copies, (const LockedPiece *)pieces + i, sources);
    bool is_sent = is_good && copies_send_locked(&copies, (void *)(uintptr_t)stream, at_once != 0);
    free(copies.to);
    return is_good ? PyLong_FromLongLong(is_sent ? count : -1) : NULL;
}

/* Move leaves that have destinations; return false if there is no memory. */
static bool move_all(const Leaf *leaves, int64_t count, int64_t nbytes, int threads) {
    Job *job = job_new(leaves, count, NULL, nbytes, threads, false);
    if (job == NULL) return false;
    Py_BEGIN_ALLOW_THREADS
    job_begin(job);
    for (int64_t chunk = 0; chunk < job_chunks(job); chunk++) {
        while (!job_work(job, chunk, INT32_MAX)) continue;
    }
    job_free(job, -1);
    Py_END_ALLOW_THREADS
    return true;
}

/* touch(threads): let threads touch the huge pages of large tensors for the first time. */
static PyObject *blocks_touch(PyObject *object, PyObject *args) {
    Blocks *self = (Blocks *)object;
    int threads;
    if (!PyArg_ParseTuple(args, "i:touch", &threads)) return NULL;
    Leaf *leaves = malloc(sizeof *leaves * (size_t)(self->run_count + 1));
    if (leaves == NULL) return PyErr_NoMemory();
    int64_t count = 0, nbytes = 0;
    for (int64_t i = 0; i < self->run_count && !self->is_cuda; i++) {
        const Run *run = &self->runs[i];
        uintptr_t page = HUGE_PAGE_BYTES, start = ((uintptr_t)run->to + page - 1) / page * page,
                  end = ((uintptr_t)run->to + (uintptr_t)(run->end - run->start)) / page * page;
        if (run->end - run->start < HUGE_FROM_BYTES || start >= end) continue;
        leaves[count++] =
            (Leaf){.offset = nbytes, .nbytes = (int64_t)(end - start), .to = (char *)start};
        nbytes += (int64_t)(end - start);
    }
    bool is_done = count == 0 || move_all(leaves, count, nbytes, threads);
    free(leaves);
    if (!is_done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* unpack(host, start, end, threads): copy bytes `start` to `end` of the host slab, which begins at
 * address `host`, to tensors in host memory. */
static PyObject *blocks_unpack(PyObject *object, PyObject *args) {
    Blocks *self = (Blocks *)object;
    unsigned long long host;
    long long start, end;
    int threads;
    if (!PyArg_ParseTuple(args, "KLLi:unpack", &host, &start, &end, &threads)) return NULL;
    if (self->is_cuda) return PyErr_Format(PyExc_ValueError, "these tensors are on a GPU");
    int64_t first, count = runs_between(self, start, end, &first);
    Leaf *leaves = malloc(sizeof *leaves * (size_t)(count + 1));
    for (int64_t i = 0; leaves != NULL && i < count; i++) {
        const Run *run = &self->runs[first + i];
        int64_t from = run->start > start ? run->start : start,
                to = run->end < end ? run->end : end;
        leaves[i] = (Leaf){.source = (const char *)(uintptr_t)host + from,
                           .offset = from - start,
                           .nbytes = to - from,
                           .to = run->to + (from - run->start)};
    }
    bool is_done = leaves != NULL && (count == 0 || move_all(leaves, count, end - start, threads));
    free(leaves);
    if (!is_done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* fill(sources, stream, stacks): pack leaves, of AT_ONCE_BYTES together at most, into ordinary memory,
 * and send them from there. All of them have been read when the call returns. Returns what
 * `copy` returns. */
static PyObject *blocks_fill(PyObject *object, PyObject *args) {
    Blocks *self = (Blocks *)object;
    PyObject *sources, *stacks;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OKO!:fill", &sources, &stream, &PyDict_Type, &stacks)) return NULL;
    if (self->table.header->nbytes > AT_ONCE_BYTES) {
        return PyErr_Format(PyExc_ValueError,
                            "the batch is too large to be sent from ordinary memory");
    }
    char *memory = malloc((size_t)self->table.header->nbytes + 1);
    if (memory == NULL) return PyErr_NoMemory();
    int64_t nbytes = self->table.header->nbytes;
    Work work = {.leaves = NULL};
    PyObject *result = NULL;
    if (work_begin(&work, &self->table, sources, stacks, nbytes)) {
        work_do(&work, memory);
        result = send_runs(self, memory, 0, nbytes, (void *)(uintptr_t)stream, false);
    }
    free(memory);
    return result;
}

/* -- leaves ------------------------------------------------------------------------------------ */

/* Views share the block's storage, so that `record_stream` works, and each has a version counter
 * of its own. */
static PyObject *view(const Blocks *self, const Block *block, const Row *row) {
    int64_t width = self->table.header->width;
    if (self->view != NULL) {
        return PyObject_CallFunction(self->view, "OiLNN", block->tensor, row->dtype,
                                     (long long)(row->offset - block->start),
                                     tuple_of(row->ndim, row->sizes),
                                     tuple_of(row->ndim, row->sizes + width));
    }
    void *base = block->storage != NULL ? block->storage : handle_of(block->tensor), *made = NULL;
    if (torch.alloc_from_pool(base, row->offset - block->start + block->skipped,
                              torch.scalar[row->dtype], row->ndim, row->sizes, row->sizes + width,
                              &made))
        return PyErr_Format(PyExc_RuntimeError, "torch could not make a view of the slab");
    PyObject *object = torch.wrap(made); /* which takes the tensor out of the handle */
    torch.delete_handle(made);
    return object;
}

/* A packed leaf, as a new reference. */
static PyObject *packed_leaf(const Blocks *self, int64_t index) {
    const Block *block = &self->blocks[self->block_of[index]];
    return block->is_leaf ? Py_XNewRef(block->tensor)
                          : view(self, block, row_at(self->table.header, index));
}

/* The number of leaves that are neither packed nor repeated. */
static Py_ssize_t count_others(const Header *table) {
    Py_ssize_t count = 0;
    for (int64_t i = 0; i < table->rows; i++) {
        const Row *row = row_at(table, i);
        count += !is_packed(row) && row->kind != ALIAS;
    }
    return count;
}

/* leaves(others): all leaves of the batch, in order. others: the values of the leaves that are
 * not packed, in order. */
static PyObject *blocks_leaves(PyObject *object, PyObject *others) {
    Blocks *self = (Blocks *)object;
    const Header *table = self->table.header;
    if (!PyList_Check(others))
        return PyErr_Format(PyExc_TypeError, "the leaves that are not packed are a list");
    Py_ssize_t given = PyList_Size(others), count = count_others(table);
    if (given != count)
        return PyErr_Format(PyExc_ValueError, "%zd leaves for %zd that aren't packed", given,
                            count);
    PyObject *leaves = PyList_New((Py_ssize_t)table->rows);
    Py_ssize_t next = 0;
    for (int64_t i = 0; leaves != NULL && i < table->rows; i++) {
        const Row *row = row_at(table, i);
        PyObject *leaf;
        if (is_packed(row)) {
            leaf = packed_leaf(self, i);
        } else if (row->kind == ALIAS) {
            leaf = Py_XNewRef(PyList_GetItem(leaves, (Py_ssize_t)row->offset));
        } else {
            leaf = Py_XNewRef(PyList_GetItem(others, next++));
        }
        if (leaf == NULL || PyList_SetItem(leaves, (Py_ssize_t)i, leaf) != 0) Py_CLEAR(leaves);
    }
    return leaves;
}

static PyObject *blocks_tensors(PyObject *object, UNUSED void *nothing) {
    Blocks *self = (Blocks *)object;
    PyObject *tensors = PyList_New((Py_ssize_t)self->count);
    for (int64_t i = 0; tensors != NULL && i < self->count; i++) {
        PyList_SetItem(tensors, (Py_ssize_t)i, Py_XNewRef(self->blocks[i].tensor));
    }
    return tensors;
}

static Py_ssize_t blocks_length(PyObject *object) { return (Py_ssize_t)((Blocks *)object)->count; }

static PyMethodDef blocks_type_methods[] = {
    {"of", blocks_of, METH_VARARGS | METH_CLASS,
     "of(table, sharing, device_type, device_index[, slab[, make, view]])"},
    {"copy", blocks_copy, METH_VARARGS,
     "copy(host, start, end, stream, is_page_locked): the number of copies, or -error of CUDA"},
    {"copy_locked", blocks_copy_locked, METH_VARARGS,
     "copy_locked(sources, pieces, stream, at_once): from page-locked memory of their own"},
    {"touch", blocks_touch, METH_VARARGS,
     "touch(threads): let threads touch large tensors on the CPU for the first time"},
    {"unpack", blocks_unpack, METH_VARARGS,
     "unpack(host, start, end, threads): copy bytes of the host slab to tensors on the CPU"},
    {"fill", blocks_fill, METH_VARARGS,
     "fill(sources, stream, stacks): pack into ordinary memory, and copy from there"},
    {"leaves", blocks_leaves, METH_O,
     "leaves(others): all leaves of the batch; others are those that are not packed, in order"},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef blocks_getters[] = {
    {"tensors", blocks_tensors, NULL, "The tensor of each block.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot blocks_slots[] = {
    {Py_tp_dealloc, blocks_dealloc},
    {Py_tp_methods, blocks_type_methods},
    {Py_tp_getset, blocks_getters},
    {Py_sq_length, blocks_length},
    {0, NULL},
};
PyType_Spec blocks_spec = {"pinstage._native._core.Blocks", sizeof(Blocks), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, blocks_slots};

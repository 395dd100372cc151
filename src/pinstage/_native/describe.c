/* Describing leaves, which makes the offset table. */
#include "core.h"
#include "driver.h"

#include <stdlib.h>
#include <string.h>

/* -- what a leaf is ---------------------------------------------------------------------------- */

/* Fill in what follows from dtype, shape and the source's stride. */
static int arrange(Found *leaf, const int64_t *shape, const int64_t *stride) {
    int64_t count = 1,
            step = 1; /* a shape without elements may still have more steps than can be counted */
    for (int32_t d = 0; d < leaf->ndim; d++) {
        leaf->shape[d] = shape[d];
        leaf->stride[d] = stride[d];
        if (shape[d] < 0 || __builtin_mul_overflow(step, shape[d] > 1 ? shape[d] : 1, &step))
            return NOT_PLAIN;
        count *= shape[d];
    }
    if (__builtin_mul_overflow(count, (int64_t)torch.itemsize[leaf->dtype], &leaf->nbytes))
        return NOT_PLAIN;
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
    if (tensor.device_type != device_type ||
        (device_type != DL_CPU && tensor.device_id != device_id))
        return NOT_PLAIN;
    leaf->dtype = dtype_of(handle);
    if (leaf->dtype < 0 || tensor.ndim > MAX_DIMS) return NOT_PLAIN;
    if (tensor.dtype.bits * tensor.dtype.lanes != 8 * torch.itemsize[leaf->dtype]) return NOT_PLAIN;
    leaf->ndim = tensor.ndim;
    leaf->data = (const char *)tensor.data + tensor.byte_offset;
    if (arrange(leaf, tensor.shape, tensor.strides) != 0) return NOT_PLAIN;
    /* DLPack's exchange lacks these flags: */
    if (torch.requires_grad(*(void **)handle) || torch.is_neg(handle)) return NOT_PLAIN;
    if (tensor.dtype.code == DL_COMPLEX && torch.is_conj(handle)) return NOT_PLAIN;
    if (leaf->nbytes && (tensor.data == NULL || !fits_its_storage(handle, leaf, tensor.strides)))
        return NOT_PLAIN;
    return 0;
}

/* The code of the dtype of a buffer; -1 if it isn't plain. */
static int dtype_of_buffer(const Py_buffer *buffer) {
    const unsigned char *format =
        (const unsigned char *)(buffer->format == NULL ? "B" : buffer->format);
    bool is_complex = format[0] == 'Z';
    format += is_complex;
    bool is_letter = format[0] != 0 && format[0] < 128 && format[1] == 0;
    int dtype = is_letter ? torch.by_format[format_index((char)format[0], is_complex)] : 255;
    return dtype != 255 && buffer->itemsize == torch.itemsize[dtype] ? dtype : -1;
}

/* Read the strides of a buffer, in elements; false if torch has no such strides, or elements
 * aren't aligned. */
static bool read_strides(const Py_buffer *buffer, int64_t *stride) {
    if ((uintptr_t)buffer->buf % (uintptr_t)buffer->itemsize != 0) return false;
    for (int d = 0; d < buffer->ndim; d++) {
        if (buffer->strides[d] < 0 || buffer->strides[d] % buffer->itemsize != 0) return false;
        stride[d] = buffer->strides[d] / buffer->itemsize;
    }
    return true;
}

int find_array(PyObject *object, Found *leaf) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(object, &buffer, PyBUF_RECORDS_RO) != 0) {
        PyErr_Clear(); /* such as dates */
        return NOT_PLAIN;
    }
    int64_t shape[MAX_DIMS], stride[MAX_DIMS];
    int result = NOT_PLAIN, dtype = dtype_of_buffer(&buffer);
    if (dtype >= 0 && buffer.ndim <= MAX_DIMS && read_strides(&buffer, stride)) {
        leaf->dtype = dtype;
        leaf->ndim = buffer.ndim;
        leaf->data = buffer.buf;
        for (int d = 0; d < buffer.ndim; d++) shape[d] = buffer.shape[d];
        result = arrange(leaf, shape, stride);
    }
    PyBuffer_Release(&buffer);
    bool is_empty = result == 0 && leaf->nbytes == 0;
    if (is_empty)
        set_contiguous(leaf->ndim, leaf->shape, leaf->stride); /* the buffer's strides may be 0 */
    return result;
}

/* -- asking Python about a leaf ---------------------------------------------------------------- */

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
    if (!PyArg_ParseTuple(answer, "iiOOOK:described", &kind, &leaf->dtype, &sizes, &strides,
                          &source, &address))
        return false;
    leaf->data = (const char *)(uintptr_t)address;
    leaf->nbytes = 0; /* `find_tensor` may have set it */
    Py_ssize_t ndim = PySequence_Size(sizes);
    if (ndim < 0) return false;
    if (ndim > MAX_DIMS || kind < OTHER || kind > MOVED || kind == STRIDED || leaf->dtype < 0 ||
        leaf->dtype >= MOST_DTYPES)
        return fail(PyExc_ValueError, "a leaf was described in a way that no table can have");
    leaf->ndim = (int32_t)ndim;
    if (!read_sizes(sizes, shape, leaf->ndim) || !read_sizes(strides, stride, leaf->ndim))
        return false;
    if (kind != RAW) {
        leaf->kind = kind;
        return true;
    }
    if (arrange(leaf, shape, stride) != 0)
        return fail(PyExc_OverflowError, "a leaf is larger than any memory");
    return PyList_Append(kept, source) == 0;
}

/* -- leaves that are repeated ------------------------------------------------------------------ */

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
    while (met->places[at].object != NULL && met->places[at].object != object)
        at = (at + 1) & met->mask;
    if (met->places[at].object == NULL) {
        met->places[at].object = object;
        met->places[at].index = index;
    }
    return met->places[at].index;
}

/* -- the table --------------------------------------------------------------------------------- */

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

void look_ahead(PyObject *leaves, Py_ssize_t count, Py_ssize_t index) {
    if (index + 16 < count) __builtin_prefetch(PyList_GetItem(leaves, index + 16));
    if (index + 8 >= count || torch.handle_at == 0) return;
    PyObject *object = PyList_GetItem(leaves, index + 8);
    if (Py_TYPE(object) != torch.tensor) return;
    const char *tensor = *(const char **)handle_of(object);
    __builtin_prefetch(tensor);
    __builtin_prefetch(tensor + 64);
    __builtin_prefetch(tensor + 128);
}

typedef struct {
    PyObject *leaves, *atoms, *plainly, *cut; /* see `pinstage._batch._describe` */
    int device_type, device_id, arrays, each;
    bool are_plain; /* whether tensors have no tangents of forward-mode AD */
    Py_ssize_t count;
    Growing made;
    Met met;
    PyObject *kept, *stacks;
    Figures sum;
    LockedPiece *locked; /* the pieces of LOCKED leaves */
    int64_t locked_count, locked_room;
} Describing;

/* Whether a leaf stays as it is, by its type alone; -1 with an error. */
static int is_atom(const Describing *self, PyTypeObject *type) {
    if (type == torch.tensor || type == torch.array) return 0;
    return PySet_Contains(self->atoms, (PyObject *)type);
}

/* Describe a leaf that isn't stacked, or gathered, yet; -1 with an error. */
static int add_stack(const Describing *self, PyObject *object, Py_ssize_t index, Found *leaf) {
    PyObject *row = PyLong_FromSsize_t(index);
    int result = row == NULL ? -1 : PyDict_SetItem(self->stacks, row, object);
    Py_XDECREF(row);
    return result == 0 ? find_stack(object, leaf) : -1;
}

/* Let Python describe a leaf, or return a stack in its place; -1 with an error. */
static int ask(const Describing *self, PyObject *object, Py_ssize_t index, Found *leaf) {
    PyObject *answer = PyObject_CallFunction(self->plainly, "On", object, index);
    if (answer == NULL) return -1;
    int result = (PyObject *)Py_TYPE(answer) == stack_type  ? add_stack(self, answer, index, leaf)
                 : read_described(answer, self->kept, leaf) ? 0
                                                            : -1;
    Py_DECREF(answer);
    return result;
}

/* Describe a leaf that isn't an atom, here or in Python; -1 with an error. */
static int describe_leaf(const Describing *self, PyObject *object, Py_ssize_t index, Found *leaf) {
    PyTypeObject *type = Py_TYPE(object);
    int result = NOT_PLAIN;
    if ((PyObject *)type == stack_type) {
        result = add_stack(self, object, index, leaf);
    } else if (type == torch.tensor && self->are_plain) {
        result = find_tensor(object, self->device_type, self->device_id, leaf);
    } else if (type == torch.array && self->arrays) {
        result = find_array(object, leaf);
    }
    return result == NOT_PLAIN ? ask(self, object, index, leaf) : result;
}

/* Fill in the row of a leaf that isn't repeated, and its source; false with an error. */
static bool fill_row(Describing *self, Row *row, int64_t *source, const Found *leaf) {
    row->kind = (uint8_t)leaf->kind;
    row->dtype = (uint8_t)leaf->dtype;
    row->nbytes = leaf->nbytes;
    bool is_counted = add_row(&self->sum, row);
    if (!is_packed(row)) return true;
    size_t sizes = sizeof(int64_t) * (size_t)leaf->ndim;
    row->ndim = (uint8_t)leaf->ndim;
    memcpy(row->sizes, leaf->shape, sizes);
    memcpy(row->sizes + self->made.table->width, leaf->stride, sizes);
    source[0] = (int64_t)(uintptr_t)leaf->data;
    if (leaf->kind == STRIDED) memcpy(source + 1, leaf->source_stride, sizes);
    bool fits = leaf->nbytes <= INT64_MAX / 4 && self->sum.payload - leaf->nbytes <= INT64_MAX / 4;
    return (is_counted && fits) || fail(PyExc_OverflowError, "batch is larger than any memory");
}

/* Add the row of a leaf; false with an error. */
static bool add_leaf(Describing *self, Py_ssize_t index) {
    Growing *made = &self->made;
    PyObject *object = PyList_GetItem(self->leaves, index);
    int stays = object == NULL ? -1 : is_atom(self, Py_TYPE(object));
    if (stays < 0) return false;
    Found leaf; /* not all zeros, for speed */
    leaf.kind = OTHER;
    leaf.dtype = leaf.ndim = 0;
    leaf.nbytes = 0;
    leaf.data = NULL;
    int64_t first = stays ? index : met_first(&self->met, object, index);
    bool is_new = first == index;
    if (is_new && !stays && describe_leaf(self, object, index, &leaf) != 0) return false;
    if (leaf.ndim > made->table->width && !widen(made, self->count, leaf.ndim)) return false;
    Row *row = row_at(made->table, index);
    row->offset = -1;
    made->filled = index + 1;
    if (is_new ||
        row_at(made->table, first)->kind == OTHER) /* objects that aren't tensors may repeat */
        return fill_row(self, row, source_at(made, index), &leaf);
    row->kind = ALIAS;
    row->offset = first;
    return true;
}

/* -- page-locked leaves --------------------------------------------------------------------------
 *
 * Those of LOCKED_FROM bytes and more are sent from where they are; packing a smaller one takes
 * less time than another copy, unless the batch has few leaves. */

enum { LOCKED_FROM = 32 * 1024, LOCKED_FROM_OF_FEW = 16 * 1024 };

/* Unless each leaf is to be asked: if none of this number is page-locked, no other is asked. */
enum { ASKED = 3 };

static bool add_piece(Describing *self, int64_t row, int64_t start, int64_t end) {
    if (self->locked_count == self->locked_room) {
        int64_t room = 2 * self->locked_room + 16;
        LockedPiece *more = realloc(self->locked, sizeof *more * (size_t)room);
        if (more == NULL) return no_memory();
        self->locked = more;
        self->locked_room = room;
    }
    self->locked[self->locked_count++] = (LockedPiece){row, start, end};
    return true;
}

/* Let Python cut a leaf where registrations end, and add the pieces, if there are any. */
static bool add_pieces(Describing *self, int64_t index, const char *data, int64_t nbytes) {
    PyObject *pieces = PyObject_CallFunction(self->cut, "KL", (unsigned long long)(uintptr_t)data,
                                             (long long)nbytes);
    Py_ssize_t count = pieces == NULL ? -1 : PySequence_Size(pieces);
    bool is_good = count >= 0;
    for (Py_ssize_t i = 0; i < count && is_good; i++) {
        long long start, end;
        PyObject *piece = PySequence_GetItem(pieces, i);
        is_good = piece != NULL && PyArg_ParseTuple(piece, "LL", &start, &end) &&
                  add_piece(self, index, start, end);
        Py_XDECREF(piece);
    }
    Py_XDECREF(pieces);
    return is_good;
}

/* Find the leaves that are sent from where they are; false with an error. */
static bool find_locked(Describing *self) {
    const Header *table = self->made.table;
    int64_t least =
        self->sum.packed + self->sum.moved <= MOST_FEW ? LOCKED_FROM_OF_FEW : LOCKED_FROM;
    bool may_have = self->cut != Py_None && sends_locked() && self->sum.payload > AT_ONCE_BYTES;
    int64_t asked = 0;
    for (int64_t i = 0; i < self->count && may_have; i++) {
        Row *row = row_at(table, i);
        if (row->kind != RAW || row->nbytes < least) continue;
        const char *data = (const char *)(uintptr_t)*source_at(&self->made, i);
        if (data == NULL) continue; /* a stack */
        Locked where = where_is(data, row->nbytes);
        int64_t before = self->locked_count;
        if (where == IN_ONE && !add_piece(self, i, 0, row->nbytes)) return false;
        if (where == IN_PIECES && !add_pieces(self, i, data, row->nbytes)) return false;
        if (self->locked_count > before) row->kind = LOCKED;
        may_have = self->each || ++asked < ASKED || self->locked_count > 0;
    }
    return true;
}

/* Place all rows; return what `describe` returns. */
static PyObject *place_leaves(Describing *self) {
    int64_t *order = malloc(sizeof(int64_t) * (size_t)(self->sum.packed + 1));
    if (order == NULL) return PyErr_NoMemory();
    if (!find_locked(self)) {
        free(order);
        return NULL;
    }
    place_rows(self->made.table, order);
    free(order);
    PyObject *figures = figures_of(self->made.data, self->made.table, &self->sum);
    return Py_BuildValue("(NOOOy#)", figures, self->made.addresses, self->kept, self->stacks,
                         self->locked == NULL ? "" : (const char *)self->locked,
                         (Py_ssize_t)(sizeof *self->locked * (size_t)self->locked_count));
}

/* describe(leaves, atoms, plainly, (device_type, device_id), arrays, cut, each): see
 * `pinstage._batch._describe`. */
PyObject *describe(UNUSED PyObject *module, PyObject *args) {
    Describing self = {.cut = Py_None};
    if (!PyArg_ParseTuple(args, "O!OO(ii)p|Op:describe", &PyList_Type, &self.leaves, &self.atoms,
                          &self.plainly, &self.device_type, &self.device_id, &self.arrays,
                          &self.cut, &self.each))
        return NULL;
    self.are_plain = !may_be_dual();
    self.count = PyList_Size(self.leaves);
    self.kept = PyList_New(0);
    self.stacks = PyDict_New();
    bool is_good = self.kept != NULL && self.stacks != NULL && met_new(&self.met, self.count) &&
                   widen(&self.made, self.count, 1);
    for (Py_ssize_t i = 0; i < self.count && is_good; i++) {
        look_ahead(self.leaves, self.count, i);
        is_good = add_leaf(&self, i);
    }
    PyObject *result = is_good ? place_leaves(&self) : NULL;
    Py_XDECREF(self.kept);
    Py_XDECREF(self.stacks);
    free(self.met.places);
    free(self.locked);
    growing_end(&self.made);
    return result;
}

/* The offset table: whether a buffer is one, whether its rows stay inside their slab, and where
 * leaves are placed. */
#define _GNU_SOURCE
#include "core.h"

#include <stdlib.h>

const Header *table_of(PyObject *data) {
    char *start;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(data, &start, &length) != 0) return NULL;
    const Header *header = (const Header *)start;
    if (length >= (Py_ssize_t)sizeof(Header) && (uintptr_t)header % _Alignof(Header) == 0 &&
        header->magic == TABLE_MAGIC && header->width >= 1 && header->width <= MAX_DIMS &&
        header->rows >= 0 && header->nbytes >= 0 && header->nbytes % ALIGNMENT == 0) {
        Py_ssize_t rows =
            (length - (Py_ssize_t)sizeof(Header)) / (Py_ssize_t)row_bytes(header->width);
        if (header->rows == rows &&
            (size_t)length == sizeof(Header) + row_bytes(header->width) * (size_t)rows)
            return header;
    }
    PyErr_SetString(PyExc_ValueError, "its header or its length is wrong");
    return NULL;
}

bool is_dense(int32_t ndim, const int64_t *shape, const int64_t *stride) {
    if (is_contiguous(ndim, shape, stride)) return true; /* the usual case */
    /* dimensions of more than one element, by stride: */
    int32_t order[MAX_DIMS], count = 0;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        if (shape[d] == 1) continue;
        int32_t at = count++;
        for (; at > 0 && stride[order[at - 1]] > stride[d]; at--) order[at] = order[at - 1];
        order[at] = d;
    }
    int64_t expected = 1;
    for (int32_t i = 0; i < count; i++) {
        if (stride[order[i]] != expected) return false;
        expected *= shape[order[i]];
    }
    return true;
}

/* The bytes of a row's shape; -1 if a size or a stride is negative, or there are more than can
 * be counted. */
static int64_t bytes_of(const Row *row, int64_t width, int64_t itemsize) {
    bool is_empty = false, overflows = false;
    int64_t bytes = itemsize;
    for (int d = 0; d < row->ndim; d++) {
        int64_t size = row->sizes[d], stride = row->sizes[width + d];
        if (size < 0 || stride < 0) return -1;
        is_empty = is_empty || size == 0;
        overflows = overflows || __builtin_mul_overflow(bytes, size, &bytes);
    }
    if (is_empty) return 0;
    return overflows ? -1 : bytes;
}

/* Whether a packed row's size, shape and strides agree, and its leaf is in a slab of `nbytes`. A
 * tensor made from the row has exactly the bytes of the row: a stride that repeats elements
 * would make a smaller one. */
static bool is_in_slab(const Row *row, int64_t width, int64_t nbytes) {
    int64_t itemsize =
        row->dtype < MOST_DTYPES ? torch.itemsize[row->dtype] : 0; /* a power of two */
    if (itemsize == 0 || row->ndim > width) return false;
    if (row->nbytes < 0 || row->nbytes != bytes_of(row, width, itemsize)) return false;
    if (row->offset < 0 || (row->offset & (itemsize - 1)) != 0 ||
        row->offset > nbytes - row->nbytes)
        return false;
    return row->nbytes == 0 || is_dense(row->ndim, row->sizes, row->sizes + width);
}

/* Whether a table may have such a row. Rows may overlap nevertheless. */
static bool is_possible(const Header *table, int64_t index) {
    const Row *row = row_at(table, index);
    if (is_packed(row)) return is_in_slab(row, table->width, table->nbytes);
    if (row->kind == ALIAS) return row->offset >= 0 && row->offset < index;
    return row->kind == MOVED || row->kind == OTHER;
}

/* -- places --------------------------------------------------------------------------------------
 *
 * Leaves that may share a device tensor are neighbours in the slab: those of one size group and
 * dtype, in the order of the batch. So each block is one range of the slab, and one copy. A leaf
 * that is kept alive keeps its whole block, so the size of blocks is limited: 1 MiB for leaves
 * below 64 KiB, and 4 MiB for others. The limits are not lower, because a tensor that a second
 * stream uses costs 5 us. */

enum { SMALL, MEDIUM, LARGE, GROUPS };
static const int64_t MEDIUM_FROM = 64 * 1024,
                     LARGE_FROM = 4 * 1024 * 1024; /* a LARGE leaf has a block of its own */
static const int64_t MOST_IN_BLOCK[] = {[SMALL] = 1024 * 1024,
                                        [MEDIUM] = 4 * 1024 * 1024,
                                        [LARGE] = 0};

static int group_of(const Row *row) {
    return row->nbytes < MEDIUM_FROM ? SMALL : row->nbytes < LARGE_FROM ? MEDIUM : LARGE;
}

enum { KEYS = 2 * GROUPS * MOST_DTYPES };

/* LOCKED leaves come last: the host slab ends where they begin. */
static int key_of(const Row *row) {
    int group = row->kind == LOCKED ? GROUPS + group_of(row) : group_of(row);
    return group * MOST_DTYPES + row->dtype;
}

/* Write the packed rows to `order`, by size group and dtype; return their number. */
static int64_t rows_by_key(const Header *table, int64_t *order) {
    int64_t starts[KEYS] = {0}, packed = 0;
    int last = 0;
    bool is_sorted = true;
    for (int64_t i = 0; i < table->rows; i++) {
        const Row *row = row_at(table, i);
        if (!is_packed(row)) continue;
        is_sorted = is_sorted && key_of(row) >= last;
        last = key_of(row);
        starts[last]++;
        order[packed++] = i;
    }
    if (is_sorted) return packed;
    for (int64_t key = 0, start = 0; key < KEYS; key++) {
        int64_t here = starts[key];
        starts[key] = start;
        start += here;
    }
    for (int64_t i = 0; i < table->rows; i++) {
        const Row *row = row_at(table, i);
        if (is_packed(row)) order[starts[key_of(row)]++] = i;
    }
    return packed;
}

void place_rows(Header *table, int64_t *order) {
    int64_t packed = rows_by_key(table, order), end = 0, start = 0;
    uint32_t block = 0;
    for (int64_t i = 0; i < packed; i++) {
        Row *row = row_at(table, order[i]);
        const Row *before = row_at(table, order[i == 0 ? 0 : i - 1]);
        if (key_of(row) != key_of(before) ||
            (i > 0 && end + row->nbytes - start > MOST_IN_BLOCK[group_of(row)])) {
            block++;
            start = end;
        }
        row->block = block;
        row->offset = end;
        end = (end + row->nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    table->nbytes = end;
}

/* Compare the places of two rows; an empty leaf comes before another leaf at its place. */
static int by_offset(const void *a, const void *b, void *table) {
    int64_t first = *(const int64_t *)a, second = *(const int64_t *)b;
    const Row *one = row_at(table, first), *other = row_at(table, second);
    if (one->offset != other->offset) return one->offset < other->offset ? -1 : 1;
    if (one->nbytes != other->nbytes) return one->nbytes < other->nbytes ? -1 : 1;
    return first < second ? -1 : first > second;
}

/* The first packed row that begins before the end of the one before it; -1 if there is none. */
static int64_t first_overlap(const Table *self) {
    int64_t end = 0;
    for (int64_t i = 0; i < self->packed; i++) {
        const Row *row = row_at(self->header, self->order[i]);
        if (row->offset < end) return self->order[i];
        end = row->offset + row->nbytes;
    }
    return -1;
}

/* Sort the packed rows by their offsets; return the number of a row that overlaps another, or
 * -1. */
static int64_t sort_rows(Table *self) {
    self->packed = rows_by_key(self->header, self->order);
    if (first_overlap(self) < 0) return -1; /* as `place_rows` placed them */
    qsort_r(self->order, (size_t)self->packed, sizeof(int64_t), by_offset, (void *)self->header);
    return first_overlap(self);
}

bool table_begin(Table *self, PyObject *data) {
    const Header *header = table_of(data);
    *self = (Table){.header = header};
    if (header == NULL) return false;
    int64_t wrong = 0;
    while (wrong < header->rows && is_possible(header, wrong)) wrong++;
    if (wrong == header->rows) {
        self->order = malloc(sizeof(int64_t) * (size_t)(header->rows + 1));
        if (self->order == NULL) return no_memory();
        wrong = sort_rows(self);
    }
    if (wrong < 0) {
        self->data = Py_NewRef(data);
        return true;
    }
    table_end(self);
    const char *text = "row %lld has an unknown kind or dtype, contradicts itself, overlaps "
                       "another row, or leads outside of "
                       "its %lld bytes";
    return PyErr_Format(PyExc_ValueError, text, (long long)wrong, (long long)header->nbytes) !=
           NULL;
}

int64_t slab_bytes(const Header *table) {
    int64_t end = 0;
    bool has_locked = false;
    for (int64_t i = 0; i < table->rows; i++) {
        const Row *row = row_at(table, i);
        bool is_locked = row->kind == LOCKED, is_in_slab = is_packed(row) && !is_locked;
        has_locked = has_locked || is_locked;
        if (is_in_slab && row->offset + row->nbytes > end) end = row->offset + row->nbytes;
    }
    return has_locked ? (end + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT : table->nbytes;
}

void table_end(Table *self) {
    free(self->order);
    Py_XDECREF(self->data);
    *self = (Table){.order = NULL};
}

PyObject *figures_of(PyObject *data, const Header *table, const Figures *sum) {
    return Py_BuildValue("(OLLLLLL)", data, (long long)table->nbytes, (long long)sum->payload,
                         (long long)sum->packed, (long long)sum->moved, (long long)sum->others,
                         (long long)slab_bytes(table));
}

PyObject *figures(UNUSED PyObject *module, PyObject *data) {
    Table table;
    if (!table_begin(&table, data)) return NULL;
    Figures sum = {0};
    for (int64_t i = 0; i < table.header->rows; i++)
        add_row(&sum, row_at(table.header, i)); /* disjoint: no overflow */
    PyObject *result = figures_of(data, table.header, &sum);
    table_end(&table);
    return result;
}

/* The offset table: whether a buffer is one, whether its rows stay inside their slab, and where leaves are placed. */
#define _GNU_SOURCE
#include "core.h"

#include <stdlib.h>

const Header *table_of(PyObject *data) {
    char *start;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(data, &start, &length) != 0) return NULL;
    const Header *header = (const Header *)start;
    if (length >= (Py_ssize_t)sizeof(Header) && (uintptr_t)header % _Alignof(Header) == 0 && header->magic == TABLE_MAGIC &&
        header->width >= 1 && header->width <= MAX_DIMS && header->rows >= 0 && header->nbytes >= 0 &&
        header->nbytes % ALIGNMENT == 0) {
        Py_ssize_t rows = (length - (Py_ssize_t)sizeof(Header)) / (Py_ssize_t)row_bytes(header->width);
        if (header->rows == rows && (size_t)length == sizeof(Header) + row_bytes(header->width) * (size_t)rows) return header;
    }
    PyErr_SetString(PyExc_ValueError, "its header or its length is wrong");
    return NULL;
}

/* Whether a packed row's size, shape and strides agree, and its leaf stays inside a slab of `nbytes`. */
static bool lies_in_slab(const Row *row, int64_t width, int64_t nbytes) {
    int64_t itemsize = row->dtype < MOST_DTYPES ? torch.itemsize[row->dtype] : 0; /* a power of two */
    if (itemsize == 0 || row->ndim > width || row->offset < 0 || row->offset > nbytes || (row->offset & (itemsize - 1)))
        return false;
    bool is_empty = false, overflows = false;
    int64_t bytes = itemsize, reach = 0, part;
    for (int d = 0; d < row->ndim; d++) {
        int64_t size = row->sizes[d], stride = row->sizes[width + d];
        if (size < 0 || stride < 0) return false;
        is_empty = is_empty || size == 0;
        overflows = overflows || __builtin_mul_overflow(bytes, size, &bytes) ||
                    __builtin_mul_overflow(size - 1, stride, &part) || __builtin_add_overflow(reach, part, &reach);
    }
    if (is_empty) return row->nbytes == 0;
    overflows = overflows || __builtin_add_overflow(reach, 1, &reach) || __builtin_mul_overflow(reach, itemsize, &reach);
    return !overflows && row->nbytes == bytes && bytes <= nbytes - row->offset && reach <= bytes;
}

/* -- places ---------------------------------------------------------------------------------------------------------
 *
 * Leaves that may share a device tensor are neighbours in the slab: those of one size group and dtype, in the order of
 * the batch. So each block is one range of the slab, and one copy. A leaf that is kept alive keeps its whole block, so
 * the size of blocks is limited: 1 MiB for leaves below 64 KiB, and 4 MiB for others. The limits are not lower, because
 * a tensor that a second stream uses costs 5 us. */

enum { SMALL, MEDIUM, LARGE, GROUPS };
static const int64_t MEDIUM_FROM = 64 * 1024, LARGE_FROM = 4 * 1024 * 1024; /* a LARGE leaf has a block of its own */
static const int64_t MOST_IN_BLOCK[] = {[SMALL] = 1024 * 1024, [MEDIUM] = 4 * 1024 * 1024, [LARGE] = 0};

static int group_of(const Row *row) { return row->nbytes < MEDIUM_FROM ? SMALL : row->nbytes < LARGE_FROM ? MEDIUM : LARGE; }

enum { KEYS = GROUPS * (MOST_DTYPES + 1) };

/* Rows of unknown dtypes, which `lies_in_slab` refuses, may have the key of another dtype. */
static int key_of(const Row *row) { return group_of(row) * (MOST_DTYPES + 1) + row->dtype % (MOST_DTYPES + 1); }

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
        if (key_of(row) != key_of(before) || (i > 0 && end + row->nbytes - start > MOST_IN_BLOCK[group_of(row)])) {
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
    const Row *one = row_at(table, *(const int64_t *)a), *other = row_at(table, *(const int64_t *)b);
    if (one->offset != other->offset) return one->offset < other->offset ? -1 : 1;
    return one->nbytes < other->nbytes ? -1 : one->nbytes > other->nbytes;
}

bool table_begin(Table *self, PyObject *data) {
    const Header *header = table_of(data);
    *self = (Table){.header = header};
    if (header == NULL) return false;
    self->data = Py_NewRef(data);
    int64_t *order = self->order = malloc(sizeof(int64_t) * (size_t)(header->rows + 1));
    bool is_good = order != NULL || no_memory(), is_rising = true; /* as `place_rows` placed them */
    if (is_good) self->packed = rows_by_key(header, order);
    for (int64_t i = 0; i < self->packed && is_good; i++) {
        const Row *row = row_at(header, order[i]);
        is_rising = is_rising && (i == 0 || row->offset >= row_at(header, order[i - 1])->offset);
        is_good = lies_in_slab(row, header->width, header->nbytes) ||
                  fail(PyExc_ValueError, "the offset table leads outside of its slab, or names an unknown dtype");
    }
    if (!is_good) {
        table_end(self);
    } else if (!is_rising) {
        qsort_r(order, (size_t)self->packed, sizeof(int64_t), by_offset, (void *)header);
    }
    return is_good;
}

void table_end(Table *self) {
    free(self->order);
    Py_XDECREF(self->data);
    *self = (Table){.order = NULL};
}

PyObject *figures_of(PyObject *data, const Header *table, const Figures *sum) {
    return Py_BuildValue("(OLLLLL)", data, (long long)table->nbytes, (long long)sum->payload, (long long)sum->packed,
                         (long long)sum->moved, (long long)sum->others);
}

PyObject *figures(UNUSED PyObject *module, PyObject *data) {
    const Header *header = table_of(data);
    if (header == NULL) return NULL;
    Figures sum = {0};
    int64_t index = 0;
    for (; index < header->rows; index++) {
        const Row *row = row_at(header, index);
        bool is_possible = is_packed(row)       ? lies_in_slab(row, header->width, header->nbytes)
                           : row->kind == ALIAS ? row->offset >= 0 && row->offset < index
                                                : row->kind == MOVED || row->kind == OTHER;
        if (!is_possible || !add_row(&sum, row)) break;
    }
    if (index == header->rows) return figures_of(data, header, &sum);
    return PyErr_Format(PyExc_ValueError, "row %lld leads outside of its %lld bytes, or has an unknown kind or dtype",
                        (long long)index, (long long)header->nbytes);
}

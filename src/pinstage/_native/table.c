/* The offset table: whether a buffer is one, whether its rows stay inside of their slab, and where leaves are placed. */
#define _GNU_SOURCE
#include "core.h"

#include <stdlib.h>
#include <string.h>

bool table_of(PyObject *object, Py_buffer *buffer, const Header **table) {
    if (PyObject_GetBuffer(object, buffer, PyBUF_SIMPLE) != 0) return false;
    const Header *header = buffer->buf;
    if (buffer->len >= (Py_ssize_t)sizeof(Header) && (uintptr_t)header % _Alignof(Header) == 0 &&
        header->magic == TABLE_MAGIC && header->width >= 1 && header->width <= MAX_DIMS && header->rows >= 0 &&
        header->nbytes >= 0 && header->nbytes % ALIGNMENT == 0) {
        Py_ssize_t rows = (buffer->len - (Py_ssize_t)sizeof(Header)) / (Py_ssize_t)row_bytes(header->width);
        if (header->rows == rows && (size_t)buffer->len == sizeof(Header) + row_bytes(header->width) * (size_t)rows) {
            *table = header;
            return true;
        }
    }
    PyBuffer_Release(buffer);
    PyErr_SetString(PyExc_ValueError, "its header or its length is wrong");
    return false;
}

bool lies_in_slab(const Row *row, int64_t width, int64_t nbytes) {
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
 * the batch. So each block is one range of the slab, and one copy. A leaf that is kept keeps its block: hence the limits,
 * 1 MiB for a leaf below 64 KiB and 4 MiB for others. Not less, since a tensor that a second stream uses costs 5 us. */

enum { SMALL, MEDIUM, LARGE, GROUPS };
static const int64_t MEDIUM_FROM = 64 * 1024, LARGE_FROM = 4 * 1024 * 1024; /* a LARGE leaf has a block of its own */
static const int64_t MOST_IN_BLOCK[] = {[SMALL] = 1024 * 1024, [MEDIUM] = 4 * 1024 * 1024, [LARGE] = 0};

static int group_of(const Row *row) { return row->nbytes < MEDIUM_FROM ? SMALL : row->nbytes < LARGE_FROM ? MEDIUM : LARGE; }

static int key_of(const Row *row) { return group_of(row) << 8 | row->dtype; }

/* Write the packed rows by size group and dtype; say how many there are. */
static int64_t rows_by_key(const char *rows, size_t row_size, int64_t count, int64_t *order) {
    int64_t starts[GROUPS << 8], packed = 0;
    int last = 0;
    bool is_sorted = true;
    for (int64_t i = 0; i < count; i++) {
        const Row *row = (const Row *)(rows + row_size * (size_t)i);
        if (!is_packed(row)) continue;
        is_sorted = is_sorted && key_of(row) >= last;
        last = key_of(row);
        order[packed++] = i;
    }
    if (is_sorted) return packed;
    memset(starts, 0, sizeof starts);
    for (int64_t i = 0; i < count; i++) {
        const Row *row = (const Row *)(rows + row_size * (size_t)i);
        if (is_packed(row)) starts[key_of(row)]++;
    }
    for (int64_t key = 0, start = 0; key < GROUPS << 8; key++) {
        int64_t here = starts[key];
        starts[key] = start;
        start += here;
    }
    for (int64_t i = 0; i < count; i++) {
        const Row *row = (const Row *)(rows + row_size * (size_t)i);
        if (is_packed(row)) order[starts[key_of(row)]++] = i;
    }
    return packed;
}

int64_t place_rows(Header *table, char *rows, int64_t *order) {
    size_t row_size = row_bytes(table->width);
    int64_t packed = rows_by_key(rows, row_size, table->rows, order), end = 0, start = 0;
    uint32_t block = 0;
    for (int64_t i = 0; i < packed; i++) {
        Row *row = (Row *)(rows + row_size * (size_t)order[i]);
        const Row *before = i == 0 ? row : (Row *)(rows + row_size * (size_t)order[i - 1]);
        if (key_of(row) != key_of(before) || (i > 0 && end + row->nbytes - start > MOST_IN_BLOCK[group_of(row)])) {
            block++;
            start = end;
        }
        row->block = block;
        row->offset = end;
        end = (end + row->nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    return end;
}

/* The order of two rows of a table; an empty leaf comes before the one behind it. */
static int by_offset(const void *a, const void *b, void *table) {
    const Row *one = row_at(table, *(const int64_t *)a), *other = row_at(table, *(const int64_t *)b);
    if (one->offset != other->offset) return one->offset < other->offset ? -1 : 1;
    return one->nbytes < other->nbytes ? -1 : one->nbytes > other->nbytes;
}

int64_t *rows_by_offset(const Header *table, int64_t *packed) {
    int64_t *order = malloc(sizeof(int64_t) * (size_t)(table->rows + 1));
    if (order == NULL) return (int64_t *)PyErr_NoMemory();
    *packed = rows_by_key((const char *)(table + 1), row_bytes(table->width), table->rows, order);
    bool is_rising = true; /* as `place_rows` placed them */
    for (int64_t i = 1; i < *packed && is_rising; i++) {
        is_rising = row_at(table, order[i])->offset >= row_at(table, order[i - 1])->offset;
    }
    if (!is_rising) qsort_r(order, (size_t)*packed, sizeof(int64_t), by_offset, (void *)table);
    return order;
}

static PyObject *figures(UNUSED PyObject *module, PyObject *object) {
    Py_buffer buffer;
    const Header *header;
    if (!table_of(object, &buffer, &header)) return NULL;
    Header found = {header->magic, header->rows, header->width, header->nbytes, 0, 0, 0, 0, 0};
    PyObject *result = NULL;
    for (int64_t i = 0; i < header->rows; i++) {
        const Row *row = row_at(header, i);
        bool is_possible = true;
        if (is_packed(row)) {
            is_possible = lies_in_slab(row, header->width, header->nbytes) &&
                          !__builtin_add_overflow(found.payload, row->nbytes, &found.payload);
            found.packed++;
            if (is_possible) found.dtypes |= INT64_C(1) << row->dtype;
        } else if (row->kind == ALIAS) {
            is_possible = row->offset >= 0 && row->offset < i;
        } else if (row->kind == MOVED) {
            found.moved++;
        } else {
            is_possible = row->kind == OTHER;
            found.others++;
        }
        if (!is_possible) {
            PyErr_Format(PyExc_ValueError, "row %lld leads outside of its %lld bytes, or has an unknown kind or dtype",
                         (long long)i, (long long)header->nbytes);
            goto done;
        }
    }
    if (memcmp(&found, header, sizeof found) != 0) {
        PyErr_SetString(PyExc_ValueError, "its header says something else than its rows");
        goto done;
    }
    result = Py_BuildValue("(LLLLLL)", (long long)header->nbytes, (long long)header->payload, (long long)header->packed,
                           (long long)header->moved, (long long)header->others, (long long)header->dtypes);
done:
    PyBuffer_Release(&buffer);
    return result;
}

PyMethodDef table_methods[] = {
    {"figures", figures, METH_O,
     "figures(table): nbytes, payload, packed, moved, others, dtypes, if its rows agree with them."},
    {NULL, NULL, 0, NULL},
};

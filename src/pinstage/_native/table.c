/* The offset table: whether a buffer is one, and whether its rows stay inside of their slab. */
#include "core.h"

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
    if (itemsize == 0 || row->ndim > width || row->offset < 0 || row->offset > nbytes || (row->offset & (itemsize - 1))) return false;
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
    return !overflows && row->nbytes == bytes && bytes <= nbytes - row->offset && reach <= nbytes - row->offset;
}

/* figures(table): what a table from elsewhere says of itself, if all of it is true: nbytes, payload, packed, moved, others,
 * dtypes. */
static PyObject *figures(PyObject *module, PyObject *object) {
    (void)module;
    Py_buffer buffer;
    const Header *header;
    if (!table_of(object, &buffer, &header)) return NULL;
    Header found = {0};
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
    if (found.payload != header->payload || found.packed != header->packed || found.moved != header->moved ||
        found.others != header->others || found.dtypes != header->dtypes) {
        PyErr_SetString(PyExc_ValueError, "its header says something else than its rows");
        goto done;
    }
    result = Py_BuildValue("(LLLLLL)", (long long)header->nbytes, (long long)header->payload, (long long)header->packed,
                           (long long)header->moved, (long long)header->others, (long long)header->dtypes);
done:
    PyBuffer_Release(&buffer);
    return result;
}

PyMethodDef table_methods[] = {{"figures", figures, METH_O, NULL}, {NULL, NULL, 0, NULL}};

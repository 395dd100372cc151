/* Shared by all parts of the extension. Limited API of Python 3.11; no headers of torch, CUDA or
 * numpy. */
#ifndef PINSTAGE_CORE_H
#define PINSTAGE_CORE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "pack.h"

#define UNUSED __attribute__((unused))

/* -- the offset table ----------------------------------------------------------------------------
 *
 * A header, then a row for each leaf of a batch, in order. `pinstage._batch._table` reads the same
 * with numpy. */

#define TABLE_MAGIC INT64_C(0x70696e7374616705) /* "pinstag", version 5 */
enum { ALIGNMENT = 16 };
enum { MOST_DTYPES = 63 };

enum { OTHER, RAW, STRIDED, MOVED, ALIAS, LOCKED }; /* kinds of rows */

typedef struct {
    int64_t magic, rows, width, nbytes;
} Header;

typedef struct {
    int64_t offset; /* in the slab; for an ALIAS, the row that it repeats; else -1 */
    int64_t nbytes;
    uint8_t kind, dtype, ndim, nothing;
    uint32_t
        /* Of a packed leaf: leaves with one number may share a device tensor; see `place_rows` */
        block;
    int64_t sizes[]; /* shape[width], stride[width] */
} Row;

_Static_assert(TABLE_MAGIC >> 8 == INT64_C(0x70696e73746167), "the last byte is the version");
_Static_assert(sizeof(Header) == 32 && sizeof(Row) == 24 && offsetof(Row, kind) == 16 &&
                   offsetof(Row, block) == 20 && offsetof(Row, sizes) == 24,
               "pinstage._batch._table reads this format; a change needs another version");

static inline size_t row_bytes(int64_t width) { return sizeof(Row) + 16 * (size_t)width; }

static inline Row *row_at(const Header *table, int64_t index) {
    return (Row *)((char *)(table + 1) + row_bytes(table->width) * (size_t)index);
}

/* Bytes of a leaf's source: its address, and its strides if it is STRIDED. */
static inline size_t source_bytes(int64_t width) { return sizeof(int64_t) * (size_t)(1 + width); }

/* Whether a leaf has a place: in the host slab, or behind it if it is LOCKED, and sent from where
 * it is. */
static inline bool is_packed(const Row *row) {
    return row->kind == RAW || row->kind == STRIDED || row->kind == LOCKED;
}

/* Sums of a table's rows: bytes of packed leaves, and leaves of each kind. */
typedef struct {
    int64_t payload, packed, moved, others;
} Figures;

/* Add a row; false if there are more bytes than can be counted. */
static inline bool add_row(Figures *sum, const Row *row) {
    sum->packed += is_packed(row);
    sum->moved += row->kind == MOVED;
    sum->others += row->kind == OTHER;
    return !is_packed(row) || !__builtin_add_overflow(sum->payload, row->nbytes, &sum->payload);
}

/* The fields of `pinstage._batch._table.Table`. */
PyObject *figures_of(PyObject *data, const Header *table, const Figures *sum);

/* The table that a bytes object holds; NULL with an error if it isn't one. Only `table_begin`
 * checks the rows. */
const Header *table_of(PyObject *data);

/* Whether memory of this shape and stride is in the order of its dimensions, without gaps. No
 * size is 0. */
static inline bool is_contiguous(int32_t ndim, const int64_t *shape, const int64_t *stride) {
    int64_t expected = 1;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        if (shape[d] != 1 && stride[d] != expected) return false;
        expected *= shape[d];
    }
    return true;
}

/* Set the stride of a new tensor; false if there are more steps than can be counted, which a shape
 * without elements may have. */
static inline bool set_contiguous(int32_t ndim, const int64_t *shape, int64_t *stride) {
    int64_t step = 1;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        stride[d] = step;
        if (__builtin_mul_overflow(step, shape[d] > 1 ? shape[d] : 1, &step)) return false;
    }
    return true;
}

/* Whether memory of this shape and stride has neither gaps nor overlaps, in whatever order. No
 * size is 0. */
bool is_dense(int32_t ndim, const int64_t *shape, const int64_t *stride);

/* Give each packed row its place in the slab, and its block; set the table's size. `order` has
 * room for all packed rows. */
void place_rows(Header *table, int64_t *order);

/* A table whose rows were checked: packed ones are inside the slab, disjoint and dense, and
 * ALIASes repeat an earlier row. */
typedef struct {
    PyObject *data; /* the bytes that hold it */
    const Header *header;
    int64_t *order, packed; /* the packed rows, in the order of their offsets */
} Table;

/* Take a table from Python; false with an error, and nothing to end. It may be ended twice. */
bool table_begin(Table *self, PyObject *data);
void table_end(Table *self);

/* Bytes of the host slab. */
int64_t slab_bytes(const Header *table);

/* Bytes of a LOCKED leaf that are in one allocation or registration. */
typedef struct {
    int64_t row, start, end;
} LockedPiece;

/* -- torch, as found when the extension was set up --------------------------------------------- */

typedef struct {
    uint8_t code, bits;
    uint16_t lanes;
} DLDataType;

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

/* Copies to a device of at most this size from pageable memory have read it when the call
 * returns, and do not wait for the device (CUDA Programming Guide, Asynchronous Concurrent
 * Execution). */
enum { AT_ONCE_BYTES = 64 * 1024 };

/* The most tensors that `move_few` copies. More are moved as quickly from one slab: a leaf alone
 * takes 7 us, a slab 25 us and 3 us per leaf. */
enum { MOST_FEW = 8 };

enum { DL_CPU = 1, DL_CUDA = 2, DL_COMPLEX = 5 };

typedef struct {
    PyTypeObject *tensor, *array;
    int (*export_tensor)(void *object, DLTensor *out); /* DLPack exchange API, public */
    PyObject *level_owner, *level_name;                /* see `may_be_dual` */
    PyObject *count_modes; /* counts modes; see `makes_views` in `blocks.c` */
    union {
        /* In the order of `_FUNCTIONS` in `pinstage._compat.views`, which finds and probes them. */
        void *functions[12];
        struct {
            /* torch's stable C shim: these return a code if they fail */
            int (*storage_size)(void *handle, int64_t *out);
            int (*storage_offset)(void *handle, int64_t *out);
            int (*get_dtype)(void *handle, int32_t *out);
            int (*reinterpret)(void *self, int64_t ndim, const int64_t *sizes,
                               const int64_t *strides, int64_t offset, void **out);
            int (*alloc_from_pool)(void *self, int64_t offset_bytes, int32_t dtype, int64_t ndim,
                                   const int64_t *sizes, const int64_t *strides, void **out);
            int (*empty_strided)(int64_t ndim, const int64_t *sizes, const int64_t *strides,
                                 int32_t dtype, int32_t device_type, int32_t device_index,
                                 void **out);
            int (*get_data)(void *handle, void **out);
            int (*delete_handle)(void *handle);
            /* C++, where an exception would end the process. The shim can't make a Python
             * object. It reads a tensor's flags only by its dispatcher of boxed values, which
             * lacks `requires_grad`. The three functions that read flags never throw;
             * `THPVariable_Wrap` throws if Python is out of memory. */
            PyObject *(*wrap)(void *handle);
            bool (*is_neg)(const void *handle);
            bool (*is_conj)(const void *handle);
            bool (*requires_grad)(const void *impl);
        };
    };
    /* Where a tensor object has its at::Tensor; 0: a probe failed, none of these may be called. */
    Py_ssize_t handle_at;
    uint8_t itemsize[MOST_DTYPES]; /* by the code of a dtype; 0: there is none */
    uint8_t by_scalar[256];        /* by the number that the C shim has for it; 255: none */
    int16_t scalar[MOST_DTYPES];   /* that number; -1: none */
    uint8_t by_format[256];        /* code of a numpy format, by `format_index`; 255: none */
} Torch;

extern Torch torch;

/* The place of a numpy format in `by_format`: "f", an ASCII character, in the first half, and
 * "Zf" in the second. */
static inline unsigned format_index(char format, bool is_complex) {
    return (unsigned)(format & 127) | is_complex << 7;
}

/* The at::Tensor in a tensor object, as the C shim takes it. */
static inline void *handle_of(PyObject *object) { return (char *)object + torch.handle_at; }

/* The code of a tensor's dtype; -1 if it is not known here. */
int dtype_of(void *handle);

/* Whether a level of forward-mode AD is open, or that can't be known. */
bool may_be_dual(void);

/* -- helpers ----------------------------------------------------------------------------------- */

/* From this size on, the interpreter lock is released; below, handing it over costs as much as
 * packing or copying. */
enum { RELEASE_FROM_BYTES = 128 * 1024 };

/* Set an exception; return false. */
static inline bool fail(PyObject *type, const char *text) {
    return PyErr_Format(type, "%s", text) != NULL;
}

static inline bool no_memory(void) { return PyErr_NoMemory() != NULL; }

/* The end of a deallocation: free the object, and release its type. */
void free_object(PyObject *object);

/* -- the parts --------------------------------------------------------------------------------- */

/* The description of a leaf. */
typedef struct {
    int kind, dtype;
    int32_t ndim;
    int64_t nbytes;
    const char *data;
    int64_t shape[MAX_DIMS], stride[MAX_DIMS]; /* in the slab */
    int64_t source_stride[MAX_DIMS];           /* of a STRIDED leaf */
} Found;

enum { NOT_PLAIN = -2 }; /* Python has to describe it; no error */

/* Describe a torch.Tensor, of exactly that class. Returns 0, or NOT_PLAIN, or -1 with an error. */
int find_tensor(PyObject *object, int32_t device_type, int32_t device_id, Found *leaf);

/* Prefetch the memory of the next leaves: a batch's tensors are usually scattered, and not in
 * the caches. */
void look_ahead(PyObject *leaves, Py_ssize_t count, Py_ssize_t index);

/* Whether a leaf of this type, neither a tensor nor an array, stays as it is: objects of `atoms`
 * hold no tensor, and those of `wrappers` are replaced by what they wrap. -1 with an error. */
int stays(PyObject *atoms, PyObject *wrappers, PyTypeObject *type);

/* Describe a numpy.ndarray, of exactly that class, which has to keep its memory. */
int find_array(PyObject *object, Found *leaf);

/* Samples of one field, to be stacked; or one leaf, whose rows are gathered. */
typedef struct {
    int64_t count, nbytes; /* nbytes: of all */
    int dtype;
    int32_t ndim;
    int64_t shape[MAX_DIMS]; /* of a sample */
    Rows rows;               /* of a leaf that is gathered */
    Leaf leaves[];           /* followed by the stride of each */
} Stack;

/* The stack that `alike` or `stack_rows` returned; NULL with an error. */
const Stack *stack_of(PyObject *object);
extern PyObject *stack_type;

/* Describe such a stack, which has no data yet. Returns 0, or -1 with an error. */
int find_stack(PyObject *object, Found *leaf);

/* A batch about to be packed: its leaves in the order of their offsets. Holds its bytes until it
 * is done. */
typedef struct {
    Table table; /* unless another object owns it */
    PyObject *sources;
    Leaf *leaves;
    int64_t count, nbytes;
} Work;

/* Take the leaves of a table, which must exist as long as the work. The work is all zeros,
 * except for its own table. `sources`: bytes with the source of each row; see `source_bytes`.
 * `stacks`: results of `alike` and `stack_rows` by row, which must exist as long as the work; such a
 * row is read from its samples. NULL if there are none. False with an error, and nothing to end. */
bool work_begin(Work *work, const Table *table, PyObject *sources, PyObject *stacks, int64_t room);

/* Pack all leaves into a slab, in this thread, and end the work. */
void work_do(Work *work, char *slab);

/* Functions of the module; `module.c` says what they take and return. */
PyObject *figures(PyObject *module, PyObject *data);
PyObject *describe(PyObject *module, PyObject *args);
PyObject *alike(PyObject *module, PyObject *args);
PyObject *stack_rows(PyObject *module, PyObject *args);
PyObject *pack(PyObject *module, PyObject *args);
PyObject *find_driver(PyObject *module, PyObject *nothing);
PyObject *has_context(PyObject *module, PyObject *nothing);
PyObject *make_stream(PyObject *module, PyObject *nothing);
PyObject *match(PyObject *module, PyObject *args);
PyObject *move_few(PyObject *module, PyObject *args);
PyObject *fetch_few(PyObject *module, PyObject *args);
PyObject *fill_few(PyObject *module, PyObject *args);
PyObject *copy_out(PyObject *module, PyObject *args);

extern PyType_Spec structure_spec, job_spec, blocks_spec, stack_spec;

#endif

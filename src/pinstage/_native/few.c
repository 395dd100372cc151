/* A few leaves, each copied to a tensor of its own, without a slab. */
#include "blocks.h"
#include "driver.h"

#include <stdlib.h>
#include <string.h>

/* More bytes that aren't page-locked are moved as quickly from one slab. */
enum { MOST_FEW_BYTES = 1024 * 1024 };

/* A smaller leaf is copied through a buffer in less time than CUDA takes to say where it is. */
enum { ASK_FROM_BYTES = 16 * 1024 };

typedef struct {
    PyObject *leaves;           /* of the batch */
    PyObject *atoms, *wrappers; /* see `move_few` */
    bool is_cuda;
    int borrows;  /* whether page-locked leaves may be read after the call */
    int is_later; /* whether page-locked leaves, too, may be too large */
    int device_index;
    void *stream, *copies;  /* the current one, and ours */
    int count;              /* tensors and arrays among the leaves */
    int locked;             /* those that are sent from page-locked memory */
    int made;               /* those that have a destination */
    int64_t nbytes, others; /* of all, and of those that aren't sent from page-locked memory */
    Found sources[MOST_FEW];
    bool is_locked[MOST_FEW];    /* of each source */
    Py_ssize_t index[MOST_FEW];  /* of each source in the leaves */
    PyObject *tensors[MOST_FEW]; /* the destinations, held */
    char *to[MOST_FEW];          /* their memory */
} Few;

static bool is_repeated(const Few *few, PyObject *leaf) {
    for (int i = 0; i < few->count; i++) {
        if (PyList_GetItem(few->leaves, few->index[i]) == leaf) return true;
    }
    return false;
}

/* Add a tensor or an array. Returns 0, or NOT_PLAIN, or -1 with an error. */
static int add_source(Few *few, PyObject *leaf, Py_ssize_t index) {
    if (few->count == MOST_FEW || is_repeated(few, leaf)) return NOT_PLAIN;
    Found *source = &few->sources[few->count];
    bool is_tensor = Py_TYPE(leaf) == torch.tensor;
    int result = is_tensor ? find_tensor(leaf, DL_CPU, 0, source) : find_array(leaf, source);
    if (result != 0) return result;
    if (source->kind != RAW || torch.scalar[source->dtype] < 0) return NOT_PLAIN;
    bool is_asked = few->copies != NULL &&
                    source->nbytes >= (few->borrows ? ASK_FROM_BYTES : AT_ONCE_BYTES + 1);
    bool is_locked = is_asked && where_is(source->data, source->nbytes) == IN_ONE;
    few->nbytes += source->nbytes;
    few->others += is_locked ? 0 : source->nbytes;
    if ((few->is_later ? few->nbytes : few->others) > MOST_FEW_BYTES) return NOT_PLAIN;
    few->is_locked[few->count] = is_locked;
    few->locked += is_locked;
    few->index[few->count++] = index;
    return 0;
}

int stays(PyObject *atoms, PyObject *wrappers, PyTypeObject *type) {
    int is_atom = PySet_Contains(atoms, (PyObject *)type),
        is_wrapper = PySet_Contains(wrappers, (PyObject *)type);
    return is_atom < 0 || is_wrapper < 0 ? -1 : is_atom && !is_wrapper;
}

/* Check that a leaf of another type stays as it is. Returns what `add_source` returns. */
static int check_stays(const Few *few, PyTypeObject *type) {
    int result = stays(few->atoms, few->wrappers, type);
    return result < 0 ? -1 : result ? 0 : NOT_PLAIN;
}

/* Find the sources, which are few, small, dense, and different objects, and are read at once.
 * Returns what `add_source` returns. */
static int find_sources(Few *few) {
    int result = may_be_dual() ? NOT_PLAIN : 0;
    for (Py_ssize_t i = 0; i < PyList_Size(few->leaves) && result == 0; i++) {
        PyObject *leaf = PyList_GetItem(few->leaves, i);
        PyTypeObject *type = Py_TYPE(leaf);
        bool is_data = type == torch.tensor || type == torch.array;
        result = is_data ? add_source(few, leaf, i) : check_stays(few, type);
    }
    if (result != 0) return result;
    bool is_read =
        !few->is_cuda || are_read_at_once(few->sources, few->is_locked, few->count, few->stream);
    /* Copies of our stream don't wait for earlier users of the memory. */
    bool is_free = !few->is_cuda || few->borrows || few->locked == 0 || is_idle(few->stream);
    return few->count > 0 && is_read && is_free ? 0 : NOT_PLAIN;
}

/* Make the destinations; false if there is no memory. */
static bool make_tensors(Few *few) {
    for (; few->made < few->count; few->made++) {
        const Found *leaf = &few->sources[few->made];
        char **to = &few->to[few->made];
        PyObject *made = new_tensor(leaf->ndim, leaf->shape, leaf->stride, leaf->dtype,
                                    few->is_cuda, few->device_index, to);
        if (made == NULL) return false;
        few->tensors[few->made] = made;
    }
    return true;
}

/* Copy page-locked sources by our stream, and wait until they have been read; false if the driver
 * refuses it. */
static bool copy_locked(const Few *few) {
    Copies copies;
    if (!copies_new(&copies, few->count)) {
        PyErr_Clear();
        return false;
    }
    for (int i = 0; i < few->count; i++) {
        if (few->is_locked[i])
            copies_add(&copies, few->to[i], few->sources[i].data, few->sources[i].nbytes);
    }
    bool is_done = copies_send_locked(&copies, few->copies, true);
    free(copies.to);
    return is_done;
}

/* Copy the sources to a device; return CUDA's error. `buffer`: see `copy_at_once`. */
static int copy_to_device(const Few *few, char *buffer) {
    int code = 0;
    PyThreadState *state = PyEval_SaveThread();
    for (int i = 0; i < few->count && code == 0; i++) {
        if (few->is_locked[i]) {
            if (few->borrows) code = copy_later(few->to[i], &few->sources[i], few->stream);
        } else if (few->sources[i].nbytes > 0) {
            code = copy_at_once(few->to[i], &few->sources[i], buffer, few->stream);
        }
    }
    PyEval_RestoreThread(state);
    return code;
}

static void copy_on_host(const Few *few) {
    for (int i = 0; i < few->count; i++) {
        const Found *source = &few->sources[i];
        if (source->nbytes > 0) memmove(few->to[i], source->data, (size_t)source->nbytes);
    }
}

/* The leaves with the destinations in the places of the sources, and the figures that `move_few`
 * returns. */
static PyObject *moved(const Few *few) {
    long copies = 0;
    PyObject *leaves = PyList_GetSlice(few->leaves, 0, PyList_Size(few->leaves));
    for (int i = 0; leaves != NULL && i < few->count; i++) {
        copies += few->sources[i].nbytes > 0;
        if (PyList_SetItem(leaves, few->index[i], Py_XNewRef(few->tensors[i])) != 0)
            Py_CLEAR(leaves);
    }
    return leaves == NULL ? NULL
                          : Py_BuildValue("(NiLli)", leaves, few->count, (long long)few->nbytes,
                                          copies, few->locked);
}

/* Copy, and return what `move_few` returns. */
static PyObject *copy_few(const Few *few) {
    if (!few->is_cuda) {
        copy_on_host(few);
        return moved(few);
    }
    char *buffer = malloc(AT_ONCE_BYTES);
    if (buffer == NULL) Py_RETURN_NONE;
    int code = copy_to_device(few, buffer);
    free(buffer);
    if (code == 0 && few->locked > 0 && !few->borrows && !copy_locked(few)) Py_RETURN_NONE;
    return code != 0 ? PyLong_FromLong(-(long)code) : moved(few);
}

/* move_few(leaves, (atoms, wrappers), device_type, device_index, stream, copies, borrows,
 * most_bytes, is_later): move leaves as `.to()` would, on torch's current stream. All leaves have been read
 * when it returns, without waiting for earlier work, but for page-locked leaves of at least 16 KiB
 * if it `borrows`.
 *
 * atoms: types of leaves that stay as they are, except those of wrappers. copies: our stream, which
 * page-locked leaves of more than AT_ONCE_BYTES take if the current one is idle and the call doesn't
 * borrow; 0: CUDA isn't asked where leaves are. most_bytes: if leaves of a call that borrows have
 * more bytes together, and the stream is busy, their number is returned, and nothing is moved.
 * is_later: the batch is for later work, which a large copy on the current stream would delay.
 *
 * Returns the new leaves, how many were moved, their bytes, the number of copies, and how many
 * leaves were sent from page-locked memory. Returns None if the leaves are not few, small and plain,
 * would not be read at once, or there is no memory; returns CUDA's error as a negative number. */
PyObject *move_few(UNUSED PyObject *module, PyObject *args) {
    Few few; /* not all zeros: that would take as long as a small copy */
    few.count = few.made = few.locked = 0;
    few.nbytes = few.others = 0;
    int device_type;
    unsigned long long stream, copies;
    long long most_bytes;
    if (!PyArg_ParseTuple(args, "O!(OO)iiKKpLp:move_few", &PyList_Type, &few.leaves, &few.atoms,
                          &few.wrappers, &device_type, &few.device_index, &stream, &copies,
                          &few.borrows, &most_bytes, &few.is_later))
        return NULL;
    few.is_cuda = device_type == 1;
    few.stream = (void *)(uintptr_t)stream;
    few.copies = sends_locked() ? (void *)(uintptr_t)copies : NULL;
    if (!makes_views() || (few.is_cuda && !has_driver())) Py_RETURN_NONE;
    int result = find_sources(&few);
    if (result == -1) return NULL;
    if (result == NOT_PLAIN) Py_RETURN_NONE;
    if (few.borrows && few.nbytes > most_bytes && few.is_cuda && !is_idle(few.stream))
        return PyLong_FromLongLong(few.nbytes);
    PyObject *answer = make_tensors(&few) ? copy_few(&few) : Py_NewRef(Py_None);
    for (int i = 0; i < few.made; i++) Py_DECREF(few.tensors[i]);
    return answer;
}

/* -- to the host ------------------------------------------------------------------------------- */

/* Where the next source begins in the slab, behind byte `end`. */
static int64_t start_behind(int64_t end) { return (end + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

/* Add a tensor of the device. Returns what `add_source` returns. */
static int add_fetched(Few *few, PyObject *leaf, Py_ssize_t index, int64_t room) {
    if (few->count == MOST_FEW || is_repeated(few, leaf)) return NOT_PLAIN;
    Found *source = &few->sources[few->count];
    int result = find_tensor(leaf, DL_CUDA, few->device_index, source);
    if (result != 0) return result;
    int64_t start = start_behind(few->nbytes);
    if (source->nbytes > room - start || source->kind != RAW || torch.scalar[source->dtype] < 0)
        return NOT_PLAIN;
    few->nbytes = start + source->nbytes;
    few->index[few->count++] = index;
    return 0;
}

/* Start the copies of the sources to a slab, one behind the other; return CUDA's error. */
static int copy_to_slab(const Few *few, char *slab) {
    int code = 0;
    int64_t end = 0;
    PyThreadState *state = PyEval_SaveThread();
    for (int i = 0; i < few->count && code == 0; i++) {
        int64_t start = start_behind(end);
        end = start + few->sources[i].nbytes;
        if (start < end) code = copy_to_host(slab + start, &few->sources[i], few->stream);
    }
    PyEval_RestoreThread(state);
    return code;
}

/* Fill the new tensors that there are from the slab. */
static void fill_tensors(const Few *few, const char *slab) {
    int64_t end = 0;
    for (int i = 0; i < few->made; i++) {
        int64_t start = start_behind(end);
        end = start + few->sources[i].nbytes;
        if (start < end) memcpy(few->to[i], slab + start, (size_t)(end - start));
    }
}

/* fill_few(leaves, slab): fill the tensors that `fetch_few` made, when their bytes are there. */
PyObject *fill_few(UNUSED PyObject *module, PyObject *args) {
    Few few; /* not all zeros, as in `move_few` */
    unsigned long long address;
    few.made = 0;
    if (!PyArg_ParseTuple(args, "O!K:fill_few", &PyList_Type, &few.leaves, &address)) return NULL;
    for (Py_ssize_t i = 0; i < PyList_Size(few.leaves); i++) {
        PyObject *leaf = PyList_GetItem(few.leaves, i);
        if (Py_TYPE(leaf) != torch.tensor) continue;
        Found *made = &few.sources[few.made];
        int result = few.made < MOST_FEW ? find_tensor(leaf, DL_CPU, 0, made) : NOT_PLAIN;
        if (result == -1) return NULL;
        if (result == NOT_PLAIN)
            return PyErr_Format(PyExc_ValueError, "fetch_few didn't make these tensors");
        few.to[few.made++] = (char *)made->data;
    }
    Py_BEGIN_ALLOW_THREADS
    fill_tensors(&few, (const char *)(uintptr_t)address);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* fetch_few(leaves, (atoms, wrappers), device_index, stream, slab, room, waits): start the copies of
 * a device's tensors to page-locked memory of `room` bytes, behind the stream's earlier work, and
 * make new tensors on the host. If it `waits`, it waits for the stream, and fills them; otherwise
 * `fill_few` does that later. Otherwise as `move_few`. */
PyObject *fetch_few(UNUSED PyObject *module, PyObject *args) {
    Few few; /* not all zeros, as in `move_few` */
    few.count = few.made = few.locked = 0;
    few.nbytes = 0;
    few.is_cuda = false; /* the destinations */
    unsigned long long stream, address;
    long long room;
    int waits;
    if (!PyArg_ParseTuple(args, "O!(OO)iKKLp:fetch_few", &PyList_Type, &few.leaves, &few.atoms,
                          &few.wrappers, &few.device_index, &stream, &address, &room, &waits))
        return NULL;
    char *slab = (char *)(uintptr_t)address;
    few.stream = (void *)(uintptr_t)stream;
    int result = makes_views() && has_driver() && !may_be_dual() ? 0 : NOT_PLAIN;
    for (Py_ssize_t i = 0; i < PyList_Size(few.leaves) && result == 0; i++) {
        PyObject *leaf = PyList_GetItem(few.leaves, i);
        PyTypeObject *type = Py_TYPE(leaf);
        result = type == torch.tensor ? add_fetched(&few, leaf, i, room) : check_stays(&few, type);
    }
    if (result == -1) return NULL;
    if (result == NOT_PLAIN || few.count == 0) Py_RETURN_NONE;
    int code = copy_to_slab(&few, slab);
    bool is_made = code == 0 && make_tensors(&few); /* while the copies are under way */
    if (code == 0 && few.nbytes > 0 && (waits || !is_made)) {
        Py_BEGIN_ALLOW_THREADS
        code = wait_for_stream(few.stream);
        if (code == 0) fill_tensors(&few, slab);
        Py_END_ALLOW_THREADS
    }
    PyObject *answer = code != 0 ? PyLong_FromLong(-(long)code)
                       : is_made ? moved(&few)
                                 : Py_NewRef(Py_None);
    for (int i = 0; i < few.made; i++) Py_DECREF(few.tensors[i]);
    return answer;
}

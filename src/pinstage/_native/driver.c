/* Copies by CUDA's driver, whose functions are found by dlsym, and by memcpy where there is no
 * GPU.
 *
 * One call for a batch of copies takes as long as one copy of all the bytes: 300 leaves of 1 MiB
 * take 5.80 ms, like one copy of 300 MiB; with a call for each they take 6.50 ms. */
#include "driver.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int order;
    int source_hint[2], target_hint[2];
    unsigned flags;
} Attributes; /* CUmemcpyAttributes */

enum { IN_STREAM_ORDER = 1, DURING_CALL = 2 }; /* CUmemcpySrcAccessOrder */

static struct {
    int (*copy)(unsigned long long to, const void *from, size_t nbytes, void *stream);
    int (*to_host)(void *to, unsigned long long from, size_t nbytes, void *stream);
    int (*query)(void *stream);
    int (*wait)(void *stream);
    int (*context)(void **context);
    int (*make_stream)(void **stream, unsigned flags);
    int (*attributes)(unsigned count, int *attributes, void **values, unsigned long long address);
    int (*batch)(unsigned long long *to, unsigned long long *from, size_t *nbytes, size_t count,
                 Attributes *attributes, size_t *attributes_from, size_t kinds,
                 void *stream); /* of CUDA 13 */
    int (*batch_12)(unsigned long long *to, unsigned long long *from, size_t *nbytes, size_t count,
                    Attributes *attributes, size_t *attributes_from, size_t kinds, size_t *failed,
                    void *stream); /* of CUDA 12.8 */
} driver;

bool has_driver(void) { return driver.copy != NULL; }

/* find_driver(): find the functions of CUDA's driver, if this process has loaded it; return
 * whether it can copy. */
PyObject *find_driver(UNUSED PyObject *module, UNUSED PyObject *nothing) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (library == NULL) Py_RETURN_FALSE;
    *(void **)&driver.copy = dlsym(library, "cuMemcpyHtoDAsync_v2");
    *(void **)&driver.to_host = dlsym(library, "cuMemcpyDtoHAsync_v2");
    *(void **)&driver.wait = dlsym(library, "cuStreamSynchronize");
    *(void **)&driver.query = dlsym(library, "cuStreamQuery");
    *(void **)&driver.context = dlsym(library, "cuCtxGetCurrent");
    *(void **)&driver.make_stream = dlsym(library, "cuStreamCreate");
    *(void **)&driver.attributes = dlsym(library, "cuPointerGetAttributes");
    *(void **)&driver.batch = dlsym(library, "cuMemcpyBatchAsync_v2");
    *(void **)&driver.batch_12 = dlsym(library, "cuMemcpyBatchAsync");
    return PyBool_FromLong(driver.copy != NULL && driver.to_host != NULL && driver.query != NULL &&
                           driver.wait != NULL && driver.context != NULL &&
                           driver.make_stream != NULL && driver.attributes != NULL);
}

/* has_context(): whether the calling thread has a current context, which `where_is` needs. */
PyObject *has_context(UNUSED PyObject *module, UNUSED PyObject *nothing) {
    void *context = NULL;
    return PyBool_FromLong(driver.context(&context) == 0 && context != NULL);
}

/* make_stream(): make a stream of the current context that doesn't wait for the legacy default
 * stream; return its handle, or CUDA's error as a negative number. */
PyObject *make_stream(UNUSED PyObject *module, UNUSED PyObject *nothing) {
    void *stream = NULL;
    int code = driver.make_stream(&stream, 1 /* CU_STREAM_NON_BLOCKING */);
    return PyLong_FromLongLong(code == 0 ? (long long)(intptr_t)stream : -(long long)code);
}

/* The number that CUDA has for the allocation or registration of a byte of host memory; 0 if it
 * isn't page-locked, or is managed memory, which the driver moves. */
static unsigned long long allocation_of(const char *address) {
    int attributes[] = {2 /* MEMORY_TYPE */, 8 /* IS_MANAGED */, 7 /* BUFFER_ID */};
    int type = 0;
    unsigned managed = 0; /* CUDA writes a byte, or an int */
    unsigned long long number = 0;
    void *values[] = {&type, &managed, &number};
    bool is_known = driver.attributes(3, attributes, values, (uintptr_t)address) == 0;
    return is_known && type == 1 /* CU_MEMORYTYPE_HOST */ && managed == 0 ? number : 0;
}

Locked where_is(const char *data, int64_t nbytes) {
    unsigned long long first = allocation_of(data), last = allocation_of(data + nbytes - 1);
    if (first == 0 || last == 0) return ELSEWHERE;
    return first == last ? IN_ONE : IN_PIECES;
}

bool sends_locked(void) { return driver.batch != NULL || driver.batch_12 != NULL; }

/* Whether CUDA knows the byte at an address. `cuPointerGetAttribute` would make an error of
 * ordinary memory, and take 1 us instead of 0.2. */
static bool is_known(const char *address) {
    int attribute = 2 /* CU_POINTER_ATTRIBUTE_MEMORY_TYPE */, type = 0;
    void *value = &type;
    return driver.attributes(1, &attribute, &value, (uintptr_t)address) != 0 || type != 0;
}

/* Whether CUDA knows neither the first nor the last of these bytes, so that a small copy from
 * them has read them when the call returns. A tensor may begin in ordinary memory and end in a
 * registered range. */
static bool is_pageable(const Found *leaf) {
    return !is_known(leaf->data) && !is_known(leaf->data + leaf->nbytes - 1);
}

bool are_read_at_once(const Found *leaves, const bool *is_locked, int count, void *stream) {
    bool is_known_idle = false;
    for (int i = 0; i < count; i++) {
        if (is_locked[i] || leaves[i].nbytes <= AT_ONCE_BYTES) continue;
        if (!is_pageable(&leaves[i]) || !(is_known_idle || (is_known_idle = is_idle(stream))))
            return false;
    }
    return true;
}

int copy_at_once(char *to, const Found *leaf, char *buffer, void *stream) {
    size_t size = (size_t)leaf->nbytes;
    bool is_direct =
        leaf->nbytes > AT_ONCE_BYTES || (leaf->nbytes > AT_ONCE_BYTES / 4 && is_pageable(leaf));
    if (!is_direct) memcpy(buffer, leaf->data, size);
    return driver.copy((uintptr_t)to, is_direct ? leaf->data : buffer, size, stream);
}

bool is_idle(void *stream) { return driver.query(stream) == 0; }

int copy_later(char *to, const Found *leaf, void *stream) {
    return driver.copy((uintptr_t)to, leaf->data, (size_t)leaf->nbytes, stream);
}

int copy_to_host(char *to, const Found *leaf, void *stream) {
    return driver.to_host(to, (uintptr_t)leaf->data, (size_t)leaf->nbytes, stream);
}

int wait_for_stream(void *stream) { return driver.wait(stream); }

/* Send page-locked ranges in one call; return whether that was done. The driver refuses it on
 * the legacy default stream. */
static bool send_batch(size_t count, unsigned long long *to, unsigned long long *from,
                       size_t *nbytes, void *stream, int order) {
    Attributes attributes = {.order = order};
    size_t attributes_from = 0, failed = 0;
    if (count == 0 || (uintptr_t)stream <= 1) return false;
    if (driver.batch != NULL)
        return driver.batch(to, from, nbytes, count, &attributes, &attributes_from, 1, stream) == 0;
    if (driver.batch_12 == NULL) return false;
    return driver.batch_12(to, from, nbytes, count, &attributes, &attributes_from, 1, &failed,
                           stream) == 0;
}

bool copies_new(Copies *copies, int64_t room) {
    unsigned long long *memory = malloc((2 * sizeof *memory + sizeof(size_t)) * (size_t)(room + 1));
    *copies = (Copies){memory, memory + (room + 1), (size_t *)(memory + 2 * (room + 1)), 0};
    return memory != NULL || no_memory();
}

void copies_add(Copies *copies, const char *to, const char *from, int64_t nbytes) {
    copies->to[copies->count] = (uintptr_t)to;
    copies->from[copies->count] = (uintptr_t)from;
    copies->nbytes[copies->count++] = (size_t)nbytes;
}

PyObject *copies_send(Copies *copies, bool is_cuda, void *stream, bool is_page_locked) {
    int code = 0;
    size_t total = 0;
    for (size_t i = 0; i < copies->count; i++) total += copies->nbytes[i];
    PyThreadState *state =
        is_cuda || (int64_t)total >= RELEASE_FROM_BYTES ? PyEval_SaveThread() : NULL;
    if (!is_cuda) {
        for (size_t i = 0; i < copies->count; i++) {
            memcpy((void *)(uintptr_t)copies->to[i], (const void *)(uintptr_t)copies->from[i],
                   copies->nbytes[i]);
        }
    } else if (!is_page_locked || copies->count < 2 ||
               !send_batch(copies->count, copies->to, copies->from, copies->nbytes, stream,
                           IN_STREAM_ORDER)) {
        for (size_t i = 0; i < copies->count && code == 0; i++) {
            code = driver.copy(copies->to[i], (const void *)(uintptr_t)copies->from[i],
                               copies->nbytes[i], stream);
        }
    }
    if (state != NULL) PyEval_RestoreThread(state);
    return PyLong_FromLongLong(code == 0 ? (long long)copies->count : -(long long)code);
}

bool copies_send_locked(const Copies *copies, void *stream, bool at_once) {
    PyThreadState *state = PyEval_SaveThread();
    bool is_sent = send_batch(copies->count, copies->to, copies->from, copies->nbytes, stream,
                              at_once ? DURING_CALL : IN_STREAM_ORDER);
    PyEval_RestoreThread(state);
    return is_sent;
}

/* copy_out([(to, from, nbytes)...], stream): copy from a device to the host, behind the stream's
 * earlier work; return the number of copies, or CUDA's error as a negative number. */
PyObject *copy_out(UNUSED PyObject *module, PyObject *args) {
    PyObject *pieces;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "O!K:copy_out", &PyList_Type, &pieces, &stream)) return NULL;
    Py_ssize_t count = PyList_Size(pieces);
    Copies copies;
    bool is_good = copies_new(&copies, count);
    for (Py_ssize_t i = 0; i < count && is_good; i++) {
        unsigned long long to, from;
        long long nbytes;
        is_good = PyArg_ParseTuple(PyList_GetItem(pieces, i), "KKL", &to, &from, &nbytes);
        if (is_good)
            copies_add(&copies, (const char *)(uintptr_t)to, (const char *)(uintptr_t)from, nbytes);
    }
    int code = 0;
    if (is_good) {
        PyThreadState *state = PyEval_SaveThread();
        for (size_t i = 0; i < copies.count && code == 0; i++) {
            code = driver.to_host((void *)(uintptr_t)copies.to[i], copies.from[i], copies.nbytes[i],
                                  (void *)(uintptr_t)stream);
        }
        PyEval_RestoreThread(state);
    }
    free(copies.to);
    return is_good ? PyLong_FromLongLong(code == 0 ? (long long)count : -(long long)code) : NULL;
}

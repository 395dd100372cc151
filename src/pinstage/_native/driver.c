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

enum { IN_STREAM_ORDER = 1 }; /* CU_MEMCPY_SRC_ACCESS_ORDER_STREAM */

static struct {
    int (*copy)(unsigned long long to, const void *from, size_t nbytes, void *stream);
    int (*query)(void *stream);
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
    *(void **)&driver.query = dlsym(library, "cuStreamQuery");
    *(void **)&driver.attributes = dlsym(library, "cuPointerGetAttributes");
    *(void **)&driver.batch = dlsym(library, "cuMemcpyBatchAsync_v2");
    *(void **)&driver.batch_12 = dlsym(library, "cuMemcpyBatchAsync");
    return PyBool_FromLong(driver.copy != NULL && driver.query != NULL &&
                           driver.attributes != NULL);
}

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

bool are_read_at_once(const Found *leaves, int count, void *stream) {
    bool is_idle = false;
    for (int i = 0; i < count; i++) {
        if (leaves[i].nbytes <= AT_ONCE_BYTES) continue;
        if (!is_pageable(&leaves[i]) || !(is_idle || (is_idle = driver.query(stream) == 0)))
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

/* Send page-locked ranges in one call; return whether that was done. The driver refuses it on
 * the legacy default stream. */
static bool send_batch(size_t count, unsigned long long *to, unsigned long long *from,
                       size_t *nbytes, void *stream) {
    Attributes attributes = {.order = IN_STREAM_ORDER};
    size_t attributes_from = 0, failed = 0;
    if (count < 2 || (uintptr_t)stream <= 1) return false;
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
    } else if (!is_page_locked ||
               !send_batch(copies->count, copies->to, copies->from, copies->nbytes, stream)) {
        for (size_t i = 0; i < copies->count && code == 0; i++) {
            code = driver.copy(copies->to[i], (const void *)(uintptr_t)copies->from[i],
                               copies->nbytes[i], stream);
        }
    }
    if (state != NULL) PyEval_RestoreThread(state);
    return PyLong_FromLongLong(code == 0 ? (long long)copies->count : -(long long)code);
}

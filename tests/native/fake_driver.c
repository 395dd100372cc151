/* A libcuda.so.1 for tests on the CPU: device memory is host memory, and some host memory counts as
 * page-locked. `cuMemcpyBatchAsync_v2` reads such memory when `fake_go_on` is called, unless its
 * caller wants it to be read during the call. */
#include <stddef.h>
#include <string.h>

typedef unsigned long long Address;

typedef struct {
    int order;
    int hints[4];
    unsigned flags;
} Attributes;

enum { MOST = 4096, DURING_CALL = 2 };

static struct {
    Address start, end, number;
} locked[MOST];
static int locked_count, refusal, questions;
static struct {
    Address to, from;
    size_t nbytes;
} late[MOST];
static int late_count;

void fake_lock(Address start, size_t nbytes, Address number) {
    locked[locked_count].start = start;
    locked[locked_count].end = start + nbytes;
    locked[locked_count++].number = number;
}

void fake_go_on(void) {
    for (int i = 0; i < late_count; i++)
        memcpy((void *)late[i].to, (const void *)late[i].from, late[i].nbytes);
    late_count = 0;
}

void fake_reset(void) { locked_count = refusal = questions = late_count = 0; }

void fake_refuse(int code) { refusal = code; }

int fake_questions(void) { return questions; }

int cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t nbytes, void *stream) {
    (void)stream;
    memcpy((void *)to, from, nbytes);
    return 0;
}

int cuMemcpyDtoHAsync_v2(void *to, Address from, size_t nbytes, void *stream) {
    (void)stream;
    memcpy(to, (const void *)from, nbytes);
    return 0;
}

int cuStreamSynchronize(void *stream) { return stream == NULL ? 0 : 0; }

int cuStreamQuery(void *stream) { return stream == NULL ? 0 : 0; }

int cuStreamCreate(void **stream, unsigned flags) {
    *stream = (void *)(size_t)(flags + 2);
    return 0;
}

int cuCtxGetCurrent(void **context) {
    *context = &locked;
    return 0;
}

int cuPointerGetAttributes(unsigned count, int *attributes, void **values, Address address) {
    int at = 0;
    questions++;
    while (at < locked_count && !(locked[at].start <= address && address < locked[at].end)) at++;
    for (unsigned i = 0; i < count && at < locked_count; i++) {
        if (attributes[i] == 2) *(int *)values[i] = 1;
        if (attributes[i] == 7) *(Address *)values[i] = locked[at].number;
    }
    return 0;
}

int cuMemcpyBatchAsync_v2(Address *to, Address *from, size_t *nbytes, size_t count,
                          Attributes *attributes, size_t *attributes_from, size_t kinds,
                          void *stream) {
    (void)attributes_from, (void)kinds, (void)stream;
    if (refusal != 0) return refusal;
    for (size_t i = 0; i < count; i++) {
        late[late_count].to = to[i];
        late[late_count].from = from[i];
        late[late_count++].nbytes = nbytes[i];
    }
    if (attributes->order == DURING_CALL) fake_go_on();
    return 0;
}

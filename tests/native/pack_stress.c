/* Packs random batches from several threads at once, as hard as it can, and compares every byte;
 * see scripts/sanitize.sh.
 *
 * `pack_stress ROUNDS [SEED]`. Jobs are waited for chunk by chunk, given up in the middle,
 * forked in the middle, and left behind at the end. It is meant to run under sanitizers: what a
 * job gave back is freed or overwritten at once. */
#define _GNU_SOURCE
#include "../../src/pinstage/_native/pack.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CALLERS = 4, MOST_LEAVES = 60, KIB = 1024 };

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            abort(); \
        } \
    } while (0)

#if defined(__SANITIZE_THREAD__)
enum { THREADS_AFTER_FORK = 1 }; /* TSan ends a forked child that starts a thread */
#else
enum { THREADS_AFTER_FORK = 4 };
#endif

typedef struct {
    uint64_t state;
} Random;

static int64_t below(Random *random, int64_t bound) {
    random->state ^= random->state << 13;
    random->state ^= random->state >> 7;
    random->state ^= random->state << 17;
    return (int64_t)(random->state % (uint64_t)bound);
}

/* -- a batch ----------------------------------------------------------------------------------- */

typedef struct {
    Leaf leaves[MOST_LEAVES];
    char *memory[MOST_LEAVES];
    int64_t shapes[MOST_LEAVES][3], strides[MOST_LEAVES][3];
    Rows rows[MOST_LEAVES];
    int64_t *numbers[MOST_LEAVES]; /* of rows */
    int64_t count, nbytes;
    char *slab, *expected;
    bool is_reused; /* whether chunks may take the places of earlier ones */
} Batch;

static void *allocate(int64_t nbytes) {
    void *memory = malloc((size_t)nbytes);
    CHECK(memory != NULL || nbytes == 0);
    return memory;
}

static void fill(Random *random, char *memory, int64_t nbytes) {
    for (int64_t i = 0; i + 8 <= nbytes; i += 8) {
        int64_t word = below(random, INT64_MAX);
        memcpy(memory + i, &word, 8);
    }
    for (int64_t i = nbytes / 8 * 8; i < nbytes; i++) memory[i] = (char)below(random, 256);
}

/* A leaf as it lies, of no bytes or a few, of some KiB, or of more than one piece. */
static void make_dense(Random *random, Batch *batch, int64_t i, int64_t largest) {
    int64_t bound = below(random, 3) ? 300 : below(random, 2) ? 40 * KIB : largest;
    int64_t nbytes = below(random, bound);
    batch->leaves[i] = (Leaf){.nbytes = nbytes, .itemsize = 1, .ndim = 1};
    batch->memory[i] = allocate(nbytes);
    fill(random, batch->memory[i], nbytes);
    batch->leaves[i].source = batch->memory[i];
}

/* One whose elements are apart from each other. */
static void make_strided(Random *random, Batch *batch, int64_t i, int64_t largest) {
    static const int32_t itemsizes[] = {1, 2, 4, 8, 16};
    int32_t itemsize = itemsizes[below(random, 5)], ndim = (int32_t)below(random, 4);
    int64_t *shape = batch->shapes[i], *strides = batch->strides[i];
    int64_t count = 1, reach = 1, elements = largest / itemsize;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        shape[d] = 1 + below(random, d == 0 ? elements / count : 40);
        if (count * shape[d] > elements) shape[d] = 1;
        strides[d] = below(random, 8) ? reach + below(random, 3) : 0;
        if (strides[d] * shape[d] * itemsize > 2 * largest) strides[d] = 0;
        reach += strides[d] * (shape[d] - 1);
        count *= shape[d];
    }
    batch->leaves[i] = (Leaf){.nbytes = count * itemsize,
                              .itemsize = itemsize,
                              .ndim = ndim,
                              .shape = shape,
                              .strides = strides};
    batch->memory[i] = allocate(reach * itemsize);
    fill(random, batch->memory[i], reach * itemsize);
    batch->leaves[i].source = batch->memory[i];
}

/* One of rows, which may overlap, in any order. */
static void make_rows(Random *random, Batch *batch, int64_t i, int64_t largest) {
    static const int64_t sizes[] = {1, 2, 4, 8, 16, 52, 512, 1023, 1024, 40 * KIB, 200 * KIB};
    int64_t size = sizes[below(random, 11)], length = 1 + below(random, 20),
            distance = below(random, 2 * size + 1), count = below(random, largest / size + 1),
            nbytes = distance * (length - 1) + size;
    batch->memory[i] = allocate(nbytes);
    fill(random, batch->memory[i], nbytes);
    batch->numbers[i] = allocate(count * 8);
    for (int64_t row = 0; row < count; row++) batch->numbers[i][row] = below(random, length);
    batch->rows[i] = (Rows){batch->numbers[i], size, distance};
    batch->leaves[i] =
        (Leaf){.source = batch->memory[i], .nbytes = count * size, .rows = &batch->rows[i]};
}

static void write_expected(const Leaf *leaf, char *expected) {
    char *to = expected + leaf->offset;
    if (leaf->rows != NULL) {
        int64_t size = leaf->rows->row_bytes;
        for (int64_t row = 0; row < leaf->nbytes / size; row++)
            memcpy(to + row * size, leaf->source + leaf->rows->index[row] * leaf->rows->distance,
                   (size_t)size);
        return;
    }
    if (leaf->strides == NULL) {
        memcpy(to, leaf->source, (size_t)leaf->nbytes);
        return;
    }
    for (int64_t i = 0; i < leaf->nbytes / leaf->itemsize; i++) {
        int64_t at = 0, rest = i;
        for (int32_t d = leaf->ndim - 1; d >= 0; d--) {
            at += rest % leaf->shape[d] * leaf->strides[d];
            rest /= leaf->shape[d];
        }
        memcpy(to + i * leaf->itemsize, leaf->source + at * leaf->itemsize, (size_t)leaf->itemsize);
    }
}

static Batch *batch_new(Random *random, int64_t largest) {
    Batch *batch = calloc(1, sizeof(Batch));
    CHECK(batch != NULL);
    batch->count = below(random, MOST_LEAVES);
    batch->is_reused = below(random, 2) == 0;
    int64_t end = 0;
    for (int64_t i = 0; i < batch->count; i++) {
        int64_t kind = below(random, 6);
        (kind > 1 ? make_dense : kind ? make_rows : make_strided)(random, batch, i, largest);
        /* samples of a stack follow one another at any byte */
        if (below(random, 4)) end = (end + 15) / 16 * 16 + 16 * below(random, 3);
        batch->leaves[i].offset = end;
        if (i == 0) batch->leaves[i].offset = end = 0;
        end += batch->leaves[i].nbytes;
    }
    batch->nbytes = end = (end + 15) / 16 * 16;
    batch->slab = allocate(end);
    batch->expected = calloc(1, (size_t)(end + 1));
    CHECK(batch->expected != NULL);
    if (end > 0) memset(batch->slab, 0x5a, (size_t)end);
    for (int64_t i = 0; i < batch->count; i++) {
        write_expected(&batch->leaves[i], batch->expected);
    }
    return batch;
}

static void batch_free(Batch *batch) {
    for (int64_t i = 0; i < batch->count; i++) {
        free(batch->memory[i]);
        free(batch->numbers[i]);
    }
    free(batch->slab);
    free(batch->expected);
    free(batch);
}

static Job *start(const Batch *batch, int threads) {
    Job *job =
        job_new(batch->leaves, batch->count, batch->slab, batch->nbytes, threads, batch->is_reused);
    CHECK(job != NULL);
    job_begin(job);
    return job;
}

/* Wait for the chunks of a job from `first` on, in order, and compare each while the next ones
 * are still written, perhaps to its place. */
static void wait_for_chunks(const Batch *batch, Job *job, int64_t first, int64_t chunks,
                            int milliseconds) {
    int64_t from = first == 0 ? 0 : job_chunk_end(job, first - 1);
    for (int64_t chunk = first; chunk < chunks; chunk++) {
        while (!job_work(job, chunk, milliseconds)) {
        }
        int64_t end = job_chunk_end(job, chunk);
        CHECK(end >= from && end <= batch->nbytes);
        CHECK(memcmp(batch->slab + job_chunk_place(job, chunk), batch->expected + from,
                     (size_t)(end - from)) == 0);
        if (batch->is_reused) job_reuse(job, chunk);
        from = end;
    }
    if (chunks == job_chunks(job)) CHECK(from == batch->nbytes);
}

/* -- what is done with batches ----------------------------------------------------------------- */

static void one_round(Random *random) {
    Batch *batch = batch_new(random, below(random, 8) ? 100 * KIB : 3000 * KIB);
    if (batch->count > 0 && below(random, 8) == 0) {
        pack_all(batch->leaves, batch->count, batch->slab, batch->nbytes, below(random, 2) == 0);
        CHECK(memcmp(batch->slab, batch->expected, (size_t)batch->nbytes) == 0);
    } else if (below(random, 8) == 0) { /* it never begins */
        job_free(job_new(batch->leaves, batch->count, batch->slab, batch->nbytes, 4,
                         batch->is_reused),
                 -1);
    } else {
        Job *job = start(batch, 1 + (int)below(random, 6));
        int64_t chunks = below(random, 3) ? job_chunks(job) : below(random, job_chunks(job) + 1);
        wait_for_chunks(batch, job, 0, chunks, (int)below(random, 3));
        job_free(job, -1);
    }
    batch_free(batch);
}

typedef struct {
    pthread_t thread;
    Random random;
    int64_t rounds;
} Caller;

static void *call(void *argument) {
    Caller *caller = argument;
    for (int64_t i = 0; i < caller->rounds; i++) one_round(&caller->random);
    return NULL;
}

static void from_several_threads(Random *random, int64_t rounds) {
    Caller callers[CALLERS];
    for (int i = 0; i < CALLERS; i++) {
        callers[i].random.state = (uint64_t)below(random, INT64_MAX) + 1;
        callers[i].rounds = rounds;
        CHECK(pthread_create(&callers[i].thread, NULL, call, &callers[i]) == 0);
    }
    for (int i = 0; i < CALLERS; i++) CHECK(pthread_join(callers[i].thread, NULL) == 0);
}

/* The child has none of the threads. It ends its copy of the job without them, and packs with
 * threads of its own. */
static void fork_in_the_middle(Random *random) {
    Batch *batch = batch_new(random, 3000 * KIB);
    Job *job = start(batch, 4);
    int64_t chunks = below(random, job_chunks(job) + 1);
    wait_for_chunks(batch, job, 0, chunks, 1);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(60); /* instead of waiting for ever */
        CHECK(pack_threads() == 0);
        job_free(job, -1);
        batch_free(batch);
        for (int i = 0; i < 3; i++) {
            batch = batch_new(random, 1000 * KIB);
            job = start(batch, THREADS_AFTER_FORK);
            wait_for_chunks(batch, job, 0, job_chunks(job), 1);
            job_free(job, -1);
            batch_free(batch);
        }
        _exit(0);
    }
    wait_for_chunks(batch, job, chunks, job_chunks(job), 1);
    job_free(job, -1);
    batch_free(batch);
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(int count, char **arguments) {
    CHECK(count > 1);
    int64_t rounds = atoll(arguments[1]);
    Random random = {count > 2 ? strtoull(arguments[2], NULL, 10) : 88172645463325252u};
    from_several_threads(&random, rounds);
    CHECK(pack_threads() > 0);
    for (int64_t i = 0; i < rounds / 10 + 1; i++) fork_in_the_middle(&random);
    from_several_threads(&random, rounds / 10 + 1);
    /* The process ends while it is at it. Volatile: what is left has to be found by who looks
     * for leaks. */
    static Batch *volatile left;
    static Job *volatile job;
    left = batch_new(&random, 3000 * KIB);
    job = start(left, 4);
    CHECK(job != NULL);
    printf("%lld rounds in %d threads, %d threads of ours\n", (long long)rounds, CALLERS,
           pack_threads());
    return 0;
}

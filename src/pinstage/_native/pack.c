#define _GNU_SOURCE
#include "pack.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

/* The share that a thread takes at once: 12 us of work. That is long compared with taking it,
 * and short enough that a dozen threads end at about the same time. */
static const int64_t PIECE_BYTES = 128 * 1024;

/* From this size on, a leaf is written past the caches: the bus reads several times more slowly
 * from the caches of a dozen CPUs. */
static const int64_t STREAM_BYTES = 1024;

/* The bus is idle until the first chunk is packed, so that one is the smallest. Each later chunk
 * is twice as large as the one before it, up to LARGEST_CHUNK: a few of these fit the caches. */
static const int64_t FIRST_CHUNK = 512 * 1024;
static const int64_t LARGEST_CHUNK = 4 * 1024 * 1024;

/* Poll interval of `job_free`. */
enum { WAIT_MS = 20 };

/* Set in the place of a chunk when a thread begins it: the place is final then. */
static const int64_t BEGUN = INT64_MIN;

/* -- copying ----------------------------------------------------------------------------------- */

/* Through the caches; past them; or through the near ones to the last one, from which the bus
 * reads quickly. */
typedef enum { CACHED, PAST_CACHES, DEMOTED } Stores;

#if defined(__x86_64__)

__attribute__((target("avx2"))) static void stream_avx2(char *to, const char *from, int64_t lines) {
    for (; lines > 0; lines--, to += 64, from += 64) {
        __m256i a = _mm256_loadu_si256((const __m256i *)from),
                b = _mm256_loadu_si256((const __m256i *)(from + 32));
        _mm256_stream_si256((__m256i *)to, a);
        _mm256_stream_si256((__m256i *)(to + 32), b);
    }
}

static void stream_lines(char *to, const char *from, int64_t lines) {
    if (__builtin_cpu_supports("avx2")) {
        stream_avx2(to, from, lines);
    } else {
        memcpy(to, from, (size_t)lines * 64);
    }
}

/* Each line is moved to the last cache some lines later, when its stores are complete. */
__attribute__((target("avx2"))) static void demote_lines(char *to, const char *from,
                                                         int64_t lines) {
    for (int64_t i = 0; i < lines; i++, to += 64, from += 64) {
        __m256i a = _mm256_loadu_si256((const __m256i *)from),
                b = _mm256_loadu_si256((const __m256i *)(from + 32));
        _mm256_store_si256((__m256i *)to, a);
        _mm256_store_si256((__m256i *)(to + 32), b);
        /* cldemote: compilers have a name for it only if the whole file is compiled for it */
        if (i >= 8) __asm__ volatile(".byte 0x0f, 0x1c, 0x07" : : "D"(to - 512) : "memory");
    }
}

bool can_demote(void) {
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (c & (1u << 25)) != 0;
}

/* Order stores past the caches before all later stores. */
static void end_streams(void) { _mm_sfence(); }

#else

static void stream_lines(char *to, const char *from, int64_t lines) {
#if defined(__aarch64__)
    for (; lines > 0; lines--, to += 64, from += 64) {
        __asm__ volatile("ldp q0, q1, [%1]\n\tldp q2, q3, [%1, #32]\n\tstnp q0, q1, [%0]\n\tstnp "
                         "q2, q3, [%0, #32]"
                         :
                         : "r"(to), "r"(from)
                         : "v0", "v1", "v2", "v3", "memory");
    }
#else
    memcpy(to, from, (size_t)lines * 64);
#endif
}

static void demote_lines(char *to, const char *from, int64_t lines) {
    memcpy(to, from, (size_t)lines * 64);
}

bool can_demote(void) { return false; }

static void end_streams(void) {}

#endif

static void copy_bytes(char *to, const char *from, int64_t nbytes, Stores stores) {
    if (stores == CACHED || nbytes < STREAM_BYTES) {
        memcpy(to, from, (size_t)nbytes);
        return;
    }
    int64_t head = (64 - ((intptr_t)to & 63)) & 63;
    memcpy(to, from, (size_t)head);
    int64_t lines = (nbytes - head) / 64;
    (stores == DEMOTED ? demote_lines : stream_lines)(to + head, from + head, lines);
    int64_t done = head + lines * 64;
    memcpy(to + done, from + done, (size_t)(nbytes - done));
}

static void copy_elements(char *to, const char *from, int64_t count, int64_t step,
                          int32_t itemsize) {
    switch (itemsize) {
    case 1:
        for (int64_t i = 0; i < count; i++) to[i] = from[i * step];
        break;
    case 2:
        for (int64_t i = 0; i < count; i++) memcpy(to + 2 * i, from + 2 * i * step, 2);
        break;
    case 4:
        for (int64_t i = 0; i < count; i++) memcpy(to + 4 * i, from + 4 * i * step, 4);
        break;
    case 8:
        for (int64_t i = 0; i < count; i++) memcpy(to + 8 * i, from + 8 * i * step, 8);
        break;
    default:
        for (int64_t i = 0; i < count; i++)
            memcpy(to + itemsize * i, from + itemsize * i * step, (size_t)itemsize);
    }
}

/* Copy elements `first` to `last` of a strided leaf, counted in the order of its shape, one
 * behind the other. */
static void copy_strided(char *to, const Leaf *leaf, int64_t first, int64_t last) {
    int32_t inner = leaf->ndim - 1;
    int64_t row = inner < 0 ? 1 : leaf->shape[inner], step = inner < 0 ? 1 : leaf->strides[inner];
    int64_t index[MAX_DIMS], rest = first / row;
    const char *from = leaf->source;
    for (int32_t d = inner - 1; d >= 0; d--) {
        index[d] = rest % leaf->shape[d];
        rest /= leaf->shape[d];
        from += index[d] * leaf->strides[d] * leaf->itemsize;
    }
    for (int64_t at = first % row; first < last; at = 0) {
        int64_t count = row - at < last - first ? row - at : last - first;
        const char *start = from + at * step * leaf->itemsize;
        if (step == 1) {
            memcpy(to, start, (size_t)(count * leaf->itemsize));
        } else {
            copy_elements(to, start, count, step, leaf->itemsize);
        }
        to += count * leaf->itemsize;
        first += count;
        for (int32_t d = inner - 1; d >= 0; d--) {
            from += leaf->strides[d] * leaf->itemsize;
            if (++index[d] < leaf->shape[d]) break;
            from -= index[d] * leaf->strides[d] * leaf->itemsize;
            index[d] = 0;
        }
    }
}

/* Rows are fetched ahead, about as many bytes as a core can wait for at once. */
enum { AHEAD_BYTES = 2048, MOST_ROWS_AHEAD = 32 };

/* Short rows are gathered into this much memory, and stored from there as one range. */
enum { GATHERED_BYTES = 4096 };

static inline int64_t less(int64_t a, int64_t b) { return a < b ? a : b; }

static inline __attribute__((always_inline)) void fetch(const char *row, int64_t nbytes) {
    for (int64_t at = 0; at < nbytes; at += 64) __builtin_prefetch(row + at);
    if (nbytes > 16)
        __builtin_prefetch(row + nbytes - 1); /* it may begin in the middle of a line */
}

/* Copy `count` of the `left` rows whose numbers begin at `index`. */
static inline __attribute__((always_inline)) void copy_rows(char *to, const char *source,
                                                            const int64_t *index, int64_t count,
                                                            int64_t left, int64_t distance,
                                                            int64_t nbytes) {
    int64_t ahead = less(AHEAD_BYTES / nbytes, MOST_ROWS_AHEAD);
    for (int64_t i = 0; i < count; i++, to += nbytes) {
        if (i + ahead < left) fetch(source + index[i + ahead] * distance, nbytes);
        memcpy(to, source + index[i] * distance, (size_t)nbytes);
    }
}

/* Copy short rows. A loop of its own for each usual size of an element: its copy is one load. */
static void copy_short_rows(char *to, const char *source, const Rows *rows, int64_t first,
                            int64_t count, int64_t left) {
    const int64_t *index = rows->index + first;
    int64_t distance = rows->distance;
    switch (rows->row_bytes) {
    case 1:
        copy_rows(to, source, index, count, left, distance, 1);
        break;
    case 2:
        copy_rows(to, source, index, count, left, distance, 2);
        break;
    case 4:
        copy_rows(to, source, index, count, left, distance, 4);
        break;
    case 8:
        copy_rows(to, source, index, count, left, distance, 8);
        break;
    case 16:
        copy_rows(to, source, index, count, left, distance, 16);
        break;
    default:
        copy_rows(to, source, index, count, left, distance, rows->row_bytes);
    }
}

/* Copy bytes `from` to `end` of gathered rows. The first and the last row may be cut. */
static void gather_rows(char *to, const Leaf *leaf, int64_t from, int64_t end, Stores stores) {
    const Rows *rows = leaf->rows;
    const int64_t size = rows->row_bytes;
    char gathered[GATHERED_BYTES];
    for (int64_t row = from / size, at = from % size, done; from < end; from += done, to += done) {
        int64_t left = (end - from) / size;
        if (at > 0 || left == 0 || size >= STREAM_BYTES) {
            done = less(size - at, end - from);
            if (left > 1) fetch(leaf->source + rows->index[row + 1] * rows->distance, STREAM_BYTES);
            copy_bytes(to, leaf->source + rows->index[row] * rows->distance + at, done, stores);
            row++;
            at = 0;
            continue;
        }
        int64_t count = stores == CACHED ? left : less(left, GATHERED_BYTES / size);
        char *there = stores == CACHED ? to : gathered;
        copy_short_rows(there, leaf->source, rows, row, count, left);
        done = count * size;
        if (there != to) copy_bytes(to, there, done, stores);
        row += count;
    }
}

/* -- pieces and chunks ------------------------------------------------------------------------- */

/* Some whole leaves (`to` is 0), or a part of one leaf: bytes `from` to `to`, or elements if it
 * is strided. */
typedef struct {
    int64_t first, last; /* leaves; `last` is excluded */
    int64_t from, to;
    int64_t chunk;
} Piece;

typedef struct {
    int64_t start, end; /* in the batch */
    _Atomic int64_t
        place;    /* in the slab: `start`, or the place of an earlier chunk, which has been sent */
    int64_t room; /* bytes of this place */
    atomic_int left; /* pieces that are not moved yet */
} Chunk;

struct Job {
    const Leaf *leaves;
    int64_t count;
    char *slab;
    int64_t nbytes;
    int64_t piece_count;
    Chunk *chunks; /* behind the pieces */
    int64_t chunk_count;
    Stores stores;
    int64_t reused;       /* chunks before this one were begun, or have a reused place */
    _Atomic int64_t next; /* the first piece that no thread has taken */
    int64_t forks;        /* the value of the global `forks` when it was made */
    int helpers;          /* as many are asked for when it begins; 0 from then on */
    int wanted;           /* helpers that may still come; under the lock of the helpers */
    atomic_int helping;   /* helpers that work on it */
    Job *behind;          /* the next in the line of jobs; under the same lock */
    Piece pieces[];
};

/* The bytes between a leaf and the next one. */
static int64_t padding_behind(const Leaf *leaves, int64_t count, int64_t index, int64_t nbytes) {
    int64_t next = index + 1 < count ? leaves[index + 1].offset : nbytes;
    return next - leaves[index].offset - leaves[index].nbytes;
}

/* The number of bytes that take as long to copy as a leaf takes. */
static int64_t work_of(const Leaf *leaf) {
    if (leaf->rows == NULL || leaf->nbytes == 0 || leaf->rows->row_bytes >= ROW_BYTES)
        return leaf->nbytes;
    return leaf->nbytes / leaf->rows->row_bytes * ROW_BYTES;
}

/* A huge page, which the system clears when it is touched for the first time, in 0.2 ms. While one
 * thread touches it, others that do wait. */
static const int64_t TOUCH_BYTES = 2 * 1024 * 1024;

static bool is_only_touched(const Leaf *leaf) { return leaf->to != NULL && leaf->source == NULL; }

static void touch(char *from, int64_t nbytes) {
    for (int64_t at = 0; at < nbytes; at += 4096) *(volatile char *)(from + at) = 0;
}

/* Parts of a leaf are counted in elements if it is strided, else in bytes. */
static int64_t unit_of(const Leaf *leaf) { return leaf->strides != NULL ? leaf->itemsize : 1; }

/* The length of the parts into which a leaf is cut: whole rows, unless they are long. */
static int64_t part_of(const Leaf *leaf) {
    if (is_only_touched(leaf)) return TOUCH_BYTES;
    if (leaf->rows == NULL) return PIECE_BYTES / unit_of(leaf);
    int64_t size = leaf->rows->row_bytes,
            count = PIECE_BYTES / (size < ROW_BYTES ? ROW_BYTES : size);
    return count > 0 ? count * size : PIECE_BYTES;
}

/* Copy a part of a leaf, or all of it if `to` is 0, and set the padding behind the leaf to zero. */
static void move_part(const Leaf *leaf, int64_t from, int64_t to, char *at, int64_t padding,
                      Stores stores) {
    int64_t unit = unit_of(leaf);
    if (to == 0)
        to = leaf->strides != NULL ? leaf->nbytes / unit
                                   : leaf->nbytes; /* a division takes longer */
    if (from == to) {
        /* there is nothing to write */
    } else if (is_only_touched(leaf)) {
        touch(at, to - from);
    } else if (leaf->rows != NULL) {
        gather_rows(at, leaf, from, to, stores);
    } else if (leaf->strides != NULL) {
        copy_strided(at, leaf, from, to);
    } else {
        copy_bytes(at, leaf->source + from, to - from, stores);
    }
    if (to * unit == leaf->nbytes && padding > 0)
        memset(at + (to - from) * unit, 0, (size_t)padding);
}

void pack_all(const Leaf *leaves, int64_t count, char *slab, int64_t nbytes, bool past_caches) {
    for (int64_t i = 0; i < count; i++) {
        if (i + 4 < count) { /* small leaves are usually scattered, and not in the caches */
            const char *next = leaves[i + 4].source;
            for (int64_t at = 0; at < leaves[i + 4].nbytes && at < 1024; at += 64)
                __builtin_prefetch(next + at);
        }
        int64_t padding = padding_behind(leaves, count, i, nbytes);
        move_part(&leaves[i], 0, 0, slab + leaves[i].offset, padding,
                  past_caches ? PAST_CACHES : CACHED);
    }
    if (past_caches) end_streams();
}

static int64_t start_of(const Job *job, const Piece *piece) {
    const Leaf *leaf = &job->leaves[piece->first];
    return leaf->offset + piece->from * unit_of(leaf);
}

static void move_piece(const Job *job, const Piece *piece) {
    Chunk *chunk = &job->chunks[piece->chunk];
    int64_t place = atomic_load_explicit(&chunk->place, memory_order_acquire);
    if ((place & BEGUN) == 0) place = atomic_fetch_or(&chunk->place, BEGUN);
    char *slab = job->slab + (place & ~BEGUN); /* of the chunk */
    for (int64_t i = piece->first; i < piece->last; i++) {
        const Leaf *leaf = &job->leaves[i];
        if (leaf->to != NULL) { /* new memory, whose pages this thread has in its caches */
            move_part(leaf, piece->from, piece->to, leaf->to + piece->from * unit_of(leaf), 0,
                      CACHED);
            continue;
        }
        char *at = slab + (leaf->offset + piece->from * unit_of(leaf) - chunk->start);
        move_part(leaf, piece->from, piece->to, at,
                  padding_behind(job->leaves, job->count, i, job->nbytes), job->stores);
    }
}

/* Return how many pieces there are, and write them if `pieces` is not NULL. */
static int64_t cut_pieces(const Leaf *leaves, int64_t count, Piece *pieces) {
    int64_t made = 0;
    for (int64_t i = 0; i < count;) {
        if (work_of(&leaves[i]) > PIECE_BYTES) {
            int64_t length = leaves[i].nbytes / unit_of(&leaves[i]), step = part_of(&leaves[i]);
            for (int64_t from = 0; from < length; from += step, made++) {
                int64_t to = from + step < length ? from + step : length;
                if (pieces != NULL) pieces[made] = (Piece){i, i + 1, from, to, 0};
            }
            i++;
            continue;
        }
        int64_t first = i, work = 0;
        while (i < count && work_of(&leaves[i]) <= PIECE_BYTES && work < PIECE_BYTES &&
               leaves[i].offset - leaves[first].offset < PIECE_BYTES)
            work += work_of(&leaves[i++]);
        if (pieces != NULL) pieces[made] = (Piece){first, i, 0, 0, 0};
        made++;
    }
    return made;
}

static void cut_chunks(Job *job) {
    int64_t size = FIRST_CHUNK, start = 0, chunk = 0;
    for (int64_t i = 0; i < job->piece_count; i++) {
        job->pieces[i].chunk = chunk;
        job->chunks[chunk].left++;
        int64_t end = i + 1 < job->piece_count ? start_of(job, &job->pieces[i + 1]) : job->nbytes;
        if (i + 1 == job->piece_count ||
            (end - start >= size && job->nbytes - end >= FIRST_CHUNK)) {
            Chunk *made = &job->chunks[chunk++];
            made->start = start;
            made->end = end;
            made->room = end - start;
            atomic_store(&made->place, start);
            size = 2 * size < LARGEST_CHUNK ? 2 * size : LARGEST_CHUNK;
            start = end;
        }
    }
    job->chunk_count = chunk;
}

/* -- threads ----------------------------------------------------------------------------------- */

/* Adaptive: it is held for less time than it takes to sleep and wake. */
static pthread_mutex_t lock = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP;
static Job *first_job, *last_job; /* the line of jobs that want helpers */
static atomic_int bell; /* changes when there is another job; parked threads sleep on it */
static int threads;
static int64_t forks; /* the number of forks from the first process to this one */

static void wait_while(atomic_int *word, int value, int milliseconds) {
    struct timespec pause = {milliseconds / 1000, (milliseconds % 1000) * 1000000L};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, milliseconds < 0 ? NULL : &pause, NULL, 0);
}

static void wake(atomic_int *word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

/* Move the next piece; return whether there was one. */
static bool step(Job *job) {
    if (atomic_load_explicit(&job->next, memory_order_relaxed) >= job->piece_count) return false;
    int64_t index = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
    if (index >= job->piece_count) return false;
    move_piece(job, &job->pieces[index]);
    end_streams();
    atomic_int *left = &job->chunks[job->pieces[index].chunk].left;
    if (atomic_fetch_sub_explicit(left, 1, memory_order_release) == 1) wake(left, INT_MAX);
    return true;
}

/* Take a job out of the line; under the lock. */
static void leave_line(Job *job) {
    Job **link = &first_job, *before = NULL;
    while (*link != NULL && *link != job) {
        before = *link;
        link = &before->behind;
    }
    if (*link == job) {
        *link = job->behind;
        if (last_job == job) last_job = before;
    }
    job->behind = NULL;
}

static void *help(void *nothing) {
    prctl(PR_SET_NAME, "pinstage-pack");
    pthread_mutex_lock(&lock);
    for (;;) {
        while (first_job == NULL) {
            int heard = atomic_load(&bell);
            pthread_mutex_unlock(&lock);
            wait_while(&bell, heard, -1);
            pthread_mutex_lock(&lock);
        }
        Job *job = first_job;
        if (--job->wanted == 0) leave_line(job);
        atomic_fetch_add(&job->helping, 1);
        pthread_mutex_unlock(&lock);
        while (step(job)) {
        }
        pthread_mutex_lock(&lock);
        /* Under the lock, so that a thread that waits for 0 does not free the job before this
         * thread is done with it. */
        if (atomic_fetch_sub(&job->helping, 1) == 1) wake(&job->helping, INT_MAX);
    }
    return nothing;
}

static int start_threads(int count) {
    int code = 0;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the program's threads */
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 256 * 1024);
    while (threads < count) {
        pthread_t thread;
        if ((code = pthread_create(&thread, &attributes, help, NULL)) != 0)
            break; /* go on with fewer */
        threads++;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return code;
}

static void in_child(void) {
    /* A forked child doesn't have the threads, and their jobs are the parent's. */
    lock = (pthread_mutex_t)PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP;
    first_job = last_job = NULL;
    threads = 0;
    forks++;
}

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void in_parent(void) { pthread_mutex_unlock(&lock); }

__attribute__((constructor)) static void at_fork(void) {
    pthread_atfork(before_fork, in_parent, in_child);
}

int pack_threads(void) {
    pthread_mutex_lock(&lock);
    int count = threads;
    pthread_mutex_unlock(&lock);
    return count;
}

/* -- jobs -------------------------------------------------------------------------------------- */

Job *job_new(const Leaf *leaves, int64_t count, char *slab, int64_t nbytes, int most_threads,
             bool reuses) {
    int64_t piece_count = cut_pieces(leaves, count, NULL);
    Job *job = calloc(1, sizeof(Job) + (sizeof(Piece) + sizeof(Chunk)) * (size_t)piece_count);
    if (job == NULL) return NULL;
    *job = (Job){.leaves = leaves,
                 .count = count,
                 .slab = slab,
                 .nbytes = nbytes,
                 .piece_count = piece_count,
                 .forks = forks};
    job->chunks = (Chunk *)(job->pieces + piece_count);
    job->stores = reuses ? DEMOTED : PAST_CACHES;
    cut_pieces(leaves, count, job->pieces);
    cut_chunks(job);
    job->helpers = most_threads - 1;
    if (job->helpers > job->piece_count - 1) job->helpers = (int)job->piece_count - 1;
    return job;
}

int job_begin(Job *job) {
    int helpers = job->helpers;
    job->helpers = 0;
    if (helpers <= 0 || job_is_lost(job)) return 0;
    pthread_mutex_lock(&lock);
    job->wanted = helpers;
    if (last_job != NULL) {
        last_job->behind = job;
    } else {
        first_job = job;
    }
    last_job = job;
    int code = start_threads(helpers);
    atomic_fetch_add(&bell, 1);
    pthread_mutex_unlock(&lock); /* before they wake, since the lock is what they ask for first */
    wake(&bell, helpers);
    return code;
}

int64_t job_chunks(const Job *job) { return job->chunk_count; }

int64_t job_chunk_end(const Job *job, int64_t chunk) { return job->chunks[chunk].end; }

int64_t job_chunk_place(const Job *job, int64_t chunk) {
    return atomic_load(&job->chunks[chunk].place) & ~BEGUN;
}

void job_reuse(Job *job, int64_t chunk) {
    int64_t place = job_chunk_place(job, chunk), room = job->chunks[chunk].room;
    for (; job->reused < job->chunk_count; job->reused++) {
        Chunk *later = &job->chunks[job->reused];
        int64_t unbegun = later->start;
        if (atomic_load(&later->place) == unbegun && later->end - later->start > room) return;
        if (atomic_compare_exchange_strong(&later->place, &unbegun, place)) {
            later->room = room;
            job->reused++;
            return;
        }
    }
}

bool job_is_lost(const Job *job) { return job->forks != forks; }

bool job_work(Job *job, int64_t chunk, int milliseconds) {
    if (job_is_lost(job)) return false;
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    atomic_int *left = &job->chunks[chunk].left;
    for (;;) {
        int count = atomic_load_explicit(left, memory_order_acquire);
        if (count == 0) return true;
        if (!step(job)) wait_while(left, count, milliseconds);
        clock_gettime(CLOCK_MONOTONIC, &now);
        int64_t passed =
            (now.tv_sec - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1000000;
        if (passed >= milliseconds) return atomic_load_explicit(left, memory_order_acquire) == 0;
    }
}

bool job_free(Job *job, int milliseconds) {
    atomic_store(&job->next, job->piece_count);
    pthread_mutex_lock(&lock);
    leave_line(job);
    pthread_mutex_unlock(&lock);
    int helping;
    while (!job_is_lost(job) && (helping = atomic_load(&job->helping)) != 0) {
        if (milliseconds >= 0 && (milliseconds -= WAIT_MS) < 0) return false;
        wait_while(&job->helping, helping, WAIT_MS);
    }
    /* The last helper may still have the lock under which it counted itself out. */
    pthread_mutex_lock(&lock);
    pthread_mutex_unlock(&lock);
    free(job);
    return true;
}

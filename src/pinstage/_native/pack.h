/* Packing bytes into a slab, by one thread or several, in chunks that may be sent while the next
 * chunk is packed.
 *
 * This code doesn't use Python. A job is cut into pieces of about 128 KiB, which threads take
 * one after the other, the calling thread among them. Consecutive pieces make a chunk, which can
 * be sent when all of its pieces are moved. Then a later chunk may take its place in the slab. / */
#ifndef PINSTAGE_PACK_H
#define PINSTAGE_PACK_H

#include <stdbool.h>
#include <stdint.h>

enum { MAX_DIMS = 64 };

/* Rows of a source, one behind the other. */
typedef struct {
    const int64_t *index; /* the number of each row in the source */
    int64_t row_bytes;
    int64_t distance; /* bytes from one row of the source to the next */
} Rows;

/* A leaf to be moved: row by row if it has `rows`, byte by byte if `strides` is NULL, else
 * element by element into contiguous memory. */
typedef struct {
    const char *source;
    int64_t offset; /* in the batch; ascending */
    int64_t nbytes;
    const int64_t *shape;   /* of a strided leaf */
    const int64_t *strides; /* of a strided leaf, in elements; NULL to copy its bytes */
    int32_t ndim;
    int32_t itemsize;
    char *to; /* where it is moved to; NULL: to its place in the slab. Without a source, its pages
                 are only touched. */
    const Rows *rows; /* NULL unless rows are gathered */
} Leaf;

/* Gathering a shorter row takes as long as copying this many bytes: it waits for memory. */
enum { ROW_BYTES = 128 };

typedef struct Job Job;

/* Make a job. `slab` has `nbytes` bytes, with room for all leaves. Padding between leaves is set
 * to zero. `leaves` and what they point to must exist until `job_free`. `reuses`: places may be
 * reused. NULL if there is no memory. */
Job *job_new(const Leaf *leaves, int64_t count, char *slab, int64_t nbytes, int threads,
             bool reuses);

/* Let threads work on it; until then only `job_work` touches the slab and the leaves. A second
 * call does nothing. Return 0, or the error of a thread that could not be started; then the
 * others do the work. */
int job_begin(Job *job);

/* The number of chunks, and the end of each in the batch. The last one ends at `nbytes`. */
int64_t job_chunks(const Job *job);
int64_t job_chunk_end(const Job *job, int64_t chunk);

/* Where in the slab a complete chunk is: at its place in the batch, or at that of an earlier
 * chunk. */
int64_t job_chunk_place(const Job *job, int64_t chunk);

/* Let the next chunk that no thread has begun take the place of this chunk, which has been sent.
 * Call it in one thread at a time. */
void job_reuse(Job *job, int64_t chunk);

/* Whether this CPU can move a line to the last of its caches, from which the bus reads quickly. */
bool can_demote(void);

/* Work until a chunk is complete, or for about `milliseconds`; return whether it is complete. */
bool job_work(Job *job, int64_t chunk, int milliseconds);

/* Whether this process was forked from the process that began the job. The threads, and perhaps
 * the slab, are the parent's: here the job can only be freed. */
bool job_is_lost(const Job *job);

/* Leave out the pieces that no thread has begun, and free the job when no thread touches the
 * slab or the leaves. Return false if a thread still does after `milliseconds` (-1: no limit);
 * then the job is never freed. */
bool job_free(Job *job, int milliseconds);

/* Pack all leaves in the calling thread alone. `past_caches`: the bus reads the slab next, not
 * the CPU. */
void pack_all(const Leaf *leaves, int64_t count, char *slab, int64_t nbytes, bool past_caches);

/* The number of packing threads, parked or at work. */
int pack_threads(void);

#endif

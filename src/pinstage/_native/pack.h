/* Bytes into a slab: by one thread or several, in chunks that may travel while the next one is packed.
 *
 * Nothing here knows Python. A job is cut into pieces of about 128 KiB, which threads take one after the other, the
 * calling thread among them. Consecutive pieces make a chunk; when all of it is moved, it can travel. Then a later chunk may
 * take its place in the slab.
 */
#ifndef PINSTAGE_PACK_H
#define PINSTAGE_PACK_H

#include <stdbool.h>
#include <stdint.h>

enum { MAX_DIMS = 64 };

/* A leaf to be moved: memory as it lies if `strides` is NULL, else element by element into contiguous memory. */
typedef struct {
    const char *source; /* NULL for one that somebody else has written */
    int64_t offset;     /* in the batch; rising from leaf to leaf */
    int64_t nbytes;
    const int64_t *shape;   /* of a strided leaf */
    const int64_t *strides; /* of a strided leaf, in elements; NULL for one that is copied as it lies */
    int32_t ndim;
    int32_t itemsize;
} Leaf;

typedef struct Job Job;

/* Cut a job. `slab` has `nbytes` bytes, and all leaves lie inside. Padding between leaves is set to zero. `leaves` and
 * what they point to have to stay until `job_free`. `reuses`: places may be reused, and no leaf is without a source. NULL
 * where there is no memory. */
Job *job_new(const Leaf *leaves, int64_t count, char *slab, int64_t nbytes, int threads, bool reuses);

/* Set threads to work at it; until then nothing touches slab or leaves but `job_work`. Once; a second call does nothing. Return
 * the error of a thread that could not be started, or 0; the others do the work. */
int job_begin(Job *job);

/* How many chunks there are, and where in the batch each ends. The last one ends at `nbytes`. */
int64_t job_chunks(const Job *job);
int64_t job_chunk_end(const Job *job, int64_t chunk);

/* Where in the slab a complete chunk lies: where it does in the batch, or in the place of an earlier one. */
int64_t job_chunk_place(const Job *job, int64_t chunk);

/* Let the next chunk that nobody has begun be packed in the place of this one, which has travelled. For one thread at a
 * time. */
void job_reuse(Job *job, int64_t chunk);

/* Whether this cpu can move a line to the last of its caches, which the bus reads quickly from. */
bool can_demote(void);

/* Work until a chunk is complete, or for about `milliseconds`; say whether it is complete. */
bool job_work(Job *job, int64_t chunk, int milliseconds);

/* Whether the process that began a job is not this one, but one that this one was forked from. The threads that work at
 * it are that one's, and so may the slab be: here it is not worked at, and can only be freed. */
bool job_is_lost(const Job *job);

/* Leave out what nobody has begun, and free the job when no thread touches slab or leaves any more. Return false if a thread
 * still does after `milliseconds`, -1 for no limit: then the job is never freed. */
bool job_free(Job *job, int milliseconds);

/* In one go, by the calling thread alone. `past_caches`: the bus reads the slab next, and not the cpu. */
void pack_all(const Leaf *leaves, int64_t count, char *slab, int64_t nbytes, bool past_caches);

/* How many threads of ours there are, parked or at work. */
int pack_threads(void);

#endif

/* Calls of CUDA's driver, for blocks and for few leaves (`driver.c`). */
#ifndef PINSTAGE_DRIVER_H
#define PINSTAGE_DRIVER_H

#include "core.h"

/* Whether `find_driver` has found a driver. */
bool has_driver(void);

/* Whether copies of these leaves, but for page-locked ones, have read them when they return,
 * without waiting for earlier work. Small copies do that through a buffer of ordinary memory; larger ones only from ordinary
 * memory, and while the stream is idle. Then this is the quickest way: 588 KiB take 55 us, or 77
 * us if they are packed first. */
bool are_read_at_once(const Found *leaves, const bool *is_locked, int count, void *stream);

/* Copy a leaf for which `are_read_at_once` is true to a device; return CUDA's error.
 *
 * buffer: AT_ONCE_BYTES of ordinary memory. Page-locked bytes are copied through it, or they
 * would be read too late. Copying a few KiB takes no longer than finding out where they are. */
int copy_at_once(char *to, const Found *leaf, char *buffer, void *stream);

/* Whether a stream has nothing left to do. */
bool is_idle(void *stream);

/* Copy a page-locked leaf, which is read when the stream comes to the copy; return CUDA's error. */
int copy_later(char *to, const Found *leaf, void *stream);

/* Copy a leaf of a device to page-locked memory, behind earlier work; return CUDA's error. */
int copy_to_host(char *to, const Found *leaf, void *stream);

/* Wait for all work of a stream; return CUDA's error. */
int wait_for_stream(void *stream);

/* Where CUDA knows memory to be: page-locked as a whole; page-locked at both ends, which belong to
 * different allocations or registrations; or anything else. */
typedef enum { ELSEWHERE, IN_PIECES, IN_ONE } Locked;

/* Ask CUDA about a leaf's memory, with a current context. */
Locked where_is(const char *data, int64_t nbytes);

/* Whether `copies_send_locked` can send anything. */
bool sends_locked(void);

/* Copies to be sent together. All three arrays are in the memory of `to`. */
typedef struct {
    unsigned long long *to, *from;
    size_t *nbytes, count;
} Copies;

/* Make room for copies; false with an error. The caller frees `to`. */
bool copies_new(Copies *copies, int64_t room);

void copies_add(Copies *copies, const char *to, const char *from, int64_t nbytes);

/* Send them; return the number of copies, or CUDA's error as a negative number. May release the
 * interpreter lock. */
PyObject *copies_send(Copies *copies, bool is_cuda, void *stream, bool is_page_locked);

/* Send them from page-locked memory, by one call; false if the driver refuses it. `at_once`:
 * whether the memory has been read when the call returns. Releases the interpreter lock. */
bool copies_send_locked(const Copies *copies, void *stream, bool at_once);

#endif

/* Making tensors (`blocks.c`), and checking those that exist (`match.c`). */
#ifndef PINSTAGE_BLOCKS_H
#define PINSTAGE_BLOCKS_H

#include "core.h"

/* Whether torch makes views now. In a mode such as FakeTensorMode it would make something else,
 * and the C shim, which is below all modes, would ignore that. */
bool makes_views(void);

/* Make a tensor as `torch.empty_strided` would, on torch's current stream, and set `address` to
 * its memory; NULL without an error if there is no memory. */
PyObject *new_tensor(int64_t ndim, const int64_t *shape, const int64_t *stride, int dtype,
                     int device_type, int device_index, char **address);

/* Dense bytes of a leaf. */
typedef struct {
    int dtype, ndim;
    int64_t nbytes;
    const int64_t *shape, *stride;
} Bytes;

/* Whether a tensor on a device (DLPack's) has the same dtype, shape and stride, and can be
 * written as bytes; find where it is. */
bool is_plain_place(PyObject *object, int device_type, int device_index, const Bytes *like,
                    char **address);

#endif

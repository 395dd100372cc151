/* Making tensors (`blocks.c`). */
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

/* A tuple of numbers; NULL with an error. */
PyObject *tuple_of(int64_t count, const int64_t *numbers);

#endif

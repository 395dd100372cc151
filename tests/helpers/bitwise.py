"""Views of tensors by which a comparison sees every bit, and no stride without a meaning."""

import math

import torch

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor):
    """Return a tensor's elements as integers on the CPU, so that a comparison sees every bit."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype.itemsize == 16:
        tensor = torch.view_as_real(tensor)
    return tensor.view(INTEGERS[tensor.dtype.itemsize]).cpu()


def telling_stride(shape, stride):
    """Return the meaningful strides: of dimensions with more than one element, unless there is
    none.
    """
    pairs = zip(stride, shape, strict=True) if math.prod(shape) else ()
    return [step for step, size in pairs if size != 1]

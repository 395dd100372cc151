"""The dtypes that an offset table can name."""

from __future__ import annotations

import torch

from .. import _native
from .._compat.views import learn_tensors

_NAMES = (
    "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool",
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
    "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
    "int1", "int2", "int3", "int4", "int5", "int6", "int7",
    "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7",
)  # fmt: skip
"""In the order of their codes, which stand in tables: a name is added at the end."""

DTYPES: tuple[torch.dtype | None, ...] = tuple(getattr(torch, name, None) for name in _NAMES)
"""By code; None where this torch does not have it. A tensor of another dtype travels by its own ``.to()``."""

CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in enumerate(DTYPES) if dtype is not None}

ALIGNMENT = 16
"""Each leaf starts at a multiple of this many bytes: the size of the largest element torch stores (complex128; a view
of another dtype needs an offset that is a multiple of its element), and of the widest load of a GPU thread, which
cuBLAS, bulk copies and vectorised kernels ask for."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What stands for dtypes of a size where bits count and values do not."""

_FORMATS = {
    "bool": "?", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "lq",
    "uint64": "LQ", "float16": "e", "float32": "f", "float64": "d", "complex64": "Zf", "complex128": "Zd",
}  # fmt: skip
"""numpy's characters for dtypes (each that has the right size counts)."""


def _tell_the_extension() -> None:
    samples = {}
    for name, dtype in zip(_NAMES, DTYPES, strict=True):
        if dtype is not None:
            try:
                sample = torch.zeros(ALIGNMENT, dtype=torch.uint8, device="cpu").view(dtype)
            except (RuntimeError, TypeError, NotImplementedError):
                sample = None  # it travels, but is described in Python
            _native.core.add_dtype(CODES[dtype], dtype.itemsize, _FORMATS.get(name, ""))
            if sample is not None:
                samples[CODES[dtype]] = sample
    learn_tensors(samples)


_tell_the_extension()


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name."""
    return str(dtype).removeprefix("torch.")

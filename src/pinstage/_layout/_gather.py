"""How leaves get into a slab that is on their own device: by torch, in few kernels."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from ._table import Table

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What stands for dtypes of a size where bits count and values do not."""

_CAN_BE_JOINED = frozenset(
    {
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    }
)
"""What ``torch.cat`` moves bit for bit everywhere; others are joined as integers of their size, bools among them, whose
bytes it would make 0 or 1."""


def gather(table: Table, tensors: list[torch.Tensor], slab: torch.Tensor) -> None:
    """Copy tensors to their places in a slab, on their device's current stream.

    One ``torch.cat`` for each run of the table (a dtype, or a dtype and a shape of rows), whatever the number of
    leaves, and one copy for each strided, expanded or lazily conjugated leaf.

    Args:
        table: the offset table.
        tensors: as the table describes them.
        slab: uint8 ``[>= table.nbytes]`` on the device that the tensors are on.
    """
    for run, rows in table.runs(slab):
        if run.raw and run.nbytes:
            members = run.members(table.columns.shapes)
            pieces = [tensors[position] for position in members.positions]  # padding is at -1: the last, for now
            for index in members.folded:
                pieces[index] = flat(pieces[index])
            for index in members.padding:
                pieces[index] = _padding(run.dtype, (run.sizes[index], *run.trailing), rows.device)
            _join(pieces, rows)
    for position in table.gathered:
        copy_elements(table, position, tensors[position], slab)


def _join(pieces: list[torch.Tensor], rows: torch.Tensor) -> None:
    if rows.dtype not in _CAN_BE_JOINED:
        integer = INTEGERS[rows.dtype.itemsize]
        pieces, rows = [piece.view(integer) for piece in pieces], rows.view(integer)
    if len(pieces) == 1:
        rows.copy_(pieces[0])
    else:
        torch.cat(pieces, out=rows)


def duplicate(tensor: torch.Tensor) -> torch.Tensor:
    """Return a bit-exact copy of a dense tensor, with memory of its own."""
    if tensor.dtype in _CAN_BE_JOINED:
        return tensor.clone()
    return tensor.view(INTEGERS[tensor.dtype.itemsize]).clone().view(tensor.dtype)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements in the order in which they lie in memory, without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,))


@lru_cache(maxsize=64)
def _padding(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    with torch.inference_mode(mode=False):  # kept: it must serve outside of inference mode too
        zeros = torch.zeros(dtype.itemsize * math.prod(shape), dtype=torch.uint8, device=device)
    return zeros.view(dtype).view(shape)


def copy_elements(table: Table, position: int, source: torch.Tensor, slab: torch.Tensor) -> None:
    """Copy a leaf whose bytes are not its value as they lie: strided, expanded, lazily conjugated."""
    dtype, offset = table.columns.dtypes[position], table.offsets[position]
    if position not in table.columns.lazy and dtype.itemsize in INTEGERS:
        # As integers: a copy of bools makes them 0 or 1, and copy_ has no kernels for int1 to int7.
        dtype = INTEGERS[dtype.itemsize]
        source = source.view(dtype)
    target = slab[offset : offset + source.numel() * dtype.itemsize].view(dtype)
    target.as_strided(source.shape, table.stride_of(position)).copy_(source)

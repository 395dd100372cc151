"""Finds leaves whose values fit a narrower type, so that fewer bytes need to cross the bus.

Only the values of one batch are known, so nothing is sent in another type by itself. A type fits if
it restores every value bit for bit: NaN and -0.0 never fit. A leaf is read in parts, up to the
first that doesn't fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .._batch import as_tensor
from .._sizes import count, format_bytes
from ._bus import MIB, Bus
from ._report import Line, duration

MOST_BYTES = 256 * MIB
"""Larger leaves aren't read, so that an audit takes less than a second."""
_LEAST_SECONDS, _PATHS = 1e-6, 3
"""Smaller savings aren't shown, nor more paths for one type: `Audit.to_dict` has them all."""

_PLAIN = (torch.Tensor, torch.nn.Parameter, np.ndarray, np.memmap)
_WIDE = {"int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Form(NamedTuple):
    """A narrower type that has the values as whole numbers, or as 255ths."""

    dtype: torch.dtype
    least_itemsize: int  # of leaves it is for
    divisor: int = 1  # values are whole numbers divided by it
    restore: Callable[[torch.Tensor], torch.Tensor] = lambda x: x  # after the cast, on the CPU
    code: str = ""  # as `restore`, on any device, bit for bit


# A GPU divides by a number by multiplying by its reciprocal, which rounds differently. Devices may
# round 16 bits differently.
FORMS = (
    Form(torch.bool, 2),
    Form(torch.uint8, 2),
    Form(torch.uint8, 4, 255, lambda x: x / 255, " / torch.tensor(255.0, device=x.device)"),
    Form(torch.uint8, 4, 255, lambda x: x * (1 / 255), " * (1 / 255)"),  # torchvision's ToDtype
    Form(torch.int8, 2),
    Form(torch.int16, 4),
    Form(torch.int32, 8),
)
"""The narrowest first."""


class NarrowLeaf(NamedTuple):
    """A leaf whose values in this batch all fit a narrower type."""

    path: str
    dtype: str  # of the leaf, without "torch."
    narrow_dtype: str  # the narrowest that fits
    code: str  # restores the leaf from the narrow tensor `x`, on the device, bit for bit
    saved_bytes: int
    saved_seconds: float  # of its .to()


def narrow_leaves(
    leaves: Sequence[tuple[Any, Any]], bus: Bus
) -> tuple[tuple[NarrowLeaf, ...], tuple[str, ...]]:
    """Find the leaves that fit a narrower type.

    Args:
        leaves: a `LeafReport` and its leaf, for each leaf with values on the host.
        bus: the speeds of copies.

    Returns:
        The leaves found, and the paths of leaves that are too large to look at.
    """
    found, too_large = [], []
    for report, leaf in leaves:
        is_dense = type(leaf) in _PLAIN and report.contiguous != "-"
        if report.alias_of is not None or report.dtype not in _WIDE or not is_dense:
            continue
        if report.nbytes > MOST_BYTES:
            too_large.append(report.path)
        elif form := narrowest(as_tensor(leaf).detach().resolve_neg()):
            found.append(_saving(report, leaf.itemsize, form, bus))
    return tuple(found), tuple(too_large)


def _saving(report: Any, itemsize: int, form: Form, bus: Bus) -> NarrowLeaf:
    name, code = str(form.dtype).removeprefix("torch."), f"x.to(torch.{report.dtype}){form.code}"
    saved = report.nbytes // itemsize * (itemsize - form.dtype.itemsize)
    seconds = saved / (bus.pinned if report.pinned else bus.pageable) * 1e-9
    return NarrowLeaf(report.path, report.dtype, name, code, saved, seconds)


def narrowest(leaf: torch.Tensor) -> Form | None:
    """Return the narrowest form that restores all values of a tensor of one of the wide types."""
    for form in FORMS:
        if leaf.itemsize >= form.least_itemsize and all(_fits(part, form) for part in _parts(leaf)):
            return form
    return None


def _parts(leaf: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of at most 1 MiB of a leaf of any strides."""
    if leaf.nbytes <= MIB:
        yield leaf
        return
    for half in leaf.chunk(2, leaf.shape.index(max(leaf.shape))):
        yield from _parts(half)


def _fits(part: torch.Tensor, form: Form) -> bool:
    whole = (part * form.divisor).round().to(form.dtype)
    restored = form.restore(whole.to(part.dtype)).to(part.dtype)  # 255ths of integers are floats
    bits = _BITS[part.itemsize]
    return torch.equal(restored.view(bits), part.view(bits))


def lines_of(leaves: Sequence[NarrowLeaf], too_large: Sequence[str]) -> Iterator[Line]:
    """Yield a line for the leaves of each pair of types, and one for the leaves not looked at."""
    groups: dict[tuple[str, ...], list[NarrowLeaf]] = {}
    for leaf in leaves:
        groups.setdefault(leaf[1:4], []).append(leaf)
    for (dtype, name, code), group in groups.items():
        text = f"{dtype} that fits {name} in this batch: {_paths([leaf.path for leaf in group])}"
        nbytes = format_bytes(sum(leaf.saved_bytes for leaf in group))
        seconds = sum(leaf.saved_seconds for leaf in group)
        saved = f"saves {nbytes}, {duration(seconds)} of .to()"
        if seconds >= _LEAST_SECONDS:
            yield Line(f"{text}; {saved}; on the device: {code}", "info")
    if too_large:
        yield Line(f"not looked at, above {MOST_BYTES // MIB} MiB: {_paths(too_large)}", "info")


def _paths(paths: Sequence[str]) -> str:
    shown, more = ", ".join(path or "the batch" for path in paths[:_PATHS]), len(paths) - _PATHS
    return f"{shown} and {count(more, 'more leaf', 'more leaves')}" if more > 0 else shown

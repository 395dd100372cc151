"""Sizes as people write them, as the package prints them, and as pools round them."""

import numbers
import operator
import re
from fractions import Fraction
from functools import lru_cache
from typing import SupportsIndex, TypeAlias

Size: TypeAlias = SupportsIndex | str
"""Bytes as an int, or text such as ``"512MiB"``."""

UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)},
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_bytes(size: SupportsIndex | float | str) -> int:
    """Read a size in bytes.

    ``KiB, MiB, GiB, TiB, PiB`` are powers of 1024; ``kB, MB, GB, TB, PB`` are powers of 1000. Case
    doesn't matter.

    Args:
        size: bytes as a whole number, or text such as ``"512MiB"``, ``"1.5 GiB"``, ``"4096"``.

    Returns:
        The number of bytes, zero or more.

    Raises:
        TypeError: ``size`` is neither a number nor text. A bool doesn't count as a number.
        ValueError: ``size`` is negative, not a number with a known unit, or not a whole number of
            bytes.
    """
    if isinstance(size, str):
        return _parse_text(size)
    # Python's or numpy's.
    if isinstance(size, float | numbers.Real) and not isinstance(size, SupportsIndex):
        if not float(size).is_integer():
            raise ValueError(
                f"not a whole number of bytes: {size}; write an int, or text such as '1.5 GiB'"
            )
        size = int(size)
    if isinstance(size, bool) or not isinstance(size, SupportsIndex):
        raise TypeError(
            f"a size is an int or text such as '512MiB', not {size!r} ({type(size).__name__})"
        )
    nbytes = operator.index(size)
    if nbytes < 0:
        raise ValueError(f"a size cannot be negative: {nbytes}")
    return nbytes


def _parse_text(size: str) -> int:
    match = _SIZE.fullmatch(size)
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(
            f"not a size: {size!r}; write bytes as an int, or text such as '512MiB' or '1.5 GB'"
        )
    exact = Fraction(match[1]) * unit
    if exact.denominator != 1:
        raise ValueError(f"not a whole number of bytes: {size!r} is {float(exact)} bytes")
    return int(exact)


def format_bytes(nbytes: float) -> str:
    """Write a size for people: two decimals and a binary unit, ``"1.50 GiB"``; below 1 KiB, ``"512
    B"``.

    Args:
        nbytes: bytes; may be negative, as a difference is, or a fraction, as a median is.

    Returns:
        The text. It is rounded, so ``parse_bytes`` may read another number.
    """
    value, unit = float(abs(nbytes)), 0
    while round(value, 2) >= 1024 and unit < len(_BINARY) - 1:
        value, unit = value / 1024, unit + 1
    sign = "-" if nbytes < 0 else ""
    return f"{sign}{value:.{2 if unit else 0}f} {_BINARY[unit]}"


def size_to_paste(nbytes: int) -> str:
    """Write a size for `parse_bytes`, rounded up to whole KiB or a larger unit: ``"9MiB"``."""
    power = max((power for power in range(1, len(_BINARY)) if nbytes >= 8 << 10 * power), default=1)
    return f"{-(-nbytes // (1 << 10 * power))}{_BINARY[power]}"


def count(number: float, noun: str, plural: str | None = None) -> str:
    """Write a number with its noun: ``1 copy``, ``1,000 copies``."""
    return f"{number:,.0f} {noun if number == 1 else plural or noun + 's'}"


def round_up(nbytes: int, unit: int) -> int:
    """Round up to a multiple of ``unit``."""
    return -(-nbytes // unit) * unit


# -- size classes ----------------------------------------------------------------------------------

CLASSES_PER_DOUBLING = 8
"""Eight steps from one power of two to the next, so rounding adds less than 1/8 to any request.
torch's own host allocator rounds to powers of two, which turns 129.5 MB into 256 MB
(pytorch#150517)."""

SMALL_SLAB_BYTES = 1024 * 1024
"""Below this size, another slab costs less than waste: one slab of each smaller class takes about
12 MiB in all.
"""

REUSE_FACTOR = 2
"""From `SMALL_SLAB_BYTES` on, an idle slab of up to this many times its class serves a request
before the pool grows: pinning another gigabyte because a batch is 20% smaller would waste more."""


@lru_cache(maxsize=4096)
def size_class(nbytes: int, granularity: int = 1) -> int:
    """Round a request up to its size class.

    That is at most 12.5% above `nbytes`, rounded up to a multiple of `granularity`, the unit of the
    memory.
    """
    step = 1 << max(0, (nbytes - 1).bit_length() - CLASSES_PER_DOUBLING.bit_length())
    return round_up(round_up(nbytes, step), granularity)


@lru_cache(maxsize=4096)
def reuse_limit(nbytes: int, granularity: int = 1) -> int:
    """Return the size of the largest idle slab that serves a request before the pool grows.

    For small classes, at most 12.5% of that slab is waste; from `SMALL_SLAB_BYTES` on, it is
    `REUSE_FACTOR` times the class.
    """
    capacity = size_class(nbytes, granularity)
    if capacity < SMALL_SLAB_BYTES:
        return max(capacity, nbytes * 8 // 7)
    return REUSE_FACTOR * capacity

"""Sizes as people write them, and as the package prints them."""

import operator
import re
from fractions import Fraction
from typing import SupportsIndex

UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", start=1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", start=1)},
    "kB": 1000,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_bytes(size: SupportsIndex | str) -> int:
    """Read a size in bytes.

    ``KiB, MiB, GiB, TiB, PiB`` are powers of 1024; ``kB, MB, GB, TB, PB`` powers of 1000. Units are case-sensitive,
    because ``Mb`` means megabits elsewhere; ``KB`` is read as ``kB``.

    Args:
        size: bytes as an integer, or text such as ``"512MiB"``, ``"1.5 GiB"``, ``"4096"``.

    Returns:
        The number of bytes, zero or more.

    Raises:
        TypeError: ``size`` is neither an integer nor text. A bool is not an integer here.
        ValueError: negative, not a number with a known unit, or not a whole number of bytes.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or match[2] not in UNITS:
            raise ValueError(f"not a size: {size!r}; write bytes as an int, or text such as '512MiB' or '1.5 GB'")
        exact = Fraction(match[1]) * UNITS[match[2]]
        if exact.denominator != 1:
            raise ValueError(f"not a whole number of bytes: {size!r} is {float(exact)} bytes")
        return int(exact)
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise TypeError(f"a size is an int or text such as '512MiB', not {type(size).__name__}")
    nbytes = operator.index(size)
    if nbytes < 0:
        raise ValueError(f"a size cannot be negative: {nbytes}")
    return nbytes


def format_bytes(nbytes: float) -> str:
    """Write a size for people: two decimals and a binary unit, ``"1.50 GiB"``; below 1 KiB, ``"512 B"``.

    Args:
        nbytes: bytes; may be negative, as a difference is, or a fraction, as a median is.

    Returns:
        The text. It is rounded, so ``parse_bytes`` does not bring every number back.
    """
    value, unit = float(abs(nbytes)), 0
    while round(value, 2) >= 1024 and unit < len(_BINARY) - 1:
        value, unit = value / 1024, unit + 1
    sign = "-" if nbytes < 0 else ""
    return f"{sign}{value:.{2 if unit else 0}f} {_BINARY[unit]}"


def round_up(nbytes: int, unit: int) -> int:
    """Round up to a multiple of ``unit``."""
    return -(-nbytes // unit) * unit

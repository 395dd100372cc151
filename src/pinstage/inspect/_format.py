"""Times, rates and shares as people read them; sizes are `_sizes.format_bytes`."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Write a time with three digits or more: ``7.50 us``, ``12.3 ms``, ``2.50 s``."""
    if seconds == 0:
        return "0"
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= 0.9995 * factor:
            return f"{seconds / factor:.{_digits(seconds / factor)}f} {unit}"
    return f"{seconds * 1e6:.{_digits(seconds * 1e6)}f} us"


def rate(bytes_per_second: float) -> str:
    """Write a bandwidth in GB/s, powers of 1000: ``55.3 GB/s``; whole from 100 on."""
    value = bytes_per_second / 1e9
    return f"{value:.{1 if 1 <= value < 100 else 0 if value >= 100 else 2}f} GB/s"


def share(part: float, whole: float) -> str:
    """Write a part of a whole in percent; ``-`` where there is no whole."""
    return f"{part / whole:.0%}" if whole else "-"


def count(number: float, noun: str, plural: str | None = None) -> str:
    """Write a number with its noun: ``1 copy``, ``1,000 copies``."""
    return f"{number:,.0f} {noun if number == 1 else plural or noun + 's'}"


def _digits(value: float) -> int:
    return 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2

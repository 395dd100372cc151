import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinstage._sizes import format_bytes, parse_bytes, size_to_paste


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        (np.int64(7), 7),
        ("4096", 4096),
        ("12 B", 12),
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        (" 1.5 GiB ", 3 << 29),
        ("1TiB", 1 << 40),
        ("3KiB", 3072),
        ("2kB", 2000),
        ("64 MB", 64_000_000),
        ("0.3GB", 300_000_000),
        ("512mib", 512 << 20),
        ("2KIB", 2048),
        (np.float32(4096), 4096),
    ],
)
def test_sizes_are_read_as_written(text, nbytes):
    assert parse_bytes(text) == nbytes
    assert type(parse_bytes(text)) is int


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("'512MiB'", ["", "GiB", "-1GiB", "2G", "1e9", "1_000", "0x10", "1 GiB 2", "٣"]),
        ("negative: -4096", [-4096]),
        ("whole number of bytes", ["0.1 KiB", 1.5, float("nan"), float("inf")]),
    ],
)
def test_what_is_no_size_is_refused(text, sizes):
    for size in sizes:
        with pytest.raises(ValueError, match=text):
            parse_bytes(size)


@given(st.integers(0, 1 << 55))
def test_a_size_to_paste_is_hardly_more(nbytes):
    read = parse_bytes(size_to_paste(nbytes))
    assert nbytes <= read <= max(nbytes * 1.125, nbytes + 1024)


@pytest.mark.parametrize("size", [True, False, None, b"1MiB", [1]])
def test_other_types_are_a_type_error(size):
    with pytest.raises(TypeError, match=type(size).__name__):
        parse_bytes(size)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 << 29, "1.50 GiB"),
        ((1 << 20) - 1, "1.00 MiB"),
        (5 << 60, "5120.00 PiB"),
        (-(3 << 29), "-1.50 GiB"),
        (-5, "-5 B"),
        (1536.5, "1.50 KiB"),
        (192.0, "192 B"),
    ],
)
def test_sizes_have_two_decimals_and_binary_units(nbytes, text):
    assert format_bytes(nbytes) == text


@given(st.integers(0, 1 << 60))
def test_printed_sizes_are_read_back_nearly_exactly(nbytes):
    assert abs(parse_bytes(_exact(format_bytes(nbytes))) - nbytes) <= max(1, nbytes * 0.005)


def _exact(text):
    # Two decimals of a binary unit are rarely whole bytes: compare hundredths.
    number, unit = text.split()
    return str(round(float(number) * parse_bytes(f"1{unit}")))

"""Stages batches of many kinds and compares them bit for bit: a program for environments without
pytest.

::

    python smoke.py FOLDER      # pinstage must be imported from there

Ends with an error if no thread of the extension has packed.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

import pinstage as ps
from pinstage import _native

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.complex128,
    torch.float8_e4m3fn,
)


def batches():
    """Return nested batches: small and ragged, of several chunks, and with odd leaves."""
    bits = torch.Generator().manual_seed(0)

    def tensor(dtype, *shape):
        return torch.randint(0, 2, shape, generator=bits).to(torch.float32).to(dtype)

    wide = tensor(torch.float32, 1000, 3000)
    return [
        {str(i): tensor(DTYPES[i % 6], i % 7, 1 + i % 5) for i in range(300)},
        [
            tensor(torch.uint8, 3 << 20),
            (wide, wide.t(), wide[:, ::2], wide[::2].expand(2, 500, 3000)),
            wide,
        ],
        {
            "array": np.arange(7000.0).reshape(70, 100)[:, ::3],
            "scalar": torch.tensor(2.5),
            "none": torch.empty(0, 4),
            "text": "x",
        },
    ]


def check(staged, batch):
    """Raise if a staged batch differs from its source."""
    (found, structure), (expected, original) = tree_flatten(staged), tree_flatten(batch)
    assert structure == original
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, str):
            assert one == other
            continue
        leaf = torch.as_tensor(other)
        assert (one.dtype, one.shape) == (leaf.dtype, leaf.shape)
        places = {tensor.untyped_storage().data_ptr() for tensor in (one, leaf)}
        assert leaf.numel() == 0 or len(places) == 2
        assert torch.equal(one, leaf)  # their elements are 0 and 1, without a NaN


def load():
    samples = [{"x": torch.full((64,), float(i)), "n": i} for i in range(64)]
    loader = ps.DataLoader(samples, batch_size=16, num_workers=2, device="cpu")
    for batch, expected in zip(loader, torch.utils.data.DataLoader(samples, 16), strict=True):
        check(batch, expected)


def main():
    source = Path(ps.__file__)
    assert source.is_relative_to(Path(sys.argv[1]).resolve()), f"pinstage is from {source}"
    for threads in (1, 4):
        with ps.Stager("cpu", max_bytes="1GiB", pack_threads=threads) as stager:
            for batch in 3 * batches():
                check(stager.to_device(batch), batch)
    load()
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    threads = names.count("pinstage-pack\n")
    assert threads > 0, "no thread of the extension has packed"
    print(f"smoke: {source.parent}: {_native.core}, {threads} threads of its own")


if __name__ == "__main__":
    main()

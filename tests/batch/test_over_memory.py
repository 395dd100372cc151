"""Tensors over memory that isn't torch's: every dtype that torch lists, by every function that
makes one.
"""

import json

import pytest
import torch
import warm
from processes import output_of

import pinstage as ps

DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

PROGRAM = """
import json, sys, warnings
import torch
import pinstage as ps

warnings.simplefilter("ignore")  # of torch: complex32 is experimental, quantised dtypes are deprecated
pool, region = ps.SlabPool(max_bytes="1MiB"), ps.HostRegion("64KiB", device="cpu")
lease = pool.acquire(4096)
lease.numpy()[:] = 0


def of_tree(dtype):
    with ps.HostRegion.empty_like([torch.empty((2, 3), dtype=dtype, device="meta")], device="cpu") as region:
        return region.tree()[0]


def unpacked(dtype):
    batch = [torch.empty(2, 3, dtype=dtype)]
    layout = ps.Layout.of(batch)
    return layout.unpack(torch.zeros(max(layout.nbytes, 16), dtype=torch.uint8), layout.others(batch))[0]


WAYS = {
    "lease": lambda dtype: lease.tensor((2, 3), dtype),
    "lease, all of it": lambda dtype: lease.tensor(dtype=dtype),
    "lease, nothing": lambda dtype: lease.tensor(0, dtype),
    "region": lambda dtype: region.tensor((2, 3), dtype, offset=16),
    "region, all of it": lambda dtype: region.tensor(dtype=dtype),
    "region, nothing": lambda dtype: region.tensor((), dtype),
    "tree": of_tree,
    "layout": unpacked,
}


def outcome(make, dtype):
    try:
        made = make(dtype)
        assert made.dtype is dtype
        if made.untyped_storage().nbytes():
            torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage()).sum()
        return "made"
    except Exception as error:
        return type(error).__name__


found = {}
for dtype in {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}:
    for way, make in WAYS.items():
        print(way, dtype, file=sys.stderr, flush=True)  # the last line says what ended the process
        found.setdefault(str(dtype), {})[way] = outcome(make, dtype)
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("thing", "says"),
    [
        (None, "not a dtype of torch: None"),
        ("float32", "not a dtype of torch: 'float32'"),
        (float, "not a dtype of torch: "),
        (torch.qint8, "memory can't be a tensor of torch.qint8: .*; take its integers"),
    ],
)
def test_memory_has_dtypes_of_torch_except_quantised(thing, says):
    with (
        ps.HostRegion("64KiB", device="cpu") as region,
        pytest.raises(TypeError, match=says),
    ):
        region.tensor(3, thing)


@pytest.mark.filterwarnings("ignore")
def test_no_dtype_ends_the_process():
    found = json.loads(output_of(warm.command("-c", PROGRAM)))
    assert set(found) == set(DTYPES)
    for name, outcomes in found.items():
        if not torch.empty(0, dtype=DTYPES[name]).is_quantized:
            assert set(outcomes.values()) == {"made"}, name
            continue
        assert outcomes.pop("layout") == "made", name  # it isn't packed, and stays as it is
        assert outcomes.pop("tree") == "LayoutError", name
        assert set(outcomes.values()) == {"TypeError"}, name

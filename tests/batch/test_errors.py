"""Error messages about unknown classes, wrong flatten functions, and dicts whose keys are
tensors.
"""

import collections
import dataclasses

import pytest
import torch
from loader_data import unbatched
from strategies import assert_same, raises_at
from torch.utils.data import ChainDataset, DataLoader, TensorDataset

import pinstage as ps
from pinstage.errors import LayoutError

pytestmark = pytest.mark.usefixtures("both_paths")


def fresh():
    class Box:
        def __init__(self, value, note=None):
            self.value = value
            self.note = note

    return Box


# -- unknown classes -------------------------------------------------------------------------------


def test_all_unknown_classes_are_named_with_their_remedy():
    one, two, three, inner = (
        type(name, (fresh(),), {}) for name in ("One", "Two", "Three", "Inner")
    )
    window = type("Window", (collections.deque,), {})
    batch = {
        "a": [one(torch.ones(1)), one(torch.ones(1))],
        "b": two({"deep": [inner(torch.ones(1))]}),
        "c": three("no tensor"),
        "d": window([torch.ones(1)]),
    }
    with raises_at("['a'][0]") as caught:
        ps.Layout.of(batch)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("batch['a'][0] holds tensors and isn't a known container: ")
    assert "pinstage.register_node(One)" in first
    assert [line.split("  #")[0].strip() for line in lines] == [
        "pinstage.register_node(Two)",
        "pinstage.register_node(Inner)",
        "pinstage.register_node(Window, flatten, unflatten)",
    ]
    assert "batch['b'].value['deep'][0]" in lines[1]
    for cls in (one, two, inner):
        ps.register_node(cls)
    ps.register_node(
        window, lambda found: (list(found), None), lambda children, _: window(children)
    )
    assert len(ps.Layout.of(batch).slots) == 4


def linked(count, make):
    box = None
    for index in range(count):
        box = make(index)(torch.ones(1), box)
    return box


def linked_in_itself():
    box = fresh()(torch.ones(1))
    box.note = {"back": box}
    return box


def linked_often():
    cls = fresh()
    return linked(8000, lambda _: cls)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [linked_in_itself, linked_often])
def test_a_class_in_many_places_is_named_once(make):
    with raises_at("['a']", match="register_node") as caught:
        ps.Layout.of({"a": make()})
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(60)
def test_an_error_names_a_bounded_number_of_classes():
    with pytest.raises(LayoutError, match="holds tensors and isn't a known container") as caught:
        ps.Layout.of([linked(300, lambda index: type(f"Link{index}", (fresh(),), {}))])
    assert str(caught.value).count("pinstage.register_node(") == 32


SOURCES = {
    "a generator": lambda: (torch.ones(index) for index in range(3)),
    "an iterator": lambda: iter([torch.ones(1)]),
    "a loader of tensors": lambda: DataLoader(TensorDataset(torch.ones(4, 2))),
    "a loader of text": lambda: DataLoader(["a", "b"]),
    "a loader's iterator": lambda: iter(DataLoader(["a", "b"])),
    "our loader": lambda: ps.DataLoader(["a", "b"], device="cpu"),
    "what streams samples": lambda: ChainDataset([]),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_what_yields_batches_is_no_batch(stager, source):
    for put in (stager.to_device, stager.stage, stager.to_host, ps.Layout.of):
        with raises_at("", match=r"yields batches: .*wrap_loader.*prefetch"):
            put(source())
    inside = {"rows": iter("abc"), "x": torch.ones(2)}
    assert stager.to_device(inside)["rows"] is inside["rows"]


# -- what flatten returns --------------------------------------------------------------------------

WRONG = {
    "children alone": (
        lambda box: [box.value],
        "flatten returned a list of 1; return (children, context)",
    ),
    "one child": (
        lambda box: (box.value, None),
        "flatten returned a Tensor as children; return ((child, ...), context)",
    ),
    "nothing": (lambda box: None, "flatten returned a NoneType; return (children, context)"),
    "four": (
        lambda box: ((), 1, 2, 3),
        "flatten returned a tuple of 4; return (children, context)",
    ),
    "too few entries": (
        lambda box: ((box.value,), None, ()),
        "flatten returned 1 children and 0 path entries",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_flatten_names_class_and_path(kind):
    cls = fresh()
    wrong, text = WRONG[kind]
    ps.register_node(
        cls,
        lambda box: wrong(box) if box.note else ((box.value,), None),
        lambda children, context: cls(*children),
    )
    for _ in range(2):
        with raises_at("['b'][1]") as caught:
            ps.Layout.of(
                {"a": torch.ones(1), "b": [cls(torch.ones(1)), cls(torch.ones(2), "wrong")]}
            )
        assert str(caught.value).startswith("batch['b'][1] cannot be taken apart: ")
        assert cls.__qualname__ in str(caught.value)
        assert text in str(caught.value)


def test_classes_behind_a_wrong_one_may_be_new():
    cls = fresh()
    one, other = (dataclasses.make_dataclass("New", ["value"])(1) for _ in range(2))
    ps.register_node(cls, lambda box: None, lambda children, context: cls(*children))
    with raises_at("[1]", match="flatten returned a NoneType"):
        ps.Layout.of([one, cls(torch.ones(1)), other])


# -- keys that are tensors -------------------------------------------------------------------------


def stepped():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


def test_optimizer_state_is_staged_under_its_parameters(stager):
    state = stepped().state
    for _ in range(2):
        for way in (stager.to_device, stager.to_host):
            staged = way({"state": state, "more": [torch.ones(1)]})["state"]
            assert_same(state, staged)  # the keys are the same objects, too
            del staged
    assert stager.stats().passthrough_leaves == 0


def test_dicts_with_tensors_as_keys_nest(stager):
    keys = [torch.ones(2), torch.ones(3), torch.ones(2)]
    tree = {
        keys[0]: {keys[1]: torch.zeros(1), keys[2]: [torch.ones(4)]},
        keys[1]: (torch.ones(2), "text"),
    }
    batch = [tree, {"b": 1, "a": tree}]
    assert_same(batch, stager.to_device(batch))


def test_unknown_objects_below_tensor_keys_have_paths():
    box = fresh()
    with raises_at("['s'][<key 0>]['x']"):
        ps.Layout.of({"s": {torch.ones(2): {"x": box(torch.ones(1))}, torch.ones(3): 1}})


def with_tensor_keys(index):
    return {torch.full((2,), index): torch.full((2,), index), torch.ones(3): index}


@pytest.mark.parametrize("workers", [0, 1])
def test_dicts_with_tensor_keys_leave_a_loader_intact(workers):
    for index, batch in enumerate(unbatched(with_tensor_keys, 4, num_workers=workers)):
        (key, value), (_, number) = batch.items()
        assert (key.tolist(), value.tolist(), number) == ([index] * 2, [index] * 2, index)

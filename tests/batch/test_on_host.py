"""Leaves that stay on the host: `on_host` in a batch, and ``Stager(keep_on_host=...)``."""

import pytest
import torch
from loader_data import unbatched
from strategies import raises_at

import pinstage as ps


class Untouchable:
    """Cannot be compared, hashed, or looked into."""

    __hash__ = None

    def __init__(self):
        object.__setattr__(self, "tensor", torch.ones(3))

    def __eq__(self, other):
        raise AssertionError("it was compared")

    def __getattribute__(self, name):
        if name == "__dict__":
            raise AssertionError("it was searched")
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    "thing",
    [torch.ones(3), Untouchable(), {"a": torch.ones(2)}, "text", None],
    ids=lambda thing: type(thing).__name__,
)
def test_kept_objects_are_returned_themselves(stager, thing):
    for _ in range(3):
        staged = stager.to_device(
            {"x": torch.ones(2), "kept": ps.on_host(thing), "in a list": [ps.on_host(thing)]}
        )
        assert staged["kept"] is staged["in a list"][0] is thing
        fetched = stager.to_host({"x": staged["x"], "kept": ps.on_host(thing)})
        assert fetched["kept"] is thing
    stats = stager.stats()
    assert (stats.packed_leaves, stats.passthrough_leaves) == (3, 0)


def test_kept_things_may_be_all_there_is(stager):
    thing = torch.ones(3)
    assert stager.to_device(ps.on_host(thing)) is thing
    assert stager.stats().copies == 0


def test_a_tensor_kept_once_is_staged_elsewhere(stager):
    lengths = torch.tensor([3, 2])
    staged = stager.to_device({"device": lengths, "host": ps.on_host(lengths)})
    assert staged["host"] is lengths
    assert staged["device"] is not lengths
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        torch.ones(2, 3, 1), staged["host"], batch_first=True
    )
    assert packed.batch_sizes.tolist() == [2, 2, 1]


def test_a_layout_says_nothing_of_what_is_kept():
    one, other = (
        {"x": torch.ones(2), "kept": ps.on_host(thing)} for thing in (Untouchable(), "text")
    )
    assert ps.Layout.of(one) == ps.Layout.of(other)
    assert ps.Layout.of(one).others(one) == [one["kept"].obj]


def kept(index):
    return {
        "x": torch.full((2,), index),
        "lengths": ps.on_host(torch.tensor([index])),
        "odd": ps.on_host({"s": {index}}),
    }


@pytest.mark.parametrize("workers", [0, 1])
def test_kept_objects_pass_through_a_loader(workers):
    loader = unbatched(kept, 5, num_workers=workers)
    for index, batch in enumerate(loader):
        assert (batch["lengths"].tolist(), batch["odd"]) == ([index], {"s": {index}})
        assert batch["x"].tolist() == [index, index]
    assert loader.stats().passthrough_leaves == 0


# -- Stager(keep_on_host=...) ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "keep",
    [
        ["['lengths']", "['odd']"],
        lambda path, leaf: path.startswith("['lengths'][") or isinstance(leaf, Untouchable),
    ],
    ids=["at a path or below it", "by a function"],
)
def test_chosen_leaves_stay(make_stager, keep):
    stager = make_stager(keep_on_host=keep)
    for count in (2, 2, 3, 1, 0):
        original = {
            "x": torch.ones(3),
            "lengths": [torch.ones(1) for _ in range(count)],
            "odd": Untouchable(),
            "lengthsy": 1,
        }
        staged = stager.to_device(original)
        assert staged["odd"] is original["odd"]
        assert list(map(id, staged["lengths"])) == list(map(id, original["lengths"]))
        assert staged["x"] is not original["x"]
    assert stager.stats().packed_leaves == 5


def test_one_path_may_be_given_alone(make_stager):
    says = r"keep_on_host=\"\['a'\]\.b\" leads to nothing in this batch; its leaves are at"
    with raises_at("['a'].b", match=says):
        make_stager(keep_on_host="['a'].b").to_device({"a": torch.ones(1)})


def test_paths_are_checked_in_the_first_batch_only(make_stager):
    stager = make_stager(keep_on_host=["['a']"])
    kept = torch.ones(1)
    assert stager.to_device({"a": kept})["a"] is kept
    assert stager.to_device({"b": torch.ones(1)})["b"].tolist() == [1]


@ps.register_tensor
class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize("keep", ["['x']", lambda path, leaf: leaf.numel() == 2], ids=type)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_tensors_of_a_registered_class_stay(make_stager, keep, requires_grad):
    marked = torch.ones(2).as_subclass(Marked).requires_grad_(requires_grad)
    batch = {"x": marked, "other": ps.on_host("text")}
    for _ in range(2):
        kept = make_stager(keep_on_host=keep).to_device(batch)["x"]
        assert (type(kept), kept.data_ptr()) == (Marked, marked.data_ptr())


@pytest.mark.parametrize("keep", [3, [3]])
def test_other_values_of_keep_on_host_are_refused(keep):
    with pytest.raises(
        TypeError, match=r"keep_on_host takes paths or a function of path and leaf: .*; a path is"
    ):
        ps.Stager("cpu", keep_on_host=keep)


def test_an_error_in_the_function_loses_no_slab(make_stager):
    with pytest.raises(ZeroDivisionError):
        make_stager(keep_on_host=lambda path, leaf: 1 / 0).to_device([torch.ones(1)])
    # `make_pool` fails a test that leaves a slab in use.

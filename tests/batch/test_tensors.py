"""Tensors of other classes: after `register_tensor` they are packed with the rest."""

import pytest
import torch
import torch.distributed as dist
from strategies import raises_at

import pinstage as ps

pytestmark = pytest.mark.usefixtures("both_paths")


class Marked(torch.Tensor):
    """Wraps all results of torch in its class, with its mark."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(found, cls) and isinstance(args[0], cls):
            vars(found).update(vars(args[0]))
        return found


class Child(Marked):
    pass


class Pair(torch.Tensor):
    """Contains two tensors."""

    @staticmethod
    def __new__(cls, one, other, note):
        return torch.Tensor._make_wrapper_subclass(
            cls, one.shape, dtype=one.dtype, device=one.device
        )

    def __init__(self, one, other, note):
        self.one, self.other, self.note = one, other, note

    def __tensor_flatten__(self):
        return ["one", "other"], self.note

    @staticmethod
    def __tensor_unflatten__(inner, note, size, stride):
        return Pair(inner["one"], inner["other"], note)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


ps.register_tensor(Marked)
ps.register_tensor(Pair)


def marked(rows=2, cls=Marked):
    made = torch.arange(3.0 * rows).view(rows, 3).as_subclass(cls)
    made.mark = {"rows": rows, "unhashable": [torch.ones(1)]}
    return made


@pytest.mark.parametrize("cls", [Marked, Child])
def test_a_registered_tensor_class_is_packed_and_rebuilt(stager, cls):
    for rows in (2, 3, 3, 1):
        original = marked(rows, cls)
        staged = stager.to_device({"x": original, "plain": torch.ones(2)})["x"]
        assert type(staged) is cls
        assert staged.mark is original.mark
        assert torch.equal(staged, original)
        assert staged.data_ptr() != original.data_ptr()
        fetched = stager.to_host([staged])[0]
        assert (type(fetched), fetched.mark, fetched.tolist()) == (
            cls,
            original.mark,
            original.tolist(),
        )
        del staged, fetched
    stats = stager.stats()
    assert (stats.packed_leaves, stats.passthrough_leaves) == (8, 0)


def test_rebuild_says_what_stands_in_the_staged_batch(stager):
    class Odd(torch.Tensor):
        pass

    def rebuild(tensor, attributes):
        return tensor, attributes["mark"]

    for _ in range(2):
        assert ps.register_tensor(Odd, rebuild) is Odd
    odd = torch.ones(3).as_subclass(Odd)
    odd.mark = "here"
    staged = stager.to_device([odd])[0]
    assert (type(staged[0]), staged[0].tolist(), staged[1]) == (torch.Tensor, [1, 1, 1], "here")


def test_a_tensor_class_is_packed_by_its_parts(stager):
    for rows in (1, 2, 2):
        pair = Pair(torch.ones(rows), torch.zeros(rows, 2), {"note": rows})
        staged = stager.to_device({"pair": pair})["pair"]
        assert type(staged) is Pair
        assert (staged.one.tolist(), staged.other.tolist(), staged.note) == (
            [1] * rows,
            [[0, 0]] * rows,
            {"note": rows},
        )
        assert staged.one is not pair.one
        del staged
    assert stager.stats().packed_leaves == 6


def test_a_repeated_tensor_is_packed_once(stager):
    tensor = marked()
    staged = stager.to_device({"a": tensor, "b": [tensor, marked()]})
    assert staged["a"] is staged["b"][0]
    assert staged["a"] is not staged["b"][1]
    assert stager.stats().packed_leaves == 2


@pytest.mark.parametrize("twice", [False, True])
def test_tensors_that_require_grad_stay_what_they_are(stager, twice):
    tensor = marked().requires_grad_()
    staged = stager.to_device([tensor, *[tensor] * twice])
    assert all(found is tensor for found in staged)
    stats = stager.stats()
    assert (stats.packed_leaves, stats.passthrough_leaves) == (0, 1)
    assert stager.to_host([tensor])[0] is tensor


def test_an_unregistered_tensor_class_moves_by_to(stager):
    late = type("Late", (torch.Tensor,), {})
    tensor = torch.ones(2).as_subclass(late)
    assert stager.stage([tensor]).passthrough_leaves == 1
    ps.register_tensor(late)
    transfer = stager.stage([tensor])
    assert transfer.passthrough_leaves == 0
    assert type(transfer.wait()[0]) is late


@pytest.mark.parametrize("cls", [torch.Tensor, dict, 3, torch.nn.Parameter])
def test_what_is_no_such_class_is_refused(cls):
    with pytest.raises(TypeError, match=r"register_tensor"):
        ps.register_tensor(cls)


def test_a_class_is_not_registered_in_two_ways():
    class Once(torch.Tensor):
        pass

    ps.register_tensor(Once)
    with pytest.raises(ValueError, match=r"Once.*already registered in another way"):
        ps.register_tensor(Once, lambda tensor, attributes: tensor)
    with pytest.raises(TypeError, match=r"use pinstage\.register_tensor"):
        ps.register_node(Once)


def test_a_path_leads_to_the_tensor_itself():
    layout = ps.Layout.of({"x": [marked()], "pair": Pair(torch.ones(1), torch.ones(2), None)})
    assert [slot.path for slot in layout.slots] == ["['pair'].one", "['pair'].other", "['x'][0]"]


def test_a_freed_registered_tensor_is_an_error():
    tensor = marked()
    tensor.untyped_storage().resize_(0)
    with raises_at("['x']", match="lacks the memory"):
        ps.Layout.of({"x": tensor})


# -- DTensor ---------------------------------------------------------------------------------------


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield dist.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_the_local_part_of_a_dtensor_is_packed(mesh, stager):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    for rows in (2, 4, 4):
        tensor = distribute_tensor(torch.arange(3.0 * rows).view(rows, 3), mesh, [Shard(0)])
        staged = stager.to_device({"x": tensor, "y": torch.ones(1)})["x"]
        assert type(staged) is DTensor
        assert (staged.device_mesh, staged.placements) == (tensor.device_mesh, tensor.placements)
        assert (staged.shape, staged.stride()) == (tensor.shape, tensor.stride())
        assert torch.equal(staged.to_local(), tensor.to_local())
        assert staged.to_local().data_ptr() != tensor.to_local().data_ptr()
        assert torch.equal((staged + 1).to_local(), tensor.to_local() + 1)
        del staged
    parameter = torch.nn.Parameter(tensor)
    assert stager.to_device([parameter])[0] is parameter
    assert stager.stats().passthrough_leaves == 1

"""Classes of batches on a device: which leaves stay on the host, which move by themselves, and how
they are rebuilt.
"""

import pytest
import torch

import pinstage as ps

pytestmark = pytest.mark.gpu

MIB = 1 << 20


class Marked(torch.Tensor):
    pass


ps.register_tensor(Marked)


class Movable:
    def __init__(self, inner):
        self.inner = inner

    def to(self, device):
        return Movable({name: tensor.to(device) for name, tensor in self.inner.items()})


def test_kept_leaves_stay_on_the_host(stager):
    lengths = torch.tensor([3, 2])
    staged = stager.to_device({"x": torch.ones(2, 3, 1), "lengths": ps.on_host(lengths)})
    assert staged["lengths"] is lengths
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        staged["x"], staged["lengths"], batch_first=True
    )
    assert packed.data.device == stager.device


def test_registered_tensor_classes_are_packed(stager):
    for rows in (1, 5, 3, 3):
        marked = torch.arange(2.0 * rows).view(rows, 2).as_subclass(Marked)
        marked.note = {rows}
        staged = stager.to_device({"x": marked, "y": torch.ones(rows)})["x"]
        assert (type(staged), staged.device, staged.note) == (Marked, stager.device, {rows})
        fetched = stager.to_host([staged])[0]
        assert (type(fetched), fetched.device.type, fetched.tolist()) == (
            Marked,
            "cpu",
            marked.tolist(),
        )
        del staged
    stats = stager.stats()
    assert (stats.copies, stats.packed_leaves, stats.passthrough_leaves) == (8, 8, 0)


def test_optimizer_state_is_fetched_under_its_own_parameters(stager):
    model = torch.nn.Linear(3, 4).to(stager.device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3, device=stager.device)).sum().backward()
    optimizer.step()
    fetched = stager.to_host(optimizer.state)
    assert list(map(id, fetched)) == list(map(id, optimizer.state))
    for parameter, state in optimizer.state.items():
        for name, tensor in state.items():
            assert fetched[parameter][name].device.type == "cpu"
            assert torch.equal(fetched[parameter][name], tensor.cpu())


@pytest.mark.filterwarnings("ignore:.*Movable holds tensors")
def test_a_self_moving_object_arrives_and_returns(stager):
    staged = stager.to_device([Movable({"x": torch.ones(3)}), torch.ones(2)])[0]
    assert staged.inner["x"].device == stager.device
    fetched = stager.to_host([staged])[0]
    assert fetched.inner["x"].tolist() == [1, 1, 1]
    assert fetched.inner["x"].device.type == "cpu"


@pytest.mark.filterwarnings("ignore:.*Movable holds tensors")
def test_moved_objects_keep_memory_for_other_streams(cuda_device, stager, latch):
    other = torch.cuda.Stream(cuda_device)
    out = torch.empty(MIB, device=cuda_device)
    with torch.cuda.stream(other):  # its kernels are loaded before the stream is held
        out.copy_(torch.zeros(MIB, device=cuda_device))
    torch.cuda.synchronize(cuda_device)
    latch.hold(other)
    staged = stager.stage([Movable({"x": torch.full((MIB,), 7.0)})]).wait(other)
    with torch.cuda.stream(other):
        out.copy_(staged[0].inner["x"])
    del staged
    overwriting = [torch.full((MIB,), -1.0, device=cuda_device) for _ in range(8)]
    latch.open()
    other.synchronize()
    assert overwriting
    assert (out == 7).all()

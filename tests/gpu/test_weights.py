"""Loading checkpoints into modules on the device: bit-equal, in stream order, through a small
pool.
"""

import pytest
import torch

import pinstage as ps

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def make(seed, device="cpu", width=2048, layers=8):
    """Return a model of 16 MiB per layer."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(width, width, device=device) for _ in range(layers)]
    return torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(width, device=device))


def assert_same(module, expected, dtype=None):
    for name, tensor in module.state_dict().items():
        want = expected[name].to(tensor.device)
        if dtype is not None and tensor.is_floating_point():
            want = want.to(dtype)
        assert torch.equal(tensor, want), name


@pytest.mark.parametrize("device", ["cuda", "meta"])
@pytest.mark.parametrize("kind", ["state_dict", "mmap", "pinned", "pairs"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_weights_are_the_checkpoints_bit_for_bit(stager, tmp_path, device, kind, dtype):
    state, module = make(1).state_dict(), make(0, device)
    if dtype is not None:
        module.to(dtype)
    source = state
    if kind == "mmap":
        torch.save(state, tmp_path / "state")
        source = torch.load(tmp_path / "state", mmap=True)
    elif kind == "pinned":
        source = {name: tensor.pin_memory() for name, tensor in state.items()}
    elif kind == "pairs":
        source = iter(state.items())
    assert stager.load_weights(module, source) == ([], [])
    assert {tensor.device for tensor in module.state_dict().values()} == {stager.device}
    assert_same(module, state, dtype)
    assert stager.pool.stats().peak_held_bytes <= 64 * MIB


def test_weights_take_two_groups_of_the_device(cuda_device):
    weights = {f"{number}": torch.full((20, MIB), float(number)) for number in range(8)}
    with ps.Stager(cuda_device, max_bytes="256MiB") as stager:
        there = {
            name: torch.zeros_like(tensor, device=cuda_device) for name, tensor in weights.items()
        }
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(cuda_device)
        before = torch.cuda.memory_allocated(cuda_device)
        stager.load_weights(there, weights)
        assert torch.cuda.max_memory_allocated(cuda_device) - before <= 2 * (64 << 20)
        assert all((there[name] == weights[name][0, 0]).all() for name in there)


def test_page_locked_sources_are_borrowed(cuda_device, borrowing):
    state, module = make(1).state_dict(), make(0, cuda_device)
    borrowing.load_weights(module, {name: tensor.pin_memory() for name, tensor in state.items()})
    torch.cuda.synchronize(cuda_device)
    assert_same(module, state)


def test_safetensors_files_are_loaded(stager, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    torch_files = pytest.importorskip("safetensors.torch")
    state, module = make(1).state_dict(), make(0, "meta")
    torch_files.save_file(state, tmp_path / "state.safetensors")
    with safetensors.safe_open(tmp_path / "state.safetensors", framework="pt") as file:
        stager.load_weights(module, file)
    assert_same(module, state)


def test_a_module_on_the_host_is_refused(stager):
    with pytest.raises(RuntimeError, match=r"0\.weight is on cpu, the stager is for cuda:0"):
        stager.load_weights(make(0), make(1).state_dict())


def test_earlier_work_sees_the_old_weights(cuda_device, stager, latch):
    """Work that hasn't started uses the destination; the sources change after the call."""
    module = make(0, cuda_device, layers=1)
    old = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = make(1, layers=1).state_dict()
    expected = {name: tensor.clone() for name, tensor in state.items()}
    stager.load_weights(module, state)  # allocations and kernels before the latch
    module.load_state_dict(old)
    torch.cuda.synchronize(cuda_device)
    with latch:
        latch.hold(torch.cuda.current_stream(cuda_device))
        seen = module[0].weight.detach().clone()
        stager.load_weights(module, state)
        for tensor in state.values():
            tensor.zero_()
    torch.cuda.synchronize(cuda_device)
    assert torch.equal(seen, old["0.weight"])
    assert_same(module, expected)


def test_weights_reach_a_device_that_isn_t_current(two_devices):
    state, module = make(1, width=256).state_dict(), make(0, two_devices[1], width=256)
    with ps.Stager(two_devices[1], max_bytes="64MiB") as stager, torch.cuda.device(two_devices[0]):
        stager.load_weights(module, state)
        torch.cuda.synchronize(two_devices[1])
        assert_same(module, state)

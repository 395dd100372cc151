"""Frozen modules on the device: bit-equal, overlapped, and with no extra device memory."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import pinstage as ps
from pinstage._stage import shared_targets
from pinstage.offload import frozen_module

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def pool(cuda_device):
    with ps.SlabPool("2GiB", memory=ps.memory.default_memory(cuda_device)) as pool:
        yield pool
        torch.cuda.synchronize(cuda_device)


def make(seed, width=2048, layers=4, *, buffers=True):
    """Return a module of 16 MiB per layer, on the host."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(width, width) for _ in range(layers)]
    norm = torch.nn.BatchNorm1d(width) if buffers else torch.nn.LayerNorm(width)
    return torch.nn.Sequential(*layers, norm).requires_grad_(False)


def content_of(module):
    return [tensor.clone() for tensor in module.state_dict().values()]


def assert_equal(some, others):
    assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("start", ["cpu", "cuda"])
def test_outputs_and_statistics_equal_a_resident_module_s(cuda_device, pool, start):
    plain, module = make(0).to(cuda_device), make(0).to(start)
    x = torch.randn(64, 2048, device=cuda_device)
    handle = frozen_module(module, pool, device=cuda_device)
    for _ in range(3):
        expected = plain(x)
        with handle:
            assert {tensor.device for tensor in module.state_dict().values()} == {cuda_device}
            found = module(x)
        assert torch.equal(found, expected)
        assert all(tensor.device.type == "cpu" for tensor in module.state_dict().values())
        assert all(tensor.is_pinned() for tensor in module.parameters())
    assert_equal(content_of(module), [tensor.cpu() for tensor in content_of(plain)])


def test_the_next_module_is_copied_during_compute(cuda_device, pool, latch):
    first, second = (
        frozen_module(make(seed).eval(), pool, device=cuda_device) for seed in range(2)
    )
    for handle in (first, second):
        with handle:  # allocations and kernels before the latch
            pass
    torch.cuda.synchronize(cuda_device)
    with first, latch:
        second.onload()
        latch.hold(torch.cuda.current_stream(cuda_device))  # the computation
        copied = torch.cuda.Event()
        copied.record(shared_targets.of(cuda_device).stream)
        copied.synchronize()  # though the current stream is held
        assert second.stats().device_bytes > 0
    second.offload()


def test_only_modules_with_buffers_wait_at_the_end(cuda_device, pool, latch):
    plain, normed = (
        frozen_module(make(0, buffers=buffers), pool, device=cuda_device)
        for buffers in (False, True)
    )
    stream = torch.cuda.current_stream(cuda_device)
    for handle in (plain, normed):
        with handle:  # allocations before the latch
            pass
    torch.cuda.synchronize(cuda_device)
    with latch:
        with plain:
            latch.hold(stream)
        assert not stream.query()
    x = torch.randn(4096, 2048, device=cuda_device)
    with normed:
        for _ in range(20):
            normed._module(x)
    assert stream.query()


class Codebook(torch.nn.Module):
    """Buffers of which torch counts no change, norms with the same statistics, and buffers that are
    replaced.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("embed", torch.zeros(4))
        self.register_buffer("table", torch.arange(16.0).view(4, 4))
        self.register_buffer("steps", torch.tensor(0))
        self.first, self.second = (torch.nn.BatchNorm1d(4, affine=False) for _ in range(2))
        self.second.running_mean = self.first.running_mean

    def forward(self, x):
        self.embed.data.copy_(self.embed * 0.9 + x.mean(0) * 0.1)
        self.table.t_()
        self.steps = torch.tensor(int(self.steps) + 1)  # on the host
        self.first.running_var = self.first.running_var * 2
        return self.second(x) + self.embed


def test_changes_of_buffers_are_kept(cuda_device, pool):
    plain, module = Codebook().to(cuda_device), Codebook()
    plain.second.running_mean = plain.first.running_mean  # .to() has made two tensors of it
    x = torch.randn(64, 4, device=cuda_device)
    handle = frozen_module(module, pool, device=cuda_device)
    for _ in range(3):
        expected = plain(x)
        with handle:
            assert torch.equal(module(x), expected)
        assert all(tensor.is_pinned() for tensor in module.buffers())
        assert_equal(content_of(module), [tensor.cpu() for tensor in content_of(plain)])


def test_a_refused_change_leaves_the_module_alone(cuda_device, pool):
    module = make(0, width=256)
    handle = frozen_module(module, pool, device=cuda_device)
    before, objects = content_of(module), [*module.parameters(), *module.buffers()]
    handle.__enter__()
    module.double()
    with pytest.raises(RuntimeError, match="changed inside the block"):
        handle.offload()
    assert_equal(content_of(module), before)
    assert all(
        one is other
        for one, other in zip([*module.parameters(), *module.buffers()], objects, strict=True)
    )
    assert all(tensor.is_pinned() for tensor in objects)


def test_device_memory_is_free_after_the_block(cuda_device, pool):
    torch.cuda.synchronize(cuda_device)
    before = torch.cuda.memory_allocated(cuda_device)
    handle = frozen_module(make(0), pool, device=cuda_device)
    for _ in range(2):
        with handle:
            assert torch.cuda.memory_allocated(cuda_device) - before >= 64 * MIB
        assert torch.cuda.memory_allocated(cuda_device) == before
    handle.onload()
    handle.offload()
    torch.cuda.synchronize(cuda_device)
    assert torch.cuda.memory_allocated(cuda_device) == before


def test_modules_in_turn_need_the_memory_of_two(cuda_device, pool):
    """The host runs ahead of all copies and kernels."""
    modules = [make(seed, buffers=False) for seed in range(3)]
    handles = [frozen_module(module, pool, device=cuda_device) for module in modules]
    x = torch.randn(64, 2048, device=cuda_device)
    expected = x
    for handle in handles:
        with handle:
            expected = handle._module(expected)
    torch.cuda.synchronize(cuda_device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(cuda_device)
    before = torch.cuda.memory_reserved(cuda_device)
    for _ in range(3):
        y = x
        handles[0].onload()
        for number, handle in enumerate(handles):
            with handle:
                if number + 1 < len(handles):
                    handles[number + 1].onload()
                y = handle._module(y)
        assert torch.equal(y, expected)
    module_bytes = max(handle.stats().host_bytes for handle in handles)
    assert torch.cuda.max_memory_reserved(cuda_device) - before <= 2 * module_bytes + 16 * MIB


def test_too_little_device_memory_leaves_everything_as_before(cuda_device, pool):
    handle = frozen_module(make(0, layers=20), pool, device=cuda_device)
    expected = content_of(handle._module)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(cuda_device).total_memory
    before = torch.cuda.memory_allocated(cuda_device)
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved(cuda_device) + 280 * MIB) / total
    )
    try:
        with pytest.raises(torch.OutOfMemoryError):
            handle.onload()  # 320 MiB in two slabs: the first has room
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.synchronize(cuda_device)
    assert torch.cuda.memory_allocated(cuda_device) == before
    assert_equal(content_of(handle._module), expected)
    with handle:
        assert_equal([tensor.cpu() for tensor in content_of(handle._module)], expected)


def test_onloaded_memory_is_not_reused_too_early(cuda_device, pool, latch):
    handle = frozen_module(make(0, buffers=False), pool, device=cuda_device)
    x = torch.randn(64, 2048, device=cuda_device)
    side = torch.cuda.Stream(cuda_device)
    side.wait_stream(torch.cuda.current_stream(cuda_device))
    with torch.cuda.stream(side), handle:  # kernels and workspaces before the latch
        expected = handle._module(x)
    noise = [torch.full((16 * MIB,), 255, dtype=torch.uint8, device=cuda_device) for _ in range(4)]
    del noise
    torch.cuda.synchronize(cuda_device)
    with latch:
        latch.hold(shared_targets.of(cuda_device).stream)
        handle.onload()
        side.wait_stream(torch.cuda.current_stream(cuda_device))
        with torch.cuda.stream(side), handle:
            found = handle._module(x)
        noise = [
            torch.full((16 * MIB,), 255, dtype=torch.uint8, device=cuda_device) for _ in range(4)
        ]
    torch.cuda.synchronize(cuda_device)
    del noise
    assert torch.equal(found, expected)


def test_a_compiled_module_is_compiled_once(cuda_device, pool):
    module = make(0, width=256).eval()
    x = torch.randn(64, 256, device=cuda_device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter)
    handle = frozen_module(compiled, pool, device=cuda_device)
    with torch.inference_mode():
        for _ in range(3):
            with handle:
                expected = module(x)
                torch.testing.assert_close(compiled(x), expected, rtol=1e-3, atol=1e-3)
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_a_recurrent_layer_keeps_flat_weights(cuda_device, pool, kind):
    """cuDNN wants weights in one chunk of memory, and torch warns otherwise; warnings are
    errors.
    """
    module = kind(64, 64, num_layers=2).to(cuda_device).requires_grad_(False).eval()
    x = torch.randn(5, 3, 64, device=cuda_device)
    expected = module(x)[0]
    with frozen_module(module, pool, device=cuda_device):
        assert torch.equal(module(x)[0], expected)


def test_a_module_is_moved_to_the_named_device(two_devices):
    module, x = make(0, width=256), torch.randn(4, 256, device=two_devices[1])
    with ps.SlabPool("64MiB", memory=ps.memory.default_memory(two_devices[1])) as pool:
        handle = frozen_module(module, pool, device=two_devices[1])
        with torch.cuda.device(two_devices[0]), handle:
            assert module(x).device == two_devices[1]
        handle.close()
        torch.cuda.synchronize(two_devices[1])


def test_compiled_modules_change_their_buffers(cuda_device, pool):
    plain, module = make(0, width=256).to(cuda_device), make(0, width=256)
    x = torch.randn(64, 256, device=cuda_device)
    compiled = torch.compile(module, backend="aot_eager")
    handle = frozen_module(module, pool, device=cuda_device)
    for _ in range(3):
        with torch.no_grad(), handle:
            assert torch.equal(compiled(x), plain(x))
    assert_equal(content_of(module), [tensor.cpu() for tensor in content_of(plain)])

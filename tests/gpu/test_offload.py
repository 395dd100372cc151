"""Activations and optimizer state on the host: streams wait, the host doesn't, and no memory is
reused too early.
"""

import contextlib

import pytest
import torch
from doubles import wait_until

import pinstage as ps
from pinstage._stage import shared_targets
from pinstage.offload import optimizer_state, save_on_cpu

pytestmark = pytest.mark.gpu

MIB = 1 << 20


class Block(torch.nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.wide, self.back = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.back(torch.nn.functional.gelu(self.wide(self.norm(x))))


def make(device, blocks=6, tokens=2048, width=512):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(width) for _ in range(blocks))).to(device)
    return model, torch.randn(tokens, width, device=device).requires_grad_()


def gradients(model, x, context=None):
    for tensor in [*model.parameters(), x]:
        tensor.grad = None
    with context or contextlib.nullcontext():
        y = model(x)
    y.square().mean().backward()
    return [tensor.grad for tensor in [*model.parameters(), x]]


def assert_equal(some, others):
    assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.fixture
def pool(cuda_device):
    with ps.SlabPool("1GiB", memory=ps.memory.default_memory(cuda_device)) as pool:
        yield pool
        torch.cuda.synchronize(cuda_device)
        stats = pool.stats()
        assert (stats.leased_slabs, stats.in_flight_slabs) == (0, 0)


@pytest.mark.parametrize("max_device_bytes", [0, "24MiB", "1GiB"])
def test_gradients_are_bit_equal_to_a_plain_run(cuda_device, pool, max_device_bytes):
    model, x = make(cuda_device)
    expected = gradients(model, x)
    # Plain runs must agree, or this test proves nothing.
    assert_equal(gradients(model, x), expected)
    offload = save_on_cpu(pool, max_device_bytes=max_device_bytes)
    for _ in range(5):
        assert_equal(gradients(model, x, offload), expected)
    stats = offload.stats()
    assert stats.copies == 5 * 4 * 6
    assert stats.stayed_at_cap == 0


@pytest.mark.parametrize("way", ["out_stream", "stream"])
def test_the_host_waits_for_no_copy(cuda_device, pool, latch, way):
    model, x = make(cuda_device, blocks=3)
    expected = gradients(model, x)
    offload = save_on_cpu(pool, max_device_bytes="24MiB")
    gradients(model, x, offload)
    torch.cuda.synchronize()
    with latch:
        latch.hold(getattr(shared_targets.of(cuda_device), way))
        found = [gradients(model, x, offload) for _ in range(2)]  # must return, or the test hangs
        latch.open()
        for each in found:
            assert_equal(each, expected)


def overwritten_too_early(pool, latch, device, *, waits=True):
    """Save a tensor while copies are held, drop it, and reuse its memory; return the gradient."""
    target = shared_targets.of(device)
    x = torch.full((4 * MIB,), 2.0, device=device, requires_grad=True)

    def forward():
        with save_on_cpu(pool, max_device_bytes=0):
            return (x * 3).square()

    forward().backward(torch.ones_like(x))
    # The allocator has the memory, and the kernel is loaded.
    del [torch.empty_like(x).fill_(8.0) for _ in range(12)][:]
    x.grad = None
    torch.cuda.synchronize()
    ones = torch.ones_like(x)
    with latch:
        latch.hold(target.out_stream)
        y = forward()
        # One of them in the memory of x * 3.
        trash = [torch.empty_like(x).fill_(8.0) for _ in range(16)]
        if not waits:
            torch.cuda.current_stream().synchronize()  # filled before the copy
        latch.open()
        torch.cuda.synchronize()
    y.backward(ones)
    del trash
    return x.grad


def test_memory_is_not_reused_before_its_copy(cuda_device, pool, latch):
    assert (overwritten_too_early(pool, latch, cuda_device) == 36).all()


def test_memory_is_reused_too_early_without_the_wait(cuda_device, pool, latch, monkeypatch):
    target = shared_targets.of(cuda_device)
    monkeypatch.setattr(type(target), "wait_for", lambda *_: None)
    assert (overwritten_too_early(pool, latch, cuda_device, waits=False) == 48).any()


def test_the_device_holds_no_more_than_is_allowed(cuda_device, pool):
    def peak(context):
        x = torch.randn(4 * MIB, device=cuda_device, requires_grad=True)  # 16 MiB
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = x
        with context or contextlib.nullcontext():
            for _ in range(30):
                y = y.sin()
        y.sum().backward()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / (16 * MIB)

    assert peak(None) >= 30
    offload = save_on_cpu(pool, max_device_bytes="32MiB")
    for _ in range(3):
        # Two leaving and two returned ahead; tensors that backward found still there; tensors in
        # use; gradients.
        assert peak(offload) <= 13


def test_nothing_is_page_locked_after_the_first_step(cuda_device, pool):
    model, x = make(cuda_device)
    offload = save_on_cpu(pool, max_device_bytes="24MiB")
    gradients(model, x, offload)
    misses = pool.stats().misses
    for _ in range(10):
        gradients(model, x, offload)
    assert pool.stats().misses == misses
    assert offload.stats().stayed_at_cap == 0


def test_backward_finds_most_tensors_on_the_device(cuda_device, pool):
    model, x = make(cuda_device)
    offload = save_on_cpu(pool, max_device_bytes="96MiB")
    gradients(model, x, offload)
    torch.cuda.synchronize()
    before = offload.stats()
    gradients(model, x, offload)
    after = offload.stats()
    assert after.late - before.late <= 1


def test_side_streams_of_the_user_are_ordered(cuda_device, pool):
    model, x = make(cuda_device)
    expected = gradients(model, x)
    offload = save_on_cpu(pool, max_device_bytes="24MiB")
    streams = [torch.cuda.Stream(cuda_device) for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(10):
        model.zero_grad()
        x.grad = None
        y = x
        previous = torch.cuda.current_stream()
        for number, block in enumerate(model):
            stream = streams[number % 2]
            stream.wait_stream(previous)
            with torch.cuda.stream(stream), offload:
                y.record_stream(stream)
                y = block(y)
            previous = stream
        torch.cuda.current_stream().wait_stream(previous)
        y.record_stream(torch.cuda.current_stream())
        y.square().mean().backward()
        torch.cuda.synchronize()
        for tensor, gradient in zip([*model.parameters(), x], expected, strict=True):
            assert torch.equal(tensor.grad, gradient)


def test_tensors_stay_while_a_graph_is_capturing(cuda_device, pool):
    model, x = make(cuda_device, blocks=1)
    expected = gradients(model, x)
    offload = save_on_cpu(pool)
    side = torch.cuda.Stream(cuda_device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            gradients(model, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(model, x, offload)
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(found, expected)
    assert offload.stats().copies == 0


@pytest.mark.filterwarnings("ignore:.*")  # torch's own, of its compiler
def test_compiled_blocks_give_the_gradients_of_compiled_blocks(cuda_device, pool):
    model, x = make(cuda_device, blocks=2)
    compiled = torch.nn.Sequential(*(torch.compile(block) for block in model))
    expected = gradients(compiled, x)
    offload = save_on_cpu(pool, max_device_bytes="48MiB")
    for _ in range(3):
        assert_equal(gradients(compiled, x, offload), expected)
    assert offload.stats().copies > 0
    torch._dynamo.reset()


def test_a_model_on_two_devices_saves_from_both(two_devices):
    one, other = two_devices
    first, x = make(one)
    second, _ = make(other)

    def run(context):
        for tensor in [*first.parameters(), *second.parameters(), x]:
            tensor.grad = None
        with context:
            y = second(first(x).to(other))
        y.square().mean().backward()
        return [tensor.grad.clone() for tensor in [*first.parameters(), *second.parameters(), x]]

    with ps.SlabPool(max_bytes="1GiB") as pool:
        expected = run(torch.enable_grad())
        offload = save_on_cpu(pool, max_device_bytes="24MiB")
        for _ in range(5):
            assert_equal(run(offload), expected)
        torch.cuda.synchronize(one)
        torch.cuda.synchronize(other)


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_weights_are_bit_equal_with_offloaded_state(cuda_device, pool, kind):
    def train(offloaded):
        model, x = make(cuda_device, blocks=2)
        optimizer = torch.optim.AdamW(model.parameters(), **{kind: True})
        state = optimizer_state(optimizer, pool) if offloaded else None
        for step in range(6):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if state is not None and step % 2:
                state.onload()
            optimizer.step()
        if state is not None:
            assert state.stats().host_bytes == 2 * 2 * 2 * 512 * 2048 * 4
            state.close()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert_equal(train(offloaded=True), train(offloaded=False))


def test_the_state_s_memory_is_free_between_steps(cuda_device, pool):
    parameter = torch.nn.Parameter(torch.zeros(16 * MIB, device=cuda_device))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    state = optimizer_state(optimizer, pool)
    optimizer.step()
    torch.cuda.synchronize()
    wait_until(lambda: before - torch.cuda.memory_allocated() >= 2 * 64 * MIB)
    state.close()

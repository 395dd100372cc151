"""Activations on the host between forward and backward: gradients bit-equal, and no slab left in
use.
"""

import contextlib
import gc
import signal
import threading
import warnings
import weakref
from functools import partial

import pytest
import torch
from doubles import CountingMemory, Gate, PinnedMemory, QueuedTarget, assert_idle, wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import bits, tensors
from torch.utils.checkpoint import checkpoint

from pinstage import SlabPool
from pinstage._stage import Targets
from pinstage.errors import PinstageError, PoolClosedError, StagingWarning
from pinstage.offload import save_on_cpu

KIB = 1 << 10

offload_from = partial(save_on_cpu, min_bytes=KIB)


@pytest.fixture
def offload(pool):
    return offload_from(pool)


def leaf(*shape):
    """Return a tensor that gets a gradient; without a shape, one of 6400 bytes."""
    return torch.randn(shape or (40, 40), requires_grad=True)


class Save(torch.autograd.Function):
    """Saves a tensor in forward, and appends to a list what it finds in backward."""

    @staticmethod
    def forward(ctx, x, tensor, found):
        ctx.save_for_backward(tensor)
        ctx.found = found
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.found.extend(ctx.saved_tensors)
        return gradient, None, None


class Decoder(torch.nn.Module):
    """Every layer attends to the same `memory` tensor."""

    def __init__(self, size=32):
        super().__init__()
        self.encoder = torch.nn.Linear(size, size)
        self.layers = torch.nn.ModuleList(torch.nn.Bilinear(size, size, size) for _ in range(3))

    def forward(self, x):
        memory = self.encoder(x).relu()
        for layer in self.layers:
            x = layer(x, memory).tanh()
        return x


MODELS = {
    "mlp": lambda: torch.nn.Sequential(
        *(
            torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 32), torch.nn.GELU())
            for _ in range(4)
        )
    ),
    # Queries, keys and values are views of one product.
    "attention": lambda: torch.nn.Sequential(
        *(
            torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.5, batch_first=True)
            for _ in range(2)
        )
    ),
    "decoder": Decoder,
    "convolution": lambda: torch.nn.Sequential(
        torch.nn.Conv1d(16, 24, 3), torch.nn.BatchNorm1d(24), torch.nn.SiLU(), torch.nn.MaxPool1d(2)
    ),
    "recurrent": lambda: torch.nn.GRU(32, 16, batch_first=True),
}


def output_of(model, x):
    torch.manual_seed(1)
    y = model(x)
    return y[0] if isinstance(y, tuple) else y


def gradients(model, x, context=None):
    """Return the gradients of a model's parameters and input; only forward is inside the
    context.
    """
    tensors = [*model.parameters(), x]
    for tensor in tensors:
        tensor.grad = None
    with context or contextlib.nullcontext():
        y = output_of(model, x)
    y.square().sum().backward()
    return [tensor.grad for tensor in tensors]


def make(name):
    """Return a model, an input, and the gradients of a plain run."""
    torch.manual_seed(0)
    model, x = MODELS[name](), leaf(4, 16, 32)
    return model, x, gradients(model, x)


def inside(offload, function):
    """Return a function that calls another one inside the block."""

    def call(x):
        with offload:
            return function(x)

    return call


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_device_bytes", [0, 5 * KIB, "1GiB"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_bit_equal_to_a_plain_run(pool, name, max_device_bytes):
    model, x, expected = make(name)
    offload = offload_from(pool, max_device_bytes=max_device_bytes)
    for _ in range(3):
        assert_equal(gradients(model, x, offload), expected)
    assert offload.stats().copies > 0
    with offload:  # backward may run inside the block
        assert_equal(gradients(model, x), expected)


@pytest.mark.parametrize("inside", [False, True])
def test_gradients_of_gradients_are_bit_equal(offload, inside):
    def second(context):
        with context:
            loss = output_of(model, x).square().sum()
            if inside:
                (first,) = torch.autograd.grad(loss, x, create_graph=True)
        if not inside:
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(
            first.square().sum(), [*model.parameters(), x], materialize_grads=True
        )

    model, x, _ = make("mlp")
    expected = second(contextlib.nullcontext())
    assert_equal(second(offload), expected)


def test_several_forward_passes_before_the_first_backward(pool):
    model, x, _ = make("attention")
    inputs = [x.detach().clone().requires_grad_() for _ in range(3)]
    expected = gradients(model, x)[-1]
    offload = offload_from(pool, max_device_bytes=64 * KIB)
    for order in ((0, 1, 2), (2, 0, 1)):
        outputs = []
        for one in inputs:
            one.grad = None
            with offload:
                outputs.append(output_of(model, one))
        for i in order:
            outputs[i].square().sum().backward()
            assert torch.equal(inputs[i].grad, expected)


@pytest.mark.parametrize("recomputed", [False, True], ids=["inputs", "recomputed tensors"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_can_offload(offload, reentrant, recomputed):
    model, x, expected = make("attention")
    for block in model:
        around = inside(offload, block.forward) if recomputed else block.forward
        block.forward = partial(checkpoint, around, use_reentrant=reentrant)
    assert_equal(gradients(model, x, None if recomputed else offload), expected)
    assert offload.stats().copies >= 2


@pytest.mark.filterwarnings("ignore:.*")  # torch's own, of its compiler
@pytest.mark.parametrize("where", ["inside the block", "around it"])
def test_compiled_functions_give_the_same_gradients(offload, where):
    torch._dynamo.reset()
    model, x, expected = make("mlp")
    is_around = where == "around it"
    if is_around:
        model.forward = inside(offload, model.forward)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        assert_equal(gradients(compiled, x, None if is_around else offload), expected)
    assert offload.stats().copies > 0
    torch._dynamo.reset()


# -- which tensors are sent, and which stay --------------------------------------------------------


def test_parameters_views_of_them_and_small_tensors_stay(offload):
    weight = torch.nn.Parameter(torch.randn(32, 32))
    x = leaf(4, 32)
    with offload:
        y = x @ weight.t() + (x @ weight[:, :]).sum()
    stats = offload.stats()
    assert (stats.copies, stats.stayed) == (0, 4)
    y.sum().backward()


def test_keep_says_what_else_stays(pool):
    offload = offload_from(pool, keep_on_device=lambda tensor: tensor.shape[0] == 50)
    x, y = leaf(50, 40), leaf(60, 40)
    with offload:
        loss = x.exp().sum() + y.exp().sum()
    assert offload.stats().copies == 1
    loss.backward()
    assert torch.equal(x.grad, x.exp())


def test_memory_saved_many_times_is_copied_once(offload):
    def loss_of(h):
        views = h, h.t().sin(), h[:, :].square(), (h.view(-1) * 3).square()
        return (h * h).sum() + sum(view.sum() for view in views)

    x = leaf()
    with offload:
        loss = loss_of(x * 1)
    assert (offload.stats().copies, offload.stats().shared) == (2, 3)  # h, and h * 3
    (found,), (expected,) = (torch.autograd.grad(one, x) for one in (loss, loss_of(x * 1)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dropped", [0, 1])
def test_memory_stays_known_without_one_of_its_saves(offload, dropped):
    x = leaf()
    with offload:
        h = x * 1
        branches = [h.sin(), h.cos()]
        del branches[dropped]
        branches.append(h.square())
    assert (offload.stats().copies, offload.stats().shared) == (1, 2)
    sum(branches).sum().backward()
    assert torch.equal(x.grad, 2 * x + (-x.sin(), x.cos())[dropped])


def test_gaps_of_a_tensor_aren_t_copied(offload):
    product = leaf(4, 16, 3, 4, 8) * 1
    with offload:
        q, k, v = product.permute(2, 0, 3, 1, 4).unbind()
        y = (q * k) * v
    assert offload.stats().copies == 4  # q, k, v, q * k
    assert offload.stats().copied_bytes == 4 * q.nbytes
    y.sum().backward()


def test_bytes_between_saved_elements_count_as_unsaved(offload):
    x, buffer = leaf(1), torch.ones(40, 40)
    left, right = buffer[:, :25], buffer[:, 25:]  # their ranges of memory overlap
    found = []
    with offload:
        y = Save.apply(x, left, found)
        right.data.fill_(3.0)  # as a user's kernel does, without a version counter
        y = Save.apply(Save.apply(y, right[:39], found), buffer, found)
    y.backward()
    assert_equal(found, [buffer, right[:39], left])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensor=tensors())
def test_a_tensor_returns_with_strides_and_offset(pool, target, tensor):
    found, is_lazy = [], tensor.is_conj() or tensor.is_neg()
    offload = save_on_cpu(pool, min_bytes=1)
    with offload:
        y = Save.apply(leaf(1), tensor, found)
    y.backward()
    assert offload.stats().copies == (tensor.numel() > 0 and not is_lazy)
    assert torch.equal(bits(found[0]), bits(tensor))
    assert found[0].stride() == tensor.stride()
    # In the memory of the tensor, or in new memory, which torch aligns.
    offset = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    assert found[0].data_ptr() % 64 in (tensor.data_ptr() % 64, offset % 64)
    found.clear()
    assert_idle(pool, target)


def test_sparse_tensors_stay(offload):
    x = leaf(40, 4)
    with offload:
        loss = torch.sparse.mm(torch.eye(40).to_sparse(), x).sum()
    assert (offload.stats().copies, offload.stats().stayed) == (0, 1)
    loss.backward()
    assert torch.equal(x.grad, torch.ones(40, 4))


@pytest.mark.parametrize("cap", [8 * KIB, 20 * KIB], ids=["only the smallest fits", "some fit"])
def test_tensors_stay_at_the_cap_and_are_counted(make_pool, target, cap):
    model, x, expected = make("mlp")
    pool = make_pool(cap)
    offload = offload_from(pool)
    assert_equal(gradients(model, x, offload), expected)
    stats = offload.stats()
    assert stats.stayed_at_cap > 0
    assert stats.stayed_at_cap_bytes >= 8 * KIB
    assert pool.stats().peak_held_bytes <= cap
    assert_idle(pool, target)


def test_tensors_stay_where_the_pool_is_frozen(offload, pool):
    pool.freeze()
    x = leaf()
    with offload:
        y = x.sin()
    y.sum().backward()
    assert (offload.stats().copies, offload.stats().stayed_at_cap) == (0, 1)
    assert torch.equal(x.grad, x.cos())


def test_pageable_memory_serves_where_page_locking_is_refused(offload, pool, memory):
    memory.fail_allocate(MemoryError("no more"))
    x = leaf()
    with offload, pytest.warns(StagingWarning, match="no more") as told:
        y = x.sin().cos()
    y.sum().backward()
    assert len(told) == 1
    assert (offload.stats().copies, offload.stats().stayed_at_cap) == (2, 0)
    assert pool.stats().held_bytes == 0
    expected = x.detach().clone().requires_grad_()
    expected.sin().cos().sum().backward()
    assert torch.equal(x.grad, expected.grad)


@pytest.mark.filterwarnings("ignore::pinstage.errors.UnreleasedLeaseWarning")
def test_a_handler_may_end_waiting_for_slabs(offload, pool, memory):
    def ring(*_):
        memory.allocate_gate.open()
        raise TimeoutError("rung")

    x, before = leaf(), signal.signal(signal.SIGALRM, ring)
    memory.allocate_gate = Gate()
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with offload, pytest.raises(TimeoutError, match=r"^rung$"):
            x.sin()
    finally:
        signal.signal(signal.SIGALRM, before)
    wait_until(lambda: pool.stats().held_slabs == 1 and not pool.stats().leased_slabs)


def test_a_closed_pool_is_an_error(make_pool):
    pool = make_pool(4 << 20)
    pool.close()
    x = leaf()
    with offload_from(pool), pytest.raises(PoolClosedError):
        x.exp()


def test_cpu_tensors_stay_where_the_pool_is_pinned(make_pool):
    offload = offload_from(make_pool(4 << 20, memory=PinnedMemory()))
    with offload:
        leaf().exp().sum().backward()
    assert (offload.stats().copies, offload.stats().stayed) == (0, 1)


# -- order -----------------------------------------------------------------------------------------


def chain(x, length=10):
    for _ in range(length):
        x = x.sin()
    return x.sum()


def test_backward_finds_tensors_that_set_out_before(pool, target):
    x = leaf()
    offload = offload_from(pool, max_device_bytes=20000)  # three of them
    for turn in range(1, 4):
        with offload:
            loss = chain(x)
        loss.backward()
        stats = offload.stats()
        assert stats.still_there + stats.ahead + stats.late == 10 * turn
        assert stats.late <= (turn if target is None else 0)  # the first, if it is sent by then


def test_no_more_comes_back_ahead_than_is_allowed(pool, device_type, monkeypatch):
    arrived, fetch = [], device_type.bring_back

    def counted(self, here, after):
        arrival = fetch(self, here, after)
        arrived.append(weakref.ref(arrival.there.untyped_storage()))
        return arrival

    monkeypatch.setattr(device_type, "bring_back", counted)
    counts = []

    def count(_):
        counts.append(sum(reference() is not None for reference in arrived))

    x = leaf()
    with offload_from(pool, max_device_bytes=20000):
        y = x
        for _ in range(12):
            y = y.sin()
            y.register_hook(count)
    y.sum().backward()
    assert 0 < max(counts) <= 3 + 1  # three ahead, and one in use


def test_device_memory_is_freed_after_its_copy(make_pool, late):
    target = late(1000, 1000)
    pool = make_pool(4 << 20)
    x = leaf()
    alive = []
    with offload_from(pool, max_device_bytes=20000):
        y = x.sin()
        for _ in range(12):
            alive.append(weakref.ref(y.untyped_storage()))
            y = y.sin()
        kept = sum(reference() is not None for reference in alive)
    assert kept <= 3 + 1
    y.sum().backward()
    assert_idle(pool, target)
    wait_until(lambda: not any(reference() for reference in alive))


def test_a_host_running_ahead_reuses_slabs_in_flight(make_pool, late, monkeypatch):
    target = late(1000, 1000)
    waited_for = []
    to_host = target.to_host

    def noted(copies, *, after):
        waited_for.append(after)
        return to_host(copies, after=after)

    monkeypatch.setattr(target, "to_host", noted)
    pool = make_pool(1 << 20)
    model, x, expected = make("mlp")
    offload = offload_from(pool, max_device_bytes=20 * KIB)
    for _ in range(4):
        assert_equal(gradients(model, x, offload), expected)
    copies = offload.stats().copies
    assert pool.stats().misses <= copies // 4
    assert pool.stats().peak_held_slabs <= copies // 4
    assert pool.stats().in_flight_slabs > 0
    assert not any(waited_for[: copies // 4])
    assert all(waited_for[copies // 4 :]), "a slab was written before its last copy was done"
    target.run_all()
    wait_until(lambda: pool.stats().in_flight_slabs == 0)


# -- changes in place ------------------------------------------------------------------------------


@pytest.mark.parametrize("min_bytes", [KIB, "1MiB"], ids=["gone", "stayed"])
def test_changing_a_saved_tensor_is_autograd_s_error(pool, min_bytes):
    x = leaf()
    with save_on_cpu(pool, min_bytes=min_bytes):
        h = x * 1
        loss = h.square().sum()
        h.view(-1)[3:].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    del loss


def test_tensors_saved_around_a_change_go_twice(offload):
    x = leaf()
    with offload, torch.no_grad():
        h = x * 1
        with torch.enable_grad():
            first = (x * h).sum()
            h.add_(1)
            second = (x * h).sum()
    assert offload.stats().copies == 2
    assert torch.equal(torch.autograd.grad(second, x)[0], h)
    del first, second


def test_uncounted_changes_are_sent_again_next_pass(offload):
    x, static = leaf(), torch.ones(40, 40)
    losses = []
    for value in (1.0, 2.0):
        static.data.fill_(value)  # as the replay of a graph does
        with offload:
            losses.append((x * static).sum())
    assert torch.equal(torch.autograd.grad(losses[1], x)[0], torch.full((40, 40), 2.0))
    losses.clear()


# -- the end of graphs -----------------------------------------------------------------------------


def test_a_dropped_graph_returns_its_slabs_without_collection(pool, offload, target):
    model, x, _ = make("attention")
    gc.disable()
    try:
        with offload:
            y = output_of(model, x)
        assert pool.stats().leased_slabs > 0
        del y
        assert_idle(pool, target)
    finally:
        gc.enable()


def test_returned_tensors_of_dropped_graphs_live_until_copied(make_pool, late):
    target = late(0, 1000)
    pool = make_pool(1 << 20)
    x, other = leaf(), leaf()
    offload = offload_from(pool)
    with offload:
        dropped, kept = chain(other, 4), chain(x, 4)
    kept.backward()
    target.lost = 0
    del dropped  # its tensors are being copied, and nothing will wait for them
    target.run_all()
    assert target.lost == 0
    wait_until(lambda: pool.stats().in_flight_slabs == 0)
    with offload:
        kept = chain(x, 8)
    kept.backward()
    assert_idle(pool, target)
    target.lost = 0


def test_a_graph_in_a_cycle_returns_its_slabs(pool, target):
    class Ring:
        pass

    x = leaf()
    with offload_from(pool) as offload:
        y = x.sin().sin()
    ring = Ring()
    # Autograd hides its references from the collector.
    ring.parts = (
        ring,
        y,
        offload,
        offload._saving.pack(x.exp()),
    )
    del ring, y, offload
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gc.collect()
        assert_idle(pool, target)


def test_an_exception_in_forward_leaves_nothing_behind(pool, offload, target):
    x = leaf()

    with pytest.raises(ZeroDivisionError), offload:
        x.exp().sin() / (1 // 0)
    assert_idle(pool, target)
    copies = offload.stats().copies
    x.exp()
    assert offload.stats().copies == copies == 1


def test_an_exception_in_backward_leaves_nothing_behind(pool, target):
    def fail(_):
        raise ZeroDivisionError

    x = leaf()
    with offload_from(pool, max_device_bytes=20000):
        h = x.exp().sin()
        h.register_hook(fail)
        y = h.exp().sin().sum()
    with pytest.raises(ZeroDivisionError):
        y.backward()
    del h, y
    assert_idle(pool, target)


def test_a_failed_copy_gives_its_slab_back(pool, offload, monkeypatch, target, device_type):
    def fail(*_, **__):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(device_type, "to_host", fail)
        with offload, pytest.raises(ZeroDivisionError):
            leaf().exp()
    assert_idle(pool, target)


def test_the_pool_can_close_while_a_graph_lives(make_pool, target):
    pool = make_pool(4 << 20)
    x = leaf()
    with offload_from(pool):
        y = x.exp().sin().sum()
    if target is not None:
        target.run_all()
    pool.close()
    y.backward()
    torch.testing.assert_close(x.grad, x.exp().cos() * x.exp())
    del y
    assert_idle(pool, target)


# -- blocks in blocks, threads ---------------------------------------------------------------------


def test_of_nested_blocks_the_innermost_counts(pool, make_pool):
    other = make_pool(4 << 20)
    outer, inner = offload_from(pool), offload_from(other)
    x = leaf()
    with outer:
        y = x.exp()
        with inner:
            y = y.sin()
        with torch.autograd.graph.save_on_cpu():
            y = y.cos()
        y = y.tanh()
    assert (outer.stats().copies, inner.stats().copies) == (2, 1)
    y.sum().backward()
    (expected,) = torch.autograd.grad(x.exp().sin().cos().tanh().sum(), x)
    assert torch.equal(x.grad, expected)


def test_a_block_may_be_entered_inside_itself(offload):
    x = leaf()
    with offload, offload:
        y = x.exp().sin()
    y.sum().backward()
    assert (offload.stats().copies, offload.stats().shared) == (1, 1)


def in_four_threads(background, differentiate):
    """Call a function five times in each of four threads at once; return the results."""
    start = threading.Barrier(4)

    def run():
        start.wait(20)
        return [differentiate() for _ in range(5)]

    threads = [background(run) for _ in range(4)]
    return [found for thread in threads for found in thread.result(60)]


def test_threads_share_one_object(pool, background):
    def differentiate():
        own = x.detach().clone().requires_grad_()
        with offload:
            y = model(own)
        return torch.autograd.grad(y.square().sum(), [*model.parameters(), own])

    offload = offload_from(pool, max_device_bytes=40 * KIB)
    model, x, expected = make("decoder")
    for found in in_four_threads(background, differentiate):
        assert_equal(found, expected)


def test_threads_can_go_back_through_one_graph(pool, background):
    model, x, expected = make("decoder")
    with offload_from(pool, max_device_bytes=20 * KIB):
        loss = output_of(model, x).square().sum()
    tensors = [*model.parameters(), x]
    back = partial(torch.autograd.grad, loss, tensors, retain_graph=True)
    for found in in_four_threads(background, back):
        assert_equal(found, expected)
    del loss, back


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"min_bytes": -1}, ValueError, "negative"),
        ({"min_bytes": "a lot"}, ValueError, "a lot"),
        ({"max_device_bytes": -1}, ValueError, "negative"),
        ({"keep_on_device": 3}, TypeError, "keep_on_device must be a function: 3"),
    ],
)
def test_wrong_arguments_are_refused(pool, wrong, error, text):
    with pytest.raises(error, match=text):
        save_on_cpu(pool, **wrong)


def test_it_is_refused_where_changes_are_not_seen(pool, monkeypatch):
    monkeypatch.setattr(
        "pinstage._compat.storages.why_changes_are_not_seen", lambda: "torch is too old"
    )
    with pytest.raises(PinstageError, match="torch is too old"):
        save_on_cpu(pool)


# -- any graph -------------------------------------------------------------------------------------

STEPS = {
    "sin": lambda a, _: a.sin(),
    "exp": lambda a, _: (a * 0.1).exp(),
    "product": lambda a, b: a * b,
    "matrices": lambda a, b: a @ b / 30,
    "transposed": lambda a, _: a.t(),
    "rows": lambda a, _: torch.cat([a[10:], a[:10] * 2]),
    "flat": lambda a, _: a.contiguous().view(-1).tanh().view(30, 30),
    "softmax": lambda a, _: a.softmax(0),
    "half": lambda a, _: a.to(torch.bfloat16).sigmoid().float(),
    "in place": lambda a, _: (a * 1).relu_(),
}


@settings(
    max_examples=settings.default.max_examples // 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    program=st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 99), st.integers(0, 99)),
        min_size=1,
    ),
    max_device_bytes=st.sampled_from([0, 5000, 8000, 1 << 20]),
    cap=st.sampled_from([5000, 30000, 1 << 20]),
    lag=st.sampled_from([None, (0, 0), (1, 2), (3, 3), (100, 0), (0, 100), (100, 100)]),
    ending=st.sampled_from(["once", "twice", "parts", "dropped", "half dropped"]),
)
def test_any_graph_has_gradients_and_empties_the_pool(
    program, max_device_bytes, cap, lag, ending, monkeypatch
):
    def run(context):
        values = [x]
        with context:
            for name, one, other in program:
                values.append(STEPS[name](values[one % len(values)], values[other % len(values)]))
            losses = [values[-1].square().sum(), values[len(values) // 2].cos().sum()]
        del values
        if ending == "dropped":
            return []
        if ending == "half dropped":
            losses.pop()
        backwards = losses[::-1] if ending == "parts" else [sum(losses)] * (1 + (ending == "twice"))
        return [
            torch.autograd.grad(loss, x, retain_graph=number < len(backwards))[0]
            for number, loss in enumerate(backwards, 1)
        ]

    torch.manual_seed(0)
    x = leaf(30, 30)
    late = None if lag is None else QueuedTarget(*lag)
    with SlabPool(cap, memory=CountingMemory()) as pool, monkeypatch.context() as patch:
        if late is not None:
            patch.setattr("pinstage.offload._saving.shared_targets", Targets(late))
        expected = run(contextlib.nullcontext())
        offload = offload_from(pool, max_device_bytes=max_device_bytes)
        for _ in range(2):
            found = run(offload)
            assert all(map(torch.equal, found, expected))
        if late is not None:
            late.run_all()
            assert late.lost == 0
        assert_idle(pool)
        assert pool.stats().peak_held_bytes <= cap

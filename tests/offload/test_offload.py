"""Activations on the host between forward and backward: gradients bit-equal, and no slab left in
use.
"""

import contextlib
import gc
import threading
import warnings
import weakref

import pytest
import torch
from doubles import CountingMemory, QueuedTarget, assert_idle, known, wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import pinstage as ps
from pinstage import SlabPool
from pinstage.errors import PinstageError, PoolClosedError, StagingWarning
from pinstage.offload import save_on_cpu

KIB = 1 << 10


@pytest.fixture(params=["at once", "late"])
def target(request, monkeypatch):
    """Run a test twice: with copies that are done at once, and with copies that are done on a
    wait.
    """
    if request.param == "at once":
        yield None
        return
    late = QueuedTarget(6, 6)
    monkeypatch.setattr("pinstage.offload._saving.shared_targets", known(late))
    monkeypatch.setattr("pinstage.offload._optimizer.shared_targets", known(late))
    yield late
    late.run_all()
    assert late.lost == 0, "memory was let go of before a copy was done"


@pytest.fixture
def pool(make_pool, target):
    pool = make_pool(4 << 20)
    yield pool
    assert_idle(pool, target)


class Attention(torch.nn.Module):
    """Queries, keys and values are views of one product."""

    def __init__(self, size=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = (
            torch.nn.LayerNorm(size),
            torch.nn.Linear(size, 3 * size),
            torch.nn.Linear(size, size),
        )

    def forward(self, x):
        q, k, v = (
            self.qkv(self.norm(x))
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
            .unbind()
        )
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


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


class Convolution(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv1d(16, 24, 3),
            torch.nn.BatchNorm1d(24),
            torch.nn.SiLU(),
            torch.nn.MaxPool1d(2),
        )

    def forward(self, x):
        return self.layers(x)


MODELS = {
    "mlp": lambda: torch.nn.Sequential(
        *(
            torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 32), torch.nn.GELU())
            for _ in range(4)
        )
    ),
    "attention": lambda: torch.nn.Sequential(Attention(), Attention()),
    "decoder": Decoder,
    "convolution": Convolution,
    "dropout": lambda: torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 8)
    ),
    "recurrent": lambda: torch.nn.GRU(32, 16, batch_first=True),
}


def make(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    x = torch.randn(4, 16, 32).requires_grad_()
    return model, x


def output_of(model, x):
    torch.manual_seed(1)
    y = model(x)
    return y[0] if isinstance(y, tuple) else y


def gradients(model, x, context=None, backward=lambda y: y.square().sum().backward()):
    """Return the gradients of a model's parameters and input; only forward is inside the
    context.
    """
    for tensor in [*model.parameters(), x]:
        tensor.grad = None
    with context or contextlib.nullcontext():
        y = output_of(model, x)
    backward(y)
    return [tensor.grad for tensor in [*model.parameters(), x]]


def assert_equal(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert torch.equal(one, other)


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_device_bytes", [0, 5 * KIB, "1GiB"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_bit_equal_to_a_plain_run(pool, name, max_device_bytes):
    model, x = make(name)
    expected = gradients(model, x)
    offload = save_on_cpu(pool, min_bytes=KIB, max_device_bytes=max_device_bytes)
    for _ in range(3):
        assert_equal(gradients(model, x, offload), expected)
    assert offload.stats().copies > 0


def test_backward_may_run_inside_the_block(pool):
    model, x = make("attention")
    expected = gradients(model, x)
    with save_on_cpu(pool, min_bytes=KIB):
        assert_equal(gradients(model, x), expected)


@pytest.mark.parametrize("inside", [False, True])
def test_gradients_of_gradients_are_bit_equal(pool, inside):
    def second(context):
        with context:
            loss = output_of(model, x).square().sum()
            if inside:
                (first,) = torch.autograd.grad(loss, x, create_graph=True)
        if not inside:
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(
            first.square().sum(), [*model.parameters(), x], allow_unused=True
        )

    model, x = make("mlp")
    expected = second(contextlib.nullcontext())
    found = second(save_on_cpu(pool, min_bytes=KIB))
    for one, other in zip(found, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    del found, one


def test_several_forward_passes_before_the_first_backward(pool):
    model, x = make("attention")
    inputs = [x.detach().clone().requires_grad_() for _ in range(3)]
    expected = gradients(model, x)[-1]
    offload = save_on_cpu(pool, min_bytes=KIB, max_device_bytes=64 * KIB)
    for order in ((0, 1, 2), (2, 0, 1)):
        outputs = []
        for one in inputs:
            one.grad = None
            with offload:
                outputs.append(output_of(model, one))
        for i in order:
            outputs[i].square().sum().backward()
            assert torch.equal(inputs[i].grad, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_save_their_inputs_on_the_host(pool, reentrant):
    def run(context):
        x.grad = None
        with context:
            y = x * 1
            for block in model:
                y = checkpoint(block, y, use_reentrant=reentrant)
        y.square().sum().backward()
        return [parameter.grad for parameter in model.parameters()] + [x.grad]

    model, x = make("attention")
    expected = [gradient.clone() for gradient in run(contextlib.nullcontext())]
    model.zero_grad()
    offload = save_on_cpu(pool, min_bytes=KIB)
    assert_equal(run(offload), expected)
    assert offload.stats().copies >= 2


def test_checkpointed_blocks_can_offload_recomputed_tensors(pool):
    def block(y):
        with save_on_cpu(pool, min_bytes=KIB):
            return model[0](y)

    model, x = make("mlp")
    expected = torch.autograd.grad(model[0](x).square().sum(), x)[0]
    for reentrant in (False, True):
        y = checkpoint(block, x, use_reentrant=reentrant)
        y.square().sum().backward()
        assert torch.equal(x.grad, expected)
        x.grad = None


@pytest.mark.filterwarnings("ignore:.*")  # torch's own, of its compiler
@pytest.mark.parametrize("where", ["inside the block", "around it"])
def test_compiled_functions_give_the_same_gradients(pool, where):
    offload = save_on_cpu(pool, min_bytes=KIB)
    model, x = make("mlp")

    def around(y):
        with offload:
            return model(y)

    torch._dynamo.reset()
    if where == "around it":
        expected = gradients(model, x)
        x.grad = None
        model.zero_grad()
        torch.compile(around, backend="aot_eager")(x).square().sum().backward()
        assert_equal([tensor.grad for tensor in [*model.parameters(), x]], expected)
    else:
        expected = gradients(torch.compile(model, backend="aot_eager"), x)
        for _ in range(2):
            assert_equal(gradients(torch.compile(model, backend="aot_eager"), x, offload), expected)
    assert offload.stats().copies > 0
    torch._dynamo.reset()


# -- which tensors are sent, and which stay --------------------------------------------------------


def test_parameters_views_of_them_and_small_tensors_stay(pool):
    offload = save_on_cpu(pool, min_bytes=KIB)
    weight = torch.nn.Parameter(torch.randn(32, 32))
    x = torch.randn(4, 32, requires_grad=True)
    with offload:
        y = x @ weight.t() + (x @ weight[:, :]).sum()
    stats = offload.stats()
    assert (stats.copies, stats.stayed) == (0, 4)
    y.sum().backward()


def test_keep_has_to_be_a_function(pool):
    with pytest.raises(TypeError, match="keep_on_device must be a function: 3"):
        save_on_cpu(pool, keep_on_device=3)


def test_keep_says_what_else_stays(pool):
    offload = save_on_cpu(pool, min_bytes=KIB, keep_on_device=lambda tensor: tensor.shape[0] == 50)
    x, y = (torch.randn(n, 40, requires_grad=True) for n in (50, 60))
    with offload:
        loss = x.exp().sum() + y.exp().sum()
    assert offload.stats().copies == 1
    loss.backward()
    assert torch.equal(x.grad, x.exp())


def test_memory_saved_many_times_is_copied_once(pool):
    offload = save_on_cpu(pool, min_bytes=KIB)
    x = torch.randn(40, 40, requires_grad=True)
    with offload:
        h = x * 1
        losses = [
            (h * h).sum(),
            (h.view(-1) * 3).square().sum(),
            h.t().sin().sum(),
            h[:, :].square().sum(),
        ]
        assert offload.stats().copies == 2  # h, and h * 3
    del h
    sum(losses).backward()
    assert offload.stats().shared == 3
    expected = torch.autograd.grad(
        (x * x).sum() + (x * 3).square().sum() + x.sin().sum() + x.square().sum(), x
    )[0]
    torch.testing.assert_close(x.grad, expected)


def test_gaps_of_a_tensor_aren_t_copied(pool):
    offload = save_on_cpu(pool, min_bytes=KIB)
    product = torch.randn(4, 16, 3, 4, 8, requires_grad=True) * 1
    with offload:
        q, k, v = product.permute(2, 0, 3, 1, 4).unbind()
        y = (q * k) * v
    assert offload.stats().copies == 4  # q, k, v, q * k
    assert offload.stats().copied_bytes == 4 * q.nbytes
    y.sum().backward()


def test_bytes_between_saved_elements_count_as_unsaved(pool):
    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, tensor):
            ctx.save_for_backward(tensor)
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0].sum(), None

    x, buffer = torch.ones(1, requires_grad=True), torch.ones(40, 40)
    left, right = buffer[:, :25], buffer[:, 25:]  # their ranges of memory overlap
    with save_on_cpu(pool, min_bytes=KIB):
        first = Keep.apply(x, left)
        right.data.fill_(3.0)  # as a user's kernel does, without a version counter
        second, whole = Keep.apply(x, right[:39]), Keep.apply(x, buffer)
    for loss, expected in ((first, left), (second, right[:39]), (whole, buffer)):
        assert torch.autograd.grad(loss, x)[0].item() == expected.sum().item()


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[3:, 5:],
        lambda t: t[::2],
        lambda t: t[:, 7:9].expand(60, 60, 2).transpose(0, 1),
        lambda t: t.as_strided((20, 30), (70, 2), 11),
        lambda t: t[1],
        lambda t: t.unfold(1, 4, 2),
        lambda t: t[:, 7:17],
        lambda t: t.view(60, 3, 20)[:, 1].t(),
    ],
)
def test_a_tensor_returns_with_strides_and_offset(pool, view):
    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            ctx.save_for_backward(tensor)
            return tensor.sum()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(ctx.saved_tensors[0])
            return gradient.expand_as(seen[-1])

    seen = []
    base = torch.randn(60, 60, requires_grad=True) * 1
    tensor = view(base)
    expected = tensor.detach().clone()
    with save_on_cpu(pool, min_bytes=16):
        loss = Look.apply(tensor)
    loss.backward()
    assert torch.equal(seen[0], expected)
    assert (seen[0].stride(), seen[0].dtype) == (tensor.stride(), tensor.dtype)
    assert seen[0].data_ptr() % 64 == tensor.data_ptr() % 64
    seen.clear()


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128]
)
def test_other_dtypes_travel(pool, dtype):
    x = torch.randn(40, 40, dtype=dtype, requires_grad=True)
    (expected,) = torch.autograd.grad((x * x).abs().sum(), x)
    offload = save_on_cpu(pool, min_bytes=KIB)
    with offload:
        loss = ((x * 1) * x.conj().conj()).abs().sum()
    loss.backward()
    assert offload.stats().copies > 0
    torch.testing.assert_close(x.grad, expected)


def test_lazily_conjugated_and_sparse_tensors_stay(pool):
    offload = save_on_cpu(pool, min_bytes=KIB)
    x = torch.randn(40, 40, dtype=torch.complex64, requires_grad=True)
    matrix = torch.eye(40).to_sparse()
    y = torch.randn(40, 4, requires_grad=True)
    with offload:
        loss = (x.detach().conj() * x).abs().sum() + torch.sparse.mm(matrix, y).sum()
    # The tensor that abs() saves is sent.
    assert (offload.stats().copies, offload.stats().stayed) == (
        1,
        2,
    )
    loss.backward()
    assert torch.equal(y.grad, torch.ones(40, 4))


def test_tensors_stay_at_the_cap_and_are_counted(make_pool, target):
    model, x = make("mlp")
    expected = gradients(model, x)
    for cap in (8 * KIB, 20 * KIB):  # only the smallest fits; some fit
        pool = make_pool(cap)
        offload = save_on_cpu(pool, min_bytes=KIB)
        assert_equal(gradients(model, x, offload), expected)
        stats = offload.stats()
        assert stats.stayed_at_cap > 0
        assert stats.stayed_at_cap_bytes >= 8 * KIB
        assert pool.stats().peak_held_bytes <= cap
        assert_idle(pool, target)


def test_tensors_stay_when_the_pool_is_frozen(make_pool, target):
    pool = make_pool(4 << 20)
    pool.freeze()
    model, x = make("mlp")
    expected = gradients(model, x)
    offload = save_on_cpu(pool, min_bytes=KIB)
    assert_equal(gradients(model, x, offload), expected)
    assert offload.stats().copies == 0
    assert_idle(pool, target)


def test_tensors_stay_where_the_memory_is_refused(make_pool, memory):
    pool = make_pool(4 << 20)
    memory.fail_allocate(MemoryError("no more"))
    x = torch.randn(40, 40, requires_grad=True)
    offload = save_on_cpu(pool, min_bytes=KIB)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StagingWarning)  # the pool's own warning
        with offload:
            y = x.sin()
    y.sum().backward()
    assert (offload.stats().copies, offload.stats().stayed_at_cap) == (0, 1)
    assert torch.equal(x.grad, x.cos())


def test_a_closed_pool_is_an_error(make_pool):
    pool = make_pool(4 << 20)
    pool.close()
    x = torch.randn(40, 40, requires_grad=True)
    with save_on_cpu(pool, min_bytes=KIB), pytest.raises(PoolClosedError):
        x.exp()


def test_cpu_tensors_stay_where_the_pool_is_pinned(make_pool, monkeypatch):
    monkeypatch.setattr(CountingMemory, "is_pinned", True)
    pool = make_pool(4 << 20)
    offload = save_on_cpu(pool, min_bytes=KIB)
    x = torch.randn(40, 40, requires_grad=True)
    with offload:
        x.exp().sum().backward()
    assert (offload.stats().copies, offload.stats().stayed) == (0, 1)


# -- order -----------------------------------------------------------------------------------------


def chain(x, length=10):
    for _ in range(length):
        x = x.sin()
    return x.sum()


def test_backward_finds_tensors_that_set_out_before(pool, target):
    x = torch.randn(40, 40, requires_grad=True)  # 6400 bytes
    offload = save_on_cpu(pool, min_bytes=KIB, max_device_bytes=20000)  # three of them
    for turn in range(1, 4):
        with offload:
            loss = chain(x)
        loss.backward()
        stats = offload.stats()
        assert stats.still_there + stats.ahead + stats.late == 10 * turn
        assert stats.late <= (turn if target is None else 0)  # the first, if it is sent by then


def test_no_more_comes_back_ahead_than_is_allowed(pool, monkeypatch):
    from pinstage._stage import Target

    arrived = []
    fetch = Target.bring_back

    def counted(self, here, after):
        arrival = fetch(self, here, after)
        arrived.append(weakref.ref(arrival.there.untyped_storage()))
        return arrival

    monkeypatch.setattr(Target, "bring_back", counted)
    most = 0

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx, gradient):
            nonlocal most
            most = max(most, sum(reference() is not None for reference in arrived))
            return gradient

    x = torch.randn(40, 40, requires_grad=True)
    with save_on_cpu(pool, min_bytes=KIB, max_device_bytes=20000):
        y = x
        for _ in range(12):
            y = Watch.apply(y.sin())
    y.sum().backward()
    assert most <= 3 + 1  # three ahead, and one in use


def test_device_memory_is_freed_after_its_copy(make_pool, monkeypatch):
    late = QueuedTarget(1000, 1000)
    monkeypatch.setattr("pinstage.offload._saving.shared_targets", known(late))
    pool = make_pool(4 << 20)
    x = torch.randn(40, 40, requires_grad=True)
    alive = []
    with save_on_cpu(pool, min_bytes=KIB, max_device_bytes=20000):
        y = x.sin()
        for _ in range(12):
            alive.append(weakref.ref(y.untyped_storage()))
            y = y.sin()
        kept = sum(reference() is not None for reference in alive)
    assert kept <= 3 + 1
    y.sum().backward()
    late.run_all()
    assert late.lost == 0
    wait_until(lambda: not any(reference() for reference in alive))
    assert_idle(pool)


def test_a_warm_step_allocates_nothing_of_the_pool(pool, target):
    model, x = make("attention")
    offload = save_on_cpu(pool, min_bytes=KIB)
    gradients(model, x, offload)
    assert_idle(pool, target)
    misses = pool.stats().misses
    for _ in range(3):
        gradients(model, x, offload)
        assert_idle(pool, target)
    assert pool.stats().misses == misses


def test_a_host_running_ahead_reuses_slabs_in_flight(make_pool, monkeypatch):
    late = QueuedTarget(1000, 1000)
    waited_for = []
    to_host = late.to_host

    def noted(copies, *, hold, after):
        waited_for.append(after)
        return to_host(copies, hold=hold, after=after)

    monkeypatch.setattr(late, "to_host", noted)
    monkeypatch.setattr("pinstage.offload._saving.shared_targets", known(late))
    pool = make_pool(1 << 20)
    model, x = make("mlp")
    expected = gradients(model, x)
    offload = save_on_cpu(pool, min_bytes=KIB, max_device_bytes=20 * KIB)
    for _ in range(4):
        assert_equal(gradients(model, x, offload), expected)
    copies = offload.stats().copies
    assert pool.stats().misses <= copies // 4
    assert pool.stats().peak_held_slabs <= copies // 4
    assert pool.stats().in_flight_slabs > 0
    assert not any(waited_for[: copies // 4])
    assert all(waited_for[copies // 4 :]), "a slab was written before its last copy was done"
    late.run_all()
    assert late.lost == 0
    wait_until(lambda: pool.stats().in_flight_slabs == 0)


# -- changes in place ------------------------------------------------------------------------------


@pytest.mark.parametrize("min_bytes", [KIB, "1MiB"], ids=["gone", "stayed"])
def test_changing_a_saved_tensor_is_autograd_s_error(pool, min_bytes):
    x = torch.randn(40, 40, requires_grad=True)
    with save_on_cpu(pool, min_bytes=min_bytes):
        h = x * 1
        loss = h.square().sum()
        h.view(-1)[3:].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    del loss


def test_tensors_saved_around_a_change_go_twice(pool):
    x = torch.randn(40, 40, requires_grad=True)
    offload = save_on_cpu(pool, min_bytes=KIB)
    with offload, torch.no_grad():
        h = x * 1
        with torch.enable_grad():
            first = (x * h).sum()
            h.add_(1)
            second = (x * h).sum()
    assert offload.stats().copies == 2
    assert torch.equal(torch.autograd.grad(second, x)[0], h)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(first, x)
    del first, second


def test_uncounted_changes_are_sent_again_next_pass(pool):
    offload = save_on_cpu(pool, min_bytes=KIB)
    x, static = torch.randn(40, 40, requires_grad=True), torch.ones(40, 40)
    losses = []
    for value in (1.0, 2.0):
        static.data.fill_(value)  # as the replay of a graph does
        with offload:
            losses.append((x * static).sum())
    assert torch.equal(torch.autograd.grad(losses[1], x)[0], torch.full((40, 40), 2.0))
    losses.clear()


# -- the end of graphs -----------------------------------------------------------------------------


def test_a_dropped_graph_returns_its_slabs_without_collection(pool, target):
    model, x = make("attention")
    gc.disable()
    try:
        with save_on_cpu(pool, min_bytes=KIB):
            y = output_of(model, x)
        assert pool.stats().leased_slabs > 0
        del y
        assert_idle(pool, target)
    finally:
        gc.enable()


def test_returned_tensors_of_dropped_graphs_live_until_copied(make_pool, monkeypatch):
    late = QueuedTarget(0, 1000)
    monkeypatch.setattr("pinstage.offload._saving.shared_targets", known(late))
    pool = make_pool(1 << 20)
    x, other = (torch.randn(40, 40, requires_grad=True) for _ in range(2))
    offload = save_on_cpu(pool, min_bytes=KIB)
    with offload:
        dropped, kept = chain(other, 4), chain(x, 4)
    kept.backward()
    late.lost = 0
    del dropped  # its tensors are being copied, and nothing will wait for them
    late.run_all()
    assert late.lost == 0
    wait_until(lambda: pool.stats().in_flight_slabs == 0)
    with offload:
        kept = chain(x, 8)
    kept.backward()
    assert_idle(pool, late)


def test_a_graph_in_a_cycle_returns_its_slabs(pool, target):
    class Ring:
        pass

    x = torch.randn(40, 40, requires_grad=True)
    with save_on_cpu(pool, min_bytes=KIB) as offload:
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


def test_an_exception_in_forward_leaves_nothing_behind(pool, target):
    x = torch.randn(40, 40, requires_grad=True)

    offload = save_on_cpu(pool, min_bytes=KIB)

    def forward():
        with offload:
            return x.exp().sin() / (1 // 0)

    with pytest.raises(ZeroDivisionError):
        forward()
    assert_idle(pool, target)
    copies = offload.stats().copies
    x.exp()
    assert offload.stats().copies == copies == 1


def test_an_exception_in_backward_leaves_nothing_behind(pool, target):
    def fail(_):
        raise ZeroDivisionError

    x = torch.randn(40, 40, requires_grad=True)
    with save_on_cpu(pool, min_bytes=KIB, max_device_bytes=20000):
        h = x.exp().sin()
        h.register_hook(fail)
        y = h.exp().sin().sum()
    with pytest.raises(ZeroDivisionError):
        y.backward()
    del h, y
    assert_idle(pool, target)


def test_a_failed_copy_gives_its_slab_back(pool, monkeypatch, target):
    def fail(*_, **__):
        raise ZeroDivisionError

    x = torch.randn(40, 40, requires_grad=True)
    kind = type(target) if target is not None else ps._stage.Target
    with monkeypatch.context() as patch:
        patch.setattr(kind, "to_host", fail)
        with save_on_cpu(pool, min_bytes=KIB), pytest.raises(ZeroDivisionError):
            x.exp()
    assert_idle(pool, target)


def test_the_pool_can_close_while_a_graph_lives(make_pool, target):
    pool = make_pool(4 << 20)
    x = torch.randn(40, 40, requires_grad=True)
    with save_on_cpu(pool, min_bytes=KIB):
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
    outer, inner = save_on_cpu(pool, min_bytes=KIB), save_on_cpu(other, min_bytes=KIB)
    x = torch.randn(40, 40, requires_grad=True)
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


def test_a_block_may_be_entered_inside_itself(pool):
    offload = save_on_cpu(pool, min_bytes=KIB)
    x = torch.randn(40, 40, requires_grad=True)
    with offload, offload:
        y = x.exp().sin()
    y.sum().backward()
    assert (offload.stats().copies, offload.stats().shared) == (1, 1)


def test_threads_share_one_object(pool, background):
    offload = save_on_cpu(pool, min_bytes=KIB, max_device_bytes=40 * KIB)
    model, x = make("attention")
    expected = gradients(model, x)
    start = threading.Barrier(4)

    def train():
        own = x.detach().clone().requires_grad_()
        found = []
        start.wait(20)
        for _ in range(5):
            with offload:
                y = model(own)
            found.append(torch.autograd.grad(y.square().sum(), [*model.parameters(), own]))
        return found

    for future in [background(train) for _ in range(4)]:
        for found in future.result(60):
            assert_equal(found, expected)


def test_threads_can_go_back_through_one_graph(pool, background):
    model, x = make("decoder")
    expected = gradients(model, x)
    with save_on_cpu(pool, min_bytes=KIB, max_device_bytes=20 * KIB):
        loss = output_of(model, x).square().sum()
    start = threading.Barrier(4)

    def back(loss):
        start.wait(20)
        return [
            torch.autograd.grad(loss, [*model.parameters(), x], retain_graph=True) for _ in range(5)
        ]

    for future in [background(back, loss) for _ in range(4)]:
        for found in future.result(60):
            assert_equal(found, expected)
    del loss, future, found


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [{"min_bytes": -1}, {"min_bytes": "a lot"}, {"max_device_bytes": -1}]
)
def test_sizes_have_to_be_sizes(pool, wrong):
    with pytest.raises(ValueError, match=r"size|negative|a lot"):
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
            first, second = values[-1].square().sum(), values[len(values) // 2].cos().sum()
        del values
        if ending == "dropped":
            return []
        if ending == "half dropped":
            del second
            return [torch.autograd.grad(first, x)[0]]
        if ending == "parts":
            return [
                torch.autograd.grad(loss, x, retain_graph=loss is second)[0]
                for loss in (second, first)
            ]
        return [
            torch.autograd.grad(first + second, x, retain_graph=ending == "twice" and not last)[0]
            for last in ((False, True) if ending == "twice" else (True,))
        ]

    torch.manual_seed(0)
    x = torch.randn(30, 30, requires_grad=True)
    late = None if lag is None else QueuedTarget(*lag)
    with SlabPool(cap, memory=CountingMemory()) as pool, monkeypatch.context() as patch:
        if late is not None:
            patch.setattr("pinstage.offload._saving.shared_targets", known(late))
        expected = run(contextlib.nullcontext())
        offload = save_on_cpu(pool, min_bytes=KIB, max_device_bytes=max_device_bytes)
        for _ in range(2):
            found = run(offload)
            assert all(map(torch.equal, found, expected))
        if late is not None:
            late.run_all()
            assert late.lost == 0
        assert_idle(pool)
        assert pool.stats().peak_held_bytes <= cap

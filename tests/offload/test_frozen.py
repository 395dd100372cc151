"""Frozen modules: on the host outside their block, on the device inside it, with the same content
and objects.
"""

import contextlib
import copy
import ctypes
import gc
import itertools
import weakref

import pytest
import torch
from doubles import Interrupts, assert_idle, refuse, wait_until
from hypothesis import given
from hypothesis import strategies as st
from strategies import TensorSubclass
from torch._dynamo.testing import CompileCounterWithBackend

import pinstage as ps
from pinstage.errors import (
    AcquireTimeoutError,
    BudgetExceededError,
    PinningError,
    StagingWarning,
)
from pinstage.offload import _frozen, frozen_module

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture
def pool(pool, target):
    yield pool
    if target is not None:
        target.run_all()
    gc.collect()
    wait_until(lambda: not pool.stats().in_flight_slabs)


class Shared(torch.nn.Module):
    """Shared weights, norms with the same statistics, overlapping views, views side by side, odd
    strides and sizes, and buffers that forward changes.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
        self.head = torch.nn.Linear(4, 4, bias=False)
        self.head.weight = self.weight
        both = torch.randn(2, 4, 4)
        self.left, self.right = (torch.nn.Parameter(part) for part in both)
        self.tops = torch.nn.Parameter(both[:, :2])
        self.turned = torch.nn.Parameter(torch.randn(4, 4).t())
        self.first, self.second = (torch.nn.BatchNorm1d(4, affine=False) for _ in range(2))
        self.second.running_mean, self.second.running_var = (
            self.first.running_mean,
            self.first.running_var,
        )
        whole = torch.randn(4, 4)
        key, value = torch.randn(2, 4)
        buffers = {
            "table": torch.randn(4, 4),
            "whole": whole,
            "top": whole[:2],
            "key": key,
            "value": value,
            "cache": torch.zeros(4, 4),
            "count": torch.tensor(0),
            "empty": torch.empty(0, 3),
            "small": torch.randn(5).to(torch.bfloat16),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        self.register_buffer("scale", torch.randn(4, dtype=torch.complex64), persistent=False)
        self.register_buffer("nothing", None)
        self.requires_grad_(False)

    def forward(self, x):
        x = self.second(self.first(x)) @ self.left @ self.right @ self.turned
        self.cache[2] = x[0]
        self.count.add_(1)
        return self.head(x) * self.small[0] + self.cache.sum() + self.tops.sum()

    def share_new(self):
        """Replace the mean that the norms share, for both."""
        self.first.running_mean = self.second.running_mean = self.first.running_mean * 0.9 + 1

    def swap(self):
        self.key, self.value = self.value, self.key

    def requiring_grad(self):
        self.table = self.table * torch.ones(4, requires_grad=True)

    def in_inference_mode(self):
        with torch.inference_mode():
            self.table = self.table + 1

    def by_registering(self):
        del self.table
        self.register_buffer("table", torch.ones(4, 4))


def linear(size):
    return torch.nn.Linear(size, size).requires_grad_(False)


INPUTS = torch.arange(12.0).view(3, 4)


def tensors_of(module):
    return dict([*module.named_parameters(), *module.named_buffers()])


def content_of(module):
    return {
        name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
        for name, tensor in tensors_of(module).items()
    }


def assert_same(module, expected):
    torch.testing.assert_close(tensors_of(module), expected, rtol=0, atol=0, check_stride=True)


def has_objects(module, objects):
    """Return whether the tensors are these objects."""
    return all(tensor is objects[name] for name, tensor in tensors_of(module).items())


@pytest.fixture
def is_on_host(memory):
    """Return a function that says whether all tensors of a module are in slabs; it fails if only
    some are.
    """

    def is_on_host(module):
        found = {
            any(0 <= tensor.data_ptr() - slab.ptr < slab.nbytes for slab in memory.live_blocks)
            for tensor in tensors_of(module).values()
            if tensor.numel()
        }
        assert len(found) == 1
        return found.pop()

    return is_on_host


# -- inside and outside ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of its compiler
@pytest.mark.parametrize(
    ("made", "inside", "is_compiled"),
    [
        *itertools.product(
            [contextlib.nullcontext, torch.inference_mode],
            [torch.enable_grad, torch.no_grad, torch.inference_mode],
            [False],
        ),
        (contextlib.nullcontext, torch.no_grad, True),
    ],
)
def test_outputs_and_statistics_equal_a_plain_run(pool, made, inside, is_compiled):
    plain, module = Shared(), Shared()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(module, backend=counter) if is_compiled else module
    with made():
        handle = frozen_module(run, pool)
    for _ in range(3):
        expected = plain(INPUTS)
        with inside(), handle:
            assert torch.equal(run(INPUTS), expected)
    assert counter.frame_count == is_compiled
    assert_same(module, content_of(plain))
    assert not any(tensor.is_inference() for tensor in tensors_of(module).values())
    assert int(module.count) == int(module.first.num_batches_tracked) == 3


def test_tensors_are_the_same_objects_in_other_memory(pool, is_on_host):
    module = Shared()
    before, objects = content_of(module), tensors_of(module)
    handle = frozen_module(module, pool)
    for _ in range(2):
        assert is_on_host(module)
        assert_same(module, before)
        with handle:
            assert not is_on_host(module)
            assert_same(module, before)
            assert has_objects(module, objects)


def test_memory_is_held_once_for_all_views(pool):
    module = Shared()
    handle = frozen_module(module, pool)
    # Parameters, and buffers of four dtypes; empty ones are float32.
    assert pool.stats().held_slabs == 5
    assert module.left.data_ptr() + 4 * 4 * 4 == module.right.data_ptr()
    assert module.tops.data_ptr() == module.left.data_ptr()
    assert handle.stats().host_bytes < 8 * KIB
    module.left.fill_(3)
    with handle:
        assert module.tops[0].eq(3).all()
        assert not module.tops[1].eq(3).any()


def test_stats_say_how_many_bytes_are_where(pool, target, is_on_host):
    module = linear(64)
    handle = frozen_module(module, pool)
    nbytes = 64 * 64 * 4 + 512
    assert (handle.stats().host_bytes, handle.stats().device_bytes) == (nbytes, 0)
    handle.onload()
    assert is_on_host(module)
    assert (handle.stats().host_bytes, handle.stats().device_bytes) == (nbytes, nbytes)
    with handle:
        assert handle.stats().device_bytes == nbytes
    assert handle.stats().device_bytes == 0
    handle.onload()
    handle.offload()
    assert handle.stats().device_bytes == 0


def test_gradients_pass_through_to_inputs_inside_the_block(pool):
    plain = torch.nn.Sequential(
        torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)
    ).requires_grad_(False)
    x = torch.randn(4, 16, requires_grad=True)
    (expected,) = torch.autograd.grad(plain(x).sum(), x)
    with frozen_module(plain, pool):
        plain(x).sum().backward()
    assert torch.equal(x.grad, expected)


# -- changes inside the block ----------------------------------------------------------------------


def change(code):
    """Return a function that executes a line of code on a module, `m`."""

    def run(module):
        exec(code, {"m": module, "torch": torch})

    run.__name__ = code
    return run


def changes(*lines):
    return [change(line) for line in lines]


COUNTED = changes(
    "m.table.add_(1)",
    "m.whole[1].mul_(2)",
    "m.top.sub_(1)",
    "m.first(torch.ones(3, 4))",
    "m.second(torch.ones(3, 4) + 3)",
    "m.scale.mul_(1j)",
)
"""Changes of buffers that torch counts in the submodule."""

UNCOUNTED = changes(
    "m.table.data.copy_(m.table * 0.9 + 0.1)",
    "m.top.data.mul_(3)",
    "m.second.running_mean.data.add_(1)",
    "m.key.numpy()[2] = 7",
)

OF_PARAMETERS = changes("m.weight.add_(1)", "m.head.weight.data.mul_(2)")
"""Changes in place, kept outside the block."""

EXCHANGED = [
    *changes(
        "m.table = m.table * 2 + 1",
        "m.table = torch.nn.Buffer(m.table + 1)",
        "m.table.data = torch.ones(4, 4)",
        "m.table.t_()",
        "m.table.data = m.table.data.t()",
        "m.table = m.table.flip(0).t()",
        "m.scale = m.scale.conj()",
        "m.scale.data = m.scale.data.conj()",
        "m.value = torch.ones(4)",
    ),
    Shared.share_new,
    Shared.swap,
    Shared.by_registering,
]
"""Buffers that were replaced by buffers of the same shape and dtype, or re-strided."""

NO_MORE_IN_PLACE = [
    *changes("m.table = torch.ones(1).expand(4, 4)"),
    Shared.requiring_grad,
    Shared.in_inference_mode,
]
"""The same, by tensors that a plain module couldn't change in place afterwards."""

REFUSED = changes(
    "m.weight.add_(1)",
    "m.weight.t_()",
    "m.weight.data = m.weight.data.t()",
    "m.weight.data = m.weight.data.clone()",
    "m.head.weight = torch.nn.Parameter(m.weight + 1, requires_grad=False)",
    "del m.head.weight; m.head.weight = torch.ones(4, 4)",
    "m.head = torch.nn.Linear(4, 4)",
    "del m.first",
    "m.lora = torch.nn.Linear(4, 4)",
    "m.register_buffer('new', torch.ones(4))",
    "m.nothing = torch.ones(4)",
    "m.key = None",
    "del m.scale",
    "del m.scale; m.scale = torch.ones(4)",
    "m.table = torch.nn.Parameter(m.table, requires_grad=False)",
    "m.table = m.table.double()",
    "m.table.data = m.table.data.double()",
    "m.table = m.table[:3]",
    "m.table.data = m.table.data.reshape(2, 8)",
    "m.table.resize_(2, 2)",
    "m.table = m.table.to_sparse()",
    "m.table = m.table.to('meta')",
    "m.table = torch.nested.nested_tensor([torch.ones(4), torch.ones(3)])",
    "m.top = torch.ones(2, 4)",
    "m.whole.t_()",
    "m.first.running_var = torch.ones(4)",
    "m.double()",
)


NESTED_ARE_PROTOTYPES = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def assert_equal(module, plain):
    """Compare content, but not strides."""
    torch.testing.assert_close(tensors_of(module), tensors_of(plain), rtol=0, atol=0)


def apply(changes, *modules):
    for change in changes:
        for module in modules:
            change(module)


def named(changes):
    return pytest.mark.parametrize("change", changes, ids=lambda change: change.__name__)


def outline_of(module):
    """Return the names of everything that is registered, in order, and the state dict's names."""
    parts = [[part._parameters, part._buffers, part._modules] for part in module.modules()]
    return [[list(names) for names in part] for part in parts], list(module.state_dict())


@named(COUNTED + UNCOUNTED + EXCHANGED + NO_MORE_IN_PLACE)
def test_changed_buffers_keep_tensors_and_values(pool, change, is_on_host):
    plain, module = Shared(), Shared()
    objects = tensors_of(module)
    strides = [tensor.stride() for tensor in objects.values()]
    handle = frozen_module(module, pool)
    for _ in range(2):
        change(plain)
        with handle:
            change(module)
        assert tensors_of(module).keys() == objects.keys()
        assert has_objects(module, objects)
        assert [tensor.stride() for tensor in objects.values()] == strides
        assert is_on_host(module)
        assert_equal(module, plain)
    assert not any(tensor.is_inference() or tensor.requires_grad for tensor in objects.values())


@NESTED_ARE_PROTOTYPES
@named(REFUSED)
def test_a_refused_change_leaves_the_module_alone(pool, memory, change, is_on_host):
    def content_of_slabs():
        return [ctypes.string_at(slab.ptr, slab.nbytes) for slab in memory.live_blocks]

    module = Shared()
    handle = frozen_module(module, pool)
    before, outline, objects = content_of(module), outline_of(module), tensors_of(module)
    slabs = content_of_slabs()
    handle.__enter__()
    module.key.fill_(7)
    module.value = torch.ones(4)
    change(module)
    with pytest.raises(RuntimeError, match=r"of <Shared .*> changed inside the block"):
        handle.offload()
    assert_same(module, before)
    assert outline_of(module) == outline
    assert has_objects(module, objects)
    assert content_of_slabs() == slabs
    assert is_on_host(module)
    assert handle.stats().device_bytes == 0
    with handle:
        assert_same(module, before)


def test_a_refused_change_is_named(pool):
    module = Shared()
    handle = frozen_module(module, pool)
    handle.__enter__()
    module.head.weight.add_(1)
    module.whole.t_()
    message = r"weight = head\.weight of <Shared .*> changed inside the block: 2 in all; every .*\. Change param"
    with pytest.raises(RuntimeError, match=message):
        handle.offload()


@pytest.mark.parametrize(
    "change", [Shared.swap, change("m.value = m.value + 1")], ids=["swap", "replace"]
)
def test_views_of_replaced_buffers_keep_their_values(pool, change):
    module = Shared()
    expected = module.value.clone()
    with frozen_module(module, pool):
        view = module.value.view(2, 2)
        change(module)
    assert torch.equal(view.view(4), expected)


def test_submodules_without_tensors_may_be_added_inside(pool):
    module = Shared()
    with frozen_module(module, pool):
        module.again, module.act = module.first, torch.nn.GELU()
    assert module.again is module.first
    assert isinstance(module.act, torch.nn.GELU)


@pytest.fixture
def copies(device_type, monkeypatch):
    """The bytes of each copy to the host."""
    copies, to_host = [], device_type.to_host

    def counted(self, parts, **options):
        copies.extend(part.nbytes for part in parts)
        return to_host(self, parts, **options)

    monkeypatch.setattr(device_type, "to_host", counted)
    return copies


def test_each_slab_of_buffers_is_copied_back_once(pool, copies):
    with frozen_module(Shared(), pool):
        pass
    assert len(copies) == pool.stats().held_slabs - 1  # the first has the parameters
    del copies[:]
    with frozen_module(linear(4), pool):
        pass
    assert not copies


@named([*COUNTED, EXCHANGED[0], Shared.share_new])
def test_large_buffers_are_copied_back_by_submodule(pool, monkeypatch, copies, change):
    monkeypatch.setattr(_frozen, "COPIED_BACK_BYTES", 0)
    plain, module = Shared(), Shared()
    handle = frozen_module(module, pool)
    with handle:
        pass
    assert not copies
    change(plain)
    with handle:
        change(module)
    assert 0 < len(copies) < pool.stats().held_slabs
    assert_equal(module, plain)


@NESTED_ARE_PROTOTYPES
@given(
    blocks=st.lists(
        st.tuples(
            st.lists(st.sampled_from([*COUNTED, *UNCOUNTED, *OF_PARAMETERS]), max_size=3),
            st.none() | st.lists(st.sampled_from([*COUNTED, OF_PARAMETERS[0]]), max_size=2),
            st.lists(st.sampled_from([*COUNTED, *UNCOUNTED, *EXCHANGED]), max_size=4),
            st.none() | st.sampled_from(REFUSED),
        ),
        max_size=4,
    )
)
def test_blocks_leave_what_a_plain_module_has(blocks):
    """Outside, between `onload` and the block, inside it, and at last a change that drops those
    inside.
    """
    plain, module = Shared(), Shared()
    with ps.SlabPool(MIB, memory=ps.memory.PageableMemory()) as pool:
        handle = frozen_module(module, pool, device="cpu")
        for outside, between, inside, refused in blocks:
            if between is not None:
                apply(outside, module, plain)
                handle.onload()
            apply(outside if between is None else between, module, plain)
            before = copy.deepcopy(plain)
            handle.__enter__()
            assert_equal(module, plain)
            apply(inside, module, plain)
            if refused is None:
                handle.offload()
            else:
                refused(module)
                with pytest.raises(RuntimeError, match="changed inside"):
                    handle.offload()
                plain = before
            assert outline_of(module) == outline_of(plain)
            assert_equal(module, plain)
        handle.close()


@pytest.mark.parametrize("time", ["before onload", "after onload"])
@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("weight", "m.weight.t_()"),
        ("weight", "m.weight.data = m.weight.data.t()"),
        ("weight", "m.weight.data = m.weight.data.view(2, 8)"),
        ("weight", "m.weight.data = m.weight.data.double()"),
        ("weight", "m.weight.data = m.weight.data.view(torch.int32)"),
        (r"head\.weight", "m.head.weight = torch.nn.Parameter(m.weight.data, requires_grad=False)"),
        ("table", "m.table.t_()"),
        ("table", "m.table.resize_(2, 2)"),
        ("top", "m.top.data = m.whole.data[1:3]"),
        ("scale", "m.scale.data = m.scale.data.conj()"),
        (r"second\.running_mean", "m.second.running_mean = torch.ones(4)"),
        ("weight", "m.weight.data = m.weight.data.clone()"),  # as `to` does
        ("weight", "m.weight = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)"),
        ("table", "m.table = torch.ones(4, 4)"),
        (r"added\.bias", "m.added = torch.nn.BatchNorm1d(4)"),
        ("table", "del m.table"),
    ],
)
def test_moved_or_replaced_tensors_outside_are_refused(pool, path, line, time):
    plain, module = Shared(), Shared()
    handle = frozen_module(module, pool)
    if time == "after onload":
        handle.onload()
    apply([change(line)], plain, module)
    message = rf"{path} .*of <Shared .*> isn't held: it was moved"
    with pytest.raises(RuntimeError, match=message), handle:
        pass
    with pytest.raises(RuntimeError, match="isn't held"):
        handle.onload()
    assert handle.stats().device_bytes == 0
    assert_same(module, content_of(plain))
    handle.close()
    assert_same(module, content_of(plain))


def test_views_that_are_kept_stay_valid(pool, target):
    module = Shared()
    expected = module.turned.clone()
    handle = frozen_module(module, pool)
    outside = module.turned[1]
    with handle:
        inside = module.turned[1]
        state = module.state_dict()
    with handle:
        pass
    assert inside.data_ptr() != outside.data_ptr()
    assert torch.equal(inside, expected[1])
    assert torch.equal(state["turned"], expected)
    del module, state
    handle.close()
    del handle
    gc.collect()
    assert torch.equal(outside, expected[1])
    # The reaper keeps slabs until copies are done.
    wait_until(lambda: pool.stats().in_flight_slabs == 1)
    del outside


# -- what can go wrong -----------------------------------------------------------------------------


def test_too_little_device_memory_leaves_everything_as_before(
    pool, monkeypatch, device_type, is_on_host
):
    module = Shared()
    expected = content_of(module)
    handle = frozen_module(module, pool)
    fetch, calls = device_type.bring_back, []

    def full(self, here, after):
        calls.append(None)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return fetch(self, here, after)

    monkeypatch.setattr(device_type, "bring_back", full)
    with pytest.raises(torch.OutOfMemoryError):
        handle.__enter__()
    assert handle.stats().device_bytes == 0
    assert_same(module, expected)
    assert is_on_host(module)
    with handle:
        assert_same(module, expected)


@pytest.mark.parametrize("inside", ["in place", "replaced", "refused"])
def test_interrupts_leave_a_working_module(make_pool, inside, is_on_host):
    module, pool = Shared(), make_pool(4 << 20)
    handle = frozen_module(module, pool)
    expected, outline, objects = content_of(module), outline_of(module), tensors_of(module)
    cache, turned, lora = (
        torch.full((4, 4), 7.0),
        torch.nn.Parameter(torch.ones(4, 4)),
        torch.nn.Linear(4, 4),
    )

    def work(module=module, handle=handle):
        handle.onload()
        with contextlib.suppress(RuntimeError), handle:
            if inside == "in place":
                module.cache.fill_(7)
            else:
                module.cache = cache
            if inside == "refused":
                module.turned, module.lora = turned, lora

    countdown, interrupted = 0, True
    while interrupted:
        countdown += 1
        assert countdown < 3000
        module.cache.zero_()
        interrupted = Interrupts(countdown, "offload/_frozen.py", "_compat/registered.py").during(
            work
        )
        with contextlib.suppress(RuntimeError):
            handle.offload()
        assert is_on_host(module)
        assert int(module.cache[0, 0]) in ((0,) if inside == "refused" else (0, 7))
        assert has_objects(module, objects)
        assert outline_of(module) == outline
        module.cache.zero_()
        assert_same(module, expected)
        assert handle.stats().device_bytes == 0
    assert countdown > 50
    del module, handle, expected, work, objects
    gc.collect()
    assert_idle(pool)


def test_nested_blocks_are_refused(pool, is_on_host):
    module = Shared()
    handle = frozen_module(module, pool)
    with handle:
        with pytest.raises(
            RuntimeError, match=r"<Shared .*is on the device already; leave its other block first"
        ):
            handle.__enter__()
        assert not is_on_host(module)


def with_mask(mask):
    module = linear(2)
    module.register_buffer("mask", mask)
    return module


def inference():
    with torch.inference_mode():
        return linear(2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: torch.nn.Linear(2, 2),
            r"weight: it requires grad; call module\.requires_grad_\(False\)",
        ),
        (
            lambda: with_mask(torch.eye(2).as_subclass(TensorSubclass)),
            "mask: it has no plain memory: TensorSubclass",
        ),
        (
            lambda: with_mask(torch.eye(2).to_sparse()),
            r"mask: it has no plain memory: Tensor, torch\.sparse_coo",
        ),
        (
            lambda: torch.nn.Linear(2, 2, device="meta").requires_grad_(False),
            "weight: it is on meta",
        ),
        (inference, "weight: it .* was made in inference mode"),
    ],
    ids=["trained", "subclass", "sparse", "meta", "inference"],
)
def test_unsupported_modules_are_refused_by_path(pool, make, message):
    module = make()
    whole = torch.nn.Sequential(linear(3), module)
    before = whole[0].weight.data_ptr()
    with pytest.raises(ValueError, match=rf"frozen_module can't hold 1\.{message}"):
        frozen_module(whole, pool)
    assert whole[0].weight.data_ptr() == before
    assert pool.stats().held_slabs == 0


def with_bias(bias):
    module = linear(2)
    module.bias = bias
    return module


@pytest.mark.parametrize(
    "wanted",
    [
        lambda held: held,
        torch.nn.Sequential,
        lambda held: with_bias(held.bias),
        lambda held: with_bias(torch.nn.Parameter(held.bias.data, requires_grad=False)),
    ],
    ids=["the same", "a whole", "a tied parameter", "a view"],
)
def test_memory_held_already_is_refused(pool, wanted):
    held = linear(2)
    handle = frozen_module(held, pool)
    other = wanted(held)
    with pytest.raises(
        ValueError,
        match=r"(weight|bias): it is held already: <Linear in frozen_module, to cpu>; close",
    ):
        frozen_module(other, pool)
    handle.close()
    with frozen_module(other, pool):
        pass


def test_anything_but_a_module_is_refused(pool):
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module: \{\}"):
        frozen_module({}, pool)


def test_a_small_pool_leaves_the_module_alone(make_pool, monkeypatch):
    pool = make_pool(16 * KIB)
    module = linear(64)
    before = module.weight.data_ptr()
    with pytest.raises(
        BudgetExceededError, match=r"the module doesn't fit the pool: .* requested 16\.50 KiB"
    ):
        frozen_module(module, pool)
    monkeypatch.setattr(_frozen, "ACQUIRE_SECONDS", 0.0)
    pool = make_pool(32 * KIB)
    with pool.acquire(24 * KIB), pytest.raises(AcquireTimeoutError):
        frozen_module(module, pool)
    assert module.weight.data_ptr() == before


def test_a_pool_full_of_modules_refuses_another(make_pool):
    pool = make_pool(38 * KIB)
    modules = [torch.nn.Linear(64, 64, bias=False).requires_grad_(False) for _ in range(3)]
    handles = [frozen_module(module, pool) for module in modules[:2]]
    assert pool.stats().held_for_good_bytes == 32 * KIB
    with pytest.raises(BudgetExceededError, match=r"32\.00 KiB of these held for good"):
        frozen_module(modules[2], pool)
    assert pool.stats().waits == 0
    handles.pop().close()
    del modules[1]
    gc.collect()
    with frozen_module(modules[1], pool):
        pass
    handles.clear()
    modules.clear()


@pytest.mark.parametrize("limit", [16 * KIB, 0])
def test_where_page_locking_is_refused_slabs_are_pageable(make_pool, memory, monkeypatch, limit):
    def allocate(nbytes, allocate=memory.allocate):
        if nbytes > limit:
            raise PinningError("refused", call="cudaHostRegister", nbytes=nbytes)
        return allocate(nbytes)

    monkeypatch.setattr(_frozen, "SLAB_BYTES", 16 * KIB)
    memory.allocate = allocate
    pool = make_pool(256 * KIB)
    module = torch.nn.ModuleList(linear(size) for size in (32, 32, 128, 32))
    expected = content_of(module)
    with pytest.warns(StagingWarning, match="refused") as told:
        handle = frozen_module(module, pool)
    assert len(told) == 1
    with handle:
        assert_same(module, expected)
    assert pool.stats().held_slabs == (2 if limit else 0)
    assert handle.stats().host_bytes == sum(max(tensor.nbytes, 512) for tensor in expected.values())


# -- slabs -----------------------------------------------------------------------------------------


def test_slabs_are_limited_except_for_large_tensors(pool, memory, monkeypatch):
    monkeypatch.setattr(_frozen, "SLAB_BYTES", 8 * KIB)
    module = torch.nn.ModuleList(
        torch.nn.Linear(size, size, bias=False) for size in (32, 32, 32, 128, 32)
    )
    expected = content_of(module.requires_grad_(False))
    handle = frozen_module(module, pool)
    assert [block.nbytes // KIB for block in memory.live_blocks] == [8, 4, 64, 4]
    with handle:
        assert_same(module, expected)


def test_slabs_return_when_the_module_dies_or_moves(pool, target):
    module = Shared()
    expected = content_of(module)
    handle = frozen_module(module, pool)
    with handle:
        pass
    handle.close()
    handle.close()
    with pytest.raises(
        RuntimeError, match=r"of <Shared .*> isn't held: .* or the handle was closed"
    ):
        handle.onload()
    assert pool.stats().in_flight_slabs == 5  # as above
    assert_same(module, expected)
    for tensor in tensors_of(module).values():
        tensor.data = tensor.data.clone()
    wait_until(lambda: not pool.stats().in_flight_slabs)


def test_a_dropped_handle_leaves_the_module_on_host(pool):
    module = Shared()
    expected = content_of(module)
    handle = frozen_module(module, pool)
    handle.onload()
    died = weakref.ref(handle)
    del handle
    gc.collect()
    assert died() is None
    assert_same(module, expected)
    with frozen_module(module, pool):
        assert_same(module, expected)


def test_a_module_without_tensors_is_fine(pool):
    handle = frozen_module(torch.nn.GELU(), pool)
    with handle:
        assert handle.stats() == ps.offload.OffloadedStats(host_bytes=0, device_bytes=0)
    handle.close()


def test_blocks_of_two_modules_overlap(pool, is_on_host):
    first, second, expected = Shared(), Shared(), Shared()(INPUTS)
    handles = [frozen_module(module, pool) for module in (first, second)]
    handles[0].onload()
    with handles[0]:
        handles[1].onload()
        assert torch.equal(first(INPUTS), expected)
        with handles[1]:
            assert torch.equal(second(INPUTS), expected)
    assert is_on_host(first)
    assert is_on_host(second)


# -- beside a capture ------------------------------------------------------------------------------


def test_modules_stay_where_they_are_in_a_capture(pool, capture):
    def enter():
        with handle:
            raise AssertionError("the block began")

    module = torch.nn.BatchNorm1d(4, affine=False)
    with capture():
        refuse(frozen_module, module, pool)
    handle = frozen_module(module, pool)
    with capture():
        for call in (handle.onload, enter, handle.offload, handle.close):
            refuse(call)
    with handle:
        module(torch.randn(8, 4))
        mean, changed = module.running_mean, module.running_mean.clone()
        with capture():
            refuse(handle.offload)
        assert module.running_mean is mean
    assert torch.equal(module.running_mean, changed)
    handle.close()

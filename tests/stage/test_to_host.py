"""From the device to the host, on the CPU: the result, what keeps a slab in use, and the state
after a failure.
"""

import gc
import itertools
from copy import deepcopy

import pytest
import strategies as known
import torch
from doubles import HeldOut, Interrupts, ManualEvent, outcome, stays_blocked, switching_often
from hypothesis import given
from strategies import DTYPES, assert_same, batches, bits, tensor_of

from pinstage._pool import hold_for_good
from pinstage._stage import _to_host
from pinstage._stage._events import EventGroup
from pinstage._stage._target import Target
from pinstage.errors import AcquireTimeoutError

DIRECT_BYTES = 1 << 20
"""Dense tensors from this size on are copied from where they are."""


@pytest.fixture
def stager(make_stager):
    return make_stager("16MiB")


def some_tree(seed=0):
    return {
        "loss": tensor_of(torch.float32, (), seed),
        "ids": [tensor_of(torch.int64, (n,), seed + n) for n in range(4)],
        "strided": tensor_of(torch.float32, (4, 6), seed)[:, ::2],
        "more": (tensor_of(torch.bfloat16, (2, 3), seed), "text", None),
    }


# -- what arrives ----------------------------------------------------------------------------------


@given(tree=batches(), copy=...)
def test_every_tree_arrives_as_it_was(shared_stager, tree, copy: bool):
    fetched = shared_stager.fetch(tree, copy=copy).result()
    again = shared_stager.fetch(tree, copy=copy).result()
    for result in (fetched, again):
        for leaf, staged in zip(known.leaves_of(tree), known.leaves_of(result), strict=True):
            if isinstance(leaf, torch.Tensor) and known.packable(leaf):
                assert (staged.dtype, staged.shape) == (leaf.dtype, leaf.shape)
                assert staged.stride() == known.staged_stride(leaf)
                assert torch.equal(bits(staged), bits(leaf))
            else:
                assert staged is leaf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("copy", [False, True])
def test_leaves_of_every_dtype_are_gathered_exactly(stager, dtype, copy):
    tree = [tensor_of(dtype, (n, 3, 2), n) for n in range(5)]
    tree.append(tensor_of(dtype, (4, 4), 5)[:, ::2])
    assert_same(tree, stager.fetch(tree, copy=copy).result())


def test_a_module_s_state_keeps_its_metadata(stager):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state = module.state_dict()
    assert_same(state, stager.to_host(state))
    assert_same(state, stager.to_host(state, out=deepcopy(state)))


def test_a_repeated_tensor_is_copied_once(stager):
    tensor = torch.ones(100)
    transfer = stager.fetch({"a": tensor, "b": [tensor]}, copy=False)
    fetched = transfer.result()
    assert fetched["a"] is fetched["b"][0]
    assert transfer.nbytes == 400


def test_a_tree_without_tensors_needs_no_slab(stager):
    transfer = stager.fetch({"a": "text", "b": [None, 3], "c": torch.zeros(0, 3)}, copy=False)
    assert (transfer.copies, transfer.nbytes, transfer.query()) == (0, 0, True)
    assert transfer.result()["c"].shape == (0, 3)
    assert stager.pool.stats().misses == 0


@pytest.mark.filterwarnings("ignore:.*Movable holds tensors")
@pytest.mark.parametrize("others", [[], [torch.ones(2)]], ids=["alone", "beside a tensor"])
def test_a_repeated_object_is_moved_once(stager, others):
    class Movable:
        def __init__(self, tensor):
            self.tensor = tensor

        def to(self, device):
            return Movable(self.tensor.to(device))

    thing = Movable(torch.ones(3))
    one, other, *_ = stager.to_host([thing, thing, *others])
    assert one is other
    assert one is not thing


def test_large_dense_tensors_are_copied_directly(stager, held):
    large = [torch.randn(DIRECT_BYTES // 4), torch.randn(2, 3, DIRECT_BYTES // 16).transpose(0, 1)]
    strided = torch.randn(DIRECT_BYTES // 4, 2)[:, 0]
    small = [torch.randn(40) for _ in range(50)]
    transfer = stager.fetch([small[:25], large, strided, small[25:]], copy=False)
    sources = [copy.there.data_ptr() for copy in held.copies]
    assert len(sources) == transfer.copies == 3
    assert set(sources) > {t.data_ptr() for t in large}
    held.finish()
    assert_same([small[:25], large, strided, small[25:]], transfer.result())


def test_a_repeated_tree_is_fetched_with_new_values(stager):
    for seed in range(6):
        tree = {
            "x": [torch.full((7,), float(seed)), torch.full((DIRECT_BYTES // 4,), seed)],
            "n": seed,
        }
        assert_same(tree, stager.fetch(tree, copy=False).result())


def test_the_counters_say_what_travelled(stager):
    tree = [torch.ones(100), torch.ones(50)]
    stager.fetch(tree, copy=False).result()
    stager.to_host(tree)
    stats = stager.stats()
    assert (stats.fetches, stats.fetch_copies, stats.fetched_bytes) == (2, 4, 2 * 608)
    assert stats.batches == 0


def test_threads_may_fetch_trees_of_changing_shapes(stager, background):
    def fetch_all(start):
        for size in (*range(start, 400), *range(start)):
            assert (
                stager.fetch([torch.ones(size), torch.ones(3)], copy=False).result()[0].numel()
                == size
            )

    with switching_often():
        for future in [background(fetch_all, start) for start in range(0, 400, 100)]:
            future.result()
    assert _to_host.arranged.cache_info().currsize < 40


@pytest.mark.parametrize("cap", ["64KiB", "20MiB", "256MiB"])
def test_a_tree_may_be_larger_than_the_slab(make_stager, cap):
    """Chunks end in the middle of tensors, and the places of earlier chunks are used again."""
    sizes = (3, 1 << 20, 70_000, 13 << 20, 0, 5)
    tree = [tensor_of(torch.uint8, (size,), seed) for seed, size in enumerate(sizes)]
    tree += [tensor_of(torch.int16, (64, 96), 7).t(), tensor_of(torch.int32, (50, 4), 8)[:, ::2]]
    tree.append(tree[1])
    for threads in (1, 3):
        stager = make_stager(max_bytes=cap, pack_threads=threads)
        found = stager.to_host(tree)
        assert all(map(torch.equal, found, tree))
        assert found[-1] is found[1]
        owned = {tensor.untyped_storage().data_ptr() for tensor in found if tensor.numel()}
        assert len(owned) == len(sizes) - 1 + 2
        assert stager.pool.stats().peak_held_bytes <= min(stager.pool.max_bytes // 2, 64 << 20)


def test_a_tree_may_exceed_the_stagers_quota(make_stager):
    stager = make_stager(max_bytes="8MiB")
    stager.pool.set_quota("frozen modules", min_bytes="6MiB")
    with stager.pool.acquire("1MiB", owner="frozen modules") as lease:
        hold_for_good(lease)
        assert_same(tree := [torch.ones(3 << 20)], stager.to_host(tree))
    stager.pool.set_quota("stager", max_bytes="1MiB")
    assert_same(tree, stager.to_host(tree))


def test_a_small_tree_needs_no_larger_slab(make_stager):
    stager, tree = make_stager(max_bytes="1MiB"), [torch.ones(3)]
    HeldOut(stager)  # a device with a stream of its own
    stager.pool.set_quota("stager", max_bytes="32KiB")
    assert_same(tree, stager.to_host(tree))
    stager.pool.freeze()
    assert_same(tree, stager.to_host(tree))


# -- half-copied data is never visible -------------------------------------------------------------


@pytest.mark.parametrize("copy", [True, False])
def test_a_result_may_be_asked_for_again(stager, held, copy):
    transfer = stager.fetch([torch.ones(3)], copy=copy)
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError, match="1 copy of 16 B; call result"):
            transfer.result(timeout=timeout)
    with pytest.raises(ValueError, match="must be 0 or more: -1"):
        transfer.result(timeout=-1)
    held.finish()
    result = transfer.result(timeout=0)
    assert result[0].tolist() == [1, 1, 1]
    assert transfer.result() is result


def test_bytes_are_inaccessible_until_the_copy_is_done(stager, held, background):
    tree = some_tree()
    transfer = stager.fetch(tree, copy=False)
    assert not transfer.query()
    assert "done" not in repr(transfer)
    result = background(transfer.result)
    assert stays_blocked(result)
    reachable = [name for name in dir(transfer) if not name.startswith("_")]
    assert set(reachable) == {"copies", "nbytes", "query", "result", "synchronize"}
    held.finish()
    assert_same(tree, outcome(result))
    assert transfer.result() is outcome(result)
    assert transfer.query()


@pytest.mark.parametrize("copy", [False, True])
def test_a_failed_copy_raises_and_shows_nothing(stager, held, copy):
    transfer = stager.fetch([torch.ones(3)], copy=copy)
    held.event.error = RuntimeError("device-side assert")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="device-side assert"):
            transfer.result()
    held.event.error = None
    held.finish()


def test_a_dropped_transfer_holds_its_slab_until_copied(stager, held):
    stager.fetch([torch.ones(3)])
    gc.collect()
    assert stager.pool.stats().in_flight_slabs == 1
    held.finish()
    assert stager.pool.stats().in_flight_slabs == 0


def test_several_events_are_done_when_all_are():
    events = [ManualEvent(), ManualEvent()]
    both = EventGroup(events)
    events[1].finish()
    assert not both.query()
    events[0].finish()
    assert both.query()
    both.synchronize()
    assert all(event.waited_for.is_set() for event in events)


# -- what keeps the slab in use --------------------------------------------------------------------


def test_the_last_view_returns_the_slab(stager):
    fetched = stager.fetch([torch.ones(100), torch.ones(50)], copy=False).result()
    assert stager.pool.stats().in_flight_slabs == 1
    part = fetched[1][10:]
    del fetched
    assert stager.pool.stats().in_flight_slabs == 1
    assert torch.equal(part, torch.ones(40))
    del part
    assert stager.pool.stats().free_slabs == 1


def test_with_copy_the_slab_is_free_afterwards(stager):
    tree = some_tree()
    fetched = stager.to_host(tree)
    assert stager.pool.stats().in_flight_slabs == 0
    assert_same(tree, fetched)
    storages = {leaf.untyped_storage().data_ptr() for leaf in fetched["ids"] if leaf.numel()}
    assert len(storages) == 3, "the leaves share memory"


def test_targets_can_be_changed_after_the_call(stager):
    source = torch.ones(100)
    transfer = stager.fetch([source], copy=False)
    source.zero_()
    assert torch.equal(transfer.result()[0], torch.ones(100))


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("slabs_for_all")
@pytest.mark.parametrize("call", ["fetch", "to_host", "stage", "to_device"])
def test_results_that_fill_the_pool_are_an_error(make_stager, call):
    stager = make_stager(max_bytes=4096, timeout=0.01)
    kept = stager.fetch([torch.ones(1000)], copy=False).result()
    text = r"no slab came free within 0.01 s: .*\n.*drop them sooner, or leave copy=False out"
    with pytest.raises(AcquireTimeoutError, match=text) as caught:
        getattr(stager, call)([torch.ones(1000)])
    requested = 2048 if call == "to_host" else 4000  # which takes at most half of the cap
    assert (caught.value.requested_bytes, caught.value.max_bytes) == (requested, 4096)
    assert caught.value.in_flight_bytes >= 4000
    del kept
    getattr(stager, call)([torch.ones(1000)])


def test_an_error_on_the_way_returns_the_slab(stager, monkeypatch):
    def fail(*pieces, **_):
        note = f"of {len(pieces)}"
        del pieces  # frames outside pinstage keep their locals
        raise RuntimeError("out of device memory", note)

    monkeypatch.setattr(Target, "to_host", fail)
    with pytest.raises(RuntimeError, match="out of device memory") as caught:
        stager.fetch([torch.ones(3)])
    assert stager.pool.stats().free_slabs == 1
    frames = {found.name: found.frame.f_locals for found in caught.traceback}
    assert frames["fail"]["note"].startswith("of ")  # for a debugger
    assert frames["_begin"] == {}


@pytest.mark.filterwarnings("ignore::pinstage.errors.UnreleasedLeaseWarning")
def test_interrupts_never_free_a_slab_being_written(stager):
    began_before = 0
    for number in itertools.count(1):
        source = HeldOut(stager)
        interrupted = Interrupts(number, "_to_host.py", "_stager.py").during(
            lambda: stager.fetch(some_tree())
        )
        began = bool(source.copies)
        stats = stager.pool.stats()
        assert (stats.leased_slabs, stats.in_flight_slabs) == (
            0,
            1 if began else stats.in_flight_slabs,
        )
        began_before += interrupted and began
        source.finish()
        assert stager.pool.stats().in_flight_slabs == 0
        if not interrupted:
            break
    assert began_before > 5


class OnGpu(torch.Tensor):
    is_cuda = True


def test_only_tensors_with_memory_are_dense():
    tensor, cut, freed = (torch.ones(8).as_subclass(OnGpu) for _ in range(3))
    cut.untyped_storage().resize_(31)
    freed.untyped_storage().resize_(0)
    found = [_to_host._is_dense(one) for one in (tensor, tensor[4:], cut, freed)]
    assert found == [True, True, False, False]

"""Fixed device slabs, on the CPU: the same addresses, and a batch that is held is never overwritten."""

import ctypes
import gc
import itertools

import pytest
import torch
from doubles import Interrupts, ManualEvent
from hypothesis import given
from strategies import assert_same, batches, bits, tensor_of

from pinstage import Stager
from pinstage.errors import RingError


def batch(seed=0):
    return {
        "x": tensor_of(torch.float32, (4, 5), seed),
        "y": [tensor_of(torch.int64, (), seed), tensor_of(torch.float32, (3,), seed + 1)],
        "seed": seed,
    }


def addresses(staged):
    return [staged["x"].data_ptr(), staged["y"][0].data_ptr(), staged["y"][1].data_ptr()]


# -- addresses ---------------------------------------------------------------------------------------------------------


def test_batches_come_to_the_slabs_in_turn_and_arrive_as_they_were(make_stager):
    stager = make_stager(ring=3)
    met = []
    for seed in range(12):
        staged = stager.to_device(batch(seed))
        assert_same(batch(seed), staged, "cpu")
        met.append(addresses(staged))
    assert met[:3] * 4 == met
    assert len({places[0] for places in met}) == 3


def test_the_same_layout_in_the_same_slab_gives_new_tensors_at_the_same_addresses(make_stager):
    stager = make_stager(ring=1)
    with stager.stage(batch(0)) as first:
        pass
    with stager.stage(batch(1)) as second:
        assert second["x"] is not first["x"]
        assert addresses(second) == addresses(first)
        assert second["seed"] == 1


def swap(tensor):
    torch.utils.swap_tensors(tensor, torch.zeros(4, 5))


def set_an_attribute(tensor):
    tensor.weight = 3


CHANGES = {
    "data": lambda x: setattr(x, "data", torch.zeros(4, 5)),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "t_": lambda x: x.t_(),
    "set_": lambda x: x.set_(torch.zeros(4, 5)),
    "resize_": lambda x: x.resize_(2, 2),
    "swap_tensors": swap,
    "an attribute": set_an_attribute,
    "a gradient": lambda x: setattr(x, "grad", torch.ones(4, 5)),
    "requires_grad_": lambda x: x.requires_grad_(),
    "a hook": lambda x: x.requires_grad_().register_hook(lambda grad: grad * 0),
    "values": lambda x: x.zero_(),
    "its class": lambda x: setattr(x, "__class__", torch.nn.Parameter),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("keep", [False, True])
def test_whatever_was_done_to_a_tensor_the_next_batch_is_as_it_should_be(make_stager, change, keep):
    stager = make_stager(ring=1)
    first, kept = None, []
    for seed in range(3):
        with stager.stage(batch(seed)) as staged:
            assert_same(batch(seed), staged, "cpu")
            leaf = staged["x"]
            assert (type(leaf), vars(leaf), leaf.grad) == (torch.Tensor, {}, None)
            first = first or (leaf.data_ptr(), leaf._version)
            assert (leaf.data_ptr(), leaf._version) == first
            change(leaf)
            kept += [leaf] * keep
            del staged, leaf


SIZES = {"freed": 0, "cut": 40, "larger": 1 << 20}


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("keep", [False, True])
def test_whatever_was_done_to_the_storage_of_a_batch_the_next_one_has_memory(make_stager, nbytes, keep):
    stager = make_stager(ring=2)
    kept = []
    for seed in range(8):
        with stager.stage(batch(seed)) as staged:
            assert_same(batch(seed), staged, "cpu")
            staged["x"].untyped_storage().resize_(nbytes)
            kept += [staged] * keep
            del staged


@pytest.fixture(scope="module")
def ring_of_two():
    with Stager("cpu", max_bytes="64MiB", ring=2, ring_bytes="8MiB") as stager:
        yield stager


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@given(tree=batches())
def test_every_batch_arrives_as_it_was_each_time(ring_of_two, tree):
    for _ in range(3):
        staged = ring_of_two.to_device(tree)
        assert_same(tree, staged, "cpu")
        del staged


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_tensors_made_where_gradients_are_off_serve_training_later(make_stager, mode):
    stager = make_stager(ring=1)
    with mode():
        assert_same(batch(0), stager.to_device(batch(0)), "cpu")
    weight = torch.ones(4, 5, requires_grad=True)
    staged = stager.to_device(batch(1))
    assert not staged["x"].is_inference()
    (staged["x"] * weight).sum().backward()
    assert torch.equal(bits(weight.grad), bits(batch(1)["x"]))
    staged["x"].add_(1)


def test_empty_batches_need_no_slab(make_stager):
    stager = make_stager(ring=1)
    kept = stager.to_device(batch())
    empty = stager.stage([torch.zeros(0), None])
    assert empty.get()[0].shape == (0,)
    empty.release()
    assert kept["seed"] == 0


# -- who holds a batch -------------------------------------------------------------------------------------------------

HOLDERS = {
    "the batch": lambda staged: staged,
    "one leaf": lambda staged: staged["x"],
    "a scalar": lambda staged: staged["y"][0],
    "a slice": lambda staged: staged["x"][1:],
    "a detached leaf": lambda staged: staged["y"][1].detach(),
    "an array": lambda staged: staged["y"][1].numpy(),
    "its storage": lambda staged: staged["x"].untyped_storage(),
    "a capsule": lambda staged: torch.utils.dlpack.to_dlpack(staged["x"]),
    "what autograd saved": lambda staged: staged["x"] * torch.ones(4, 5, requires_grad=True),
    "a closure": lambda staged: lambda: staged["y"][1],
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("ring", [1, 2])
def test_a_batch_that_is_held_is_reported_and_not_overwritten(make_stager, hold, ring):
    stager = make_stager(ring=ring)
    first = stager.to_device(batch(0))
    before = first["x"].clone()
    slab_of_first = first["x"].data_ptr()
    holder = hold(first)
    del first
    others = [stager.to_device(batch(seed)) for seed in range(1, ring)]
    with pytest.raises(RingError, match=rf"batch number {ring + 1} needs a device slab, all {ring} are held"):
        stager.stage(batch(9))
    with pytest.raises(RingError):
        stager.to_device(batch(9))
    assert stager.pool.stats().leased_slabs == 0
    assert stager.stats().batches == ring
    there = torch.frombuffer((ctypes.c_ubyte * 80).from_address(slab_of_first), dtype=torch.float32)
    assert torch.equal(bits(there), bits(before.flatten()))
    del there, holder
    gc.collect()
    assert_same(batch(9), stager.to_device(batch(9)), "cpu")
    del others


def test_the_error_names_the_leaf_that_is_held(make_stager):
    stager = make_stager(ring=1)
    leaf = stager.to_device(batch())["y"][1]
    with pytest.raises(RingError, match=r"batch\['y'\]\[1\] is still referred to"):
        stager.stage(batch())
    storage = leaf.untyped_storage()
    del leaf
    with pytest.raises(RingError, match="a tensor or array made from one of its leaves"):
        stager.stage(batch())
    assert storage.nbytes() > 0


def test_the_name_of_a_held_leaf_is_found_out_for_an_error_alone(make_stager):
    stager = make_stager(ring=2)
    transfer = stager.stage(batch())
    held, layout = transfer.get(), transfer.layout
    del transfer
    stager.to_device(batch(1))
    stager.to_device(batch(2))
    assert layout._slots is None
    assert_same(batch(), held, "cpu")


def test_a_transfer_that_is_alive_holds_its_slab(make_stager):
    stager = make_stager(ring=1)
    transfer = stager.stage(batch())
    with pytest.raises(RingError, match="its transfer is alive"):
        stager.stage(batch(1))
    assert_same(batch(), transfer.get(), "cpu")
    del transfer
    assert_same(batch(1), stager.to_device(batch(1)), "cpu")


def test_what_only_a_reference_cycle_holds_is_not_held(make_stager):
    stager = make_stager(ring=1)
    cycle = {"batch": stager.to_device(batch())}
    cycle["self"] = cycle
    del cycle
    assert_same(batch(1), stager.to_device(batch(1)), "cpu")


# -- release -----------------------------------------------------------------------------------------------------------


def test_after_release_the_slab_is_used_again_though_its_tensors_live_on(make_stager):
    stager = make_stager(ring=1)
    transfer = stager.stage(batch(0))
    static = transfer.get()
    transfer.release()
    for seed in range(1, 5):
        with stager.stage(batch(seed)) as staged:
            assert addresses(staged) == addresses(static)
            assert torch.equal(bits(static["x"]), bits(batch(seed)["x"]))


def test_a_released_transfer_gives_its_batch_no_more(make_stager):
    transfer = make_stager(ring=1).stage(batch())
    transfer.release()
    transfer.release()
    with pytest.raises(RingError, match="transfer was released"):
        transfer.get()


def test_a_released_transfer_that_lives_on_holds_nothing(make_stager):
    stager = make_stager(ring=1, ring_bytes=4096)
    kept = []
    for seed in range(4):
        transfer = stager.stage(batch(seed))
        assert_same(batch(seed), transfer.get(), "cpu")
        transfer.release()
        kept.append(transfer)
        assert_same(batch(seed + 1), stager.to_device(batch(seed + 1)), "cpu")


def test_the_end_of_a_with_block_releases_also_by_an_exception(make_stager):
    stager = make_stager(ring=1)
    with pytest.raises(KeyError), stager.stage(batch()) as kept:
        raise KeyError
    with stager.stage(batch(1)) as staged:
        assert addresses(staged) == addresses(kept)


def test_without_a_ring_release_does_nothing():
    with Stager("cpu", max_bytes="1MiB") as stager, stager.stage(batch()) as staged:
        assert_same(batch(), staged, "cpu")


@pytest.mark.usefixtures("slabs_for_all")
def test_the_copy_waits_for_the_events_of_every_consumer_of_the_batch_before(make_stager, monkeypatch):
    stager = make_stager(ring=1)
    log = []
    events = {"a": ManualEvent(), "b": ManualEvent()}
    target = stager._target

    def record(_, stream):
        if stream in events:
            log.append(f"record {stream}")
        return events.get(stream)

    monkeypatch.setattr(type(target), "record", record)
    monkeypatch.setattr(type(target), "consumer", lambda _, stream: stream)
    monkeypatch.setattr(type(target), "wait", lambda _, event, __: log.append(event))
    monkeypatch.setattr(type(target), "copy", lambda *_, **__: log.append("copy") or 1)
    transfer = stager.stage(batch())
    for stream in ("a", "b", "a"):
        transfer.get(stream)
    assert log == ["copy"]
    del transfer
    stager.stage(batch())
    assert sorted(log[1:3]) == ["record a", "record b"]
    assert log[3:5] in ([events["a"], events["b"]], [events["b"], events["a"]])
    assert log[5:] == ["copy"]


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_a_batch_larger_than_the_slabs_is_an_error_with_the_numbers(make_stager):
    stager = make_stager(ring=2)
    stager.to_device([torch.ones(256)])
    with pytest.raises(RingError, match=r"needs 1.02 KiB, each of the 2 .* has 1.00 KiB, the size of the first batch"):
        stager.to_device([torch.ones(257)])
    with pytest.raises(RingError, match="as ring_bytes says"):
        make_stager(ring=1, ring_bytes=64).to_device([torch.ones(100)])
    assert stager.stats().batches == 1


def test_a_failure_to_pack_gives_the_place_back(make_stager):
    stager = make_stager(4096, ring=1, ring_bytes="1MiB")
    for _ in range(3):
        with pytest.raises(MemoryError):
            stager.to_device([torch.ones(20_000)])
    assert_same(batch(), stager.to_device(batch()), "cpu")


@pytest.mark.filterwarnings("ignore::pinstage.errors.UnreleasedLeaseWarning")  # the pool's way to recover from the same
@pytest.mark.parametrize("what", ["stage", "release"])
def test_an_interrupt_anywhere_leaves_no_slab_of_the_ring_busy(make_stager, what):
    stager = make_stager(ring=1)
    for number in itertools.count(1):
        transfer = stager.stage(batch()) if what == "release" else None
        held = transfer.get() if transfer is not None else None
        interrupts = Interrupts(number, "_ring.py", "_stager.py")
        if not interrupts.during(transfer.release if transfer is not None else lambda: stager.stage(batch())):
            break
        if transfer is not None:
            transfer.release()
        del transfer
        assert_same(batch(number), stager.to_device(batch(number)), "cpu")
        del held
    assert number > (50 if what == "stage" else 3)


def test_prefetch_says_how_large_a_ring_it_needs(make_stager):
    with pytest.raises(ValueError, match="pass ring=4"):
        make_stager(ring=3).prefetch([], depth=2)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_prefetch_through_a_ring_yields_every_batch_intact(prefetch, make_stager, depth):
    stager = make_stager(ring=depth + 2)
    seed = -1
    for seed, staged in enumerate(prefetch(map(batch, range(20)), depth=depth, stager=stager)):
        assert_same(batch(seed), staged, "cpu")
    assert seed == 19


@pytest.mark.parametrize(
    "options",
    [{"ring": 0}, {"ring": 1, "ring_bytes": 0}, {"ring": None, "ring_bytes": 5}],
    ids=repr,
)
def test_a_ring_of_no_sense_is_refused(options):
    with pytest.raises(ValueError, match="ring"):
        Stager("cpu", max_bytes="1MiB", **options)


def test_threads_that_stage_at_the_same_time_get_slabs_of_their_own(make_stager, background):
    stager = make_stager(ring=8)

    def work(start):
        for seed in range(start, start + 50):
            staged = stager.to_device(batch(seed))
            assert torch.equal(bits(staged["x"]), bits(batch(seed)["x"]))
            del staged

    for future in [background(work, 1000 * thread) for thread in range(4)]:
        future.result(timeout=60)
    assert stager.stats().batches == 200

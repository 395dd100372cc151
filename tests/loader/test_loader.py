"""`DataLoader` yields the same batches as torch's loader, on the device."""

import copy
import gc
import os
import pickle
import time

import loader_data as data
import pytest
import torch
from doubles import assert_idle
from loader_data import same
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map
from torchdata.stateful_dataloader import StatefulDataLoader

import pinstage as ps
from pinstage._loader._messages import STRUCTURES_KEPT

# Torch's own queue.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


def agree(dataset, passes=1, seed=None, depth=2, own_storage=True, **options):
    """Check that our loader's batches, and the random state after them, are torch's; return our
    stats.
    """

    def run(make, **more):
        data.seed_again(0)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loader = make(dataset, generator=generator, **options, **more)
        return [list(loader) for _ in range(passes)], torch.get_rng_state(), loader

    expected, expected_state, _ = run(torch.utils.data.DataLoader)
    found, state, loader = run(ps.DataLoader, device="cpu", depth=depth, own_storage=own_storage)
    assert expected[0]
    assert same(found, expected)
    assert torch.equal(state, expected_state)
    return loader.stats()


SAMPLES = [data.tensors, data.scalar, data.mixed, data.key_order, data.channels_last]


@pytest.mark.parametrize("sample", SAMPLES)
def test_samples_arrive_as_torch_converts_them(sample, workers):
    stats = agree(data.Mapped(sample), batch_size=4, num_workers=workers)
    assert (stats.batches, stats.fallback_batches) == (6, 0)
    stats = agree(data.Mapped(sample), batch_size=4, num_workers=workers, own_storage=False)
    assert (stats.batches, stats.copies, stats.fallback_batches) == (6, 6, 0)
    agree(data.Mapped(sample), batch_size=None, num_workers=workers)


def test_custom_collation_functions_see_real_tensors(workers, monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, data.Cloud, data.collate_clouds)
    agree(data.Mapped(data.cloud), batch_size=4, num_workers=workers)


TENSORS = data.Mapped(data.tensors)
PERMUTED = data.Mapped(data.permuted, 4)


@pytest.mark.parametrize(
    ("dataset", "collate"),
    [
        (TENSORS, data.as_they_are),
        (TENSORS, data.to_graph),
        (TENSORS, data.with_strided),
        (TENSORS, data.with_arrays),  # arrays arrive as tensors, as from a Stager
        (TENSORS, data.nothing_to_pack),
        (TENSORS, default_collate),
        (data.Mapped(data.ragged), data.padded),
        (PERMUTED, None),
        (PERMUTED, data.collated_by_torch),
        (data.Mapped(data.in_classes_that_compute), None),  # they see real tensors
    ],
)
def test_what_a_collate_fn_returns_arrives(dataset, collate, workers):
    agree(dataset, batch_size=2, num_workers=workers, collate_fn=collate)


def test_what_cannot_be_packed_arrives_and_is_counted(workers):
    stats = agree(TENSORS, batch_size=4, num_workers=workers, collate_fn=data.with_sparse)
    assert stats.passthrough_leaves == 12
    assert stats.copies == 0


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4, "drop_last": True},
        {"batch_size": 4, "shuffle": True, "passes": 3},
        {"batch_size": 4, "shuffle": True, "passes": 3, "seed": 3},
        {"sampler": range(3, 20, 2), "batch_size": 3},
        {"batch_sampler": BatchSampler(SequentialSampler(range(23)), 5, drop_last=True)},
        {"batch_size": 3, "worker_init_fn": data.seed_again},
        {"batch_size": 3, "depth": 0},
        {"batch_size": 3, "depth": 5},
        {"batch_size": 3, "pin_memory": False},
    ],
    ids=" ".join,
)
def test_order_and_seeds_are_those_of_torch(options, workers):
    agree(data.Mapped(data.random_numbers), num_workers=workers, **options)


class Drawing(torch.utils.data.Sampler):
    """Draws each index on request, from a generator that the loop uses too."""

    def __iter__(self):
        for _ in range(24):
            yield int(torch.randint(24, ()))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_random_numbers_are_drawn_when_torch_draws_them(workers, depth):
    def run(make, **more):
        data.seed_again(0)
        dataset = data.Mapped(data.random_numbers)
        loader = make(dataset, 2, sampler=Drawing(), num_workers=workers, **more)
        return [(batch, torch.rand(1)) for batch in loader]

    expected = run(torch.utils.data.DataLoader)
    assert same(run(ps.DataLoader, depth=depth, device="cpu"), expected)


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (data.Streamed(data.mixed), {"batch_size": 4}),
        (data.Streamed(data.mixed), {"batch_size": 4, "drop_last": True}),
        (data.Streamed(data.mixed), {"batch_size": None}),
        (data.Batched(data.mixed), {"batch_size": 4}),
        (
            data.Mapped(repr),
            {"batch_size": None, "sampler": BatchSampler(RandomSampler(range(23)), 5, False)},
        ),
        (data.Mapped(data.tensors, size=3), {"batch_size": 4}),  # fewer batches than workers
    ],
    ids=["stream", "stream, drop last", "stream, no batching", "getitems", "lists", "short"],
)
def test_datasets_are_read_as_by_torch(dataset, options, workers):
    agree(dataset, num_workers=workers, **options)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_every_start_method_works(method):
    options = {"batch_size": 4, "num_workers": 2, "worker_init_fn": data.seed_again}
    expected = list(torch.utils.data.DataLoader(data.Mapped(data.random_numbers), **options))
    options |= {"multiprocessing_context": method, "device": "cpu"}
    loader = ps.DataLoader(data.Mapped(data.random_numbers), **options)
    assert same(list(loader), expected)
    assert loader.stats().fallback_batches == 0


def test_out_of_order_all_batches_arrive_once():
    loader = ps.DataLoader(
        data.Mapped(data.scalar, 40), 2, num_workers=2, in_order=False, device="cpu"
    )
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(40))


def test_persistent_workers_stay():
    loader = ps.DataLoader(
        data.Mapped(data.cuda_in_the_worker),
        4,
        num_workers=2,
        persistent_workers=True,
        device="cpu",
    )
    pids = [{int(pid) for batch in loader for pid in batch[:, 2]} for _ in range(3)]
    assert len(pids[0]) == 2
    assert pids[0] == pids[1] == pids[2]


def test_workers_touch_no_cuda():
    # Spawned, so that it imports only what it needs, not what this process has imported.
    dataset = data.KnowsItsLoader(None)
    loader = dataset.loader = ps.DataLoader(
        dataset, 4, num_workers=1, multiprocessing_context="spawn", device="cpu"
    )
    reached, asked, contexts, pids = torch.cat(list(loader)).unbind(1)
    assert (reached.sum(), asked.sum(), contexts.sum()) == (0, 0, 0)
    assert os.getpid() not in pids


def wrapped(dataset, batch_size, num_workers, drop_last=False, **options):
    return ps.wrap_loader(
        StatefulDataLoader(dataset, batch_size, num_workers=num_workers, drop_last=drop_last),
        **options,
    )


@pytest.mark.parametrize("make", [ps.DataLoader, wrapped])
def test_it_is_a_loader_of_torch(make, workers):
    loader = make(TENSORS, 4, num_workers=workers, drop_last=True, device="cpu", depth=2)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert (len(loader), loader.batch_size, loader.drop_last, loader.num_workers) == (
        5,
        4,
        True,
        workers,
    )
    if make is ps.DataLoader:
        assert (loader.device, loader.depth, loader.max_bytes) == (torch.device("cpu"), 2, "auto")
    for _ in range(2):
        assert (loader.dataset, loader.collate_fn) == (TENSORS, default_collate)
        assert len(list(loader)) == 5


def test_later_passes_allocate_nothing():
    loader = ps.DataLoader(data.Mapped(data.large), 4, num_workers=2, device="cpu")
    list(loader)
    misses = loader.stats().pool.misses
    for _ in range(2):
        list(loader)
    assert loader.stats().pool.misses <= max(misses, 6)


def test_a_loader_may_get_workers_between_passes():
    loader = ps.DataLoader(data.Mapped(data.mixed), 4, device="cpu")
    expected = list(loader)
    loader.num_workers, loader.prefetch_factor = 2, 2
    assert same(list(loader), expected)
    loader.num_workers, loader.prefetch_factor = 0, None
    assert same(list(loader), expected)
    assert loader.stats().fallback_batches == 0


@pytest.mark.usefixtures("slabs_for_all")
def test_a_given_pool_is_shared_and_stays_open(workers):
    dataset = data.Mapped(data.tensors)
    expected = list(torch.utils.data.DataLoader(dataset, 4))
    with ps.SlabPool("8MiB", memory=ps.memory.SharedMemory(register=False)) as pool:
        loader = ps.DataLoader(dataset, 4, num_workers=workers, pool=pool, device="cpu")
        other = torch.utils.data.DataLoader(dataset, 4, num_workers=workers)
        assert same(list(loader), expected)
        assert pool.stats().misses > 0
        assert loader.stats().pool == pool.stats()
        assert loader.max_bytes == pool.max_bytes
        assert same(list(ps.wrap_loader(other, pool=pool, device="cpu")), expected)
        assert same(list(ps.Stager("cpu", pool=pool).prefetch(expected)), expected)
        del loader, other
        gc.collect()
        assert not pool.closed
        assert_idle(pool)


@pytest.mark.parametrize("make", [ps.DataLoader, wrapped])
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]
)
def test_a_copied_loader_has_its_own_pool(make, copied, workers):
    with ps.SlabPool("8MiB", memory=ps.memory.SharedMemory(register=False)) as pool:
        loader = make(TENSORS, 4, num_workers=workers, pool=pool, device="cpu", depth=3)
        twin = copied(loader)
        assert isinstance(twin, StatefulDataLoader) == (make is wrapped)
        expected, before = list(loader), pool.stats()
        assert same(list(twin), expected)
        after = pool.stats()
        assert (after.hits, after.misses) == (before.hits, before.misses)
        assert twin.stats().pool.max_bytes == pool.max_bytes
        assert (loader.stats().batches, twin.stats().batches) == (6, 6)
        assert twin._staging_settings.depth == 3
        del loader, twin


PRIVATE = ps.SlabPool("1MiB", memory=ps.memory.PageableMemory())
SHARED = ps.SlabPool("1MiB", memory=ps.memory.SharedMemory(register=False))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"depth": -1}, "depth must not be negative: -1"),
        ({"depth": 1.5}, "depth must be an int: 1.5"),
        ({"max_bytes": 4095}, "max_bytes is too small: 4095"),
        ({"max_bytes": "much"}, "much"),
        ({"device": "meta"}, "meta"),
        (
            {"pool": PRIVATE},
            r"PageableMemory is not shared; pass SlabPool\(\.\.\., memory=SharedMemory",
        ),
        (
            {"pool": SHARED, "max_bytes": "1MiB"},
            "pool and max_bytes exclude each other: max_bytes='1MiB'",
        ),
    ],
)
def test_wrong_options_are_refused(options, text):
    with pytest.raises((TypeError, ValueError), match=text):
        ps.DataLoader(data.Mapped(data.tensors), **({"device": "cpu"} | options))


def test_stats_say_who_waits(workers):
    loader = ps.DataLoader(data.Mapped(data.large), 4, num_workers=workers, device="cpu")
    assert loader.stats().bottleneck == "Nothing was loaded yet."
    list(loader)
    stats = loader.stats()
    assert stats.packed_bytes == 2_300_000
    assert 0 < stats.batch_wait_seconds <= stats.elapsed_seconds
    assert stats.num_workers == workers
    assert stats.bottleneck.endswith(".")


def test_the_first_batches_are_not_timed(workers):
    loader = ps.DataLoader(
        data.Mapped(data.slow_at_first, 4),
        num_workers=workers,
        persistent_workers=workers > 0,
        device="cpu",
    )
    next(iter(loader))
    assert loader.stats().bottleneck.startswith("Loading was not timed")
    for _ in range(2):
        assert len(list(loader)) == 4
    assert 0 < loader.stats().elapsed_seconds < 1


class SlowAtItsEnd(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield torch.ones(3)
        time.sleep(1)


def test_the_end_of_a_pass_is_not_timed(workers):
    loader = ps.DataLoader(SlowAtItsEnd(), num_workers=min(workers, 1), device="cpu")
    assert len(list(loader)) == 1
    assert loader.stats().bottleneck.startswith("Loading was not timed")


STATS = {
    "batches": 10,
    "copies": 10,
    "packed_bytes": 1,
    "fallback_batches": 0,
    "passthrough_leaves": 0,
    "batch_wait_seconds": 5.0,
    "slab_wait_seconds": 0.0,
    "elapsed_seconds": 10.0,
    "num_workers": 2,
    "pool": None,
}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "The workers are the bottleneck"),
        ({"batch_wait_seconds": 3.4}, "The workers are the bottleneck"),
        ({"batch_wait_seconds": 3.3}, "Neither side is the bottleneck: waiting for workers took 3"),
        ({"batch_wait_seconds": 1.0}, "Neither side is the bottleneck"),
        ({"batch_wait_seconds": 0.9}, "The loop is the bottleneck: waiting for workers took 0.90"),
        ({"batch_wait_seconds": 2.0, "slab_wait_seconds": 9.0}, "Neither side is the bottleneck"),
        ({"slab_wait_seconds": 9.0}, "max_bytes is the bottleneck"),
        ({"fallback_batches": 9}, "max_bytes is the bottleneck"),
        ({"num_workers": 0}, "Loading is the bottleneck"),
        ({"num_workers": 0, "batch_wait_seconds": 2.0}, "Neither side is the bottleneck: loading"),
        ({"num_workers": 0, "batch_wait_seconds": 0.5}, "The loop is the bottleneck: loading took"),
        ({"num_workers": 0, "fallback_batches": 9}, "max_bytes is the bottleneck"),
        ({"fallback_batches": 9, "batch_wait_seconds": 0.5}, "max_bytes is the bottleneck"),
        ({"fallback_batches": 3}, "The workers are the bottleneck"),
        ({"elapsed_seconds": 0.0, "batch_wait_seconds": 0.0}, "Loading was not timed"),
    ],
)
def test_the_bottleneck_is_named(changes, sentence):
    assert ps.LoaderStats(**STATS | changes).bottleneck.startswith(sentence)


@pytest.mark.parametrize(
    ("cap", "sentence"), [("2MiB", "max_bytes is"), ("64MiB", "The workers are")]
)
def test_the_cap_is_blamed_only_when_reached(cap, sentence):
    with ps.SlabPool(cap, memory=ps.memory.PageableMemory()) as pool:
        pool.reserve("1MiB", count=2)
        stats = ps.LoaderStats(**STATS | {"slab_wait_seconds": 9.0, "pool": pool.stats()})
    assert stats.bottleneck.startswith(sentence)


@pytest.mark.parametrize("kinds", [1, 5, 100, 300])
def test_a_bounded_number_of_structures_is_kept(kinds):
    dataset = data.Mapped(data.Several(kinds), 600)
    iterator = iter(ps.DataLoader(dataset, None, num_workers=1, device="cpu"))
    for index, batch in enumerate(iterator):
        assert same(batch, dataset[index])
    assert iterator._broker.structure_of.cache_info().currsize == min(kinds, STRUCTURES_KEPT)

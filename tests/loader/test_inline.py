"""Without workers, the packing threads stack samples in the slab; the batch equals torch's."""

import contextlib
import itertools
import signal

import loader_data as data
import numpy as np
import pytest
import torch
from doubles import Interrupts
from loader_data import same
from torch.utils.data import DataLoader, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

import pinstage as ps

BATCHES = 3
SMALL, MEDIUM, LARGE = 1001, 50_001, 1_000_003
"""Bytes of a sample: batches of four go from ordinary memory, through a slab, and in chunks."""


class Samples(data.Mapped):
    """Samples with a field of bytes, one of integers, and a text."""

    def __init__(self, nbytes, size=4 * BATCHES):
        super().__init__(self.make, size)
        self.nbytes = nbytes
        self.read = []

    def make(self, index):
        self.read.append(index)
        large = torch.full((self.nbytes,), index, dtype=torch.uint8)
        return {"large": large, "numbers": torch.arange(3) + index, "text": f"sample {index}"}


@pytest.fixture(autouse=True)
def stacks_of_any_size(monkeypatch):
    """Put stacking off for small batches, too."""
    monkeypatch.setattr("pinstage._loader._collate.INLINE_STACK_BYTES", 0)


@pytest.fixture
def garbage():
    """Let torch fill new memory with NaN or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def by_value(path, leaf):
    """Keep small numbers on the host; fail for new memory."""
    assert isinstance(leaf, str) or leaf.max() < 100, path
    return path == "['numbers']"


def on_cpu(dataset, **options):
    return ps.DataLoader(dataset, 4, device="cpu", **options)


class Beside(Samples):
    """Has a tensor that requires grad, which isn't packed."""

    def make(self, index):
        return super().make(index) | {"moved": torch.ones(3, requires_grad=True)}


@pytest.mark.usefixtures("garbage")
@pytest.mark.filterwarnings("ignore:no batch of a DataLoader found a slab")
@pytest.mark.parametrize(
    ("samples", "options", "stacks"),
    [
        (Samples(LARGE), {}, 0),
        (Samples(LARGE), {"own_storage": False}, 0),
        (Samples(MEDIUM), {}, 0),
        (Samples(SMALL), {}, 0),
        (Samples(LARGE), {"max_bytes": "1MiB"}, 0),  # no slab is large enough
        (Samples(MEDIUM), {"keep_on_host": ("['numbers']",)}, 0),
        (Samples(LARGE), {"keep_on_host": ("['large']",)}, 0),  # the rest is small
        (Samples(MEDIUM), {"keep_on_host": by_value}, 2),
        (Samples(MEDIUM), {"collate_fn": data.collated_by_torch}, 2),
        (Beside(MEDIUM), {}, 1),
    ],
)
def test_each_way_reads_no_unfilled_memory(samples, options, stacks, stacked):
    expected = list(DataLoader(samples, 4))
    stacked.clear()
    found = list(on_cpu(samples, **options))
    assert len(stacked) == stacks * BATCHES
    assert same(found, expected)


@pytest.mark.usefixtures("garbage")
@pytest.mark.filterwarnings("ignore:page-locking of", "ignore:a stager falls back to pageable")
@pytest.mark.parametrize("most", [1 << 21, 0], ids=["in parts", "pageable"])
def test_refused_slabs_change_no_byte(most, stacked, monkeypatch):
    take = ps.memory.SharedMemory._take

    def take_some(memory, nbytes, device):
        if nbytes > most:
            raise OSError("none left")
        return take(memory, nbytes, device)

    monkeypatch.setattr("pinstage.memory.SharedMemory._take", take_some)
    expected = list(DataLoader(Samples(LARGE), 4))
    stacked.clear()
    with ps.SlabPool("64MiB", memory=ps.memory.SharedMemory(register=False)) as pool:
        found = list(on_cpu(Samples(LARGE), pool=pool))
    assert not stacked
    assert same(found, expected)


@pytest.mark.parametrize("kind", [torch, np])
@pytest.mark.parametrize(("count", "stacks"), [(15, 2), (16, 0)])
def test_torch_stacks_small_batches_at_once(kind, count, stacks, stacked, monkeypatch):
    monkeypatch.setattr("pinstage._loader._collate.INLINE_STACK_BYTES", 1 << 16)
    sample = kind.zeros(1 << 12, dtype=kind.uint8), torch.ones(2)
    list(ps.DataLoader([sample] * count, count, device="cpu"))
    assert len(stacked) == stacks


def with_other_strides():
    """Return tensors with all kinds of strides in their dimensions of size 1, and empty ones."""
    shapes = itertools.product((0, 1, 2), (1, 2), (1, 2), (1, 2))
    for shape, steps in itertools.product(shapes, itertools.product((1, 97), repeat=4)):
        pairs = zip(shape, torch.empty(shape).stride(), steps, strict=True)
        strides = [step if size == 1 else stride for size, stride, step in pairs]
        yield torch.arange(999.0).as_strided(shape, strides)


@pytest.mark.parametrize("count", [1, 3])
def test_strides_are_those_of_torch(count, stacked):
    samples = [[*data.permuted(0), *with_other_strides()]] * count
    (found,) = ps.DataLoader(samples, count, device="cpu")
    assert 0 < len(stacked) < len(found)
    assert same(found, default_collate(samples))
    assert [one.stride() for one in found] == [one.stride() for one in default_collate(samples)]


class Reusing(Samples):
    """Has one buffer for each sample of a batch."""

    def __init__(self, nbytes):
        super().__init__(nbytes)
        self.buffers = torch.zeros(4, nbytes, dtype=torch.uint8)

    def make(self, index):
        self.read.append(index)
        return self.buffers[index % 4].fill_(index)


@pytest.mark.parametrize("nbytes", [SMALL, MEDIUM, LARGE])
def test_a_dataset_may_overwrite_its_samples_after_next(nbytes):
    dataset = Reusing(nbytes)
    for number, batch in enumerate(on_cpu(dataset)):
        assert dataset.read == list(range(4 * number + 4)), "read ahead"
        dataset.buffers.fill_(0xEE)
        assert [sample.unique().tolist() for sample in batch] == [
            [index] for index in range(4 * number, 4 * number + 4)
        ]


class Failing(Samples):
    """Fails once in the middle of its second batch, or has a sample of another shape there."""

    def __init__(self, how):
        super().__init__(LARGE)
        self.how = how

    def make(self, index):
        how, self.how = (self.how, None) if index == 6 else (None, self.how)
        if how == "shape":
            return super().make(index) | {"large": torch.zeros(5, dtype=torch.uint8)}
        if how == "interrupt":
            signal.raise_signal(signal.SIGINT)
        if how == "error":
            raise ValueError("no such sample")
        return super().make(index)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("how", "kind"),
    [("error", ValueError), ("shape", RuntimeError), ("interrupt", KeyboardInterrupt)],
)
def test_a_failed_sample_raises_torch_s_error(how, kind):
    torchs, loader = DataLoader(Failing(how), 4), on_cpu(Failing(how))
    with pytest.raises(kind) as expected:
        list(torchs)
    with pytest.raises(kind) as found:
        list(loader)
    assert str(found.value) == str(expected.value)
    assert loader.stats().pool.leased_slabs == 0
    assert same(list(loader), list(torchs))


@pytest.mark.filterwarnings("ignore:lease was never released")  # an interrupt ended the call
@pytest.mark.parametrize("nbytes", [MEDIUM, LARGE])
def test_an_interrupt_anywhere_leaves_nothing(nbytes):
    loader = on_cpu(Samples(nbytes, 4))
    (expected,) = DataLoader(loader.dataset, 4)
    files = "_collate.py", "_iterator.py", "_sender.py", "_describe.py", "_pack.py"
    for countdown in itertools.count(1):
        iterator = iter(loader)
        is_interrupted = Interrupts(countdown, *files).during(
            lambda batches=iterator: next(batches)
        )
        assert loader.stats().pool is None or loader.stats().pool.leased_slabs == 0
        with contextlib.closing(iterator):
            assert same(list(loader), [expected])
        if not is_interrupted:
            break
    assert countdown > 30


class LooksAtBatches(DataLoader):
    def _get_iterator(self):
        return (batch * 2 for batch in super()._get_iterator())


@pytest.mark.usefixtures("garbage")
def test_an_iterator_that_computes_gets_stacked_samples():
    loader = ps.wrap_loader(LooksAtBatches(Reusing(LARGE), 4), device="cpu")
    assert [batch[:, 0].tolist() for batch in loader] == [
        [2 * index for index in range(start, start + 4)] for start in (0, 4, 8)
    ]


@pytest.mark.usefixtures("garbage")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdata_s_state_stays_exact(stacked):
    loader, again = (
        ps.wrap_loader(StatefulDataLoader(Samples(LARGE), 4), device="cpu") for _ in range(2)
    )
    batches = iter(loader)
    first = next(batches)
    again.load_state_dict(loader.state_dict())
    rest = list(batches)
    assert same(list(again), rest)
    assert not stacked
    assert same([first, *rest], list(DataLoader(Samples(LARGE), 4)))

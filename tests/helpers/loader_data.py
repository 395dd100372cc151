"""Datasets and functions of the loader's tests, at module level, so that a spawned worker finds
them; and `same`.
"""

import collections
import dataclasses
import gc
import itertools
import multiprocessing.queues
import os
import random
import resource
import signal
import sys
import time

import numpy as np
import torch
from bitwise import bits, telling_stride
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import pinstage as ps

Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Graph:
    nodes: torch.Tensor
    name: str


class Mapped(Dataset):
    """Samples made by a function of the index."""

    def __init__(self, sample, size=23):
        self.sample = sample
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.sample(index)


class Streamed(IterableDataset):
    """Each worker yields its share."""

    def __init__(self, sample, size=23):
        self.sample = sample
        self.size = size

    def __iter__(self):
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.sample(index) for index in range(start, self.size, step))


class KnowsItsLoader(Mapped):
    """Refers to the loader that reads it, which is therefore sent to a spawned worker."""

    loader = None

    def __getitem__(self, index):
        reached = "_own_slabs" in vars(self.loader)
        return torch.cat([torch.tensor([reached]), cuda_in_the_worker(index)])


class Batched(Mapped):
    def __getitems__(self, indices):
        return [self.sample(index) for index in indices]


def tensors(index):
    return torch.full((3, 5), float(index)), torch.tensor(index)


def scalar(index):
    return index


def mixed(index):
    return {
        "z": torch.arange(6.0).view(2, 3) + index,
        "text": f"sample {index}",
        "raw": bytes([index]),
        "int": index,
        "float": index / 3,
        "bool": index % 2 == 0,
        "array": np.arange(4, dtype=np.int16) * index,
        "scalar": np.float32(index),
        "point": Point(torch.tensor([index]), (torch.tensor(1 + 2j) * index, f"{index}")),
        "list": [torch.tensor([index % 2 == 0]), [torch.tensor(index, dtype=torch.bfloat16)]],
        "empty": torch.empty(0, 2),
        "a": collections.OrderedDict(q=torch.tensor(index), p=torch.tensor(-index)),
    }


def key_order(index):
    pairs = [("a", torch.tensor(index)), ("b", torch.tensor(-index))]
    return dict(pairs if index // 4 % 2 else reversed(pairs))


class Shifted(dict):
    """Changes the items that it is updated with."""

    def update(self, items):
        super().update({key: value + 1 for key, value in items.items()})


class Doubled(collections.namedtuple("Pair", "x y")):
    """Computes its second field when it is made, unless that is already text."""

    __slots__ = ()

    def __new__(cls, x, y):
        return super().__new__(cls, x, y if isinstance(y, str) else f"{float(x.sum())}")


def in_classes_that_compute(index):
    return Shifted(x=torch.full((5000,), index)), Doubled(torch.full((5000,), index), None)


class Cloud:
    def __init__(self, points):
        self.points = points


def cloud(index):
    return Cloud(torch.full((5000,), float(index)))


def collate_clouds(clouds, *, collate_fn_map=None):
    return (
        torch.utils.data._utils.collate.collate(
            [c.points for c in clouds], collate_fn_map=collate_fn_map
        )
        + 1
    )


def channels_last(index):
    return torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(index)).permute(2, 0, 1)


def permuted(index):
    shapes = itertools.product((1, 2, 3), repeat=4)
    forms = itertools.permutations(range(4))
    return [
        torch.full(shape, float(index)).permute(form)
        for shape, form in itertools.product(shapes, forms)
    ]


def random_numbers(index):
    return index, torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002 - what users' datasets do


def ragged(index):
    return torch.arange(index + 1)


class Several:
    """Samples of several structures in turn."""

    def __init__(self, kinds):
        self.kinds = kinds

    def __call__(self, index):
        return {f"data {index % self.kinds}": torch.full((index % 7,), index), "index": index}


def random_size(index):
    generator = torch.Generator().manual_seed(index)
    size = int(torch.randint(1, 60_000, (), generator=generator))
    return {
        "data": torch.randint(0, 255, (size,), generator=generator, dtype=torch.uint8),
        "index": index,
    }


def large(index):
    return torch.full((100_000,), index % 256, dtype=torch.uint8)


def fails_at_seven(index):
    if index == 7:
        raise KeyError("the seventh is bad")
    return torch.tensor(index)


def dies_at_seven(index):
    if index == 7 and get_worker_info() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.full((1000,), index)


def dies_in_the_middle_of_a_message(index):
    if index == 7 and get_worker_info() is not None:
        for queue in [
            found for found in gc.get_objects() if type(found) is multiprocessing.queues.Queue
        ]:
            if not queue._writer.closed:
                os.write(
                    queue._writer.fileno(),
                    b"\0\0\1\0 these are not the 256 bytes that were promised",
                )
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.full((1000,), index)


def collects_garbage(index):
    gc.collect()
    return torch.full((100, 1), index)


def exits_at_seven(index):
    if index == 7 and get_worker_info() is not None:
        os._exit(0)
    return torch.full((1000,), index)


def sleeps_at_three(index):
    if index == 3:
        time.sleep(60)
    return torch.tensor(index)


def cuda_in_the_worker(index):
    # torch may import the bindings by itself: the test is whether pinstage asked for them.
    asked = sys.modules["pinstage._memory._cuda"]._bindings is not None
    return torch.tensor([asked, int(torch.cuda.is_initialized()), os.getpid()])


def collated_by_torch(samples):
    return torch.utils.data.default_collate(samples)


def as_they_are(samples):
    return samples


def unbatched(sample, size, **options):
    """Return a loader whose batches are the samples of a function, as they are, on the CPU."""
    return ps.DataLoader(
        Mapped(sample, size),
        batch_size=None,
        collate_fn=as_they_are,
        device="cpu",
        max_bytes="1MiB",
        **options,
    )


def to_graph(samples):
    return Graph(torch.cat([sample.flatten() for sample, _ in samples]), f"{len(samples)} samples")


def padded(samples):
    lengths = torch.tensor([len(sample) for sample in samples])
    return {
        "values": torch.nn.utils.rnn.pad_sequence(samples, batch_first=True),
        "lengths": lengths,
    }


def with_strided(samples):
    stacked = torch.utils.data.default_collate(samples)
    return {
        "t": stacked[0].mT,
        "e": stacked[1].expand(2, -1),
        "again": stacked[0],
        "n": None,
        "s": {1, 2},
    }


def with_sparse(samples):
    return torch.stack([sample for sample, _ in samples]).to_sparse(), torch.ones(
        2, requires_grad=True
    )


def with_arrays(samples):
    arrays = [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.arange(5)[::2],
        np.float64(2.5),
        np.array([True]),
    ]
    return {"arrays": arrays, "tensor": samples[0][0], "names": np.array(["a", "b"])}


def nothing_to_pack(samples):
    return ["only text", None, 3.5]


def fails_in_collate(samples):
    raise RuntimeError("cannot collate these")


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor


def opaque(samples):
    return Opaque(samples[0][0])


def unpicklable(samples):
    return samples[0][0], lambda: None


class CannotArrive:
    def __reduce__(self):
        return int, ("no number",)


def first_cannot_arrive(samples):
    return samples[0], CannotArrive() if int(samples[0][0]) == 0 else None


def class_of_the_workers_own(samples):
    """Return a batch of a class that is made in the worker, where pickle finds it by name."""
    name = "OnlyHere"
    if name not in globals():
        globals()[name] = dataclasses.make_dataclass(
            name, ["number"], namespace={"__module__": __name__}
        )
    return globals()[name](samples[0][1])


def third_cannot_arrive(samples):
    number = int(samples[0][1])
    return number, CannotArrive() if number == 3 else None


def opens_no_more_files(worker):
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # open files stay open


def seed_again(worker):
    torch.manual_seed(1000 + worker)
    random.seed(worker)
    np.random.seed(worker)  # noqa: NPY002 - what users' functions do


def fails_to_start(worker):
    raise ValueError(f"no start for {worker}")


def same(found, expected):
    """Return whether two batches are equal bit for bit, with the same types."""
    if isinstance(expected, np.ndarray) and expected.dtype.kind not in "US":
        expected = torch.as_tensor(expected)
    if type(found) is not type(expected):
        return False
    match expected:
        case torch.Tensor(is_sparse=True):
            return found.is_sparse and same(found.to_dense(), expected.to_dense())
        case torch.Tensor():
            copied = torch.empty_like(expected).stride()
            return facts(found, found.stride()) == facts(expected, copied) and torch.equal(
                bits(found), bits(expected)
            )
        case np.ndarray():
            return np.array_equal(found, expected)
        case dict():
            return list(found) == list(expected) and same([*found.values()], [*expected.values()])
        case list() | tuple():
            return len(found) == len(expected) and all(map(same, found, expected))
        case Graph():
            return same(vars(found), vars(expected))
    return found == expected


def facts(tensor, stride):
    stride = telling_stride(tensor.shape, stride)
    return tensor.dtype, tensor.layout, tensor.shape, stride, tensor.requires_grad


# -- what stays on the host ------------------------------------------------------------------------

KEPT_PATHS = ["['lengths']", "['more'][0]"]


def sample_of_which_some_stays(index):
    return {
        "values": torch.full((3, 4), float(index)),
        "lengths": torch.arange(index, index + 5),
        "more": [torch.full((2,), index), torch.full((6,), -index), index],
    }


def is_kept(path, leaf):
    return path in KEPT_PATHS and isinstance(leaf, torch.Tensor) and int(leaf.flatten()[0]) >= 0


def slow_at_first(index):
    time.sleep(index == 0)
    return torch.ones(3)


def compute(seconds):
    """Keep a CPU busy for that long, and return a batch."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return torch.ones(3)


class Costly:
    """A batch that takes CPU time to unpickle."""

    SECONDS = 0.01

    def __init__(self, seconds=SECONDS):
        self.seconds = seconds

    def __reduce__(self):
        return compute, (self.seconds,)

"""Programs as users write them: results keep types, mistakes are found. Checked by mypy and
pyright, never run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, assert_type

import numpy as np
import torch

import pinstage as ps

Array = np.ndarray[Any, np.dtype[np.float32]]


class Pair(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


@dataclass
class Sample:
    image: torch.Tensor
    name: str


class Numbers(torch.utils.data.Dataset[Sample]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Sample:
        return Sample(torch.zeros(3), str(index))


def what_went_in_comes_back(stager: ps.Stager, tensor: torch.Tensor, sample: Sample) -> None:
    assert_type(stager.to_device(tensor), torch.Tensor)
    assert_type(stager.to_device({"x": tensor}), dict[str, torch.Tensor])
    assert_type(stager.to_device([sample]), list[Sample])
    assert_type(stager.to_device(Pair(tensor, tensor)), Pair)
    assert_type(stager.stage(sample), ps.Transfer[Sample])
    assert_type(stager.stage(sample).wait().image, torch.Tensor)
    assert_type(stager.to_host({"loss": tensor}), dict[str, torch.Tensor])


def arrays_become_tensors(stager: ps.Stager, array: Array) -> None:
    assert_type(stager.to_device(array), torch.Tensor)
    assert_type(stager.to_device({"x": array}), dict[str, torch.Tensor])
    assert_type(stager.to_device([array]), list[torch.Tensor])
    assert_type(stager.to_device((array, array)), tuple[torch.Tensor, ...])
    assert_type(stager.stage(array).wait(), torch.Tensor)
    assert_type(stager.to_host(array), Array)
    assert_type(stager.prefetch([array]), ps.Prefetcher[torch.Tensor])
    assert_type(stager.prefetch([{"a": array}]), ps.Prefetcher[dict[str, torch.Tensor]])
    assert_type(stager.prefetch([[array]], depth=3), ps.Prefetcher[list[torch.Tensor]])
    assert_type(stager.prefetch([(array, array)]), ps.Prefetcher[tuple[torch.Tensor, ...]])


def what_is_not_known_stays_so(
    stager: ps.Stager, batch: Any, thing: object, loader: torch.utils.data.DataLoader[Any]
) -> None:
    moved = stager.to_device(batch)
    moved.anything()
    assert_type(stager.stage(thing), ps.Transfer[object])
    assert_type(stager.fetch(thing), ps.HostTransfer[object])
    assert_type(stager.prefetch(loader), ps.Prefetcher[Any])
    assert_type(stager.prefetch([1.5]), ps.Prefetcher[float])
    assert_type(iter(stager.prefetch([1.5])), Iterator[float])
    assert_type(len(stager.prefetch([1.5])), int)


def no_overload_takes_them(stager: ps.Stager, batch: object) -> None:
    stager.prefetch([batch], 2)  # type: ignore[call-overload]
    stager.prefetch(3)  # type: ignore[call-overload]
    stager.stage()  # type: ignore[call-overload]


def a_transfer_is_no_batch(stager: ps.Stager, tensor: torch.Tensor) -> None:
    transfer = stager.fetch({"x": tensor})
    transfer["x"]  # type: ignore[index]
    for _ in transfer:  # type: ignore[attr-defined]
        pass
    transfer.values()  # type: ignore[attr-defined]
    _ = stager.to_device(tensor).imgae  # type: ignore[attr-defined]


def a_loader() -> None:
    ps.DataLoader(
        Numbers(),
        4,
        True,
        persistent_workers=True,
        num_workers=1,
        prefetch_factor=4,
        max_bytes="1GiB",
    )
    ps.DataLoader(Numbers(), bacth_size=4)  # type: ignore[call-arg]
    ps.DataLoader(Numbers(), num_worker=2)  # type: ignore[call-arg]
    ps.DataLoader(Numbers(), batch_size="4")  # type: ignore[arg-type]
    ps.DataLoader(Numbers(), devise="cuda")  # type: ignore[call-arg]
    ps.DataLoader(Numbers(), max_bytes=[1])  # type: ignore[arg-type]


def names() -> None:
    _ = ps.Stagger  # type: ignore[attr-defined]
    ps.offload.save_on_cpu(ps.SlabPool(), min_byte=3)  # type: ignore[call-arg]
    ps.inspect.audit({}, deivce="cuda")  # type: ignore[call-arg]


def leases(lease: ps.Lease) -> None:
    lease.tensor((2, 3), torch.float32)
    lease.tensor(4, np.dtype("int64"))
    lease.numpy(4, "float32")

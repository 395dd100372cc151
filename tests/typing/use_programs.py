"""Programs as users write them, five of them whole: results keep types, mistakes are found. Checked
by mypy and pyright, never run.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, assert_type

import numpy as np
import torch

import pinstage as ps
from pinstage.checkpoint import CheckpointStager

log = logging.getLogger(__name__)
Array = np.ndarray[Any, np.dtype[np.float32]]
Leaf = torch.Tensor | Array


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


def rows_become_tensors(stager: ps.Stager, tensor: torch.Tensor, array: Array) -> None:
    index = torch.tensor([1, 2])
    leaf = ps.rows(tensor, index)
    assert_type(leaf, ps.Rows)
    assert_type(leaf.tensor(), torch.Tensor)
    assert_type(stager.to_device(leaf), torch.Tensor)
    named = {"x": leaf, "y": ps.rows(array, [0, 3])}
    assert_type(stager.to_device(named), dict[str, torch.Tensor])
    mixed: dict[str, torch.Tensor | ps.Rows] = {"x": leaf, "y": tensor}
    assert_type(stager.to_device(mixed), dict[str, torch.Tensor])
    assert_type(stager.stage([leaf]).wait(), list[torch.Tensor])
    assert_type(stager.to_device((leaf, tensor)), tuple[torch.Tensor, ...])
    assert_type(stager.prefetch(named for _ in range(3)), ps.Prefetcher[dict[str, torch.Tensor]])
    assert_type(stager.prefetch([leaf]), ps.Prefetcher[torch.Tensor])
    ps.rows(tensor, ["0"])  # type: ignore[list-item]
    ps.rows([1.0], index)  # type: ignore[arg-type]


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


# -- five whole programs ---------------------------------------------------------------------------


def trains_on_what_an_environment_returns(steps: Iterator[Mapping[str, Leaf]]) -> None:
    """A custom loop over observations, tensors and arrays."""
    with ps.Stager("cuda:0", max_bytes="2GiB", keep_on_host=["['length']"]) as stager:
        for step in steps:
            batch = stager.to_device(step)
            assert_type(batch, Mapping[str, torch.Tensor])
            loss = batch["observation"].sum()
            shown = stager.to_host({"loss": loss})
            assert_type(shown, dict[str, torch.Tensor])
        ahead = stager.prefetch(steps, depth=3)
        assert_type(ahead, ps.Prefetcher[Mapping[str, torch.Tensor]])
        assert_type([batch["reward"].mean() for batch in ahead], list[torch.Tensor])
        pairs = stager.stage((np.zeros(3, np.float32), torch.zeros(3))).wait()
        assert_type(pairs, tuple[torch.Tensor, ...])
        mixed: list[Leaf] = [np.zeros(3, np.float32), torch.zeros(3)]
        assert_type(stager.to_device(mixed), list[torch.Tensor])
        table: dict[str, Leaf] = {"a": np.zeros(3, np.float32), "b": torch.zeros(3)}
        assert_type(stager.to_device(table), dict[str, torch.Tensor])
        log.info("%s, held %d", stager.stats(), stager.stats().pool.held_bytes)


def trains_with_workers(budget: ps.HostBudget) -> None:
    """torch's loader, replaced by ours."""
    loader = ps.DataLoader(
        Numbers(),
        batch_size=4,
        shuffle=True,
        num_workers=2,
        device="cuda",
        budget=budget,
        depth=3,
        keep_on_host=lambda path, leaf: path.endswith(".name"),
    )
    for batch in loader:
        assert_type(batch, Sample)
        assert_type(batch.image, torch.Tensor)
        batch.nmae  # type: ignore[attr-defined]  # noqa: B018
    stats = loader.stats()
    seconds = stats.batch_wait_seconds / stats.elapsed_seconds
    assert_type(seconds, float)
    assert_type(stats.packed_bytes + stats.fallback_batches, int)
    log.info("%s: %s %.1f", loader.device.index, stats.bottleneck, seconds)
    loader.close()


def resumes_a_loader_of_another_class(
    other: torch.utils.data.DataLoader[dict[str, torch.Tensor]],
) -> dict[str, Any]:
    """An existing loader, wrapped."""
    loader = ps.wrap_loader(other, device="cuda", max_bytes="1GiB", own_storage=True, owner="train")
    assert_type(loader, ps.WrappedLoader[dict[str, torch.Tensor]])
    plain: torch.utils.data.DataLoader[dict[str, torch.Tensor]] = loader
    with loader:
        for batch in loader:
            assert_type(batch, dict[str, torch.Tensor])
        log.info("%d %s %d", loader.stats().batches, loader.device.type, len(plain))
        state: dict[str, Any] = loader.state_dict()
    loader.close()
    ps.wrap_loader([1, 2])  # type: ignore[arg-type]
    ps.wrap_loader(other, keep=["x"])  # type: ignore[call-arg]
    return state


def reads_frames_into_leases(
    frames: Iterator[bytes], stager: ps.Stager, event: torch.cuda.Event
) -> None:
    """The pool by hand, with the offset table."""
    pool = stager.pool
    pool.set_quota("frames", min_bytes="64MiB")
    layout = ps.Layout.of({"frame": torch.empty(512, 512)})
    for slot in layout.slots:
        assert_type(slot, ps.Slot)
    for frame in frames:
        with pool.acquire(layout.nbytes, timeout=1.0, owner="frames") as lease:
            lease.numpy()[: len(frame)] = np.frombuffer(frame, np.uint8)
            transfer = stager.stage_lease(lease, layout)
            assert_type(transfer, ps.Transfer[Any])
            fence: ps.Fence = event
            lease.guard(fence)
    ahead = stager.prefetch(torch.utils.data.DataLoader(Numbers()))
    assert_type(ahead.source, Any)
    ahead.dataset  # type: ignore[attr-defined]  # noqa: B018


def saves_and_offloads(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Checkpoints, and an optimizer's state on the host, from one pool."""
    pool = ps.SlabPool("8GiB", budget=ps.HostBudget("64GiB", name="job-7"))
    stager = CheckpointStager(pool=pool)
    with (
        ps.offload.optimizer_state(optimizer, pool, min_bytes="4MiB") as state,
        ps.inspect.step_times() as steps,
    ):
        assert_type(state, ps.offload.Offloaded)
        with ps.offload.save_on_cpu(pool, keep_on_device=lambda tensor: tensor.dim() == 0):
            model(torch.zeros(3)).sum().backward()
        state.onload()
    assert_type(steps.times["pack"].seconds, float)
    stager.stage({"model": model.state_dict()}).result()
    try:
        pool.acquire("1TiB")
    except ps.errors.BudgetExceededError as error:
        log.info("%d bytes", error.requested_bytes)

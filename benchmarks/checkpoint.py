"""How long an asynchronous checkpoint blocks training, with torch's stagers and with
`CheckpointStager`.

    python benchmarks/checkpoint.py --out benchmarks/results/checkpoint.json

The state is 150 tensors of 50 MiB and 2,000 of 32 bytes on the device: 7.9 GB, in the two dicts of
a model and its optimizer. (With a flat dict torch logs each entry, which took 40 to 90 ms more.)
The saves are real `async_save` calls. Their writer writes nothing, but checks the first and the
last element of each tensor, which change before every save.

| case | sample |
|---|---|
| `first` | the first save of a process: until all is on the host (`median`), and until `async_save` returned (`main`) |
| `later` | the same for later saves |
| `step` | a step during which a save begins: 0.25 s of device work, then a change of all tensors |

In `step`, the loop waits before the change for stagers that need it; `main` is until the call
returned, and `none` saves nothing.

`detail` has the growth of resident memory.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import StorageWriter

from comparison import MIB, Args, Outcome, Program, Size, Variant, ok, resident, synchronize

STEP_SECONDS = 0.25


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


class LooksOnly(StorageWriter):
    """Writes nothing; lists the tensors with wrong values."""

    def __init__(self, saves: int) -> None:
        self._saves = saves
        self.wrong: list[str] = []

    reset = set_up_storage_writer = finish = _nothing

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    prepare_global_plan = prepare_local_plan

    def write_data(self, plan: Any, planner: Any) -> torch.futures.Future[list[Any]]:
        for item in plan.items:
            if item.tensor_data is not None:
                flat = planner.resolve_data(item).detach().view(-1)
                expected = float(int(item.index.fqn.partition(".p")[2]) + self._saves)
                if {float(flat[0]), float(flat[-1])} != {expected}:
                    self.wrong.append(item.index.fqn)
        done: torch.futures.Future[list[Any]] = torch.futures.Future()
        done.set_result([])
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        return True


def elements(smoke: bool) -> list[int]:
    """Return the elements of each tensor."""
    return [1000] * 4 + [8] * 20 if smoke else [50 * MIB // 4] * 150 + [8] * 2000


class Job:
    """A state on a device, and saves of it."""

    def __init__(self, device: torch.device, stager: Any, smoke: bool) -> None:
        self.device, self.stager, self.saves = device, stager, 0
        self._tensors = [
            torch.full((n,), float(i), device=device) for i, n in enumerate(elements(smoke))
        ]
        self.state: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}}
        for i, tensor in enumerate(self._tensors):
            self.state["optimizer" if i % 3 else "model"][f"p{i}"] = tensor
        side = 64 if smoke else 8192
        self._factor = torch.randn(side, side, device=device)
        self._rounds = 1
        if device.type == "cuda" and not smoke:
            self._work()
            torch.cuda.synchronize()
            start = time.perf_counter()
            self._work()
            torch.cuda.synchronize()
            self._rounds = max(1, round(STEP_SECONDS / (time.perf_counter() - start)))

    def _work(self) -> None:
        for _ in range(self._rounds):
            torch.mm(self._factor, self._factor)

    def change(self) -> None:
        torch._foreach_add_(self._tensors, 1.0)
        self.saves += 1

    def save(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Begin a save; return a function that waits until it is staged, and one that waits for its
        end and checks.
        """
        writer = LooksOnly(self.saves)
        response = dcp.async_save(
            self.state, storage_writer=writer, async_stager=self.stager, no_dist=True
        )
        is_future = not hasattr(response, "staging_completion")
        staged = _nothing if is_future else response.staging_completion.result
        upload = response if is_future else response.upload_completion

        def end() -> None:
            upload.result()
            if writer.wrong:
                raise AssertionError(
                    f"{len(writer.wrong)} tensors with other values, {writer.wrong[0]} first"
                )

        return staged, end

    def sample(
        self, allow_change: Callable[[Callable[[], None]], None] | None
    ) -> tuple[float, float]:
        """Return the seconds of a save until all is staged or, if a change is allowed by something,
        of a step in which a save begins; and the seconds until the save's call returned.
        """
        synchronize(self.device)
        start = time.perf_counter()
        staged, end = self.save() if self.stager is not None else (_nothing, _nothing)
        returned = time.perf_counter()
        if allow_change is None:
            staged()
        else:
            self._work()
            allow_change(staged)
            self.change()
            synchronize(self.device)
        total = time.perf_counter()
        end()
        if allow_change is None:
            self.change()
        return total - start, returned - start


def _default(pinned: bool, shared: bool, in_thread: bool) -> DefaultStager:
    """Make torch's stager; non-blocking copies need pinned memory."""
    stager = DefaultStager(StagingOptions(pinned, shared, in_thread, pinned))
    # torch 2.11 closes this after each save, so the second one fails (pytorch/pytorch#183413);
    # later ones do not.
    stager._state_dict_stager.close = _nothing  # type: ignore[method-assign]
    return stager


def _pool(hold: str) -> Any:
    from pinstage.checkpoint import CheckpointStager

    return CheckpointStager(max_bytes="12GiB", hold=hold)  # type: ignore[arg-type]


def _torchs(*options: str) -> Variant:
    pinned, shared, in_thread = (name in options for name in ("pinned", "shared", "thread"))
    about = f"`DefaultStager`, pinned={pinned}, shared={shared}, in a thread={in_thread}"
    setup = partial(_default, pinned, shared, in_thread)
    return Variant("_".join(("default", *options)), setup, about, needs_cuda=pinned or in_thread)


VARIANTS = (
    Variant("none", _nothing, "no save", where=lambda case: case.id == "step"),
    Variant("blocking", BlockingAsyncStager, "`BlockingAsyncStager()`"),
    Variant(
        "blocking_cached",
        lambda: BlockingAsyncStager(cache_staged_state_dict=True),
        "`BlockingAsyncStager(cache_staged_state_dict=True)`",
        needs_cuda=True,
    ),
    _torchs(),
    _torchs("shared"),
    _torchs("pinned"),
    _torchs("pinned", "shared"),
    _torchs("thread"),
    _torchs("pinned", "thread"),
    _torchs("pinned", "shared", "thread"),
    Variant("pinstage", partial(_pool, "stream"), "`CheckpointStager()`", ours=True),
    Variant(
        "pinstage_step",
        partial(_pool, "step"),
        "`CheckpointStager(hold='step')`",
        ours=True,
    ),
)


def measure(variant: Variant, args: Args, _: Size) -> dict[str, Outcome]:
    """Return the samples of all cases, which share a stager."""
    gc.collect()
    gc.freeze()  # so that collections during saves don't walk torch's objects
    job, before = Job(args.device, variant.setup(), args.smoke), resident()

    def allow_change(staged: Callable[[], None]) -> None:
        """Wait, if needed, until the state may change."""
        if variant.id == "pinstage_step":
            job.stager.wait_before_change()  # what an optimizer's step does by itself
        elif variant.id != "pinstage":
            staged()

    outcomes = {}
    for case in filter(variant.suits, cases(args)):
        sample = partial(job.sample, allow_change if case.id == "step" else None)
        count = 1 if case.id == "first" else args.repeats
        total, main = zip(*(sample() for _ in range(count)), strict=True)
        outcomes[case.id] = ok(total, f"{(resident() - before) / 1e9:.2f} GB more resident", main)
    return outcomes


def cases(args: Args) -> list[Size]:
    """Return the cases, whose bytes are those of the state."""
    return [Size(name, 4 * sum(elements(args.smoke))) for name in ("first", "later", "step")]


PROGRAM = Program.of(
    globals(),
    title="ms until all is on the host (step: of the whole step)",
    cases=cases,
    at_once=True,
    options={"repeats": (3, "saves and steps after the first save")},
    small={"repeats": 2},
    limits=("none",),
    # torch warns in each save that there is no process group.
    begin=lambda _: warnings.simplefilter("ignore"),
)
PROGRAM.run(__name__)

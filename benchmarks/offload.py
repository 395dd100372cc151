"""Activations and optimizer state on the host: a training step with each way to save device memory.

    python benchmarks/offload.py --out benchmarks/results/offload.json

| case | sample |
|---|---|
| `first step` | forward and backward of 12 blocks (LayerNorm, 4096, 16384, 4096), 8192 tokens, bf16, the first time |
| `later steps` | the same, again and again |
| `state out`, `state back` | an optimizer's state of 8 GB in 32 tensors, until all is on the host, or on the device |

`bus` is the limit of the hardware: the saved bytes are copied from the device to existing
page-locked buffers, and then back. The detail of a row has the peak of device memory and the
page-locked bytes. Gradients are compared outside the timer, bit for bit, with those of a plain step in the same process: of the
blocks above, and of two small ones with attention. That attention is torch's own formula, since the
gradients of its fused kernels differ from run to run without offloading too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import frozen
import torch
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

from comparison import (
    GIB,
    MIB,
    Args,
    Incorrect,
    Outcome,
    Program,
    Variant,
    bus,
    in_turn,
    ok,
    synchronize,
    timed,
    turns,
)

FEWEST_REPEATS = 3


@dataclass(frozen=True)
class Case:
    """A model's sizes or an optimizer's state, and the part of the time that is measured."""

    id: str
    blocks: int = 0
    tokens: int = 0
    width: int = 0
    tensors: int = 0
    bytes_each: int = 0
    attends: bool = False

    @property
    def saved(self) -> list[int]:
        """Bytes of each tensor that a block without attention saves, except small ones."""
        return [n * self.tokens * self.width * 2 for n in (1, 1, 4, 4)] * self.blocks

    @property
    def nbytes(self) -> int:
        """Bytes that cross the bus; for a step, in both directions."""
        return 2 * sum(self.saved) + self.tensors * self.bytes_each


STEPS = tuple(Case(name, 12, 8192, 4096) for name in ("first step", "later steps"))
STATES = tuple(Case(name, tensors=32, bytes_each=256 * MIB) for name in ("state out", "state back"))
SMOKE_STEPS = tuple(Case(case.id, 2, 64, 32) for case in STEPS)
SMOKE_STATES = tuple(Case(case.id, tensors=3, bytes_each=4096) for case in STATES)
ATTENTION = Case("attention", 2, 512, 1024, attends=True)
SMOKE_ATTENTION = Case("attention", 2, 64, 64, attends=True)


class Block(torch.nn.Module):
    """A transformer block without attention: the size of its saved tensors is known to the byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.wide = torch.nn.Linear(width, 4 * width, bias=False)
        self.back = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.back(gelu(self.wide(self.norm(x))))
        return y


class AttentionBlock(frozen.Block):
    """A block with attention, whose gradients are the same in each run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # In here, since `checkpoint` runs it again.
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(x[None])[0]


class Training:
    """A model, its input, and the step that is timed."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        block: Any = AttentionBlock if case.attends else Block
        blocks = [block(case.width) for _ in range(case.blocks)]
        self.model = torch.nn.Sequential(*blocks).to(device, torch.bfloat16)
        self.input = torch.randn(case.tokens, case.width).to(device, torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the model."""
        y: torch.Tensor = self.model(x)
        return y

    def recomputed(self, x: torch.Tensor) -> torch.Tensor:
        """Run the model so that backward computes each block again."""
        for block in self.model:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def step(self, context: Any, forward: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """Return the seconds of one step."""
        x = self.input.clone().requires_grad_()
        self.model.zero_grad(set_to_none=True)
        synchronize(self.device)
        start = time.perf_counter()
        with context:
            y = forward(x)
        y.float().mean().backward()
        synchronize(self.device)
        return time.perf_counter() - start

    def gradients(self) -> list[torch.Tensor]:
        """Return the last step's gradients."""
        return [
            parameter.grad for parameter in self.model.parameters() if parameter.grad is not None
        ]

    def repeats(self, found: list[torch.Tensor]) -> bool:
        """Return whether a plain step has these gradients, or there are none to compare."""
        self.step(nullcontext(), self.forward)
        return not found or all(map(torch.equal, found, self.gradients()))


def pinned_by_torch() -> int:
    """Return the most bytes that torch had page-locked."""
    stats = torch.cuda.host_memory_stats() if torch.cuda.is_initialized() else {}
    return int(stats.get("allocated_bytes.peak", stats.get("reserved_bytes.peak", 0)))


# -- the ways of a step ----------------------------------------------------------------------------

Step = Callable[[], float]
"""Runs a step and returns its seconds."""
Said = Callable[[], str]
"""Returns the details at the end."""


def _step(
    training: Training,
    case: Case,  # noqa: ARG001
    *,
    context: Callable[[torch.device], Any] = nullcontext,
    forward: Callable[[Training, torch.Tensor], torch.Tensor] = Training.forward,
) -> tuple[Step, Said]:
    made = context(training.device)
    return lambda: training.step(made, partial(forward, training)), _page_locked


def _page_locked() -> str:
    return f"page-locked {pinned_by_torch() / 1e9:.1f} GB"


def _save_on_cpu(device: torch.device, *, pin: bool) -> Any:
    return save_on_cpu(pin_memory=pin and device.type == "cuda")


def _torchtune(_: torch.device) -> Any:
    from torchtune.training import OffloadActivations

    return OffloadActivations(use_pin_memory=True, use_streams=True)


def _bus(training: Training, case: Case) -> tuple[Step, Said]:
    back, out = bus(training.device, sum(case.saved))
    once = partial(timed, lambda: (out(), back()), training.device, repeats=1, warm_ups=0)
    return lambda: once()["total"][0], _page_locked


@contextmanager
def _pinstage(
    training: Training, case: Case, *, reserve: bool = False, tensors_on_device: int = 4
) -> Iterator[tuple[Step, Said]]:
    import pinstage as ps

    smallest, largest = min(case.saved), max(case.saved)
    with ps.SlabPool("16GiB", memory=ps.memory.default_memory(training.device)) as pool:
        if reserve:
            for nbytes in set(case.saved):
                pool.reserve(nbytes, count=case.saved.count(nbytes), background=True).synchronize()
        # 1 GiB, the default, for the models that are timed.
        offload = ps.offload.save_on_cpu(
            pool, min_bytes=min(MIB, smallest), max_device_bytes=tensors_on_device * largest
        )
        step = partial(training.step, offload, training.forward)
        yield step, lambda: f"page-locked {pool.stats().peak_held_bytes / 1e9:.1f} GB"


_of_step = partial(Variant, where=lambda case: case.blocks)


WAYS = (
    _of_step("kept", _step, "all activations stay on the device"),
    _of_step("recomputed", partial(_step, forward=Training.recomputed), "`torch.utils.checkpoint` around each block"),
    _of_step("save_on_cpu", partial(_step, context=partial(_save_on_cpu, pin=False)), "torch's `save_on_cpu()`"),
    _of_step("save_on_cpu_pinned", partial(_step, context=partial(_save_on_cpu, pin=True)), "torch's `save_on_cpu(pin_memory=True)`"),
    _of_step("torchtune", partial(_step, context=_torchtune), "torchtune's `OffloadActivations(use_pin_memory=True, use_streams=True)`",
        package="torchtune torchao", needs_cuda=True),
    _of_step("bus", _bus, "as many bytes out and then back, by a page-locked buffer"),
    _of_step("pinstage", _pinstage, "`ps.offload.save_on_cpu(pool)`", ours=True),
    _of_step("pinstage_reserved", partial(_pinstage, reserve=True), "with `pool.reserve()` before",
        ours=True),
    _of_step("pinstage_4GiB", partial(_pinstage, tensors_on_device=16), 'with `max_device_bytes="4GiB"`',
        ours=True),
)  # fmt: skip


def measure_steps(variant: Variant, args: Args, case: Case) -> dict[str, Outcome]:
    """Return the samples of the first step and of later ones."""
    device = args.device
    training = Training(case, device)
    training.step(nullcontext(), training.forward)  # loads kernels, for every way
    with variant.open(training, case) as (step, said):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        limits = {"fewest": FEWEST_REPEATS, "seconds": args.seconds}
        total = [step() for _ in turns(1 + args.repeats, **limits)]
        peak = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0
        detail = "; ".join(filter(None, (f"device peak {peak:.1f} GiB", said())))
        found = training.gradients()
    wrong = [] if training.repeats(found) else ["those of a plain step"]
    if not _is_right_with_attention(variant, args):
        wrong.append("those of a plain step with attention")
    if wrong:
        raise Incorrect(f"other gradients than {' and '.join(wrong)}")
    return {"first step": ok(total[:1], detail), "later steps": ok(total[1:], detail)}


def _is_right_with_attention(variant: Variant, args: Args) -> bool:
    case = SMOKE_ATTENTION if args.smoke else ATTENTION
    training = Training(case, args.device)
    with variant.open(training, case) as (step, _):
        for _turn in range(2):  # the second step uses the first one's host memory again
            step()
        found = training.gradients()
    return training.repeats(found)


# -- an optimizer's state --------------------------------------------------------------------------


def _state_bus(device: torch.device, case: Case) -> dict[str, Callable[[], None]]:
    back, out = bus(device, case.nbytes)
    return {"state out": out, "state back": back}


@contextmanager
def _state_pinstage(device: torch.device, case: Case) -> Iterator[dict[str, Callable[[], None]]]:
    import pinstage as ps

    parameters = [torch.nn.Parameter(torch.zeros(1, device=device)) for _ in range(case.tensors)]
    optimizer = torch.optim.SGD(parameters, momentum=0.9, lr=0.1)
    for parameter in parameters:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros(
            case.bytes_each // 4, device=device
        )
    with ps.SlabPool("16GiB", memory=ps.memory.default_memory(device)) as pool:
        offloaded = ps.offload.optimizer_state(optimizer, pool, min_bytes=min(MIB, case.bytes_each))
        # `state_dict` brings the state back as a step does.
        yield {
            "state out": offloaded.offload,
            "state back": lambda: optimizer.state_dict() and None,
        }
        offloaded.close()


_of_state = partial(Variant, where=lambda case: case.tensors)


STATE_WAYS = (
    _of_state("state_bus", _state_bus, "one page-locked buffer, copies only"),
    _of_state(
        "state_pinstage",
        _state_pinstage,
        "`ps.offload.optimizer_state(...)`",
        ours=True,
    ),
)


def measure_states(variant: Variant, args: Args, case: Case) -> dict[str, Outcome | Exception]:
    """Return the samples of both ways, which are taken in turn."""
    with variant.open(args.device, case) as ways:
        calls = {name: nullcontext(ways[name]) for name in ("state back", "state out")}
        return in_turn(calls, args.device, repeats=args.repeats, warm_ups=2)


def measure(variant: Variant, args: Args, case: Case) -> dict[str, Outcome | Exception]:
    """Return the outcomes of a way of a step, or of a state."""
    return (measure_steps if case.blocks else measure_states)(variant, args, case)


PROGRAM = Program.of(
    globals(),
    title="ms",
    ways=(*WAYS, *STATE_WAYS),
    cases=(*STEPS, *STATES),
    at_once=True,
    options={
        "repeats": (20, "later steps for each variant, at most"),
        "seconds": (4.0, f"stop after this time, once {FEWEST_REPEATS} are done"),
    },
    small_cases=(*SMOKE_STEPS, *SMOKE_STATES),
    small={"repeats": FEWEST_REPEATS, "seconds": 0.0},
    limits=("bus",),
)
PROGRAM.run(__name__)

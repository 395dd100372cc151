"""Frozen modules: how long each way takes to move three modules of 2 GB to the device and back, and
to run a stack of blocks that is on the host.

    python benchmarks/frozen.py --out benchmarks/results/frozen.json

| case | sample |
|---|---|
| `first` | page-locking, for all three modules |
| `onload` | one module, until it is on the device |
| `offload` | one module, until its device memory is free |
| `in turn` | all three, each used once, with the device memory of two |
| `in turn, buffers` | the same, for modules that count their uses in a buffer |
| `stack` | one pass through 24 equal transformer blocks, 3.6 GB in all |

With a buffer, the end of a block waits for the block's work: the columns `in turn` differ by the
cost of that.

`bus` and `stack_bus` copy as many bytes from memory that is already page-locked. Outputs are
compared outside the timer, bit for bit: of modules with outputs of the same weights copied one by
one, of the stack with those of the plain stack on the device, after every pass. The detail of a
stack's row has the peak of device memory.

The rivals with a stack need diffusers and accelerate. On the CPU they run without streams.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

import pinstage as ps
from comparison import (
    MIB,
    Args,
    Incorrect,
    Outcome,
    Program,
    Variant,
    bus,
    ok,
    synchronize,
    timed,
    turns,
)
from pinstage import offload

MODULES = 3
HEAD = 64
"""Width of an attention head."""
POOL = "12GiB"
"""Cap of our pool, which is above what either case needs."""
SECONDS = 3.0


@dataclass(frozen=True)
class Case:
    """What is timed, and the modules' sizes."""

    id: str
    width: int
    layers: int
    tokens: int
    modules: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes that are copied to the device, or page-locked."""
        return self.modules * self.layers * self.width**2 * 2


def cases_of(width: int, layers: int, tokens: int) -> tuple[Case, ...]:
    """Return the cases for modules of one size."""
    names = ("first", "onload", "offload", "in turn", "in turn, buffers")
    return tuple(
        Case(name, width, layers, tokens, 1 if "load" in name else MODULES) for name in names
    )


CASES = cases_of(4096, 60, 8192)
SMALL_CASES = cases_of(64, 3, 4)


@dataclass(frozen=True)
class StackCase:
    """The sizes of a stack of transformer blocks."""

    id: str
    width: int
    blocks: int
    tokens: int

    @property
    def nbytes(self) -> int:
        """Bytes that are copied to the device for a pass: of the weights of a block, four matrices
        for the attention, eight after it, and two norms.
        """
        return self.blocks * (12 * self.width**2 + 4 * self.width) * 2


STACK = StackCase("stack", 2496, 24, 4096)
SMOKE_STACK = StackCase("stack", HEAD, 4, 8)


class Way(NamedTuple):
    """One way, set up for existing modules."""

    onload: Callable[[int], object]
    """Start copying the module with this number to the device."""
    offload: Callable[[int], object]
    use: Callable[[int, torch.Tensor], torch.Tensor] | None = None
    """Compute with a module and offload it, while the next one is copied; None: onload, compute,
    offload.
    """
    before: Callable[[int], object] = lambda _: None
    """Called outside the timer, before `onload`."""


def make(case: Case) -> list[torch.nn.Sequential]:
    """Return the modules, on the host, in pageable memory."""
    torch.manual_seed(0)
    base = torch.randn(case.width, case.width, dtype=torch.bfloat16) / case.width**0.5
    modules = []
    for number in range(MODULES):
        layers = [
            torch.nn.Linear(case.width, case.width, bias=False, dtype=torch.bfloat16, device="meta")
            for _ in range(case.layers)
        ]
        for place, layer in enumerate(layers):
            layer.weight = torch.nn.Parameter(
                base.roll(number * case.layers + place, 0), requires_grad=False
            )
        modules.append(torch.nn.Sequential(*layers))
    return modules


class Block(torch.nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        linear = partial(torch.nn.Linear, bias=False)
        self.first_norm, self.second_norm = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.projections, self.attended = linear(width, 3 * width), linear(width, width)
        self.wide, self.back = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected = self.projections(self.first_norm(x)).unflatten(-1, (3, -1, HEAD))
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.attended(found.transpose(1, 2).flatten(2))
        y: torch.Tensor = x + self.back(torch.nn.functional.gelu(self.wide(self.second_norm(x))))
        return y


class Stack(torch.nn.Module):
    """Blocks, and a norm after the last one.

    The norm makes the comparison fair: diffusers 0.42 starts its prefetching only in a model with
    a part outside the blocks. Without one, its block level with streams can compute before weights
    have arrived.
    """

    def __init__(self, blocks: Sequence[Block], width: int) -> None:
        super().__init__()
        self.blocks, self.norm = torch.nn.ModuleList(blocks), torch.nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.norm(x)
        return y


def make_stack(case: StackCase) -> Stack:
    """Return the stack, on the host, in pageable memory."""
    torch.manual_seed(0)
    weights = Block(case.width).to(torch.bfloat16).state_dict()
    with torch.device("meta"):
        blocks = [Block(case.width) for _ in range(case.blocks)]
    for number, block in enumerate(blocks):  # the weights of another block give other outputs
        rolled = {name: weight.roll(number, 0) for name, weight in weights.items()}
        block.load_state_dict(rolled, assign=True)
    return Stack(blocks, case.width).to(torch.bfloat16).requires_grad_(False)


def count_uses(module: torch.nn.Module) -> None:
    """Give a module a buffer, which each use changes."""

    def count(module: torch.nn.Module, *_: object) -> None:
        module.uses.add_(1)

    module.register_buffer("uses", torch.zeros((), dtype=torch.int64))
    module.register_forward_hook(count)


# -- the ways of modules ----------------------------------------------------------------------------

Modules = list[torch.nn.Sequential]


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _pin(module: torch.nn.Module, device: torch.device) -> None:
    for tensor in _tensors(module):
        tensor.data = tensor.data.pin_memory() if device.type == "cuda" else tensor.data.clone()


def _to(modules: Modules, device: torch.device, *, pinned: bool) -> Way:
    def before(number: int) -> None:
        if pinned:  # `.to("cpu")` returns pageable memory
            _pin(modules[number], device)

    return Way(
        lambda number: modules[number].to(device, non_blocking=pinned),
        lambda number: modules[number].to("cpu"),
        before=before,
    )


def _by_hand(modules: Modules, device: torch.device) -> Way:
    for module in modules:
        _pin(module, device)
    host = [[tensor.data for tensor in _tensors(module)] for module in modules]

    def onload(number: int) -> None:
        for tensor, content in zip(_tensors(modules[number]), host[number], strict=True):
            tensor.data = content.to(device, non_blocking=True)

    def offload(number: int) -> None:
        for tensor, content in zip(_tensors(modules[number]), host[number], strict=True):
            if not isinstance(tensor, torch.nn.Parameter):
                content.copy_(tensor)
            tensor.data = content

    return Way(onload, offload)


def _bus(modules: Modules, device: torch.device) -> Way:
    onload, _ = bus(device, sum(parameter.nbytes for parameter in modules[0].parameters()))
    return Way(onload, lambda _: None, use=lambda _, x: (onload(), x)[1])


@contextmanager
def _handles(modules: Sequence[torch.nn.Module], device: torch.device) -> Iterator[list[Any]]:
    """Yield a handle for each module."""
    with ps.SlabPool(POOL, memory=ps.memory.default_memory(device)) as pool:
        handles = [offload.frozen_module(module, pool, device=device) for module in modules]
        yield handles
        for handle in handles:
            handle.close()


def _used(
    handles: Sequence[Any], modules: Sequence[torch.nn.Module], number: int, x: torch.Tensor
) -> torch.Tensor:
    """Compute with a module, while the next one is copied to the device."""
    with handles[number]:
        if number + 1 < len(handles):
            handles[number + 1].onload()
        y: torch.Tensor = modules[number](x)
        return y


@contextmanager
def _pinstage(modules: Modules, device: torch.device) -> Iterator[Way]:
    with _handles(modules, device) as handles:
        yield Way(
            lambda number: handles[number].__enter__(),
            lambda number: handles[number].offload(),
            partial(_used, handles, modules),
        )


_of_modules = partial(Variant, where=lambda case: isinstance(case, Case))


WAYS = (
    _of_modules("to", partial(_to, pinned=False), '`module.to("cuda")`, `.to("cpu")`'),
    _of_modules(
        "to_pinned",
        partial(_to, pinned=True),
        "the same from page-locked memory, made outside the timer",
    ),
    _of_modules("by_hand", _by_hand, "page-locked copies, and `parameter.data =` tensor by tensor"),
    _of_modules("bus", _bus, "one page-locked buffer of 256 MiB, copies only"),
    _of_modules(
        "pinstage",
        _pinstage,
        "`ps.offload.frozen_module(module, pool)`",
        ours=True,
    ),
)


def measure_modules(variant: Variant, args: Args, case: Case) -> dict[str, Outcome]:
    """Return the samples of all cases of three modules."""
    device, modules = args.device, make(case)
    x = torch.randn(case.tokens, case.width).to(device, torch.bfloat16)
    expected = x
    for weight in torch.nn.ModuleList(modules).parameters():
        expected = torch.nn.functional.linear(expected, weight.to(device))
    _limit_memory(case, device)
    samples: dict[str, list[float]] = {}
    results = [_take(variant, args, modules, x, samples, "in turn")]
    for module in modules:
        count_uses(module)
    results.append(_take(variant, args, modules, x, samples, "in turn, buffers"))
    uses = len(samples["in turn, buffers"])
    right = all(torch.equal(y, expected) for y in results) and all(
        int(module.uses) == uses for module in modules
    )
    if not right and variant.id != "bus":
        raise Incorrect("other outputs or uses")
    # In the first turn, allocations are made and kernels loaded.
    return {name: ok(some[:1] if name == "first" else some[1:]) for name, some in samples.items()}


def _take(
    variant: Variant,
    args: Args,
    modules: Modules,
    x: torch.Tensor,
    samples: dict[str, list[float]],
    name: str,
) -> torch.Tensor:
    """Take samples of a way, and of all modules in turn under a name; return the last output."""

    def add(name: str, call: Callable[..., Any], *given: Any) -> Any:
        synchronize(args.device)
        began = time.perf_counter()
        found = call(*given)
        synchronize(args.device)
        samples.setdefault(name, []).append(time.perf_counter() - began)
        return found

    some_turns = partial(turns, 1 + args.repeats, fewest=2, seconds=SECONDS)
    with torch.inference_mode(), ExitStack() as opened:
        way = add("first", opened.enter_context, variant.open(modules, args.device))
        for _ in () if "onload" in samples else some_turns():
            way.before(0)
            add("onload", way.onload, 0)
            add("offload", way.offload, 0)
        for _ in some_turns():
            for number in range(MODULES):
                way.before(number)
            y: torch.Tensor = add(name, _in_turn, way, modules, x)
    return y


def _limit_memory(case: Case, device: torch.device) -> None:
    """Leave device memory for two modules."""
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    limit = torch.cuda.memory_reserved(device) + 2 * case.nbytes // MODULES + 1024 * MIB
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)


def _in_turn(way: Way, modules: Modules, x: torch.Tensor) -> torch.Tensor:
    for number in range(MODULES):
        if way.use is not None:
            x = way.use(number, x)
            continue
        way.onload(number)
        x = modules[number](x)
        way.offload(number)
    return x


# -- the ways of a stack: a call that runs it on an input on the device ----------------

Run = Callable[[torch.Tensor], torch.Tensor | None]
"""Returns the output, or None if nothing is computed."""


def _stack_bus(stack: Stack, device: torch.device) -> Run:
    nbytes = sum(parameter.nbytes for parameter in stack.blocks.parameters())
    return bus(device, nbytes, nbytes // len(stack.blocks))[0]


@contextmanager
def _stack_blocks(stack: Stack, device: torch.device) -> Iterator[Run]:
    stack.norm.to(device)
    with _handles(list(stack.blocks), device) as handles:

        def run(x: torch.Tensor) -> torch.Tensor:
            for number in range(len(handles)):
                x = _used(handles, stack.blocks, number, x)
            y: torch.Tensor = stack.norm(x)
            return y

        yield run


@contextmanager
def _stack_whole(stack: Stack, device: torch.device) -> Iterator[Run]:
    with _handles([stack], device) as handles:
        yield partial(_used, handles, [stack], 0)


def _diffusers(stack: Stack, device: torch.device, *, level: str, record: bool = False) -> Run:
    from diffusers.hooks import apply_group_offloading

    has_streams = device.type == "cuda"
    apply_group_offloading(
        stack,
        onload_device=device,
        offload_type=level,
        num_blocks_per_group=1 if level == "block_level" else None,
        use_stream=has_streams,
        record_stream=record and has_streams,
    )
    return stack


def _accelerate(stack: Stack, device: torch.device) -> Run:
    from accelerate import cpu_offload

    cpu_offload(stack, execution_device=device)
    return stack


_of_stack = partial(Variant, where=lambda case: isinstance(case, StackCase))


OFFLOADS = "diffusers' group offloading of each {}, `use_stream=True`"
DIFFUSERS = (
    ("block", "block_level", OFFLOADS.format("block")),
    ("leaf", "leaf_level", OFFLOADS.format("leaf module")),
)
STACK_WAYS = (
    _of_stack("stack_bus", _stack_bus, "one page-locked buffer of a block's size, copies only"),
    _of_stack(
        "stack_blocks",
        _stack_blocks,
        "`frozen_module` with a handle for each block, the next one's `onload()` ahead",
        ours=True,
    ),
    _of_stack(
        "stack_whole",
        _stack_whole,
        "`frozen_module` with one handle for the stack",
        ours=True,
    ),
    *(
        _of_stack(
            f"diffusers_{part}{'_recorded' * record}",
            partial(_diffusers, level=level, record=record),
            about if not record else "the same, `record_stream=True`",
            package="diffusers accelerate",  # its hooks import accelerate, and fail without it
        )
        for part, level, about in DIFFUSERS
        for record in (False, True)
    ),
    _of_stack(
        "accelerate",
        _accelerate,
        "accelerate's `cpu_offload`, from pageable memory",
        package="accelerate",
    ),
)


def measure_stack(variant: Variant, args: Args, case: StackCase) -> Outcome:
    """Return the samples, and whether every pass gave the plain stack's output."""
    device, stack = args.device, make_stack(case)
    x = torch.randn(1, case.tokens, case.width).to(device, torch.bfloat16)
    with torch.inference_mode():
        expected = copy.deepcopy(stack).to(device)(x)
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    right: list[bool] = []
    with torch.inference_mode(), variant.open(stack, device) as run:
        # The first pass makes allocations, loads kernels, and traces the order of modules.
        outcome = timed(
            partial(run, x),
            device,
            repeats=args.repeats,
            seconds=SECONDS,
            fewest=1,
            warm_ups=1,
            check=lambda y: right.append(y is None or torch.equal(y, expected)),
        )
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0
    outcome["detail"] = f"device peak {peak:.2f} GB"
    if not all(right):
        outcome["status"] = "incorrect"
        outcome["detail"] += f"; {right.count(False)} of {len(right)} results are wrong"
    return outcome


def measure(variant: Variant, args: Args, case: Any) -> dict[str, Outcome]:
    """Return the outcomes of a way of modules, or of a stack."""
    if isinstance(case, StackCase):
        return {case.id: measure_stack(variant, args, case)}
    return measure_modules(variant, args, case)


PROGRAM = Program.of(
    globals(),
    title="ms",
    ways=(*WAYS, *STACK_WAYS),
    cases=(*CASES, STACK),
    at_once=True,
    options={"repeats": (5, "samples for each variant and case")},
    small_cases=(*SMALL_CASES, SMOKE_STACK),
    limits=("bus", "stack_bus"),
)
PROGRAM.run(__name__)

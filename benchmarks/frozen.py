"""Frozen modules: how long each way takes to move three modules of 2 GB to the device and back.

    python benchmarks/frozen.py --out benchmarks/results/frozen.json

| case | sample |
|---|---|
| `first` | page-locking, for all three modules |
| `onload` | one module, until it is on the device |
| `offload` | one module, until its device memory is free |
| `in turn` | all three, each used once, with the device memory of two |
| `in turn, buffers` | the same, for modules that count their uses in a buffer |

With a buffer, the end of a block waits for the block's work: the last two columns differ by the
cost of that.

`bus` copies as many bytes from memory that is already page-locked. Outputs are compared outside the
timer, bit for bit, with outputs of the same weights copied one by one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import script
import torch

from comparison import harness, table
from comparison.harness import Outcome, Variant

MIB = 1 << 20
MODULES = 3
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
    modules = {
        "first": MODULES,
        "onload": 1,
        "offload": 1,
        "in turn": MODULES,
        "in turn, buffers": MODULES,
    }
    return tuple(Case(name, width, layers, tokens, count) for name, count in modules.items())


CASES = cases_of(4096, 60, 8192)
SMOKE_CASES = cases_of(64, 3, 4)


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


def count_uses(module: torch.nn.Module) -> None:
    """Give a module a buffer, which each use changes."""

    def count(module: torch.nn.Module, *_: object) -> None:
        module.uses.add_(1)

    module.register_buffer("uses", torch.zeros((), dtype=torch.int64))
    module.register_forward_hook(count)


def synchronize(device: torch.device) -> None:
    """Wait for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- the ways --------------------------------------------------------------------------------------

Modules = list[torch.nn.Sequential]


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _pin(module: torch.nn.Module, device: torch.device) -> None:
    for tensor in _tensors(module):
        tensor.data = tensor.data.pin_memory() if device.type == "cuda" else tensor.data.clone()


@contextmanager
def _to(modules: Modules, device: torch.device, *, pinned: bool) -> Iterator[Way]:
    def before(number: int) -> None:
        if pinned:  # `.to("cpu")` returns pageable memory
            _pin(modules[number], device)

    yield Way(
        lambda number: modules[number].to(device, non_blocking=pinned),
        lambda number: modules[number].to("cpu"),
        before=before,
    )


@contextmanager
def _by_hand(modules: Modules, device: torch.device) -> Iterator[Way]:
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

    yield Way(onload, offload)


@contextmanager
def _bus(modules: Modules, device: torch.device) -> Iterator[Way]:
    nbytes = sum(parameter.nbytes for parameter in modules[0].parameters())
    size = min(nbytes, 256 * MIB)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(-(-nbytes // size))]

    def onload(_: int) -> None:
        left = nbytes
        for block in there:
            block[:left].copy_(host[: min(left, size)], non_blocking=True)
            left -= size

    yield Way(onload, lambda _: None, use=lambda number, x: (onload(number), x)[1])


@contextmanager
def _pinstage(modules: Modules, device: torch.device) -> Iterator[Way]:
    import pinstage as ps

    with ps.SlabPool("12GiB", memory=ps.memory.default_memory(device)) as pool:
        handles = [ps.offload.frozen_module(module, pool, device=device) for module in modules]

        def use(number: int, x: torch.Tensor) -> torch.Tensor:
            with handles[number]:
                if number + 1 < MODULES:
                    handles[number + 1].onload()
                y: torch.Tensor = modules[number](x)
                return y

        yield Way(
            lambda number: handles[number].__enter__(),
            lambda number: handles[number].offload(),
            use,
        )
        for handle in handles:
            handle.close()


WAYS = (
    Variant("to", partial(_to, pinned=False), '`module.to("cuda")`, `.to("cpu")`'),
    Variant(
        "to_pinned",
        partial(_to, pinned=True),
        "the same from page-locked memory, made outside the timer",
    ),
    Variant("by_hand", _by_hand, "page-locked copies, and `parameter.data =` tensor by tensor"),
    Variant("bus", _bus, "one page-locked buffer of 256 MiB, copies only"),
    Variant(
        "pinstage",
        _pinstage,
        "`ps.offload.frozen_module(module, pool)`",
        package="pinstage",
        ours=True,
    ),
)


class Measure:
    """One variant's samples; the first case measures all of them."""

    def __init__(self, variant: Variant, args: Any) -> None:
        self._variant, self._repeats, self._device = (
            variant,
            args.repeats,
            torch.device(args.device),
        )
        self._samples: dict[str, list[float]] = {}
        self._outcome: Outcome = {}

    def measure(self, case: Case) -> Outcome:
        """Return the samples of a case."""
        if not self._samples:
            self._run(case)
        return {**self._outcome, "total": self._samples[case.id]}

    def _run(self, case: Case) -> None:
        device, modules = self._device, make(case)
        x = torch.randn(case.tokens, case.width).to(device, torch.bfloat16)
        expected = x
        for module in modules:
            for parameter in module.parameters():
                expected = torch.nn.functional.linear(expected, parameter.to(device))
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(device).total_memory
            limit = torch.cuda.memory_reserved(device) + 2 * case.nbytes // MODULES + 1024 * MIB
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
            torch.cuda.reset_peak_memory_stats(device)
        if self._variant.package:
            import_module("pinstage.offload")
        began = time.perf_counter()
        with torch.inference_mode(), self._variant.setup(modules, device) as way:
            self._add("first", began)
            for _ in self._turns():
                way.before(0)
                began = self._begin()
                way.onload(0)
                self._add("onload", began)
                began = self._begin()
                way.offload(0)
                self._add("offload", began)
            results = self._in_turns("in turn", way, modules, x)
        for module in modules:
            count_uses(module)
        with torch.inference_mode(), self._variant.setup(modules, device) as way:
            results += self._in_turns("in turn, buffers", way, modules, x)
        is_right = self._variant.id == "bus" or self._is_right(results, expected, modules)
        for name in ("onload", "offload", "in turn", "in turn, buffers"):
            del self._samples[name][0]  # made allocations and loaded kernels
        peak = torch.cuda.max_memory_reserved(device) / 1e9 if device.type == "cuda" else 0.0
        self._outcome = {
            "status": "ok" if is_right else "incorrect",
            "detail": f"device peak {peak:.1f} GB",
        }

    def _in_turns(
        self, name: str, way: Way, modules: Modules, x: torch.Tensor
    ) -> list[torch.Tensor]:
        """Take the samples of all modules in turn; return the last output."""
        for _ in self._turns():
            for number in range(MODULES):
                way.before(number)
            began = self._begin()
            y = self._in_turn(way, modules, x)
            self._add(name, began)
        return [y]

    def _is_right(
        self, results: list[torch.Tensor], expected: torch.Tensor, modules: Modules
    ) -> bool:
        """Return whether outputs are as expected, and the modules have counted their uses."""
        uses = len(self._samples["in turn, buffers"])
        has_counted = all(int(module.uses) == uses for module in modules)
        return has_counted and all(torch.equal(y, expected) for y in results)

    def _turns(self) -> Iterator[int]:
        """Yield once for the allocations and kernels, then for each sample: at least one, until the
        time is up.
        """
        began = time.perf_counter()
        for turn in range(1 + self._repeats):
            if turn < 2 or time.perf_counter() - began < SECONDS:
                yield turn

    def _in_turn(self, way: Way, modules: Modules, x: torch.Tensor) -> torch.Tensor:
        for number in range(MODULES):
            if way.use is not None:
                x = way.use(number, x)
                continue
            way.onload(number)
            x = modules[number](x)
            way.offload(number)
        return x

    def _begin(self) -> float:
        synchronize(self._device)
        return time.perf_counter()

    def _add(self, name: str, began: float) -> None:
        synchronize(self._device)
        self._samples.setdefault(name, []).append(time.perf_counter() - began)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return 1 if a variant failed or gave other outputs."""
    parser = script.parser(__doc__, repeats=5, repeats_help="samples for each variant and case")
    args = parser.parse_args(argv)
    script.settle_device(args)
    cases = SMOKE_CASES if args.smoke else CASES
    if args.child:
        (variant,) = script.chosen(args.child, WAYS)
        harness.start_device(torch.device(args.device))
        harness.work(cases, Measure(variant, args).measure, lambda: None)  # type: ignore[arg-type]
        return 0
    variants = script.chosen(args.only, WAYS)
    judge = script.compare_on_a_gpu(args, "bus")
    further = ["--smoke"] if args.smoke else []
    rows = script.collect("frozen", __file__, variants, cases, args, further, judge=judge)
    table.grid("median ms", rows, "median")
    table.grid("GB/s", rows, "gb_per_s")
    return script.finish("frozen", rows, variants, args)


if __name__ == "__main__":
    sys.exit(main())

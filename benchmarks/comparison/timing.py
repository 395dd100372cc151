"""Timers that all benchmarks share: calls until the device is done, of one way or of several in
turn, and calls beside a busy GPU.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from comparison.errors import Incorrect
from comparison.harness import Outcome, ok

BUSY_SECONDS = 0.1
BUSY_KERNELS = 10
BUSY_REPEATS = 3

Call = Callable[..., Any]


def timed(call: Call, device: torch.device, **limits: Any) -> Outcome:
    """Return the outcome of one call; `limits` are those of `in_turn`. Raises what the call raises."""
    outcome = in_turn({"": nullcontext(call)}, device, **limits)[""]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def in_turn(
    ways: Mapping[str, AbstractContextManager[Call]],
    device: torch.device,
    *,
    repeats: int,
    seconds: float = math.inf,
    fewest: int = 3,
    warm_ups: int = 3,
    warm_seconds: float = 0.0,
    inputs: Sequence[Sequence[Any]] = ((),),
    steps: int = 1,
    check: Callable[[Any], object] = lambda result: None,  # noqa: ARG005
) -> dict[str, Outcome | Exception]:
    """Time ways in turn: one call of each, again and again, so that a drift of the machine affects
    all alike. Each turn has another order: caches have what the call before has read.

    Return, for each way, the seconds of its calls until the device was done as `total`, and until
    they returned as `main`; or what it raised, and then it has no further turns. What a call
    returns is dropped before the next one, outside the timer.

    Args:
        ways: Each is entered for its call, and left at the end.
        device: The device to wait for.
        repeats: The most timed calls of a way.
        seconds: Time limit for these calls, for each way, once `fewest` are done.
        fewest: The fewest timed calls.
        warm_ups: The fewest untimed calls before.
        warm_seconds: Untimed calls go on for this time, for each way.
        inputs: The arguments of calls, in turn: each way has all of them.
        steps: The steps of a call; the seconds are those of a step.
        check: Called with what a call returned, outside the timer.
    """
    errors: dict[str, Exception] = {}
    calls: dict[str, Call] = {}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}

    def sample(call: Call, arguments: Sequence[Any]) -> tuple[float, float]:
        start = perf_counter()
        kept = call(*arguments)
        returned = perf_counter()
        synchronize(device)
        done = perf_counter()
        check(kept)
        return (done - start) / steps, (returned - start) / steps

    def take(turn: int) -> None:
        order = random.Random(turn).sample(list(calls), len(calls))
        for number, name in enumerate(order, turn):
            if name not in errors:
                with _kept(errors, name):
                    samples[name].append(sample(calls[name], inputs[number % len(inputs)]))

    with ExitStack() as opened:
        for name, way in ways.items():
            with _kept(errors, name):
                calls[name] = opened.enter_context(way)
        synchronize(device)
        for untimed in turns(fewest=warm_ups, seconds=warm_seconds * len(ways)):
            take(untimed)
        for some in samples.values():
            some.clear()
        for turn in turns(repeats, fewest=fewest, seconds=seconds * len(ways)):
            take(turn)
    return {name: errors.get(name) or _outcome(some) for name, some in samples.items()}


def _outcome(samples: Sequence[tuple[float, float]]) -> Outcome:
    total, main = zip(*samples, strict=True)
    return ok(total, main=main)


@contextmanager
def _kept(errors: dict[str, Exception], name: str) -> Iterator[None]:
    """Keep what is raised inside, under a name."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever a way raises is its result
        errors[name] = error


def turns(most: float = math.inf, *, fewest: int, seconds: float) -> Iterator[int]:
    """Yield the numbers of turns: at most `most`, for some seconds once `fewest` are done."""
    began = perf_counter()
    for turn in count():
        if turn >= most or (turn >= fewest and perf_counter() - began > seconds):
            return
        yield turn


def beside_kernels(
    call: Callable[..., Any], device: torch.device, inputs: Sequence[Sequence[Any]] = ((),)
) -> list[float]:
    """Return the seconds until calls returned while the current stream has kernels to run before
    them; nothing without a GPU.
    """
    if device.type != "cuda":
        return []
    run_kernel = kernel(device, BUSY_SECONDS / BUSY_KERNELS)
    took: list[float] = []
    for turn in range(BUSY_REPEATS):
        for _ in range(BUSY_KERNELS):
            run_kernel()
        start = perf_counter()
        kept = call(*inputs[turn % len(inputs)])
        took.append(perf_counter() - start)
        synchronize(device)
        del kept
    return took


def kernel(device: torch.device, seconds: float) -> Callable[[], None]:
    """Return a function that starts a kernel of some seconds on the current stream."""
    sleep: Callable[[int], None] = torch.cuda._sleep
    for cycles in (1000, 10_000_000):  # the first turn loads the kernel
        began = perf_counter()
        sleep(cycles)
        synchronize(device)
        took = perf_counter() - began
    return partial(sleep, int(cycles * seconds / took))


def resident() -> int:
    """Return the resident bytes of this process, explicit huge pages included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = (line.split()[1] for line in lines if line.startswith(("VmRSS", "HugetlbPages")))
    return sum(map(int, sizes)) << 10


def bus(
    device: torch.device, nbytes: int, piece: int = 256 << 20
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return functions that copy as many bytes to the device, and back: the limit of the hardware.
    They use one page-locked buffer, piece by piece.
    """
    size = min(piece, nbytes)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=device)

    def copy(target: torch.Tensor, source: torch.Tensor, *_: Any) -> None:
        for begin in range(0, nbytes, size):
            target[: nbytes - begin].copy_(source[: nbytes - begin], non_blocking=True)

    return partial(copy, there, host), partial(copy, host, there)


def compare(got: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    """Compare tensors with those on the host, bit for bit.

    Raises:
        Incorrect: One differs.
    """
    for number, (there, here) in enumerate(zip(got, expected, strict=True)):
        if not torch.equal(there.cpu(), here):
            raise Incorrect(f"tensor {number} has other bits")


def synchronize(device: torch.device) -> None:
    """Wait for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def empty_caches(device: torch.device) -> None:
    """Free torch's cached device and page-locked memory, so that all cases start from the same
    state.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        # torch 2.11 has only its private name.
        private = getattr(torch._C, "_host_emptyCache", lambda: None)
        getattr(torch.accelerator, "empty_host_cache", private)()

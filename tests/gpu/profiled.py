"""Events of torch's profiler."""

from collections.abc import Callable

import torch
from torch.autograd.profiler_util import FunctionEvent


def events_of(work: Callable[[], object], *, final_synchronize: bool = True) -> list[FunctionEvent]:
    """Run work under torch's profiler and return all device and runtime events."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        work()
        if final_synchronize:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return profiler.events()


def names_of(work: Callable[[], object], *, final_synchronize: bool = True) -> list[str]:
    """Return the names of the events of some work."""
    return [event.name for event in events_of(work, final_synchronize=final_synchronize)]

"""Events of torch's profiler."""

import torch


def events_of(work, *, final_synchronize=True):
    """Run work under torch's profiler and return all device and runtime events."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        work()
        if final_synchronize:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return profiler.events()


def names_of(work, *, final_synchronize=True):
    """Return the names of the events of some work."""
    return [event.name for event in events_of(work, final_synchronize=final_synchronize)]

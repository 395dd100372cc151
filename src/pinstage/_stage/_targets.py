"""Which device is a target, and the targets that are kept."""

from __future__ import annotations

import torch

from .._compat.views import warn_of_tensors
from ._cuda_target import CudaTarget
from ._target import Target


class Targets:
    """Devices that tensors are fetched from. Each target is made when it is first needed. Safe for
    several threads.

    Args:
        known: targets that exist already.
    """

    def __init__(self, *known: Target) -> None:
        self._made = {target.device: target for target in known}

    def of(self, device: torch.device) -> Target:
        """Return the target for a device that tensors are on."""
        target = self._made.get(device)
        if target is None:  # no lock: if two threads make one, one of them is used
            target = self._made.setdefault(
                device, CudaTarget(device) if device.type == "cuda" else Target()
            )
        return target


shared_targets = Targets()
"""The targets of the process, for users that can share their streams."""


def target_for(device: torch.device | str | int | None) -> Target:
    """Return the target for a device; for None, the current CUDA device if there is one, else the
    CPU.

    Raises:
        ValueError: the device is neither a CUDA device nor the CPU.
        CudaUnavailableError: CUDA is not available.
    """
    warn_of_tensors()
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if type(device) is int:  # not torch.device(0), which fails without an accelerator
            device = f"cuda:{device}"
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"not a device: {device!r}; write 'cuda', 'cuda:0' or 'cpu'") from error
    if device.type == "cuda":
        return CudaTarget(device, stages=True)
    if device.type == "cpu":
        return Target()
    raise ValueError(f"cannot stage to {device}: only CUDA devices and the CPU are supported")

"""torch's DTensor: its local part is staged. The mesh doesn't change, as with ``DTensor.to``."""

from __future__ import annotations

from torch.distributed.tensor import DTensor

import pinstage as ps


def nodes(cls: type) -> None:
    if issubclass(cls, DTensor):
        ps.register_tensor(DTensor)

"""torchvision's tv_tensors, which keep their attributes."""

from __future__ import annotations

import sys

import pinstage as ps


def nodes(cls: type) -> None:
    found = sys.modules.get("torchvision.tv_tensors")
    if found is not None and issubclass(cls, found.TVTensor):
        ps.register_tensor(found.TVTensor)

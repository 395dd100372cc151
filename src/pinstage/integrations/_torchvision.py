"""torchvision's tv_tensors, which keep their attributes."""

from __future__ import annotations

import sys

import pinstage as ps


def nodes(cls: type) -> None:
    tv_tensors = sys.modules.get("torchvision.tv_tensors")
    if tv_tensors is not None and issubclass(cls, tv_tensors.TVTensor):
        ps.register_tensor(tv_tensors.TVTensor)

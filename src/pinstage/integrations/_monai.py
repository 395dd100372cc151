"""monai's MetaTensor. Its metadata, including the affine matrix, stay on the host, as in monai."""

from __future__ import annotations

from typing import Any

import torch
from monai.data import MetaTensor, get_track_meta

import pinstage as ps


def nodes(cls: type) -> None:
    if issubclass(cls, MetaTensor):
        ps.register_tensor(MetaTensor, _rebuild)


def _rebuild(tensor: torch.Tensor, attributes: dict[str, Any]) -> Any:
    """Do what ``MetaTensor.to`` does: copy containers of metadata, except for a batch."""
    if not get_track_meta():
        return tensor
    made = tensor.as_subclass(MetaTensor)
    for name, value in attributes.items():
        is_copied = isinstance(value, dict | list) and not attributes.get("_is_batch", False)
        vars(made)[name] = value.copy() if is_copied else value
    return made

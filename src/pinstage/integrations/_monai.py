"""monai's MetaTensor. Its metadata, including the affine matrix, stay on the host, as in monai."""

from __future__ import annotations

from typing import Any

import torch
from monai.data import MetaTensor, get_track_meta  # type: ignore[import-not-found,unused-ignore]

import pinstage as ps


def nodes(cls: type) -> None:
    if issubclass(cls, MetaTensor):
        ps.register_tensor(MetaTensor, _rebuild)


def _rebuild(tensor: torch.Tensor, attributes: dict[str, Any]) -> Any:
    """Do what ``MetaTensor.to`` does: copy containers of metadata, except for a batch."""
    if not get_track_meta():
        return tensor
    made = tensor.as_subclass(MetaTensor)
    is_batch = attributes.get("_is_batch", False)
    vars(made).update(attributes if is_batch else {name: _copied(value) for name, value in attributes.items()})
    return made


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list) else value

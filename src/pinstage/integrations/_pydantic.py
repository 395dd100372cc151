"""pydantic's models: same fields, extras and private attributes, not validated again."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

import pinstage as ps

_EXTRA, _PRIVATE, _SET = "__pydantic_extra__", "__pydantic_private__", "__pydantic_fields_set__"


def nodes(cls: Any) -> Any:
    """Return how a model is taken apart; None if the class isn't a model."""
    if not issubclass(cls, BaseModel):
        return None

    def unflatten(children: Any, _: None) -> Any:
        fields, extra, private, fields_set = children
        model = cls.__new__(cls)
        object.__setattr__(model, "__dict__", fields)
        object.__setattr__(model, _EXTRA, extra)
        object.__setattr__(model, _PRIVATE, private)
        object.__setattr__(model, _SET, set(fields_set))
        return model

    return _flatten, unflatten


def _flatten(model: Any) -> tuple[Any, None]:
    fields_set = ps.on_host(getattr(model, _SET))
    return (vars(model).copy(), getattr(model, _EXTRA), getattr(model, _PRIVATE), fields_set), None

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
        made = cls.__new__(cls)
        for name, value in (
            ("__dict__", fields),
            (_EXTRA, extra),
            (_PRIVATE, private),
            (_SET, set(fields_set)),
        ):
            object.__setattr__(made, name, value)
        return made

    return _flatten, unflatten


def _flatten(model: Any) -> tuple[Any, None]:
    return (
        dict(vars(model)),
        getattr(model, _EXTRA),
        getattr(model, _PRIVATE),
        ps.on_host(getattr(model, _SET)),
    ), None

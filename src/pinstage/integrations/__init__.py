"""Integrations with training libraries: one small module for each."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import accelerate as accelerate
    from . import lightning as lightning
    from . import ray as ray
    from . import torchdata as torchdata
    from . import transformers as transformers
else:

    def __getattr__(name: str) -> Any:
        if name not in ("accelerate", "lightning", "ray", "torchdata", "transformers"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f".{name}", __name__)

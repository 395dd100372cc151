"""The extension in C: it describes leaves, moves bytes, and makes views. Optional: all of it is also there in Python.

`core` is the extension, or None: where it was not built, where torch has no DLPack exchange API that it knows, or where
``PINSTAGE_NATIVE=0`` is set; `why_not` says which.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch


def _load() -> tuple[Any, str | None]:
    if os.environ.get("PINSTAGE_NATIVE", "1") == "0":
        return None, "PINSTAGE_NATIVE=0 is set"
    try:
        from . import _core
    except ImportError as error:
        return None, f"the extension was not built ({error}); install pinstage where there is a C compiler, or from a wheel"
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        return None, f"torch {torch.__version__} has no DLPack exchange API"
    try:
        _core.begin(exchange, torch.Tensor, np.ndarray)
    except (ImportError, ValueError) as error:
        return None, f"torch {torch.__version__}: {error}"
    return _core, None


core, why_not = _load()

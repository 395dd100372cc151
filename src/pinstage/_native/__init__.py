"""The extension in C: it describes leaves, moves bytes, and makes views."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch


def _load() -> Any:
    try:
        extension = importlib.import_module(f"{__name__}._core")
    except ImportError as error:
        raise ImportError(
            f"pinstage's extension in C cannot be loaded: {error}; install pinstage again, from a "
            "wheel, or with a C compiler and Python's headers: pip install --force-reinstall "
            "--no-deps --no-cache-dir pinstage"
        ) from error
    extension.begin(torch.Tensor, np.ndarray)
    return extension


core = _load()

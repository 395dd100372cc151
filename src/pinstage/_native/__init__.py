"""The extension in C: it describes leaves, moves bytes, and makes views. Optional: all of it is also there in Python.

`core` is the extension, or None: where it was not compiled, where torch has no DLPack exchange API that it knows, or
where ``PINSTAGE_NATIVE=0`` is set; `why_not` says which, and what to do about it.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from typing import Any

import numpy as np
import torch


def _load() -> tuple[Any, str | None]:
    if os.environ.get("PINSTAGE_NATIVE", "1") == "0":
        return None, "PINSTAGE_NATIVE=0 is set"
    if sys.platform != "linux":
        return None, f"the extension is for Linux, and this is {sys.platform}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None, "this Python is free-threaded, and the extension is compiled for Python with the interpreter lock"
    try:
        extension = importlib.import_module(f"{__name__}._core")
    except ModuleNotFoundError:
        return None, (
            "the extension was not compiled; install pinstage from a wheel, or install a C compiler and the headers of "
            "Python, and then pinstage again, by pip with --force-reinstall --no-deps --no-cache-dir and "
            "PINSTAGE_NATIVE=1 in the environment, which makes it an error if something is still missing"
        )
    except ImportError as error:
        return None, f"the extension cannot be loaded: {error}"
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        return None, f"torch {torch.__version__} has no DLPack exchange API"
    try:
        extension.begin(exchange, torch.Tensor, np.ndarray)
    except (ImportError, ValueError) as error:
        return None, f"torch {torch.__version__}: {error}"
    return extension, None


core, why_not = _load()

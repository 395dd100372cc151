"""Leaves whose bytes are in several places until they are packed: samples to be stacked, and rows
to be gathered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

from pinstage._native import _core

Array: TypeAlias = np.ndarray[Any, Any]

Stack = _core.Stack
"""A leaf that isn't stacked, or gathered, yet: its tensor, which is uninitialised, and what to fill
it from.
"""


def stack_samples(stacks: Iterable[Stack]) -> None:
    """Fill the tensors of stacks."""
    for stack in stacks:
        stack.fill()

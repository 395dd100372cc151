"""The two ways to describe and make tensors: torch's own functions, and, where their probe fails, its public ones."""

import contextlib

import torch

from pinstage._native import core

PATHS = ("native", "public")


@contextlib.contextmanager
def on_path(path):
    """Stage on one path for a while, here and in processes that are forked meanwhile."""
    tensors = [torch.zeros(1), torch.ones(2)]
    if path == "public":
        core.find_handle([], [])
    try:
        yield
    finally:
        assert core.find_handle(tensors, [tensor._cdata for tensor in tensors])

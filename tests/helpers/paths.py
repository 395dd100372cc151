"""The two ways to describe and make tensors: torch's private functions, or public ones if a probe
fails.
"""

import contextlib
import functools

from pinstage._native import core

PATHS = ("native", "public")


@contextlib.contextmanager
def on_path(path):
    """Use one path inside the context, here and in processes that are forked meanwhile."""
    before = core.use_handle(0)
    assert before != 0
    if path != "public":
        core.use_handle(before)
    try:
        yield
    finally:
        core.use_handle(before)


def on_both_paths(test):
    """Run a property test on both paths with each example: making the examples takes the most
    time.
    """

    @functools.wraps(test)
    def on_each(*args, **kwargs):
        for path in PATHS:
            with on_path(path):
                test(*args, **kwargs)

    return on_each

"""The two paths that a batch can take: the extension in C, and plain Python beside it."""

import contextlib
import os

import pytest

from pinstage import _native

PATHS = ("native", "plain")


@contextlib.contextmanager
def on_path(path):
    """Stage on one path for a while, here and in processes that are started meanwhile.

    The extension has to be there, unless whoever runs the tests has switched it off: then its tests are skipped.
    """
    if path == "native" and os.environ.get("PINSTAGE_NATIVE") == "0":
        pytest.skip("PINSTAGE_NATIVE=0 is set")
    assert path == "plain" or _native.core is not None, _native.why_not
    with pytest.MonkeyPatch.context() as patch:
        if path == "plain":
            patch.setattr("pinstage._native.core", None)
            patch.setenv("PINSTAGE_NATIVE", "0")
        yield

"""The public surface: names, where they are found, and their signatures."""

import subprocess
import sys

import pytest

SUBMODULES = ["checkpoint", "errors", "inspect", "integrations", "memory", "metrics", "offload"]


def test_submodules_are_attributes_loaded_when_used():
    program = f"""
import sys, pinstage as ps
for name in {SUBMODULES}:
    assert name == "errors" or f"pinstage.{{name}}" not in sys.modules, name
    assert getattr(ps, name).__name__ == f"pinstage.{{name}}" and name in dir(ps)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_unknown_names_are_attribute_errors():
    import pinstage as ps

    with pytest.raises(AttributeError, match="module 'pinstage' has no attribute 'Stagger'"):
        ps.Stagger  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'pinstage\.integrations' has no attribute 'keras'"):
        ps.integrations.keras  # noqa: B018

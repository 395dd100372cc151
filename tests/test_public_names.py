"""The public API: names, their modules, and their signatures."""

import difflib

import public_api
import pytest
import warm
from processes import output_of

import pinstage as ps

SUBMODULES = [*public_api.SUBMODULES, "integrations"]


def test_submodules_are_attributes_loaded_when_used():
    program = f"""
import sys, pinstage as ps
for name in {SUBMODULES}:
    assert name == "errors" or f"pinstage.{{name}}" not in sys.modules, name
    assert getattr(ps, name).__name__ == f"pinstage.{{name}}" and name in dir(ps)
"""
    output_of(warm.command("-c", program))


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'pinstage' has no attribute 'Stagger'"):
        ps.Stagger  # noqa: B018
    with pytest.raises(
        AttributeError, match=r"module 'pinstage\.integrations' has no attribute 'keras'"
    ):
        ps.integrations.keras  # noqa: B018


def test_public_signatures_are_those_decided_upon():
    """If a change is intended, run ``python tests/helpers/public_api.py``."""
    kept, now = public_api.PAGE.read_text().splitlines(), list(public_api.surface())
    changes = [
        line
        for line in difflib.unified_diff(kept, now, "kept", "now", n=0, lineterm="")
        if line[0] in "+-"
    ]
    assert changes == []


def test_types_in_public_signatures_can_be_imported():
    assert public_api.hidden_types() == []


def test_all_names_can_be_loaded_without_extras():
    program = """
import inspect, pydoc, rlcompleter, sys
from unittest.mock import create_autospec
sys.modules["prometheus_client"] = None  # as if it weren't installed
import pinstage as ps
assert "metrics" not in dir(ps)
assert set(ps.__all__) <= dict(inspect.getmembers(ps)).keys()
assert "class Stager(" in pydoc.plaintext.document(ps)
create_autospec(ps)
assert "ps.Stager(" in rlcompleter.Completer({"ps": ps}).attr_matches("ps.")
"""
    output_of(warm.command("-c", program))

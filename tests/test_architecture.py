"""The arrows between the rooms, read from the imports of every module under ``src/pinstage``."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pinstage

SRC = Path(__file__).parents[1] / "src" / "pinstage"

# What each room may import of pinstage. PUBLIC stands for the names of `pinstage` itself.
PUBLIC = "pinstage"
FACTS = {"_sizes", "_host"}
COMMON = FACTS | {"_errors", "_torch", "_steps"}
MAY_SEE = {
    "_sizes": set(),
    "_host": set(),
    "_errors": FACTS,
    "_torch": FACTS | {"_errors"},
    "_steps": FACTS | {"_torch"},
    "_memory": COMMON,
    "_reaper": COMMON | {"_memory"},
    "_pool": COMMON | {"_memory", "_reaper"},
    "_layout": COMMON,
    "_packing": COMMON | {"_layout"},
    "_staging": COMMON | {"_memory", "_pool", "_layout", "_packing"},
    "_loader": COMMON | {"_memory", "_reaper", "_pool", "_layout", "_packing", "_staging"},
    "inspect": FACTS | {PUBLIC},
    "integrations": {PUBLIC},
    "_demo": {PUBLIC},
    "_bench": {PUBLIC},
    "_cli": {PUBLIC, "inspect", "_demo", "_bench"},
}
MAY_SEE["__init__"] = set(MAY_SEE) - {"_cli", "_demo", "_bench"}
MAY_SEE["__main__"] = {"_cli"}


def imported_names(path: Path, package: str) -> Iterator[str]:
    """Yield what a module imports, as absolute dotted names; ``from a import b`` is ``a.b``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: 1 - node.level or None]) if node.level else ""
            yield from (".".join(filter(None, [base, node.module, alias.name])) for alias in node.names)


def violations(src: Path) -> list[str]:
    """List the imports under ``src`` that no arrow allows, as ``module: imported name``."""
    found = []
    for path in sorted(src.rglob("*.py")):
        parts = path.relative_to(src).with_suffix("").parts
        room = parts[0]
        package = ".".join(["pinstage", *parts[:-1]])
        for name in imported_names(path, package):
            top, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if top == "pinstage":
                private = target.startswith("_") and not target.startswith("__")
                target = target if target in MAY_SEE or private else PUBLIC
                allowed = target == room or target in MAY_SEE.get(room, ())
            else:
                allowed = top != "cuda" or room == "_memory"
            if not allowed:
                found.append(f"{'.'.join(parts)}: {name}")
    return found


def test_every_module_belongs_to_a_known_room():
    assert {path.relative_to(SRC).with_suffix("").parts[0] for path in SRC.rglob("*.py")} <= set(MAY_SEE)


def test_imports_follow_the_arrows():
    assert violations(SRC) == []


def test_the_arrows_have_no_cycle():
    rooms = [room for room in MAY_SEE if PUBLIC not in MAY_SEE[room] and not room.startswith("__")]
    for position, room in enumerate(rooms):
        assert MAY_SEE[room] <= set(rooms[:position]), f"{room} sees a room to its right"


@pytest.mark.parametrize("room", sorted(FACTS))
def test_what_every_room_sees_needs_the_standard_library_alone(room):
    names = {name.partition(".")[0] for name in imported_names(SRC / f"{room}.py", "pinstage")}
    assert names <= sys.stdlib_module_names


def test_pool_and_layout_do_not_know_each_other():
    assert "_layout" not in MAY_SEE["_pool"]
    assert "_pool" not in MAY_SEE["_layout"]


@pytest.mark.parametrize(
    ("module", "line", "name"),
    [
        ("_pool", "from pinstage._layout import Layout", "pinstage._layout.Layout"),
        ("_pool", "from . import _layout", "pinstage._layout"),
        ("_layout", "import pinstage._pool as pool", "pinstage._pool"),
        ("_layout", "def late():\n    from ._pool import SlabPool", "pinstage._pool.SlabPool"),
        ("_memory/_host", "from .._staging import Stager", "pinstage._staging.Stager"),
        ("_memory/__init__", "from .. import _staging", "pinstage._staging"),
        ("_staging", "from pinstage import SlabPool", "pinstage.SlabPool"),
        ("_errors", "import pinstage", "pinstage"),
        ("_host", "from ._memory import default_memory", "pinstage._memory.default_memory"),
        ("_sizes", "from . import _host", "pinstage._host"),
        ("inspect/_doctor", "from pinstage._memory import default_memory", "pinstage._memory.default_memory"),
        ("integrations/lightning", "from pinstage import _pool", "pinstage._pool"),
        ("_demo", "from pinstage import _private", "pinstage._private"),
        ("_demo", "from pinstage._host import usable_cpus", "pinstage._host.usable_cpus"),
        ("_demo", "from pinstage._cli import main", "pinstage._cli.main"),
        ("_bench/rivals", "from pinstage._staging import Stager", "pinstage._staging.Stager"),
        ("_pool", "from cuda.bindings import runtime", "cuda.bindings.runtime"),
        ("_unknown", "from pinstage._errors import StagingError", "pinstage._errors.StagingError"),
    ],
)
def test_the_checker_finds_a_wrong_arrow(tmp_path, module, line, name):
    path = tmp_path / f"{module}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(line)
    assert violations(tmp_path) == [f"{module.replace('/', '.')}: {name}"]


def test_the_checker_allows_the_right_arrows(tmp_path):
    right = {
        "__init__": "from pinstage._pool import SlabPool\nfrom pinstage.inspect import audit",
        "_memory/__init__": "from ._host import HostAllocMemory",
        "_memory/_host": "import cuda.bindings.runtime\nfrom .._errors import StagingError\nfrom . import _linux",
        "_memory/_linux": "import mmap, torch.cuda",
        "_pool": "from . import _errors, _memory",
        "_staging": "from ._pool import SlabPool\nfrom ._layout import Layout",
        "_cli": "import pinstage as ps\nfrom pinstage import __version__, _demo\nfrom pinstage.inspect import audit",
        "_demo/_train": "from pinstage import Stager\nfrom ._data import hours",
        "inspect/_doctor": "import pinstage as ps\nfrom .. import _host\nfrom .._sizes import format_bytes",
    }
    for module, lines in right.items():
        path = tmp_path / f"{module}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(lines)
    assert violations(tmp_path) == []


def test_importing_pinstage_does_not_initialise_cuda():
    code = """
import os, pinstage, torch
links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
devices = [path for path in map(os.path.realpath, links) if path.startswith("/dev/nvidia")]
assert not torch.cuda.is_initialized(), "torch initialised CUDA"
assert not devices, f"CUDA devices are open: {devices}"
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_public_name_has_a_docstring():
    # ruff takes what is defined in a private module for private, and so asks for no docstrings there.
    bare = []
    for name in pinstage.__all__:
        public = getattr(pinstage, name)
        members = vars(public).items() if isinstance(public, type) else ()
        described = {name: public, **{f"{name}.{key}": member for key, member in members if not key.startswith("_")}}
        bare += [
            path
            for path, thing in described.items()
            if (callable(thing) or isinstance(thing, property | classmethod | staticmethod)) and not thing.__doc__
        ]
    assert bare == []

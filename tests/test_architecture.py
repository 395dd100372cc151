"""Allowed imports between the subpackages, checked in every module under ``src/pinstage``."""

import ast
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import warm
from processes import completed, output_of

import pinstage
from pinstage._compat.loader import _ITERATOR_HAS

SRC = Path(__file__).parents[1] / "src" / "pinstage"

# The parts of pinstage that each subpackage may import. PUBLIC stands for the names of `pinstage`
# itself.
PUBLIC = "pinstage"
FACTS = {"_sizes", "_host"}
COMMON = FACTS | {"errors", "_compat", "_steps"}
BATCHES = {"_native", "_batch"}
MAY_SEE = {
    "_sizes": set(),
    "_host": set(),
    "errors": FACTS,
    "_native": set(),
    "_compat": FACTS | {"errors", "_native"},
    "_steps": FACTS | {"_compat", "_native"},
    "_memory": COMMON,
    "_reaper": COMMON | {"_memory"},
    "_pool": COMMON | {"_memory", "_reaper"},
    "_batch": COMMON | {"_native"},
    "_region": COMMON | {"_memory", "_reaper", "_pool", "_batch"},
    "_stage": COMMON | BATCHES | {"_memory", "_reaper", "_pool", "_region"},
    "_loader": COMMON | BATCHES | {"_memory", "_reaper", "_pool", "_stage"},
    "offload": COMMON | {"_memory", "_reaper", "_pool", "_stage"},
    "checkpoint": COMMON | BATCHES | {"_memory", "_pool", "_stage"},
    "inspect": FACTS
    | {PUBLIC, "errors", "_steps", "_compat", "_native", "_memory", "_pool", "_batch"},
    "integrations": {PUBLIC, "errors"},
    "memory": {"_memory"},
    "metrics": {PUBLIC, "errors"},
    "_cli": {PUBLIC, "errors", "inspect"},
}
MAY_SEE["__init__"] = set(MAY_SEE) - {"_cli"}
MAY_SEE["__main__"] = {"_cli"}


def imported_names(path, package):
    """Yield the imports of a module, as absolute dotted names; ``from a import b`` is ``a.b``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: 1 - node.level or None]) if node.level else ""
            yield from (
                ".".join(filter(None, [base, node.module, alias.name])) for alias in node.names
            )


def violations(src):
    """List the forbidden imports under ``src``, as ``module: imported name``."""
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
    assert {path.relative_to(SRC).with_suffix("").parts[0] for path in SRC.rglob("*.py")} <= set(
        MAY_SEE
    )


def test_imports_follow_the_arrows():
    assert violations(SRC) == []


def test_the_arrows_have_no_cycle():
    rooms = [room for room in MAY_SEE if PUBLIC not in MAY_SEE[room] and not room.startswith("__")]
    for position, room in enumerate(rooms):
        assert MAY_SEE[room] <= set(rooms[:position]), f"{room} sees a room to its right"


@pytest.mark.parametrize("room", sorted(FACTS))
def test_shared_modules_need_only_the_standard_library(room):
    names = {name.partition(".")[0] for name in imported_names(SRC / f"{room}.py", "pinstage")}
    assert names <= sys.stdlib_module_names


# -- files -----------------------------------------------------------------------------------------


def imports(src):
    """Return which files import which, as dotted names; imports for type checkers count too."""
    names = {
        path: ".".join(["pinstage", *path.relative_to(src).with_suffix("").parts]).removesuffix(
            ".__init__"
        )
        for path in src.rglob("*.py")
    }
    found = {}
    for path, module in names.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        targets = set()
        for imported in imported_names(path, package):
            target = imported
            while target and target not in names.values():
                target = target.rpartition(".")[0]
            targets.add(target)
        # Public names of the package are loaded on first use.
        found[module] = targets - {"", module, PUBLIC}
    return found


def test_no_files_import_each_other():
    TopologicalSorter(imports(SRC)).prepare()  # raises an error that names them


@pytest.mark.parametrize(
    "back",
    [
        "from ._a import A",
        "from . import _a",
        "if TYPE_CHECKING:\n    import pinstage._room._a",
        "from ._c import C",
    ],
)
def test_the_checker_finds_files_that_import_each_other(tree, back):
    files = {
        "__init__.py": "from ._room import A",
        "_room/__init__.py": "from ._a import A",
        "_room/_a.py": "from ._b import B\nimport pinstage as ps",
        "_room/_b.py": back,
        "_room/_c.py": "from pinstage._room._a import A",
    }
    with pytest.raises(CycleError) as caught:
        TopologicalSorter(imports(tree(files))).prepare()
    found = {name.removeprefix("pinstage._room._") for name in caught.value.args[1]}
    assert found == {"a", "b", *("c" if "_c" in back else "")}


# -- programs outside the package ------------------------------------------------------------------

INSIDE = {
    "benchmarks/markdown.py": {"pinstage.inspect._bus", "pinstage.inspect._doctor"},
    "benchmarks/trace_reading.py": {"pinstage.inspect._trace"},
}
"""Programs that measure or draw something without a public name."""


def private_names_of_ours(folder):
    """Return the private modules of pinstage that each program of a folder imports."""
    found = {}
    for path in folder.rglob("*.py"):
        names = "\n".join(imported_names(path, ""))
        if private := set(re.findall(r"^pinstage(?:\.\w+)*?\._(?!_)\w+", names, re.MULTILINE)):
            found[path.relative_to(folder.parent).as_posix()] = private
    return found


@pytest.mark.parametrize("folder", ["examples", "benchmarks"])
def test_examples_and_benchmarks_use_public_names(folder):
    allowed = {path: names for path, names in INSIDE.items() if path.startswith(f"{folder}/")}
    assert private_names_of_ours(SRC.parents[1] / folder) == allowed


def test_the_checker_finds_private_names_in_programs(tree):
    wrong = "from pinstage._host import cpus\nimport pinstage.inspect._trace.a\nimport torch._C"
    right = (
        "from pinstage import __version__\nfrom pinstage.inspect import audit\nfrom ._x import y"
    )
    folder = tree({"demo/ways.py": wrong, "demo/right.py": right}) / "demo"
    found = {"demo/ways.py": {"pinstage._host", "pinstage.inspect._trace"}}
    assert private_names_of_ours(folder) == found


# -- private names of other packages ---------------------------------------------------------------

# Of named tuples, os, sys.
PRIVATE_BUT_DOCUMENTED = {
    "_asdict",
    "_fields",
    "_replace",
    "_exit",
    "_getframe",
    "_current_frames",
}

OF_TORCHS_LOADER = frozenset(_ITERATOR_HAS) | {"_iterator", "_get_iterator"}
"""Names that both pinstage's and torch's objects have."""

BESIDE_TORCH = {
    # Names of torch's iterator that the loader uses after `why_loader_cannot_be_taken_over` has
    # checked them.
    "_loader._iterator": {"_data_queue", "_rcvd_idx", "_reset", "_send_idx"},
    "_loader._loader": {"_get_iterator", "_iterator"},
    "_loader._sending": {"_in_order", "_rcvd_idx"},
    # Accelerate's mark on prepared loaders. If it changed, Accelerate would prepare a loader of
    # ours again.
    "integrations.accelerate": {"_is_accelerate_prepared", "_slabs"},
    # The only place where Lightning has a loader's stage. The loader's settings and counters.
    "integrations.lightning": {"_data_connector", "_prepare_dataloader"},
    "integrations._trainer_loaders": {"_slabs", "_staging_settings"},
}
"""Uses of such names outside `_compat`."""


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined_names(tree):
    """Yield the names that a module defines, including attributes of its objects."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=ast.Tuple(elts=slots)):
                yield from (slot.value for slot in slots)


def foreign_private_names(src):
    """Return the private names of other packages that each module outside `_compat` uses."""
    trees = {
        path.relative_to(src): ast.parse(path.read_text(encoding="utf-8"))
        for path in src.rglob("*.py")
    }
    ours = {}  # by subpackage
    for path, tree in trees.items():
        ours.setdefault(path.parts[0], set()).update(defined_names(tree))
    found = {}
    for path, tree in trees.items():
        names = {
            name
            for imported in imported_names(src / path, "pinstage")
            if not imported.startswith("pinstage")
            for name in imported.split(".")[1:]
        }
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id="self" | "cls")):
                    pass
                case (
                    ast.Attribute(attr=str() as name)
                    | ast.Call(
                        func=ast.Name(id="getattr" | "hasattr" | "setattr"),
                        args=[_, ast.Constant(name), *_],
                    )
                ):
                    names |= {name} - (ours[path.parts[0]] - OF_TORCHS_LOADER)
        names = {name for name in names if is_private(name)} - PRIVATE_BUT_DOCUMENTED
        if names and path.parts[0] != "_compat":
            found[".".join(path.with_suffix("").parts)] = names
    return found


def test_private_names_are_confined_to_one_package():
    assert foreign_private_names(SRC) == BESIDE_TORCH


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from torch.utils.data._utils import collate", "_utils"),
        ("import torch._C", "_C"),
        ("def late():\n    from torch import _C", "_C"),
        ("torch._C", "_C"),
        ("getattr(lock, '_is_owned', None)", "_is_owned"),
        ("lock()._is_owned()", "_is_owned"),
        ("class Ours:\n    def f(self, other): self._writer = other._reader", "_reader"),
        ("class Ours:\n    def _reset(self): self._batches._reset()", "_reset"),
    ],
)
def test_the_checker_finds_a_private_name_of_others(tree, line, name):
    assert foreign_private_names(tree({"_pool.py": line})) == {"_pool": {name}}


def test_the_checker_allows_private_names_of_our_own(tree):
    files = {
        "_compat/views.py": "torch._C",
        "_pool/_a.py": "class A:\n    __slots__ = ('_b',)\n    def _f(self): self._e = None",
        "_pool/_c.py": "from pinstage._pool._a import A\n(A()._b, A()._f(), A()._e, d.__dict__)",
    }
    assert foreign_private_names(tree(files)) == {}


@pytest.mark.parametrize(
    ("module", "line", "name"),
    [
        ("_pool", "from pinstage._batch import Layout", "pinstage._batch.Layout"),
        ("_pool", "from . import _batch", "pinstage._batch"),
        ("_batch", "import pinstage._pool as pool", "pinstage._pool"),
        ("_batch", "def late():\n    from ._pool import SlabPool", "pinstage._pool.SlabPool"),
        ("_memory/_host", "from .._stage import Stager", "pinstage._stage.Stager"),
        ("_memory/__init__", "from .. import _stage", "pinstage._stage"),
        ("_stage", "from pinstage import SlabPool", "pinstage.SlabPool"),
        ("errors", "import pinstage", "pinstage"),
        ("integrations/lightning", "from pinstage import _pool", "pinstage._pool"),
        ("_cli", "from pinstage import _private", "pinstage._private"),
        ("_pool", "from cuda.bindings import runtime", "cuda.bindings.runtime"),
        ("_unknown", "from pinstage.errors import PinstageError", "pinstage.errors.PinstageError"),
    ],
)
def test_the_checker_finds_a_wrong_arrow(tree, module, line, name):
    root = tree({f"{module}.py": line})
    assert violations(root) == [f"{module.replace('/', '.')}: {name}"]


def test_the_checker_allows_the_right_arrows(tree):
    right = {
        "__init__": "from pinstage._pool import SlabPool\nfrom pinstage.inspect import audit",
        "_memory/__init__": "from ._host import HostAllocMemory",
        "_memory/_host": "import cuda.bindings.runtime\nfrom ..errors import PinstageError\nfrom . import _linux",
        "_memory/_linux": "import mmap, torch.cuda",
        "_pool": "from . import _memory, errors",
        "_stage": "from ._pool import SlabPool\nfrom ._batch import Layout",
        "_cli": "import pinstage as ps\nfrom pinstage import __version__\nfrom pinstage.inspect import audit",
        "integrations/_train": "from pinstage import Stager\nfrom ._data import hours",
        "inspect/_doctor": "import pinstage as ps\nfrom .. import _host\nfrom .._sizes import format_bytes",
    }
    assert violations(tree({f"{module}.py": lines for module, lines in right.items()})) == []


# -- the import ------------------------------------------------------------------------------------


def test_importing_pinstage_initialises_nothing():
    code = """
import os, sys, torch
torchs_own = set(sys.modules)  # some versions of torch import cuda-python
import pinstage
links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
devices = [path for path in map(os.path.realpath, links) if path.startswith("/dev/nvidia")]
assert not torch.cuda.is_initialized(), "torch initialised CUDA"
assert not devices, f"CUDA devices are open: {devices}"
later = {"pinstage._loader", "pinstage.inspect", "pinstage._cli", "rich", "matplotlib", "cuda"}
def loaded(): return later & (set(sys.modules) - torchs_own)
assert not loaded(), loaded()
for name, module in {"DataLoader": "pinstage._loader", "audit": "pinstage.inspect"}.items():
    assert name in dir(pinstage)
    before = loaded()
    assert getattr(pinstage, name) is getattr(pinstage, name)
    assert loaded() - before == {module}, loaded()
"""
    output_of(warm.command("-c", code))


def test_importing_pinstage_takes_little_longer_than_importing_torch():
    # CPU seconds, relative to torch's, since the machine may be slow or busy. A full garbage
    # collection, which takes a tenth of a second with Python 3.13, would count towards the current
    # import.
    code = """
import gc, time
gc.disable()
began = time.process_time()
import numpy, torch
had_torch = time.process_time()
import pinstage
print((time.process_time() - had_torch) / (had_torch - began))
"""
    assert any(float(output_of([sys.executable, "-c", code])) <= 0.12 for _ in range(5))


def test_no_two_classes_share_a_name():
    modules = (ast.parse(path.read_text(encoding="utf-8")) for path in SRC.rglob("*.py"))
    names = Counter(
        node.name for module in modules for node in module.body if isinstance(node, ast.ClassDef)
    )
    del names["StageBatches"]  # Lightning's and Ray's: a program uses one of them
    assert [name for name, count in names.items() if count > 1] == []


def test_every_public_name_has_a_docstring():
    # ruff treats everything in a private module as private, and doesn't ask for docstrings there.
    described = {}
    for name in pinstage.__all__:
        described[name] = public = getattr(pinstage, name)
        members = vars(public) if isinstance(public, type) else {}
        described |= {f"{name}.{key}": members[key] for key in members if key[0] != "_"}
    kinds = Callable | property | classmethod | staticmethod
    assert [
        name for name, thing in described.items() if isinstance(thing, kinds) and not thing.__doc__
    ] == []


@pytest.mark.skipif(shutil.which("git") is None, reason="git isn't installed")
def test_no_ignored_file_is_tracked():
    tracked = completed(["git", "ls-files", "-ci", "--exclude-standard", ":/"], cwd=SRC)
    assert tracked.stdout == ""

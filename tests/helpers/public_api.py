"""The public surface as text, read from the source: names, arguments, types.

As a program it writes ``tests/public_api.txt``: ``python tests/helpers/public_api.py``.
"""

import ast
import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pinstage

PACKAGE = Path(pinstage.__file__).parent
PAGE = Path(__file__).parents[1] / "public_api.txt"
MODULES = [
    "pinstage",
    *(f"pinstage.{name}" for name in ("checkpoint", "errors", "inspect", "memory", "metrics", "offload")),
]
FRAMEWORKS = ["accelerate", "lightning", "ray", "torchdata", "transformers"]
"""Of `pinstage.integrations`, read without being imported: the frameworks need not be installed."""

MADE_BY_CALLS = {"HostTransfer", "Layout", "Lease", "Prefetcher", "SharedMapping", "StepTimes", "Transfer"}
"""Classes that users don't make themselves: how they are made isn't public."""

Definition = ast.ClassDef | ast.FunctionDef


def surface() -> Iterator[str]:
    """Yield the lines of `PAGE`."""
    for module, name, thing in public_things():
        yield ""
        yield from described(f"{module}.{name}", thing.__module__, definitions_of(thing))
    for framework in FRAMEWORKS:
        for node in parsed(PACKAGE / "integrations" / f"{framework}.py").body:
            if isinstance(node, Definition) and not node.name.startswith("_"):
                yield ""
                yield from described(f"pinstage.integrations.{framework}.{node.name}", "", [node])


def public_things() -> Iterator[tuple[str, str, type]]:
    """Yield module, name and object of all that is public, except integrations."""
    for name in MODULES:
        module = importlib.import_module(name)
        for public in sorted(names_of(module)):
            yield name, public, getattr(module, public)


def names_of(module: ModuleType) -> list[str]:
    """Return what a module makes public: its ``__all__``, or else the classes and functions that it defines."""
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
    return list(getattr(module, "__all__", [name for name in own if not name.startswith("_")]))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def definitions_of(thing: type) -> list[Definition]:
    """Return the nodes that define a class and its bases in pinstage, or a function and its overloads."""
    found = []
    for kind in getattr(thing, "__mro__", (thing,)):
        module = sys.modules[kind.__module__]
        if kind.__module__.partition(".")[0] == "pinstage" and module.__file__ is not None:
            nodes = parsed(Path(module.__file__)).body
            found += [node for node in nodes if isinstance(node, Definition) and node.name == kind.__qualname__]
    return found


def described(name: str, module: str, nodes: list[Definition]) -> Iterator[str]:
    """Yield the signature of a function, or a class with the signatures of its public members."""
    if isinstance(nodes[0], ast.FunctionDef):
        yield from (signature(node, name, module) for node in seen_by_type_checkers(nodes))
        return
    bases = [ast.unparse(base) for base in nodes[0].bases if not is_hidden(base, module)]
    yield f"class {name}({', '.join(bases)})" if bases else f"class {name}"
    seen = {"__init__"} if name.rpartition(".")[2] in MADE_BY_CALLS else set()
    for node in nodes:
        members = list(members_of(node, module))
        yield from (f"    {text}" for member, text in members if member not in seen)
        seen |= {member for member, _ in members}


def is_hidden(base: ast.expr, module: str) -> bool:
    """Say whether a base is a private class of pinstage. Its public members are listed as those of the class."""
    found = vars(sys.modules[module]).get(base.id) if isinstance(base, ast.Name) and module else None
    return getattr(found, "__module__", "").startswith("pinstage.") and all(
        found is not it for *_, it in public_things()
    )


def seen_by_type_checkers(nodes: list[Any]) -> list[Any]:
    """Return the overloads of functions, and what has none."""
    overloads = [node for node in nodes if "overload" in map(ast.unparse, node.decorator_list)]
    names = {node.name for node in overloads}
    return [node for node in nodes if node in overloads or node.name not in names]


def members_of(node: Any, module: str) -> Iterator[tuple[str, str]]:
    """Yield name and signature of the public members of a class, as a type checker sees them."""
    functions = seen_by_type_checkers([part for part in node.body if isinstance(part, ast.FunctionDef)])
    for part in node.body:
        match part:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from members_of(part, module)
            case ast.FunctionDef(name=name) if part in functions and (name == "__init__" or not name.startswith("_")):
                marks = [ast.unparse(mark) for mark in part.decorator_list]
                marks = [f"@{mark} " for mark in marks if mark != "overload" and not mark.endswith(".setter")]
                yield name, "".join(marks) + signature(part, name, module)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind) if not name.startswith("_"):
                default = "" if part.value is None else f" = {ast.unparse(part.value)}"
                yield name, f"{name}: {ast.unparse(kind)}{default}"


def signature(node: ast.FunctionDef, name: str, module: str) -> str:
    places = vars(sys.modules[module]) if module else {}
    for defaults in (node.args.defaults, node.args.kw_defaults):
        for index, default in enumerate(defaults):
            if isinstance(default, ast.Name) and default.id in places:
                defaults[index] = ast.Constant(places[default.id])
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"{name}({ast.unparse(node.args)}){returns}"


def hidden_types() -> list[str]:
    """List the classes of pinstage that stand in a public signature and can't be imported by a public name."""
    public = {id(thing) for _, _, thing in public_things()}
    found = []
    for module, name, thing in public_things():
        for node in definitions_of(thing):
            places = vars(sys.modules[getattr(thing, "__module__", "")])
            for part in annotations_of(node):
                for word in ast.walk(part):
                    kind = places.get(word.id) if isinstance(word, ast.Name) else None
                    ours = isinstance(kind, type) and kind.__module__.startswith("pinstage.")
                    if ours and id(kind) not in public:
                        found.append(f"{module}.{name}: {kind.__module__}.{kind.__qualname__}")
    return sorted(set(found))


def annotations_of(node: Definition) -> Iterator[ast.expr]:
    """Yield the annotations of what is public in a class or function."""
    is_made = node.name not in MADE_BY_CALLS
    for part in [node] if isinstance(node, ast.FunctionDef) else node.body:
        if isinstance(part, ast.AnnAssign) and not ast.unparse(part.target).startswith("_"):
            yield part.annotation
        if isinstance(part, ast.FunctionDef) and (
            not part.name.startswith("_") or (part.name == "__init__" and is_made)
        ):
            kinds = [word.annotation for word in ast.walk(part.args) if isinstance(word, ast.arg)]
            yield from (kind for kind in (*kinds, part.returns) if kind is not None)


if __name__ == "__main__":
    PAGE.write_text("".join(f"{line}\n" for line in surface()))

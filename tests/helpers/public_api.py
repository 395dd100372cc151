"""The public surface as text, read from the source: names, arguments, types.

Run as a program, ``python tests/helpers/public_api.py``, it writes ``tests/public_api.txt``.
"""

import ast
import functools
import importlib
import sys
from pathlib import Path

import pinstage

PACKAGE = Path(pinstage.__file__).parent
PAGE = Path(__file__).parents[1] / "public_api.txt"
SUBMODULES = ["checkpoint", "errors", "inspect", "memory", "metrics", "offload"]
FRAMEWORKS = ["accelerate", "lightning", "ray", "torchdata", "transformers"]
"""Modules of `pinstage.integrations`, read without imports, so that no framework needs to be
installed.
"""
MADE_BY_CALLS = {
    "HostTransfer",
    "Layout",
    "Lease",
    "Prefetcher",
    "RegionHandle",
    "StepTimes",
    "Transfer",
}
"""Classes that users don't make themselves, so that their constructors aren't public."""


def surface():
    """Yield the lines of `PAGE`."""
    for module, name, thing in public_things():
        nodes = definitions_of(thing)
        yield ""
        if nodes:
            yield from described(f"{module}.{name}", nodes, vars(sys.modules[thing.__module__]))
        else:
            yield f"{module}.{name} = {thing}"
    for framework in FRAMEWORKS:
        for node in parsed(PACKAGE / "integrations" / f"{framework}.py").body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                yield ""
                yield from described(f"pinstage.integrations.{framework}.{node.name}", [node], {})


@functools.cache
def public_things():
    """Return module, name and object of all that is public, except integrations."""
    found = []
    for path in ("pinstage", *(f"pinstage.{name}" for name in SUBMODULES)):
        module = importlib.import_module(path)
        own = [
            name for name, value in vars(module).items() if getattr(value, "__module__", "") == path
        ]
        names = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
        found += [(path, name, getattr(module, name)) for name in sorted(names)]
    return found


def is_hidden(thing):
    """Return whether something is part of pinstage and can't be imported by a public name."""
    is_ours = getattr(thing, "__module__", "").startswith("pinstage.")
    return is_ours and all(thing is not public for _, _, public in public_things())


@functools.cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def definitions_of(thing):
    """Return the nodes that define a function and its overloads, or a class and its hidden
    bases.
    """
    kinds = [
        kind for kind in getattr(thing, "__mro__", [thing]) if kind is thing or is_hidden(kind)
    ]
    found = []
    for kind in kinds if hasattr(thing, "__qualname__") else []:
        nodes = parsed(Path(sys.modules[kind.__module__].__file__)).body
        found += [node for node in nodes if getattr(node, "name", None) == kind.__qualname__]
    return found


def described(name, nodes, names):
    """Yield the signature of a function, or of a class and its public members; `names` are of its
    module.
    """
    if isinstance(nodes[0], ast.FunctionDef):
        yield from (signature(node, name, names) for node in seen_by_type_checkers(nodes))
        return
    bases = [ast.unparse(base) for node in nodes for base in node.bases]
    bases = [base for base in bases if not is_hidden(names.get(base.partition("[")[0]))]
    yield f"class {name}({', '.join(bases)})" if bases else f"class {name}"
    seen = {"__init__"} if name.rpartition(".")[2] in MADE_BY_CALLS else set()
    for node in nodes:
        members = list(members_of(node, names))
        yield from (f"    {text}" for member, text in members if member not in seen)
        seen |= {member for member, _ in members}
    parts = (part for node in nodes for part in node.body)
    init = next((part for part in parts if getattr(part, "name", "") == "__init__"), None)
    yield from (f"    {name}" for name in attributes_of(init) if name not in seen)


def seen_by_type_checkers(nodes):
    """Return the overloads of functions, and the functions without any."""
    overloads = [node for node in nodes if "overload" in map(ast.unparse, node.decorator_list)]
    names = {node.name for node in overloads}
    return [node for node in nodes if node in overloads or node.name not in names]


def members_of(node, names):
    """Yield name and signature of the public members of a class, as a type checker sees them."""
    functions = seen_by_type_checkers(
        [part for part in node.body if isinstance(part, ast.FunctionDef)]
    )
    for part in node.body:
        match part:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from members_of(part, names)
            case ast.FunctionDef(name=name) if part in functions and (
                name == "__init__" or name[0] != "_"
            ):
                marks = [f"@{ast.unparse(mark)} " for mark in part.decorator_list]
                marked = "".join(mark for mark in marks if mark != "@overload ")
                yield name, marked + signature(part, name, names)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind) if name[0] != "_":
                default = f" = {ast.unparse(resolved(part.value, names))}" if part.value else ""
                yield name, f"{name}: {ast.unparse(kind)}{default}"


def attributes_of(init):
    """Return the public attributes that ``__init__`` sets, if there is one."""
    found = {}
    for word in ast.walk(init) if init else ():
        match word:
            case ast.Attribute(ast.Name("self"), name, ast.Store()) if name[0] != "_":
                found[name] = None
    return list(found)


def signature(node, name, names):
    arguments = node.args
    arguments.defaults = [resolved(default, names) for default in arguments.defaults]
    arguments.kw_defaults = [
        default and resolved(default, names) for default in arguments.kw_defaults
    ]
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"{name}({ast.unparse(arguments)}){returns}"


def resolved(value, names):
    """Return a default's value instead of the name of a constant."""
    is_constant = isinstance(value, ast.Name) and value.id in names
    return ast.Constant(names[value.id]) if is_constant else value


def hidden_types():
    """List the classes of pinstage in public signatures that can't be imported by a public name."""
    found = set()
    for module, name, thing in public_things():
        names = vars(sys.modules[thing.__module__])
        for node in definitions_of(thing):
            words = (word for annotation in annotations_of(node) for word in ast.walk(annotation))
            kinds = (names.get(word.id) for word in words if isinstance(word, ast.Name))
            hidden = (kind for kind in kinds if isinstance(kind, type) and is_hidden(kind))
            found |= {f"{module}.{name}: {kind}" for kind in hidden}
    return sorted(found)


def annotations_of(node):
    """Yield the annotations of a function, or of the public members of a class."""
    is_made = node.name not in MADE_BY_CALLS
    for part in [node] if isinstance(node, ast.FunctionDef) else node.body:
        if isinstance(part, ast.AnnAssign) and not ast.unparse(part.target).startswith("_"):
            yield part.annotation
        if isinstance(part, ast.FunctionDef) and (
            is_made if part.name == "__init__" else part.name[0] != "_"
        ):
            kinds = [getattr(word, "annotation", None) for word in ast.walk(part.args)]
            yield from filter(None, (*kinds, part.returns))


if __name__ == "__main__":
    PAGE.write_text("".join(f"{line}\n" for line in surface()))

"""Stages batches in processes where a private name of torch or CPython is missing, or behaves
differently.

As a program it forks one process per case. torch is imported before, but pinstage is not, so that
its probes see the changed name. The results are printed as JSON.
"""

import functools
import gc
import importlib.machinery
import importlib.util
import json
import os
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils._pytree import register_pytree_node

WORKS = {
    "dual tensors": "staged",
    "a functional tensor": "staged",
    "a zero tensor": "staged",
    "registered with pytree": "staged",
    "profile": "has steps",
    "workers": "staged",
    "weights": "loaded",
}
"""The results if nothing is missing."""

SLOW_TENSORS = "tensors are described and made in Python, which takes longer: torch .*"
SLOW_LOADER = "ps.DataLoader stages in the main process, which is slower: torch .*"


class Case(NamedTuple):
    """A change, and its expected effects."""

    change: Callable[[], object]
    doctor: str | None = None
    """The check of `pinstage doctor` that reports it."""
    told: str | None = None
    """The warning, given once, as a pattern."""
    instead: Mapping[str, str] = types.MappingProxyType({})
    """Differences from `WORKS`, as patterns."""


# -- ways to change a name -------------------------------------------------------------------------


def gone(owner, name):
    return lambda: delattr(owner, name)


def instead(owner, name, value):
    return lambda: setattr(owner, name, value)


def copy_of(module):
    copy = types.ModuleType(module.__name__)
    vars(copy).update(vars(module))
    return copy


def for_us_only(package, module, name, value=None):
    """Change a name that the module's own functions need: pinstage sees a changed copy. None
    removes the name.
    """

    def change():
        real = getattr(package, module)
        fake = copy_of(real)
        if value is None:
            delattr(fake, name)
        else:
            setattr(fake, name, value)
        setattr(package, module, fake)

    return change


def of_tensors(name, ask):
    """Change an attribute of all tensors; None removes it."""

    def missing(tensor):
        raise AttributeError(name)

    return instead(torch.Tensor, name, property(missing if ask is None else ask))


def in_core(**functions):
    """Change functions of the extension that call torch's C++. Each replacement gets the real
    function first; for a class, the class of its instance."""

    def change():
        name = "pinstage._native._core"
        package = Path(importlib.util.find_spec("pinstage").origin).parent
        spec = importlib.machinery.PathFinder.find_spec(name, [str(package / "_native")])
        real = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(real)
        fake = copy_of(real)
        for function, other in functions.items():
            own = getattr(real, function)
            setattr(
                fake,
                function,
                other(own) if isinstance(other, type) else functools.partial(other, own),
            )
        sys.modules[name] = fake

    return change


data_utils: Any = importlib.import_module("torch.utils.data._utils")


def cut_views(change):
    """Replace the extension's first leaf."""

    class Blocks:
        def __init__(self, real):
            self._real = real

        def of(self, *args):
            made = self._real.of(*args)
            # Public functions are unchanged.
            return made if made is None or len(args) == 7 else Blocks(made)

        def leaves(self, others):
            first, *rest = self._real.leaves(others)
            return [change(first), *rest]

        def __len__(self):
            return len(self._real)

        def __getattr__(self, name):
            return getattr(self._real, name)

    return in_core(Blocks=Blocks)


def cannot_be_made(view):
    raise RuntimeError("torch could not make a view of the slab")


def has_no_api():
    del torch.Tensor.__dlpack_c_exchange_api__


def has_another_api():
    import ctypes

    class Header(ctypes.Structure):
        _fields_ = [
            ("major", ctypes.c_uint32),
            ("minor", ctypes.c_uint32),
            ("older", ctypes.c_void_p),
        ]

    header = Header(2, 0, None)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    has_another_api.kept = header, b"dlpack_exchange_api"
    capsule = new(ctypes.addressof(header), has_another_api.kept[1], None)
    torch.Tensor.__dlpack_c_exchange_api__ = capsule


NO_MEMORY = "refused: .* lacks the memory.*"
# Without these, tensors are described and made in Python.
WITHOUT_TENSORS = {
    "forward_ad._current_level": for_us_only(torch.autograd, "forward_ad", "_current_level"),
    "forward_ad._current_level is an object": for_us_only(
        torch.autograd, "forward_ad", "_current_level", object()
    ),
    # -- facts that the extension needs
    "the exchange API": has_no_api,
    "the exchange API of another version": has_another_api,
    "the libraries": instead(torch, "__file__", "/nowhere/torch/__init__.py"),
    "a function of the shim": in_core(
        use_torch=lambda real, exchange, functions, *rest: real(exchange, functions[1:], *rest)
    ),
    "Tensor._cdata": of_tensors("_cdata", None),
    "Tensor._cdata is something else": of_tensors("_cdata", id),
    "sizes of storages": in_core(facts=lambda real, tensor: (1, *real(tensor)[1:])),
    "dtypes": in_core(facts=lambda real, tensor: (*real(tensor)[:2], 0, *real(tensor)[3:])),
    "flags": in_core(facts=lambda real, tensor: (*real(tensor)[:3], 0, 0, 0)),
    "what counts modes": instead(torch._C, "_len_torch_dispatch_stack", lambda: 0),
    "Tensor._base": of_tensors("_base", None),
    "views of a subclass": cut_views(
        lambda view: view.as_subclass(type("Ours", (torch.Tensor,), {}))
    ),
    "views of another place": cut_views(lambda view: view.flip(0)),
    "views that are copies": cut_views(lambda view: view.clone()),
    "views that share their version": cut_views(lambda view: view[:]),
    "views that cannot be made": cut_views(cannot_be_made),
}
# Without these, the loader stages in the main process.
WITHOUT_LOADER = {
    name: for_us_only(data_utils, "collate", name)
    for name in ("collate", "collate_tensor_fn", "default_collate_fn_map")
}

CASES = {
    "nothing": Case(lambda: None),
    # -- tensors
    "is_functional_tensor": Case(
        gone(torch, "_is_functional_tensor"), instead={"a functional tensor": NO_MEMORY}
    ),
    "Tensor._is_zerotensor": Case(
        instead(torch.Tensor, "_is_zerotensor", None), instead={"a zero tensor": NO_MEMORY}
    ),
    "Tensor._version": Case(
        of_tensors("_version", lambda _: 0), "save_on_cpu, tensors", SLOW_TENSORS
    ),
    **{name: Case(change, "tensors", SLOW_TENSORS) for name, change in WITHOUT_TENSORS.items()},
    # -- torch's pytree
    "pytree's registry": Case(
        for_us_only(torch.utils, "_pytree", "SUPPORTED_NODES"),
        instead={"registered with pytree": "refused: .*"},
    ),
    # -- modules
    "non_persistent_buffers_set": Case(
        instead(
            torch.nn.Module,
            "_non_persistent_buffers_set",
            property(lambda _: set(), lambda *_: None),
        ),
        doctor="load_weights",
        instead={
            "weights": "refused: load_weights can't load a module here: torch .*; use load_state_dict"
        },
    ),
    # -- profiling
    "profiler_enabled": Case(
        gone(torch.autograd, "_profiler_enabled"), instead={"profile": "has none"}
    ),
    # -- torch's loader
    **{name: Case(change, "DataLoader", SLOW_LOADER) for name, change in WITHOUT_LOADER.items()},
}


# -- trials ----------------------------------------------------------------------------------------


class WithPytree:
    """A container that was registered with torch's pytree."""

    def __init__(self, x):
        self.x = x


def batch(seed):
    numbers = torch.arange(24.0) + seed
    cube = numbers.view(2, 3, 4)
    complexes = torch.complex(numbers, -numbers)
    return {
        "plain": cube,
        "again": cube,
        "bools": cube > seed + 3,
        "strided": cube[:, ::2],
        "turned": cube.transpose(0, 2),
        "images": numbers.view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "conjugated": complexes.conj(),
        "negated": complexes.conj().imag,
        "weight": numbers.clone().requires_grad_(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(seed),
        "sparse": torch.eye(3).to_sparse() * (seed + 1),
        "array": np.arange(5, dtype=np.int16) + seed,
        "text": f"batch {seed}",
    }


def differences(staged, seed):
    """Return the leaves that differ from the result of `.to()`."""
    expected = batch(seed) | {"array": torch.arange(5, dtype=torch.int16) + seed}
    found = [] if staged["plain"] is staged["again"] else ["again is another object"]
    return found + [
        f"{name} of batch {seed}: {staged[name]!r}"
        for name, leaf in expected.items()
        if told(staged[name]) != told(leaf)
    ]


def told(leaf):
    """Return all that must be equal in two leaves."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.dtype, leaf.shape, leaf.layout, leaf.requires_grad, leaf.to_dense().tolist()


def overwrite(sources):
    with torch.no_grad():
        for leaf in sources.values():
            if isinstance(leaf, torch.Tensor) and not (leaf.is_sparse or leaf.requires_grad):
                leaf.zero_()


def stage_some(ps, stager, count):
    wrong, kept = [], []
    for seed in range(count):
        sources = batch(seed)
        kept.append(stager.to_device(sources))
        overwrite(sources)
        wrong += differences(kept[-1], seed)
    for seed, staged in enumerate(kept):
        wrong += differences(staged, seed)
    return wrong


def dual_tensors(ps, stager):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch.arange(3.0))
        staged = stager.to_device({"x": dual, "y": torch.ones(2)})
        return (
            "staged"
            if torch.equal(forward_ad.unpack_dual(staged["x"]).tangent, torch.arange(3.0))
            else "lost"
        )


def registered_with_pytree(ps, stager):
    staged = stager.to_device(WithPytree(torch.ones(2)))
    return "staged" if torch.equal(staged.x, torch.ones(2)) else "lost"


def profile(ps, stager):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        stager.to_device(batch(0))
    return (
        "has steps"
        if "pinstage.pack" in {event.name for event in profiler.events()}
        else "has none"
    )


def workers(ps):
    dataset = [{"x": torch.full((3,), float(i)), "i": i} for i in range(8)]
    loader = ps.DataLoader(
        dataset, batch_size=2, num_workers=1, device="cpu", multiprocessing_context="fork"
    )
    xs = torch.cat([found["x"] for found in loader])
    return (
        "staged" if torch.equal(xs, torch.arange(8.0).repeat_interleave(3).view(8, 3)) else "lost"
    )


def weights(ps, stager):
    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("angles", torch.zeros(2), persistent=False)
    missing, _ = stager.load_weights(module, {"running_mean": torch.ones(2)}, strict=False)
    is_loaded = missing == ["weight", "bias", "running_var"] and module.running_mean.sum() == 2
    return "loaded" if is_loaded else "lost"


def outcome(ps, attempt, *args):
    try:
        return attempt(ps, *args)
    except ps.errors.PinstageError as error:
        return f"refused: {error}"


def like(ps, stager, tensor, value):
    staged = stager.to_device({"x": tensor})["x"]
    if getattr(torch, "_is_functional_tensor", lambda _: False)(staged):
        staged = torch._from_functional_tensor(staged)
    return "staged" if torch.equal(staged + 0, value) else "lost"


def try_all():
    """Stage batches of all kinds; return the results."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        import pinstage as ps
        from pinstage.inspect._doctor import diagnose

        register_pytree_node(
            WithPytree, lambda found: ([found.x], None), lambda found, _: WithPytree(found[0])
        )
        with ps.Stager("cpu") as stager:
            wrong = stage_some(ps, stager, 3)
            outcomes = {
                "dual tensors": outcome(ps, dual_tensors, stager),
                "a functional tensor": outcome(
                    ps, like, stager, torch._to_functional_tensor(torch.ones(3)), torch.ones(3)
                ),
                "a zero tensor": outcome(
                    ps, like, stager, torch._efficientzerotensor((3,)), torch.zeros(3)
                ),
                "registered with pytree": outcome(ps, registered_with_pytree, stager),
                "profile": profile(ps, stager),
                "workers": workers(ps),
                "weights": outcome(ps, weights, stager),
            }
            wrong += stage_some(ps, stager, 3)
            left = stager.stats().pool
        checks = diagnose(measuring=False).checks
    ours = [
        str(found.message)
        for found in told
        if "pinstage" in str(found.filename) or "longer" in str(found.message)
    ]
    return {
        "wrong": wrong,
        "outcomes": outcomes,
        "told": [text for text in ours if "clears events" not in text],
        "doctor": [check.name for check in checks if check.status == "warning"],
        "in use": left.leased_slabs + left.in_flight_slabs,
    }


def run(case):
    """Try all in a separate process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            case.change()
            result: dict[str, Any] = try_all()
        except BaseException:  # noqa: BLE001 - goes to the test
            result = {"raised": traceback.format_exc()}
        with os.fdopen(writing, "w") as file:
            json.dump(result, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    found: dict[str, Any] = (
        json.loads(text) if text else {"raised": f"the process ended by {status}"}
    )
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Some calls import them, for a second.
    for module in (
        "torch._dynamo",
        "torch._decomp.decompositions_for_jvp",
    ):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # so that the collections of each process skip what was imported
    for name in sys.argv[1:] or CASES:
        print(json.dumps({"name": name, **run(CASES[name])}), flush=True)

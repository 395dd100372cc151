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


def gone(owner: Any, name: str) -> Callable[[], None]:
    return lambda: delattr(owner, name)


def instead(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def for_us_only(package: Any, module: str, name: str, value: Any = None) -> Callable[[], None]:
    """Change a name that the module's own functions need: pinstage sees a changed copy. None
    removes the name.
    """

    def change() -> None:
        real = getattr(package, module)
        fake = types.ModuleType(real.__name__)
        vars(fake).update(vars(real))
        if value is None:
            delattr(fake, name)
        else:
            setattr(fake, name, value)
        setattr(package, module, fake)

    return change


def of_tensors(name: str, ask: Callable[[torch.Tensor], Any] | None) -> Callable[[], None]:
    """Change an attribute of all tensors; None removes it."""

    def missing(tensor: torch.Tensor) -> None:
        raise AttributeError(name)

    return instead(torch.Tensor, name, property(missing if ask is None else ask))


def in_core(**functions: Any) -> Callable[[], None]:
    """Change functions of the extension that call torch's C++. Each replacement gets the real
    function first; for a class, the class of its instance."""

    def change() -> None:
        name = "pinstage._native._core"
        source = importlib.util.find_spec("pinstage")
        assert source is not None
        assert source.origin is not None
        [path] = (Path(source.origin).parent / "_native").glob("_core*.so")
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None
        real = importlib.util.module_from_spec(spec)
        loader.exec_module(real)
        fake = types.ModuleType(name)
        vars(fake).update(vars(real))
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


def cut_views(change: Callable[[torch.Tensor], Any]) -> Callable[[], None]:
    """Replace the extension's first leaf."""

    class Blocks:
        def __init__(self, real: Any) -> None:
            self._real = real

        def of(self, *args: Any) -> Any:
            made = self._real.of(*args)
            # Public functions are unchanged.
            return made if made is None or len(args) == 7 else Blocks(made)

        def leaves(self, others: list[Any]) -> list[Any]:
            first, *rest = self._real.leaves(others)
            return [change(first), *rest]

        def __len__(self) -> int:
            return len(self._real)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    return in_core(Blocks=Blocks)


def shares_its_version(view: torch.Tensor) -> torch.Tensor:
    return view[:]


def cannot_be_made(view: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("torch could not make a view of the slab")


def has_no_api() -> None:
    del torch.Tensor.__dlpack_c_exchange_api__


def has_another_api() -> None:
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
    has_another_api.kept = header, b"dlpack_exchange_api"  # type: ignore[attr-defined]
    capsule = new(ctypes.addressof(header), has_another_api.kept[1], None)  # type: ignore[attr-defined]
    torch.Tensor.__dlpack_c_exchange_api__ = capsule  # type: ignore[attr-defined]


NO_MEMORY = "refused: .* lacks the memory.*"
NO_TENSORS = {"doctor": "tensors", "told": SLOW_TENSORS}
NO_LOADER = {
    "doctor": "DataLoader",
    "told": "ps.DataLoader stages in the main process, which is slower: torch .*",
}

CASES = {
    "nothing": Case(lambda: None),
    # -- tensors
    "forward_ad._current_level": Case(
        for_us_only(torch.autograd, "forward_ad", "_current_level"), **NO_TENSORS
    ),
    "forward_ad._current_level is an object": Case(
        for_us_only(torch.autograd, "forward_ad", "_current_level", object()), **NO_TENSORS
    ),
    "is_functional_tensor": Case(
        gone(torch, "_is_functional_tensor"), instead={"a functional tensor": NO_MEMORY}
    ),
    "Tensor._is_zerotensor": Case(
        instead(torch.Tensor, "_is_zerotensor", None), instead={"a zero tensor": NO_MEMORY}
    ),
    # -- facts that the extension needs
    "the exchange API": Case(has_no_api, **NO_TENSORS),
    "the exchange API of another version": Case(has_another_api, **NO_TENSORS),
    "the libraries": Case(instead(torch, "__file__", "/nowhere/torch/__init__.py"), **NO_TENSORS),
    "a function of the shim": Case(
        in_core(
            use_torch=lambda real, exchange, functions, *rest: real(exchange, functions[1:], *rest)
        ),
        **NO_TENSORS,
    ),
    "Tensor._cdata": Case(of_tensors("_cdata", None), **NO_TENSORS),
    "Tensor._cdata is something else": Case(of_tensors("_cdata", id), **NO_TENSORS),
    "sizes of storages": Case(
        in_core(facts=lambda real, tensor: (1, *real(tensor)[1:])), **NO_TENSORS
    ),
    "dtypes": Case(
        in_core(facts=lambda real, tensor: (*real(tensor)[:2], 0, *real(tensor)[3:])), **NO_TENSORS
    ),
    "flags": Case(in_core(facts=lambda real, tensor: (*real(tensor)[:3], 0, 0, 0)), **NO_TENSORS),
    "what counts modes": Case(
        instead(torch._C, "_len_torch_dispatch_stack", lambda: 0), **NO_TENSORS
    ),
    "Tensor._base": Case(of_tensors("_base", None), **NO_TENSORS),
    "Tensor._version": Case(
        of_tensors("_version", lambda _: 0), **NO_TENSORS | {"doctor": "save_on_cpu, tensors"}
    ),
    "views of a subclass": Case(
        cut_views(lambda view: view.as_subclass(type("Ours", (torch.Tensor,), {}))), **NO_TENSORS
    ),
    "views of another place": Case(cut_views(lambda view: view.flip(0)), **NO_TENSORS),
    "views that are copies": Case(cut_views(lambda view: view.clone()), **NO_TENSORS),
    "views that share their version": Case(cut_views(shares_its_version), **NO_TENSORS),
    "views that cannot be made": Case(cut_views(cannot_be_made), **NO_TENSORS),
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
    "collate": Case(for_us_only(data_utils, "collate", "collate"), **NO_LOADER),
    "collate_tensor_fn": Case(for_us_only(data_utils, "collate", "collate_tensor_fn"), **NO_LOADER),
    "default_collate_fn_map": Case(
        for_us_only(data_utils, "collate", "default_collate_fn_map"), **NO_LOADER
    ),
}


# -- trials ----------------------------------------------------------------------------------------


class WithPytree:
    """A container that was registered with torch's pytree."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def batch(seed: int) -> dict[str, Any]:
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


def differences(staged: dict[str, Any], seed: int) -> list[str]:
    """Return the leaves that differ from the result of `.to()`."""
    expected = batch(seed)
    found = [] if staged["plain"] is staged["again"] else ["again is another object"]
    for name, leaf in expected.items():
        got = staged[name]
        want = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf
        if not isinstance(want, torch.Tensor):
            same = got == want
        elif want.is_sparse:
            same = got.is_sparse and torch.equal(got.to_dense(), want.to_dense())
        else:
            want = want.resolve_conj().resolve_neg()
            same = (got.dtype, got.shape, got.requires_grad) == (
                want.dtype,
                want.shape,
                want.requires_grad,
            )
            same = same and torch.equal(got, want)
        if not same:
            found.append(f"{name} of batch {seed}: {got!r}")
    return found


def overwrite(sources: dict[str, Any]) -> None:
    with torch.no_grad():
        for leaf in sources.values():
            if isinstance(leaf, torch.Tensor) and not (leaf.is_sparse or leaf.requires_grad):
                leaf.zero_()


def stage_some(ps: Any, stager: Any, count: int) -> list[str]:
    wrong, kept = [], []
    for seed in range(count):
        sources = batch(seed)
        kept.append(stager.to_device(sources))
        overwrite(sources)
        wrong += differences(kept[-1], seed)
    for seed, staged in enumerate(kept):
        wrong += differences(staged, seed)
    return wrong


def dual_tensors(ps: Any, stager: Any) -> str:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch.arange(3.0))
        staged = stager.to_device({"x": dual, "y": torch.ones(2)})
        return (
            "staged"
            if torch.equal(forward_ad.unpack_dual(staged["x"]).tangent, torch.arange(3.0))
            else "lost"
        )


def registered_with_pytree(ps: Any, stager: Any) -> str:
    staged = stager.to_device(WithPytree(torch.ones(2)))
    return "staged" if torch.equal(staged.x, torch.ones(2)) else "lost"


def profile(ps: Any, stager: Any) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        stager.to_device(batch(0))
    return (
        "has steps"
        if "pinstage.pack" in {event.name for event in profiler.events()}
        else "has none"
    )


def workers(ps: Any) -> str:
    dataset = [{"x": torch.full((3,), float(i)), "i": i} for i in range(8)]
    loader = ps.DataLoader(
        dataset, batch_size=2, num_workers=1, device="cpu", multiprocessing_context="fork"
    )
    xs = torch.cat([found["x"] for found in loader])
    return (
        "staged" if torch.equal(xs, torch.arange(8.0).repeat_interleave(3).view(8, 3)) else "lost"
    )


def weights(ps: Any, stager: Any) -> str:
    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("angles", torch.zeros(2), persistent=False)
    missing, _ = stager.load_weights(module, {"running_mean": torch.ones(2)}, strict=False)
    is_loaded = (
        missing == ["weight", "bias", "running_var", "num_batches_tracked"]
        and module.running_mean.sum() == 2
    )
    return "loaded" if is_loaded else "lost"


def outcome(ps: Any, attempt: Callable[..., str], *args: Any) -> str:
    try:
        return attempt(ps, *args)
    except ps.errors.PinstageError as error:
        return f"refused: {error}"


def like(ps: Any, stager: Any, tensor: torch.Tensor, value: torch.Tensor) -> str:
    staged = stager.to_device({"x": tensor})["x"]
    if torch._is_functional_tensor(staged) if hasattr(torch, "_is_functional_tensor") else False:
        staged = torch._from_functional_tensor(staged)
    return "staged" if torch.equal(staged + 0, value) else "lost"


def try_all() -> dict[str, Any]:
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


def run(case: Case) -> dict[str, Any]:
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

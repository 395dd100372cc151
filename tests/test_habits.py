"""Interfaces behave as users expect: messages for wrong calls, and the `repr` of objects."""

import ast
import inspect
import re
from collections import UserDict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import pinstage as ps
from pinstage._loader import _loader
from pinstage.checkpoint import CheckpointStager

MIB = 1 << 20


@pytest.mark.parametrize("device", ["gpu", "cuda:x", 1.5, object()])
def test_an_invalid_device_is_refused_in_our_words(device):
    with pytest.raises(ValueError, match=r"not a device: .*; write 'cuda', 'cuda:0' or 'cpu'"):
        ps.Stager(device)


def test_an_index_without_a_gpu_is_unavailable(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ps.errors.CudaUnavailableError):
        ps.Stager(0)


STAGER = partial(ps.Stager, "cpu")
LOADER = partial(ps.DataLoader, [1], device="cpu")
TORCHS = torch.utils.data.DataLoader([torch.ones(2)] * 4, 2)
TAKE_A_POOL = [
    STAGER,
    LOADER,
    partial(ps.wrap_loader, TORCHS, device="cpu"),
    CheckpointStager,
    ps.offload.save_on_cpu,
    partial(ps.offload.optimizer_state, torch.optim.SGD([torch.ones(1)])),
]


@pytest.mark.parametrize(
    ("name", "value", "makers", "text"),
    [
        (
            "max_bytes",
            None,
            [ps.SlabPool, STAGER, LOADER],
            "cannot be None: a pool always has a cap; pass 'auto'",
        ),
        (
            "budget",
            "8GiB",
            [ps.SlabPool, STAGER, LOADER, partial(ps.HostRegion, "1MiB", device="cpu")],
            r"must be a HostBudget: '8GiB'; pass HostBudget\(",
        ),
        ("pool", "1GiB", TAKE_A_POOL, r"must be a SlabPool: '1GiB'; pass SlabPool\('1GiB'\)"),
        *(
            ("memory", value, [ps.SlabPool], "must be a MemoryResource: .*; pass one such as Page")
            for value in ("1GiB", 5, ps.memory.PageableMemory)
        ),
    ],
)
def test_another_thing_than_memory_is_refused(name, value, makers, text):
    for make in makers:
        with pytest.raises(TypeError, match=f"{name} {text}"):
            make(**{name: value})


@pytest.mark.parametrize("make", [STAGER, LOADER, CheckpointStager])
def test_a_pool_and_a_budget_exclude_each_other(make):
    budget = ps.HostBudget("1MiB", name="both")
    with (
        ps.SlabPool("1MiB", memory=ps.memory.SharedMemory(register=False)) as pool,
        pytest.raises(ValueError, match="pool and budget exclude each other: budget=HostBudget"),
    ):
        make(pool=pool, budget=budget)


def test_the_budget_remedy_can_be_pasted(stager):
    batch = torch.zeros(9 * MIB, dtype=torch.uint8)
    with pytest.raises(ps.errors.BudgetExceededError) as caught:
        stager.to_device(batch)
    (size,) = re.findall(r'pass max_bytes="(.*?)"', str(caught.value))
    with ps.Stager("cpu", max_bytes=size) as larger:
        assert torch.equal(larger.to_device(batch), batch)


@pytest.mark.parametrize(("make", "call"), [(ps.Stager.stage, "wait"), (ps.Stager.fetch, "result")])
def test_a_transfer_as_a_batch_names_the_call(stager, make, call):
    transfer = make(stager, {"x": torch.ones(3)})
    name = type(transfer).__name__
    for use in (lambda: transfer["x"], lambda: list(transfer), lambda: dict(**transfer)):
        with pytest.raises(
            TypeError, match=rf"a {name} is a batch on its way, .*; call {call}\(\)|mapping"
        ):
            use()
    with pytest.raises(
        AttributeError,
        match=rf"a {name} is a batch on its way, and has no 'items'; call {call}\(\)",
    ):
        transfer.items()
    assert not hasattr(transfer, "shape")
    assert transfer  # not an empty container
    assert getattr(transfer, call)()["x"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [np.float32, np.dtype("int16"), "uint8", bool, np.complex64])
def test_a_lease_takes_numpy_s_dtypes(pool, dtype):
    with pool.acquire(64) as lease:
        tensor = lease.tensor((2, 3), dtype)
        assert tensor.numpy().dtype == np.dtype(dtype)
        array = lease.numpy((2, 3), dtype)
        assert array.dtype == np.dtype(dtype)
        assert array.ctypes.data == tensor.data_ptr()
        del tensor, array


def test_a_lease_takes_no_other_dtype(pool):
    with pool.acquire(64) as lease:
        for view in (lease.tensor, lease.numpy):
            with pytest.raises(TypeError):
                view(1, "datetime64[s]")
        with pytest.raises(TypeError, match="no dtype: None; pass torch's or numpy's"):
            lease.tensor(2, None)


def test_objects_print_as_what_they_are(stager):
    stager.to_device({"x": torch.ones(MIB)})
    assert "<Stager cpu batches=1" in repr(stager)
    samples, options = [torch.ones(2)], {"device": "cpu", "max_bytes": "4MiB"}
    loader = ps.DataLoader(samples, batch_size=3, **options)
    assert repr(loader) == "<DataLoader to cpu: batch_size=3, no workers, max_bytes='4MiB'>"

    class Own(torch.utils.data.DataLoader):
        pass

    wrapped = ps.wrap_loader(Own(samples, batch_size=3), **options)
    assert repr(wrapped) == repr(loader).replace("DataLoader", "Own")


def test_stats_print_one_line_for_a_log(stager):
    stager.to_device({"x": torch.ones(320 * 1024)[::2]})
    line = r"1 batch, 640.00 KiB in 1 copy; 0 fetches, .*; pool .* of 8.00 MiB, waited 0.000 s$"
    assert re.match(line, str(stager.stats()))
    loader = ps.DataLoader([torch.ones(2)] * 6, batch_size=3, device="cpu", max_bytes="4MiB")
    assert str(loader.stats()).startswith("0 batches, 0 B in 0 copies in 0.000 s")
    list(loader)
    line = str(loader.stats())
    assert re.match(
        r"2 batches, \d+ B in 2 copies in .* s waiting for a batch; 0 without a slab; pool .*", line
    ), line


def test_the_loader_s_typed_arguments_are_torch_s():
    torchs = inspect.signature(torch.utils.data.DataLoader.__init__).parameters
    tree = ast.parse(Path(_loader.__file__).read_text())
    typed = next(
        method.args
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == "DataLoader"
        for method in ast.walk(node)
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
    )
    positional = [
        name for name, found in torchs.items() if found.kind is found.POSITIONAL_OR_KEYWORD
    ]
    by_name = [name for name, found in torchs.items() if found.kind is found.KEYWORD_ONLY]
    assert [argument.arg for argument in typed.args] == positional
    assert [argument.arg for argument in typed.kwonlyargs] == [*by_name, *_loader.Settings._fields]
    defaults = [ast.literal_eval(default) for default in [*typed.defaults, *typed.kw_defaults]]
    assert defaults[: len(positional) + len(by_name) - 2] == [
        found.default for found in torchs.values() if found.default is not found.empty
    ]


@pytest.mark.parametrize(
    ("make", "options", "error", "text"),
    [
        (
            STAGER,
            {"pack_threads": "2"},
            TypeError,
            "pack_threads is a number of CPU threads: '2'; pass an int, or 'auto'",
        ),
        (
            STAGER,  # a loader's timeout is torch's
            {"timeout": "1"},
            TypeError,
            "timeout is a number of seconds: '1'; pass such a number, or None",
        ),
        (STAGER, {"owner": 3}, ValueError, "owner must be a name: 3; pass text"),
        (LOADER, {"owner": 3}, ValueError, "owner must be a name: 3; pass text"),
    ],
)
def test_arguments_of_other_types_are_refused(make, options, error, text):
    with pytest.raises(error, match=text):
        make(**options)


def test_a_pool_refuses_a_nonnumeric_timeout(pool):
    with pytest.raises(TypeError, match="timeout is a number of seconds: '1'"):
        pool.acquire(1, timeout="1")
    pool.acquire(1, timeout=np.float32(1)).release()


@pytest.mark.parametrize("max_bytes", ["AUTO", " Auto "])
def test_the_automatic_cap_accepts_any_case(max_bytes, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with ps.SlabPool(max_bytes, memory=ps.memory.PageableMemory()) as pool:
        assert pool.stats().max_bytes_reason.startswith("25%")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda stager: ps.DataLoader(TORCHS, device="cpu"),
            r"dataset is a DataLoader, .*: .* write pinstage\.wrap_loader\(loader, device=",
        ),
        *(
            (call, "cannot wrap this DataLoader: its batches arrive on cpu already; iterate over")
            for call in (
                lambda stager: ps.DataLoader(ps.wrap_loader(TORCHS, device="cpu"), device="cpu"),
                lambda stager: ps.wrap_loader(ps.wrap_loader(TORCHS, device="cpu"), device="cpu"),
                lambda stager: ps.wrap_loader(LOADER()),
            )
        ),
        (
            lambda stager: ps.wrap_loader([1, 2]),
            r"cannot wrap a list: it isn't derived from .*; iterate over stager\.prefetch\(source\)",
        ),
        (
            lambda stager: stager.prefetch({"a": TORCHS}),
            "cannot prefetch from a dict, .*: .*, and prefetch from each loader by itself",
        ),
        (
            lambda stager: stager.prefetch(UserDict(x=torch.ones(2))),
            r"cannot prefetch from a UserDict, .*: pass a batch to stager\.to_device\(batch\)",
        ),
        *(
            (call, r"cannot prefetch from a (Parameter|Module)Dict, which is a mapping")
            for call in (
                lambda stager: stager.prefetch(torch.nn.ParameterDict({"a": torch.ones(2)})),
                lambda stager: stager.prefetch(torch.nn.ModuleDict()),
            )
        ),
        *(
            (call, r"cannot prefetch from a \w+ of loaders: pass zip\(\.\.\.\) of them")
            for call in (
                lambda stager: stager.prefetch((TORCHS, TORCHS)),
                lambda stager: stager.prefetch([stager.prefetch(TORCHS)]),
                lambda stager: stager.prefetch([iter(TORCHS)]),
            )
        ),
    ],
)
def test_a_mistaken_source_has_a_remedy(stager, call, text):
    with pytest.raises(TypeError, match=text):
        call(stager)


def test_tuples_and_lists_of_batches_are_sources(stager):
    batches = torch.zeros(2), torch.ones(2)
    for source in (batches, list(batches), zip(TORCHS, TORCHS, strict=True)):
        assert len(list(stager.prefetch(source))) == 2


def test_a_masked_array_has_one_remedy(stager):
    with pytest.raises(ps.errors.LayoutError) as caught:
        stager.to_device(np.ma.masked_array([1.0], [True]))
    assert str(caught.value).endswith(
        ": a masked array would lose its mask; pass .filled(...) and .mask separately"
    )


def test_names_of_tests_have_fewer_than_nine_words():
    files = Path(__file__).parent.rglob("test_*.py")
    names = {name for file in files for name in re.findall(r"\bdef (test_\w+)", file.read_text())}
    assert [name for name in sorted(names) if name.count("_") > 8] == []

"""`ps.rows`: rows of a tensor, gathered when they are packed, as indexing gathers them."""

import copy
import pickle
import threading
from typing import NamedTuple

import numpy as np
import pytest
import torch
from bitwise import bits
from doubles import WalledMemory
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import PRINTABLE_DTYPES, assert_same, tensor_of
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

import pinstage as ps
from pinstage import _native
from pinstage.errors import LayoutError

SHAPES = [(), (1,), (2,), (13,), (3, 5), (1000,), (1025,), (3, 40_000), (0,), (2, 0, 3)]


@pytest.fixture(scope="module")
def stager():
    with ps.Stager("cpu", max_bytes="256MiB") as stager:
        yield stager


def sources(dtype, count, shape):
    """Return tensors of one shape whose rows are stored in all the ways that are possible."""
    dense = tensor_of(dtype, (count, *shape), 3)
    wide = tensor_of(dtype, (2 * count, *shape), 4)[::2]
    yield from (dense, wide, dense[:1].expand(dense.shape))
    if len(shape) > 1:
        yield tensor_of(dtype, (count, *shape[::-1]), 5).movedim(1, -1).reshape(dense.shape)
        yield tensor_of(dtype, (count, *shape[:-2], shape[-1], shape[-2]), 6).mT


@st.composite
def indexed(draw):
    dtype, shape = draw(st.sampled_from(PRINTABLE_DTYPES)), draw(st.sampled_from(SHAPES))
    count = draw(st.integers(1, 9))
    source = draw(st.sampled_from(list(sources(dtype, count, shape))))
    size = draw(st.lists(st.integers(0, 3), max_size=2))
    numbers = torch.randint(
        -count, count, size, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
    )
    return source, numbers.to(draw(st.sampled_from([torch.int32, torch.int64])))


@settings(max_examples=60)
@given(indexed())
def test_rows_are_what_indexing_returns(stager, case):
    source, index = case
    expected = torch.empty((*index.shape, *source.shape[1:]), dtype=source.dtype)
    for place in np.ndindex(*index.shape):
        bits(expected[place])[...] = bits(source[int(index[place])])
    leaf = ps.rows(source, index)
    assert leaf.shape == expected.shape
    assert leaf.dtype == source.dtype
    staged = stager.to_device({"rows": leaf, "also": [leaf, torch.ones(3)]})
    assert staged["rows"] is staged["also"][0]
    assert_same(expected, staged["rows"].contiguous())
    assert_same(expected, leaf.tensor().contiguous())


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("row_bytes", [1, 2, 3, 4, 8, 16, 52, 127, 1023, 1024, 5000, 300_000])
@pytest.mark.parametrize("threads", [1, 3])
def test_large_batches_are_cut_anywhere(row_bytes, threads):
    count = min(3_000_000 // row_bytes, 40_000)
    source = tensor_of(torch.uint8, (max(count // 3, 2), row_bytes), 1)
    index = torch.randint(len(source), (count,))
    batch = [torch.ones(5), ps.rows(source, index), ps.rows(source, index.flip(0)), torch.ones(300)]
    with ps.Stager("cpu", pack_threads=threads) as stager:
        staged = stager.to_device(batch)
    assert_same([batch[0], source[index], source[index.flip(0)], batch[3]], staged)


@pytest.mark.usefixtures("both_paths")
def test_arrays_memmaps_and_lists_are_taken(stager, tmp_path):
    numbers = np.memmap(tmp_path / "tokens", np.uint16, "w+", shape=(5000,))
    numbers[:] = np.arange(5000)
    numbers.flush()
    tokens = torch.from_numpy(np.memmap(tmp_path / "tokens", np.uint16, "c", shape=(5000,)))
    windows = tokens.unfold(0, 17, 1)
    index = np.array([[4, -1], [100, 0]], np.int32)
    read_only = np.memmap(tmp_path / "tokens", np.uint16, "r").reshape(-1, 5)
    batch = ps.rows(windows, index), ps.rows(read_only, [3, 3, -2]), ps.rows(numbers, [])
    expected = windows.to(torch.int32)[torch.from_numpy(index).long()].to(torch.uint16)
    staged = stager.to_device(batch)
    assert_same((expected, torch.from_numpy(read_only[[3, 3, -2]]), tokens[:0]), staged)


class Pair(NamedTuple):
    first: object
    second: object


@ps.register_node
class Box:
    def __init__(self, inside):
        self.inside = inside


def test_rows_may_be_anywhere_in_a_batch(stager):
    source = torch.arange(20.0).view(10, 2)
    leaf, expected = ps.rows(source, [1, 5]), source[[1, 5]]
    batch = {"a": (leaf, 3), "b": Pair("text", leaf), "c": Box([leaf]), "d": ps.on_host(leaf)}
    staged = stager.stage(batch).wait()
    found = [staged["a"][0], staged["b"].second, staged["c"].inside[0]]
    assert found[0] is found[1] is found[2]
    assert_same([expected, expected.clone()], [found[0], staged["d"]])
    layout = ps.Layout.of(batch)
    memory = torch.empty(layout.nbytes, dtype=torch.uint8)
    layout.pack(batch, memory)
    unpacked = layout.unpack(memory, layout.others(batch))
    assert_same(expected, unpacked["a"][0])
    assert_same(expected, unpacked["d"])
    assert_same([expected], next(iter(stager.prefetch([[leaf]]))))
    assert_same([expected], stager.to_host([leaf]))


@pytest.mark.parametrize("size", [3, 30_000, 400_000])
def test_rows_are_written_into_existing_tensors(stager, size):
    source = torch.arange(1000)
    index = torch.randint(1000, (size,))
    out = [torch.zeros(size, dtype=torch.int64), torch.zeros(2)]
    batch = [ps.rows(source, index), torch.ones(2, requires_grad=True)]
    written = stager.to_device(batch, out=out)
    assert written[0] is out[0]
    assert_same([source[index], torch.ones(2)], out)


def test_a_path_keeps_gathered_rows_on_the_host():
    source = torch.arange(6)
    with ps.Stager("cpu", keep_on_host=["['kept']"]) as stager:
        staged = stager.to_device({"kept": ps.rows(source, [2]), "x": ps.rows(source, [4])})
        assert_same({"kept": source[2:3], "x": source[4:5]}, staged)
        with pytest.raises(IndexError, match=r"\['kept'\].*7"):
            stager.to_device({"kept": ps.rows(source, [7])})


def test_the_whole_source_is_never_pickled():
    leaf = ps.rows(torch.zeros(1_000_000), [3, 4])
    pickled = pickle.dumps(leaf)
    assert len(pickled) < 10_000
    assert_same(torch.zeros(2), pickle.loads(pickled))
    assert_same(torch.zeros(2), copy.deepcopy(leaf))


def test_a_gathered_row_has_its_own_memory():
    source = torch.arange(12.0).view(2, 3, 2).transpose(1, 2)
    row = ps.rows(source, torch.tensor(1)).tensor()
    assert_same(torch.arange(6.0, 12.0).view(3, 2).t(), row)
    source.zero_()
    assert row.any()


def test_rows_may_have_more_dimensions_than_a_table(stager):
    source, index = torch.arange(6.0).view(3, *(1,) * 10, 2), torch.tensor([2]).view((1,) * 60)
    staged = stager.to_device(ps.rows(source, index))
    assert staged.shape == (1,) * 70 + (2,)
    assert staged.flatten().tolist() == [4, 5]
    with pytest.raises(OverflowError, match="larger than any memory"):
        stager.to_device(ps.rows(torch.zeros(1, 0, 2**62), [0] * 4))


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("number", [5, -6, 2**40, -(2**63), 2**63 - 1])
def test_an_index_out_of_range_reads_nothing(stager, number):
    batch = {"x": [torch.ones(2), ps.rows(torch.zeros(5, 3), [0, 4, number])]}
    before = stager.stats()
    with pytest.raises(IndexError) as raised:
        stager.to_device(batch)
    assert "batch['x'][1]" in str(raised.value)
    assert f"{number} for 5 rows" in str(raised.value)
    assert "from -5 to 4" in str(raised.value)
    assert stager.stats() == before


def test_nothing_can_be_indexed_in_an_empty_source(stager):
    with pytest.raises(IndexError, match="0 for 0 rows"):
        stager.to_device(ps.rows(torch.zeros(0, 3), [0]))
    assert_same(torch.zeros(0, 3), stager.to_device(ps.rows(torch.zeros(0, 3), [])))


@pytest.mark.parametrize(
    ("tensor", "index"),
    [
        (torch.zeros(3, requires_grad=True), [0]),
        (torch.nn.Parameter(torch.zeros(3), requires_grad=False), [0]),
        (torch.zeros(3, device="meta"), [0]),
        (torch.zeros(3).to_sparse(), [0]),
        (torch.tensor(3), [0]),
        (np.array(["a"]), [0]),
        (np.ma.array([1, 2]), [0]),
        ([1, 2, 3], [0]),
        (torch.zeros(3), [True]),
        (torch.zeros(3), [0.5]),
        (torch.zeros(3), 1),
        (torch.zeros(3), torch.tensor([True, False, True])),
        (torch.zeros(3), torch.tensor([1], dtype=torch.uint8)),
        (torch.zeros(3), np.array([1.0])),
        (torch.zeros(3), np.array(["1"])),
        (torch.zeros(3), np.array([1.5, True], object)),
        (torch.zeros(3), np.array(["1970-01-02"], "M8[D]")),
        (torch.zeros(3), torch.zeros(1, dtype=torch.int64, device="meta")),
    ],
)
def test_other_arguments_are_refused(tensor, index):
    with pytest.raises(TypeError, match=r"rows takes|lose its mask"):
        ps.rows(tensor, index)


def test_source_and_index_are_read_by_staging(stager):
    source, index = torch.arange(10), torch.tensor([1, 2])
    leaf = ps.rows(source, index)
    source += 100
    index += 1
    assert_same(torch.tensor([102, 103]), stager.to_device(leaf))
    assert (len(leaf), repr(leaf)) == (2, "<Rows int64 [2], of 10>")


def test_rows_of_a_cut_source_are_an_error(stager):
    source = torch.ones(1_000, 4)
    leaf = ps.rows(source, [999])
    source.untyped_storage().resize_(16)
    with pytest.raises(LayoutError, match=r"batch\['x'\] lacks the memory .* storage of 16"):
        stager.to_device({"x": leaf})


@pytest.mark.parametrize("nbytes", [0, 8])
def test_a_cut_index_is_an_error(stager, nbytes):
    index = torch.zeros(1_000, dtype=torch.int64)
    leaf = ps.rows(torch.ones(1).expand(2**62), index)
    index.untyped_storage().resize_(nbytes)
    with pytest.raises(TypeError, match="with the memory for its shape"):
        stager.to_device({"x": leaf})


def test_an_index_may_be_resized_between_two_uses():
    source, index, copies = torch.arange(3.0), torch.tensor([2, 0]), {}
    first = _native.core.stack_rows(source, index, copies)
    index.resize_(1_000).fill_(1)
    second = _native.core.stack_rows(source, index, copies)
    assert_same(torch.tensor([2.0, 0.0]), first.tensor())
    assert_same(torch.ones(1_000), second.tensor())


def test_len_may_resize_the_index(stager):
    source, index = torch.ones(3, 2, dtype=torch.complex64).conj(), torch.tensor([2, 0])

    class Resizing(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.__len__:
                with torch._C.DisableTorchFunction():
                    index.resize_(1_000).fill_(1)
            return function(*args, **(kwargs or {}))

    leaf = ps.rows(source, index)
    with Resizing():
        staged = stager.to_device(leaf)
    assert torch.equal(torch.ones(1_000, 2, dtype=torch.complex64), staged)


def test_an_index_may_change_in_another_thread(stager):
    source = torch.arange(1000)
    index = torch.zeros(200_000, dtype=torch.int64)
    done = threading.Event()

    def change():
        while not done.is_set():
            index.fill_(2**40)
            index.fill_(7)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(30):
            try:
                staged = stager.to_device(ps.rows(source, index))
            except IndexError:
                continue
            assert set(staged.unique().tolist()) <= {0, 7}
    finally:
        done.set()
        thread.join()


def test_a_refused_slab_gathers_rows_in_parts():
    source = torch.arange(3_000_000)
    index = torch.randint(len(source), (600_000,))
    with (
        ps.SlabPool(memory=WalledMemory(1 << 21)) as pool,
        ps.Stager("cpu", pool=pool) as stager,
        pytest.warns(ps.errors.StagingWarning),
    ):
        assert_same(
            [source[index], torch.ones(5)],
            stager.to_device([ps.rows(source, index), torch.ones(5)]),
        )


def test_modes_make_other_tensors(stager):
    source = torch.arange(12.0).view(6, 2)
    leaf = ps.rows(source, [1, 5, 2])
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(leaf.tensor()) is FakeTensor
        with pytest.raises(ps.errors.PinstageError, match="FakeTensorMode"):
            stager.to_device([leaf])
        with pytest.raises(IndexError, match="7 for 6 rows"):
            stager.to_device([ps.rows(source, [7])])
    with torch.device("meta"):
        staged = stager.to_device(leaf)
    assert_same(source[[1, 5, 2]], staged)


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_index_may_have_any_strides(stager, dtype):
    source = torch.arange(100)
    for index in (
        torch.arange(24, dtype=dtype).view(2, 3, 4).permute(2, 0, 1) - 50,
        torch.arange(-100, 100, dtype=dtype)[::7],
        torch.tensor([3], dtype=dtype).expand(2, 5),
        torch.tensor(-1, dtype=dtype),
        torch.zeros(2, 0, dtype=dtype),
    ):
        expected = source[index.long()].contiguous()
        assert_same(expected, stager.to_device(ps.rows(source, index)).contiguous())
        assert_same(expected, ps.rows(source, index.numpy()).tensor().contiguous())

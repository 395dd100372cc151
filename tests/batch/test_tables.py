"""Offset tables: the extension writes the same ones as plain Python, and no foreign table leads
outside its slab.
"""

import contextlib
import ctypes
import itertools
import pickle
import struct
from random import Random

import numpy as np
import oracle
import pytest
import torch
from doubles import guarded
from hypothesis import example, given, settings
from hypothesis import strategies as st
from own_leaves import many as filling_blocks
from paths import PATHS, on_path
from strategies import DTYPES, NUMPY_DTYPES, arrays, batches, slab_for, tensors

import pinstage as ps
from pinstage import Layout, _native
from pinstage._batch import RowKind, Sharing, Table, content_of, cut, make_blocks, pack, take_apart
from pinstage._batch._table import INTEGERS
from pinstage._loader._messages import BROKERS, receive
from pinstage._loader._sending import send
from pinstage._loader._slabs import Settings, Slabs
from pinstage.errors import LayoutError

many = settings(max_examples=3 * settings.default.max_examples)

HEADER = oracle.HEADER
MAGIC = oracle.MAGIC
FLOAT32 = 11
LARGEST = 2**63 - 1


# -- plain Python ----------------------------------------------------------------------------------

_memory = np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8)
_memory[_memory == 255] = 1  # in no dtype a NaN, which can't be compared


def _forms(draw, most_dims):
    shape = draw(st.lists(st.integers(0, 3), max_size=most_dims))
    return shape, draw(st.lists(st.integers(0, 7), min_size=len(shape), max_size=len(shape)))


@st.composite
def strided_tensors(draw):
    """Tensors of any shape and stride: with gaps, overlaps, and meaningless strides in dimensions
    of one element.
    """
    dtype = draw(st.sampled_from(DTYPES))
    shape, stride = _forms(draw, 8)
    base = torch.from_numpy(_memory).view(dtype)
    return base.as_strided(shape, stride, draw(st.integers(0, 9)))


@st.composite
def strided_arrays(draw):
    """Arrays of any shape, and of any stride in bytes: negative, odd, overlapping, not aligned;
    some are read-only.
    """
    dtype = draw(st.sampled_from(NUMPY_DTYPES))
    shape, stride = _forms(draw, 5)
    unit = draw(st.sampled_from([1, dtype.itemsize, dtype.itemsize, dtype.itemsize]))
    signs = draw(st.lists(st.sampled_from([1, 1, 1, -1]), min_size=len(shape), max_size=len(shape)))
    start = 1 << 15 | draw(st.sampled_from([0, 0, 0, 1, 8]))
    raw = np.zeros_like(_memory) if dtype.kind == "b" else _memory
    steps = [unit * step * sign for step, sign in zip(stride, signs, strict=True)]
    array = np.ndarray(shape, dtype, raw.data, start, steps)
    array.flags.writeable = draw(st.booleans())
    return array


@st.composite
def of_many_dimensions(draw):
    count = draw(st.integers(5, 64))
    tensor = torch.from_numpy(_memory)[:4].view(*[1] * (count - 2), 2, 2)
    return tensor.permute(draw(st.permutations(range(count))))


odd_leaves = st.one_of(
    strided_tensors(), strided_arrays(), of_many_dimensions(), tensors(), arrays()
)


def facts(leaf, others, slab):
    """Return all facts about an unpacked leaf, from the slab or from `others`."""
    if any(leaf is other for other in others):
        return id(leaf)
    assert leaf.untyped_storage().data_ptr() == slab.untyped_storage().data_ptr()
    flags = leaf.requires_grad, leaf.is_conj(), leaf.is_neg(), leaf._base
    return type(leaf), leaf.dtype, leaf.shape, leaf.stride(), leaf.storage_offset(), flags


@many
@given(st.one_of(st.lists(odd_leaves, max_size=6), batches()), st.sampled_from([1, 3]))
@example(filling_blocks(), 1)
def test_tables_and_views_equal_the_plain_python_oracle(batch, repeated):
    batch = [batch] * repeated
    whole = oracle.take_apart(batch)
    expected = slab_for(whole.table)
    oracle.pack(whole, expected)
    found = []
    for path in PATHS:
        with on_path(path):
            parts = take_apart(batch)
            table = parts.table
            with guarded(table.nbytes) as slab:
                pack(parts, slab)
                leaves = cut(table, slab, parts.others())
                places = {id(leaf): place for place, leaf in enumerate(leaves)}
                same = [places[id(leaf)] for leaf in leaves]
                views = [facts(leaf, parts.others(), slab) for leaf in leaves]
                found.append((views, same))
                assert torch.equal(slab, expected)
            assert Table.of_bytes(table.data) == table == whole.table
    assert found[0] == found[1]


def bits(leaf):
    return ctypes.string_at(leaf.data_ptr(), leaf.nbytes) if leaf.nbytes else b""  # all are dense


ends_of_pieces = st.lists(st.integers(0, 4096), max_size=4)


@many
@given(st.lists(odd_leaves, max_size=12), st.sampled_from(Sharing), ends_of_pieces, st.data())
def test_blocks_have_the_slab_s_bytes_however_sent(batch, sharing, cuts, data):
    whole = oracle.take_apart(batch)
    table = whole.table
    slab = slab_for(table)
    oracle.pack(whole, slab)
    others = [None] * (table.others + table.moved)
    expected = cut(table, slab, others)
    with on_path(data.draw(st.sampled_from(PATHS))):
        blocks = make_blocks(table, sharing, torch.device("cpu"))
        ends = sorted({min(at, table.nbytes) for at in cuts} | {0, table.nbytes})
        for start, end in itertools.pairwise(ends):
            blocks.copy(slab.data_ptr(), start, end, 0, False)
        for made, leaf in zip(blocks.leaves(others), expected, strict=True):
            assert (made is None) == (leaf is None)
            if leaf is not None:
                assert (made.dtype, made.shape) == (leaf.dtype, leaf.shape)
                assert made.stride() == leaf.stride()
                assert bits(made) == bits(leaf)
                assert sharing is not Sharing.EACH or made.untyped_storage().nbytes() == leaf.nbytes


# -- tables from elsewhere -------------------------------------------------------------------------

SOURCE = torch.zeros(1 << 20, dtype=torch.uint8)
"""Bytes of the source: enough for any leaf that fits a slab."""

numbers = st.one_of(
    st.sampled_from(
        [-1, 0, 1, 2, 15, 16, 2**31, 2**32, 2**32 + 1, 2**60, 2**61, 2**62, LARGEST, -LARGEST - 1]
    ),
    st.integers(-3, 600),
    st.integers(-LARGEST - 1, LARGEST),
)
multiples = st.integers(0, 32).map(lambda n: 16 * n)
blocks = st.sampled_from([0, 0, 1, 2, 2**32 - 1])
codes = st.one_of(st.integers(0, 70), st.integers(0, 255), st.just(FLOAT32))


def pack_row(width, offset, nbytes, kind, dtype, ndim, block, shape, stride):
    sizes = [*shape, *[0] * width][:width] + [*stride, *[0] * width][:width]
    return struct.pack(f"=qqBBBxI{2 * width}q", offset, nbytes, kind, dtype, ndim, block, *sizes)


def with_header(width, nbytes, rows):
    """Make a table of rows."""
    return HEADER.pack(MAGIC, len(rows), width, nbytes) + b"".join(
        pack_row(width, *row) for row in rows
    )


def columns(width):
    """Return strategies for the numbers of a row before its shape and stride."""
    return numbers, numbers, st.integers(0, 6), codes, st.integers(0, width + 1), blocks


@st.composite
def rows_of_any_numbers(draw):
    width, nbytes = draw(st.integers(1, 3)), draw(st.one_of(multiples, multiples, numbers))
    sizes = st.lists(st.one_of(numbers, st.integers(0, 4)), max_size=width)
    rows = st.lists(st.tuples(*columns(width), sizes, sizes), max_size=4)
    return with_header(width, nbytes, draw(rows))


def damaged(data, random):
    """Return a table with some of its words or bytes changed: to other words of it, neighbours, or
    any number.
    """
    data = bytearray(data)
    words = memoryview(data).cast("q")
    for _ in range(random.randint(1, 3)):
        at = random.randrange(4 if random.random() < 0.9 else 0, len(words))
        way = random.randrange(5)
        if way == 0:
            other = random.randrange(len(words))
            words[at], words[other] = words[other], words[at]
        elif way == 4:
            words[at] = random.choice(words)
        elif way == 1:
            words[at] = random.choice([0, 1, 2, 16, 2**32, 2**60, LARGEST, -1])
        elif way == 2:
            near = words[at] * random.choice([1, 2]) + random.choice([-16, -1, 1, 16])
            words[at] = min(max(near, -LARGEST), LARGEST)
        else:
            data[8 * at + random.randrange(8)] = random.randrange(256)
    return bytes(data)


@st.composite
def changed_bytes(draw):
    """A valid table with some bytes changed, missing or added."""
    table = take_apart(draw(st.lists(strided_tensors(), min_size=1, max_size=4))).table
    data = damaged(table.data, draw(st.randoms()))
    end = draw(st.one_of(st.just(len(data)), st.integers(0, len(data) + 40)))
    return data[:end].ljust(end, b"\0")


tables = st.one_of(rows_of_any_numbers(), changed_bytes(), changed_bytes(), st.binary(max_size=200))


def one_row(
    offset, nbytes, shape, stride, *, kind=RowKind.RAW, dtype=FLOAT32, ndim=None, slab_bytes=256
):
    ndim = len(shape) if ndim is None else ndim
    return with_header(2, slab_bytes, [(offset, nbytes, kind, dtype, ndim, 0, shape, stride)])


IMPOSSIBLE = {
    "a product that overflows to nothing": one_row(16, 0, [2**32, 2**32], [1, 1]),
    "a product that overflows to itself": one_row(0, 8, [2**62, 2], [1, 1]),
    "a stride that overflows": one_row(0, 8, [2, 1], [2**62, 1]),
    "a reach that overflows": one_row(0, 16, [2, 2], [LARGEST, LARGEST]),
    "a stride out of the slab": one_row(0, 8, [2], [64]),
    "a stride that repeats elements": one_row(0, 64, [4, 4], [0, 1]),
    "a stride that leaves gaps": one_row(0, 16, [2, 2], [3, 0]),
    "a negative stride": one_row(16, 8, [2], [-1]),
    "a negative stride of one element": one_row(0, 4, [1], [-1]),
    "a negative size": one_row(0, 4, [-1, -1], [1, 1]),
    "a negative offset": one_row(-16, 4, [1], [1]),
    "an offset of no element": one_row(2, 4, [1], [1]),
    "an end out of the slab": one_row(240, 20, [5], [1]),
    "more bytes than the shape": one_row(0, 8, [1], [1]),
    "more dimensions than a row has": one_row(0, 4, [1, 1], [1, 1], ndim=3),
    "an unknown dtype": one_row(0, 4, [1], [1], dtype=62),
    "an unknown kind": one_row(0, 4, [1], [1], kind=6),
    "the alias of itself": one_row(0, 0, [], [], kind=RowKind.ALIAS, dtype=0),
    "the alias of none": one_row(-1, 0, [], [], kind=RowKind.ALIAS, dtype=0),
    "a negative slab": one_row(0, 4, [1], [1], slab_bytes=-16),
    "a slab of odd size": one_row(0, 4, [1], [1], slab_bytes=8),
    "rows that overlap": with_header(
        1, 256, [(start, 32, RowKind.RAW, 0, 1, 0, [32], [1]) for start in (16, 0)]
    ),
    "more bytes than can be counted": with_header(
        1, 2**63 - 16, [(0, 2**62, RowKind.RAW, 0, 1, 0, [2**62], [1])] * 2
    ),
    "another magic number": HEADER.pack(MAGIC - 1, 0, 1, 0),
    "no width": HEADER.pack(MAGIC, 0, 0, 0),
    "too great a width": HEADER.pack(MAGIC, 0, 65, 0),
    "rows that are not there": HEADER.pack(MAGIC, 1, 1, 0),
    "less than no rows": HEADER.pack(MAGIC, -1, 1, 0),
    "nothing": b"",
}


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_a_wrong_table_is_refused(kind):
    with pytest.raises(
        LayoutError, match=r"not an offset table of this version of pinstage: .*; compute it again"
    ):
        Table.of_bytes(IMPOSSIBLE[kind])


@pytest.mark.parametrize(
    "thing", [None, "text", bytearray(HEADER.pack(MAGIC, 0, 1, 0)), memoryview(b"")]
)
def test_what_is_no_bytes_is_no_table(thing):
    with pytest.raises(LayoutError, match=f"not an offset table .*: a {type(thing).__name__}"):
        Table.of_bytes(thing)


def read(data):
    """Return the table, or the reason for refusing it."""
    try:
        return Table.of_bytes(data)
    except LayoutError as error:
        return str(error)


@many
@given(tables)
def test_plain_python_takes_and_refuses_the_same_tables(data):
    try:
        expected = Table(data, *oracle.figures_of(data))
    except ValueError as error:
        expected = (
            f"not an offset table of this version of pinstage: {error}; compute it again with "
            "Layout.of(batch)"
        )
    assert read(data) == expected


@many
@given(tables)
def test_checked_tables_have_views_inside_their_slab(data):
    for path in PATHS:
        with on_path(path):
            table = read(data)
            if isinstance(table, str) or table.nbytes > 1 << 16:
                continue
            with guarded(table.nbytes) as slab:
                leaves = outcome_of(cut, table, slab, [None] * (table.others + table.moved))
                write_all(leaves or [], slab)


def write_all(leaves, slab):
    """Write through all views; fail if one leads outside the slab."""
    for leaf in leaves:
        if leaf is None or not leaf.numel():
            continue
        reach = (
            sum((size - 1) * step for size, step in zip(leaf.shape, leaf.stride(), strict=True)) + 1
        )
        assert slab.data_ptr() <= leaf.data_ptr()
        assert leaf.data_ptr() + reach * leaf.itemsize <= slab.data_ptr() + slab.numel()
        integers = leaf.view(INTEGERS.get(leaf.itemsize, leaf.dtype))
        integers.as_strided([reach], [1]).fill_(7)


def sources_for(data):
    """Return the extension's arguments for the leaves of a table: addresses, and strides of the
    sources.
    """
    if len(data) < HEADER.size:
        return b""
    _, rows, width, *_ = HEADER.unpack_from(data)
    if not (0 <= rows <= 9 and 1 <= width <= 64):
        return b""
    return struct.pack(f"={1 + width}q", SOURCE.data_ptr(), *[3] * width) * rows


def outcome_of(function, *arguments):
    """Call a function that may refuse: torch can't make an empty view with a huge shape, for
    example.
    """
    try:
        return function(*arguments)
    except (LayoutError, ValueError, RuntimeError, OverflowError):
        return None


def is_filled(leaf):
    """Return whether the memory of a leaf has room for all its elements."""
    return leaf.storage_offset() * leaf.itemsize + leaf.nbytes <= leaf.untyped_storage().nbytes()


@many
@given(tables, st.sampled_from([0, 16, 256, 512]), ends_of_pieces)
@example(IMPOSSIBLE["a product that overflows to nothing"], 256, [])
@example(IMPOSSIBLE["a stride out of the slab"], 256, [])
@example(IMPOSSIBLE["rows that overlap"], 256, [20])
def test_the_extension_stays_inside_its_slab(data, nbytes, cuts):
    sources = sources_for(data)
    with guarded(nbytes) as slab:
        core = _native.core
        outcome_of(core.figures, data)
        for count in range(5):
            made = outcome_of(core.Blocks.of, data, 0, 0, 0, slab)
            write_all((made and outcome_of(made.leaves, [None] * count)) or [], slab)
        outcome_of(core.pack, data, sources, slab.data_ptr(), nbytes)
        job = outcome_of(core.Job, data, sources, slab.data_ptr(), nbytes, slab, 3)
        if job is not None:
            with job:
                for chunk, end in enumerate(job.ends):
                    job.wait(chunk)
                    assert 0 <= end <= nbytes
            ends = sorted({min(at, nbytes) for at in cuts} | {0, nbytes})
            for sharing in Sharing:
                made = outcome_of(core.Blocks.of, data, sharing, 0, 0)
                assert made is None or all(map(is_filled, made.tensors))
                for start, end in itertools.pairwise(ends if made is not None else []):
                    made.copy(slab.data_ptr(), start, end, 0, False)


# -- damaged tables, by every way from outside -----------------------------------------------------

BATCHES = (
    [
        torch.arange(64.0).view(8, 8),
        torch.arange(20.0).view(4, 5).t(),
        torch.arange(30.0).view(6, 5)[:, ::2],
    ],
    [
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(7, dtype=torch.bool),
        torch.ones(()),
    ],
    [torch.arange(float(count)) for count in range(12)],
    [torch.full((40, 41), 7), torch.zeros(3, 0), torch.zeros(1, 16, dtype=torch.complex64)],
)
DAMAGED = 5 * settings.default.max_examples
"""Damaged tables of each batch."""


class Broker:
    """Keeps no structures."""

    structure_of = staticmethod(pickle.loads)


@pytest.fixture
def ways(own_storage):
    """Yield a function that starts copies by a layout: of a lease, and of a worker's message."""
    stager = ps.Stager("cpu", max_bytes="16MiB", own_storage=own_storage)
    slabs = Slabs(Settings("cpu", None, "16MiB", None, 1, None, own_storage, "test").checked())
    broker = Broker()
    BROKERS[-1] = broker  # kept weakly

    def transfers(layout, memory, others):
        structure, table = content_of(layout)
        message = (
            pickle.dumps(structure),
            table.data,
            pickle.dumps(others),
            bytearray(memory.numpy()),
        )
        yield outcome_of(send, slabs, receive(-1, 0, None, *message, 0.0))
        with stager.pool.acquire(max(layout.nbytes, 1)) as lease:
            lease.tensor()[: layout.nbytes].copy_(memory)
            yield outcome_of(stager.stage_lease, lease, layout, others)

    yield transfers
    stager.close()
    del BROKERS[-1]


def restored(batch, data):
    """Return the layout of a batch from a pickle in which another table took its place; None if it
    is refused.
    """
    layout = Layout.of(batch)
    with contextlib.suppress(LayoutError):
        return pickle.loads(pickle.dumps(layout).replace(content_of(layout)[1].data, data))


def in_slab(layout, leaves):
    """Return the leaves of a list that are in the slab."""
    return [] if leaves is None else [leaves[int(slot.path[1:-1])] for slot in layout.slots]


@pytest.mark.parametrize("own_storage", ["auto", True, False])
def test_damaged_tables_are_refused_or_exact(ways):
    random, accepted = Random(1), 0
    for batch, _ in itertools.product(BATCHES, range(DAMAGED)):
        layout = restored(batch, damaged(take_apart(batch).table.data, random))
        if layout is None or layout.nbytes > 1 << 16:
            continue
        accepted += 1
        table = content_of(layout)[1]
        others = [torch.zeros(1)] * (table.others + table.moved)
        with guarded(layout.nbytes) as slab:
            outcome_of(layout.pack, batch, slab)
            slab.copy_(torch.from_numpy(_memory)[: layout.nbytes])
            expected = [
                bytes(slab.numpy()[slot.offset : slot.offset + slot.nbytes])
                for slot in layout.slots
            ]
            for transfer in ways(layout, slab, others):
                leaves = in_slab(layout, transfer and transfer.wait())
                assert all(map(is_filled, leaves))
                assert transfer is None or [bits(leaf) for leaf in leaves] == expected
            write_all(in_slab(layout, outcome_of(layout.unpack, slab, others)), slab)
    assert accepted > DAMAGED / 20


@pytest.mark.parametrize("length", [-16, -1, 1, 16])
def test_sources_of_another_table_are_refused(length):
    parts = take_apart([torch.zeros(4, 4), torch.ones(3)])
    sources = parts.sources[:length] if length < 0 else parts.sources + bytes(length)
    with guarded(parts.table.nbytes) as slab:
        for use, more in ((_native.core.pack, ()), (_native.core.Job, (None, 2))):
            with pytest.raises(ValueError, match="sources"):
                use(parts.table.data, sources, slab.data_ptr(), slab.numel(), *more)
        assert slab.eq(0xEE).all()


# -- what no table is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "thing",
    [object(), None, torch.nn.Parameter(torch.ones(1)), 3],
    ids=["object", "None", "Parameter", "int"],
)
def test_facts_are_asked_of_plain_tensors_only(thing):
    with pytest.raises(TypeError, match=r"not a torch\.Tensor"):
        _native.core.facts(thing)


SAMPLES = [torch.ones(4), torch.ones(4)]
STACK = _native.core.alike(SAMPLES, True)
GATHERED = _native.core.stack_rows(torch.ones(3, 2), np.array([0, 1]), {})


@pytest.mark.parametrize(
    "stacks",
    [
        {1: b"bytes"},
        {1: None},
        {0: STACK},
        {2: STACK},
        {3: STACK},
        {-1: STACK},
        {"1": STACK},
        {1: STACK, 4: STACK},
        {1: GATHERED},
    ],
    ids=["bytes", "None", "0", "2", "3", "-1", "a string", "1 and 4", "rows"],
)
@pytest.mark.parametrize("use", ["pack", "Job"])
def test_samples_are_stacked_only_into_their_row(use, stacks):
    tree = [torch.zeros(4), torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(5, 8)[:2, ::2]]
    parts = take_apart(tree)
    call, more = getattr(_native.core, use), [None, 2, False] if use == "Job" else []
    with guarded(parts.table.nbytes) as slab:
        args = parts.table.data, parts.sources, slab.data_ptr(), slab.numel()
        with pytest.raises(
            (ValueError, TypeError), match=r"isn't a stack|samples of a stack don't fill its row"
        ):
            call(*args, *more, stacks)
        with pytest.raises(TypeError, match="dict"):
            call(*args, *more, [STACK])
        assert slab.eq(0xEE).all()


@pytest.mark.parametrize("use", ["pack", "Job"])
def test_a_row_without_a_source_needs_its_samples(use):
    parts = take_apart([torch.zeros(4), STACK, GATHERED])
    assert list(parts.stacks) == [1, 2]
    call, more = getattr(_native.core, use), [None, 2, False] if use == "Job" else []
    with guarded(parts.table.nbytes) as slab:
        args = parts.table.data, parts.sources, slab.data_ptr(), slab.numel()
        with pytest.raises(ValueError, match="neither a source nor samples"):
            call(*args, *more, {1: STACK})
        assert slab.eq(0xEE).all()

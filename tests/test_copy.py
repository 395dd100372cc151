"""How bytes get into a slab: by one thread or several, in chunks, and what happens when it fails."""

import concurrent.futures
import itertools
import sys
import threading
import weakref

import pytest
import torch
from doubles import PATIENCE_SECONDS, outcome, wait_until
from pinstage._layout._fragments import (
    CHUNK_BYTES,
    CHUNKS,
    FIRST_CHUNK_BYTES,
    LARGE_FRAGMENT_BYTES,
    PIECE_BYTES,
    VECTOR_LENGTH,
    Fragments,
    Part,
)
from pinstage._packing import MAX_THREADS, PARALLEL_FROM_BYTES, Packer, threads_for
from strategies import bits, tensor_of

from pinstage._host import usable_cpus
from pinstage._layout import Moves, Table, plan

BATCHES = {
    "nothing": [],
    "empty leaves": [(0,), (0, 3)],
    "one small leaf": [(7,)],
    "many small leaves": [(n % 50,) for n in range(3000)],
    "one large leaf": [(3 * PARALLEL_FROM_BYTES + 3,)],
    "large leaves": [(PARALLEL_FROM_BYTES // 2 + n,) for n in range(5)],
    "small and large leaves": [(n**4,) for n in range(50)],
    "a chunked leaf": [(2 * CHUNK_BYTES + 5,)],
    "many chunks": [(3,), (3 * CHUNK_BYTES // 2,), (5,), (CHUNK_BYTES - 1,), (1, 3)],
}


def packing_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("pinstage-pack")]


@pytest.fixture
def make_packer():
    packers = []

    def make(threads):
        packers.append(Packer(threads))
        return packers[-1]

    yield make
    for packer in packers:
        packer.close()
    assert not packing_threads()


@pytest.fixture(scope="module", params=BATCHES)
def batch(request):
    tensors = [tensor_of(torch.uint8, shape, seed % 7) for seed, shape in enumerate(BATCHES[request.param])]
    if len(tensors) > 2:
        tensors[1] = tensors[1].expand(2, *tensors[1].shape)  # one that is gathered
    table = plan(tensors).table
    expected = torch.full((table.nbytes,), 0xEE, dtype=torch.uint8)
    for tensor, offset in zip(tensors, table.offsets, strict=True):
        expected[offset : offset + tensor.numel()] = tensor.flatten()
    return table, tensors, expected


def packed(packer, table, tensors):
    slab = torch.full((table.nbytes + 64,), 0xEE, dtype=torch.uint8)
    ends = list(packer.pack(table, tensors, slab))
    assert slab[table.nbytes :].eq(0xEE).all(), "wrote behind the end"
    return slab[: table.nbytes], ends


def leaves_are_equal(table, tensors, slab, expected):
    # Padding is nobody's; what it is filled with may differ.
    return all(
        torch.equal(slab[offset : offset + tensor.numel()], expected[offset : offset + tensor.numel()])
        for tensor, offset in zip(tensors, table.offsets, strict=True)
    )


# -- the same bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 4, 5])
def test_any_number_of_threads_writes_the_same_bytes(batch, make_packer, threads):
    table, tensors, expected = batch
    slab, _ = packed(make_packer(threads), table, tensors)
    assert leaves_are_equal(table, tensors, slab, expected)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "writev", [None, lambda *arguments: -1, lambda *arguments: 5], ids=["absent", "refused", "short"]
)
def test_where_the_system_call_does_not_work_the_bytes_are_the_same(batch, make_packer, threads, writev, monkeypatch):
    monkeypatch.setattr(Moves, "writev", writev)
    table, tensors, expected = batch
    slab, _ = packed(make_packer(threads), table, tensors)
    assert leaves_are_equal(table, tensors, slab, expected)


def test_a_system_call_that_was_refused_is_not_tried_again(monkeypatch):
    calls = []
    monkeypatch.setattr(Moves, "writev", staticmethod(lambda *arguments: calls.append(arguments) or -1))
    tensors = [tensor_of(torch.uint8, (9,), seed) for seed in range(100)]
    for _ in range(3):
        packed(Packer(1), plan(tensors).table, tensors)
    assert len(calls) == 1


def test_padding_does_not_carry_what_the_slab_held_before(make_packer):
    tensors = [tensor_of(torch.uint8, (n % 13 + 1,), n) for n in range(100)]
    table = plan(tensors).table
    slab, _ = packed(make_packer(1), table, tensors)
    again = torch.zeros(table.nbytes, dtype=torch.uint8)
    list(make_packer(1).pack(table, tensors, again))
    assert torch.equal(slab, again)


# -- progress ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 4])
def test_what_is_reported_is_in_the_slab_already(batch, make_packer, threads):
    table, tensors, expected = batch
    slab = torch.full((table.nbytes,), 0xEE, dtype=torch.uint8)
    done = 0
    for end in make_packer(threads).pack(table, tensors, slab):
        assert end > done or table.nbytes == 0
        ready = torch.zeros(table.nbytes, dtype=torch.uint8)
        ready[:end] = slab[:end]
        for tensor, offset in zip(tensors, table.offsets, strict=True):
            stop = min(offset + tensor.numel(), end)
            assert torch.equal(ready[offset:stop], expected[offset:stop])
        done = end
    assert done == table.nbytes


def test_a_batch_that_one_thread_packs_is_reported_once(make_packer):
    tensors = [tensor_of(torch.uint8, (CHUNK_BYTES // 2,)) for _ in range(3)]
    _, ends = packed(make_packer(1), plan(tensors).table, tensors)
    assert ends == [plan(tensors).table.nbytes]


def test_a_large_batch_is_reported_in_turns_the_first_soon(make_packer):
    tensors = [tensor_of(torch.uint8, (PIECE_BYTES,)) for _ in range(24)]
    _, ends = packed(make_packer(4), plan(tensors).table, tensors)
    mib = 1024 * 1024
    assert ends == [2 * mib, 6 * mib, 14 * mib, 22 * mib, 24 * mib]


SIZES = [
    [1],
    [CHUNK_BYTES],
    [2 * CHUNK_BYTES - 1],
    [2 * CHUNK_BYTES],
    [10**9 + 7],
    [256] * 5000,
    [PIECE_BYTES] * 300,
    [LARGE_FRAGMENT_BYTES - 16] * 500,
    [100, 10**8, 36, 100 * PIECE_BYTES, 4, 4, 4],
    [7488] * 701,  # the last piece would begin in the last fragment
    [7488] * 701 + [10**7],
]


def fragments_of(sizes):
    offsets = list(itertools.accumulate((-(-size // 16) * 16 for size in sizes), initial=0))
    return Fragments(offsets[:-1], sizes, offsets[-1]), offsets[-1]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)} of {sizes[0]}")
def test_pieces_are_in_order_cover_all_and_are_not_too_large_for_one_call(sizes):
    fragments, end = fragments_of(sizes)
    reached = 0
    for piece in fragments.pieces:
        assert piece.offset == reached
        if type(piece) is Part:
            assert piece.nbytes <= PIECE_BYTES
            assert piece.cut + piece.nbytes <= sizes[piece.leaf]
        else:
            assert piece.fragments <= VECTOR_LENGTH
            assert piece.nbytes == fragments.nbytes[piece.first : piece.first + piece.fragments].sum()
            assert piece.nbytes < PIECE_BYTES + LARGE_FRAGMENT_BYTES
        reached += piece.nbytes
    assert reached == end


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)} of {sizes[0]}")
def test_chunks_cover_all_the_first_is_small_and_none_is_too_large(sizes):
    fragments, end = fragments_of(sizes)
    chunks = fragments.chunks
    lengths = [high - low for low, high in itertools.pairwise([0, *(chunk.end for chunk in chunks)])]
    assert chunks[-1].end == end
    assert sum(chunk.pieces for chunk in chunks) == len(fragments.pieces)
    if end < CHUNK_BYTES:
        assert len(chunks) == 1
        return
    slack = max(piece.nbytes for piece in fragments.pieces)
    assert lengths[0] <= FIRST_CHUNK_BYTES + slack
    assert all(after <= 2 * before + slack for before, after in itertools.pairwise(lengths[:-1]))
    assert min(lengths) >= FIRST_CHUNK_BYTES
    assert max(lengths) <= max(CHUNK_BYTES, end // CHUNKS) + FIRST_CHUNK_BYTES + slack
    assert len(chunks) <= CHUNKS + 4  # the first ones are smaller


def test_more_bytes_take_more_threads():
    mib = 1024 * 1024
    assert [threads_for(n * mib) for n in (0, 3, 4, 8, 16, 64, 300)] == [1, 1, 2, 3, 4, 6, 13]
    assert [threads_for(n) for n in range(0, 10**9, 10**6)] == sorted(threads_for(n) for n in range(0, 10**9, 10**6))


def test_where_chunks_end_is_known_before(batch, make_packer):
    table, tensors, _ = batch
    packer = make_packer(4)
    _, ends = packed(packer, table, tensors)
    assert packer.ends(table) == ends


def test_no_thread_is_started_for_a_batch_that_one_moves_as_quickly(make_packer):
    packer = make_packer(4)
    tensors = [tensor_of(torch.uint8, (PARALLEL_FROM_BYTES - 200,)), tensor_of(torch.uint8, (100,))]
    packed(packer, plan(tensors).table, tensors)
    assert not packing_threads()


def strided_leaves():
    """Leaves of megabytes whose elements are not side by side, one lazily conjugated, one empty."""
    return [
        tensor_of(torch.uint8, (3, 2000, 1001), 1)[:, :, :1000],
        tensor_of(torch.bfloat16, (1, 1, 1500, 3000), 2)[..., ::2],
        tensor_of(torch.complex128, (900, 600), 3)[:, 1:],
        tensor_of(torch.bool, (1, 7_000_000), 4)[:, ::2],
        tensor_of(torch.int64, (5, 1), 5).expand(5, 100_000),
        tensor_of(torch.complex64, (3, 40), 6).conj(),
        tensor_of(torch.float32, (0, 4), 7)[:, ::2],
    ]


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("raw", [0, 1, 100], ids=["alone", "beside one leaf", "beside many"])
def test_strided_leaves_are_packed_by_any_number_of_threads(make_packer, threads, raw):
    tensors = [*strided_leaves(), *[tensor_of(torch.int16, (11,), seed) for seed in range(raw)]]
    table = plan(tensors).table
    slab, ends = packed(make_packer(threads), table, tensors)
    for tensor, view in zip(tensors, table.views(slab, ()), strict=True):
        plain = tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor.resolve_conj()
        assert torch.equal(bits(view), bits(plain.contiguous()))
    assert bool(packing_threads()) == (threads > 1)
    assert len(ends) == (1 if threads == 1 else 4)


def test_strided_leaves_are_packed_without_threads_of_torchs(make_packer, monkeypatch):
    tensors = [tensor for tensor in strided_leaves() if not tensor.is_conj()]
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *arguments, **keywords: pytest.fail("torch copies"))
    packed(make_packer(2), plan(tensors).table, tensors)


def test_large_strided_leaves_are_cut_along_their_rows():
    tensors = strided_leaves()
    table = plan(tensors).table
    covered = {position: torch.zeros(tensor.shape, dtype=torch.bool) for position, tensor in enumerate(tensors)}
    for piece in table.fragments.pieces:
        tensor, part = tensors[piece.position], covered[piece.position][piece.rows]
        assert not part.any(), "moved twice"
        part[...] = True
        assert piece.nbytes == part.numel() * tensor.itemsize
        assert piece.nbytes < 2 * PIECE_BYTES or not piece.rows
        assert piece.offset >= table.offsets[piece.position]
    assert all(part.all() for part in covered.values())
    assert [chunk.end for chunk in table.fragments.chunks] == sorted(chunk.end for chunk in table.fragments.chunks)
    assert sum(chunk.pieces for chunk in table.fragments.chunks) == len(table.fragments.pieces)


def test_threads_call_one_another_while_the_first_one_moves(make_packer, monkeypatch):
    tensors = [tensor_of(torch.uint8, (4 * CHUNK_BYTES,))]
    table = plan(tensors).table
    move, all_of_them = Moves.move, threading.Barrier(4)
    moved_by = set()

    def move_when_all_are_there(moves, piece):
        if threading.get_ident() not in moved_by:
            moved_by.add(threading.get_ident())
            all_of_them.wait(PATIENCE_SECONDS)
        move(moves, piece)

    monkeypatch.setattr(Moves, "move", move_when_all_are_there)
    packed(make_packer(4), table, tensors)
    assert len(moved_by) == 4


def test_threads_are_kept_from_batch_to_batch(make_packer):
    packer = make_packer(3)
    tensors = [tensor_of(torch.uint8, (8 * PARALLEL_FROM_BYTES,))]
    packed(packer, plan(tensors).table, tensors)
    first = packing_threads()
    packed(packer, plan(tensors).table, tensors)
    assert set(first) <= set(packing_threads())
    assert 1 <= len(packing_threads()) <= 2  # the third is the calling one


# -- errors and ends ---------------------------------------------------------------------------------------------------


class FailingPieces(list):
    """Fails when a packing thread, or the calling one, takes a piece; the other one waits until that has happened."""

    def __init__(self, pieces, fail_in):
        super().__init__(pieces)
        self.fail_in = fail_in
        self.failed = threading.Event()

    def __getitem__(self, index):
        taken_in = "thread" if threading.current_thread() in packing_threads() else "caller"
        if taken_in == self.fail_in:
            self.failed.set()
            raise RuntimeError(f"failed in the {self.fail_in}")
        if self.fail_in != "nobody":
            assert self.failed.wait(PATIENCE_SECONDS), "nothing was left for the other"
        return super().__getitem__(index)


class FailingTable(Table):
    """A table whose pieces fail."""

    __slots__ = ("fail_in",)

    @property
    def fragments(self):
        fragments = Fragments(self.raw_offsets, self.raw_nbytes, self.raw_end)
        fragments.pieces = FailingPieces(fragments.pieces, self.fail_in)
        return fragments


@pytest.mark.parametrize("size", [8 * PARALLEL_FROM_BYTES, 3 * CHUNK_BYTES])
def test_an_error_in_a_packing_thread_reaches_the_caller_and_the_next_batch_is_packed(make_packer, size):
    packer = make_packer(3)
    tensors = [tensor_of(torch.uint8, (size,))]
    table = FailingTable(plan(tensors).table.columns)
    table.fail_in = "thread"
    slab = torch.zeros(table.nbytes, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="failed in the thread"):
        list(packer.pack(table, tensors, slab))
    table.fail_in = "nobody"
    list(packer.pack(table, tensors, slab))
    assert torch.equal(slab[:size], tensors[0])


def test_an_error_in_the_calling_thread_leaves_no_thread_writing(make_packer):
    packer = make_packer(3)
    tensors = [tensor_of(torch.uint8, (3 * CHUNK_BYTES,))]
    table = FailingTable(plan(tensors).table.columns)
    table.fail_in = "caller"
    slab = torch.zeros(table.nbytes, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="failed in the caller"):
        list(packer.pack(table, tensors, slab))
    slab.zero_()
    table.fail_in = "nobody"
    for _ in range(3):
        list(packer.pack(table, tensors, slab))
        assert torch.equal(slab[: tensors[0].numel()], tensors[0])


def test_an_interrupt_between_taking_a_piece_and_moving_it_reaches_the_caller(make_packer, background):
    packer = make_packer(2)
    tensors = [tensor_of(torch.uint8, (8 * PARALLEL_FROM_BYTES,))]
    table = plan(tensors).table

    def interrupt(frame, event, argument):
        if frame.f_code.co_name == "move":
            sys.settrace(None)
            raise KeyboardInterrupt

    def interrupted():
        sys.settrace(interrupt)
        try:
            list(packer.pack(table, tensors, torch.empty(table.nbytes, dtype=torch.uint8)))
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            sys.settrace(None)

    assert outcome(background(interrupted)) == "interrupted"


def test_a_pack_that_is_left_early_leaves_no_thread_writing(make_packer):
    packer = make_packer(4)
    tensors = [tensor_of(torch.uint8, (4 * CHUNK_BYTES,)).fill_(1)]
    table = plan(tensors).table
    slab = torch.zeros(table.nbytes, dtype=torch.uint8)
    for _ in range(3):
        packing = packer.pack(table, tensors, slab)
        next(packing)
        packing.close()
        slab.zero_()
        other = tensor_of(torch.uint8, (8 * PARALLEL_FROM_BYTES,))
        list(packer.pack(plan([other]).table, [other], torch.empty(other.numel(), dtype=torch.uint8)))
        assert not slab.any(), "written after it was closed"


def test_when_no_thread_can_be_started_those_that_were_write_no_more(monkeypatch):
    start, started = threading.Thread.start, []

    def start_one(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    packer = Packer(4)
    tensors = [tensor_of(torch.uint8, (2 * CHUNK_BYTES,)).fill_(1)]
    table = plan(tensors).table
    slab = torch.zeros(table.nbytes, dtype=torch.uint8)
    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        list(packer.pack(table, tensors, slab))
    slab.zero_()
    packer.close()  # waits for what was begun
    assert not slab.any()


def test_no_thread_keeps_the_slab_when_it_is_filled(make_packer):
    packer = make_packer(4)
    tensors = [tensor_of(torch.uint8, (4 * PARALLEL_FROM_BYTES,))]
    table = plan(tensors).table
    for _ in range(100):
        slab = torch.empty(table.nbytes, dtype=torch.uint8)
        list(packer.pack(table, tensors, slab))
        kept = weakref.ref(slab)
        del slab
        assert kept() is None


def test_several_threads_pack_with_one_packer_at_once(make_packer):
    packer = make_packer(2)
    barrier = threading.Barrier(3)

    def work(seed):
        tensors = [
            tensor_of(torch.uint8, (2 * PARALLEL_FROM_BYTES + seed,), seed),
            tensor_of(torch.int64, (100,), seed),
        ]
        table = plan(tensors).table
        barrier.wait(PATIENCE_SECONDS)
        for _ in range(5):
            slab, _ = packed(packer, table, tensors)
            for tensor, offset in zip(tensors, table.offsets, strict=True):
                assert torch.equal(slab[offset : offset + tensor.nbytes].view(tensor.dtype), tensor)

    with concurrent.futures.ThreadPoolExecutor(3) as executor:
        for future in [executor.submit(work, seed) for seed in range(3)]:
            future.result()


def test_closing_while_another_thread_packs_ends(background):
    packer = Packer(3)
    tensors = [tensor_of(torch.uint8, (3 * PARALLEL_FROM_BYTES,))]
    table = plan(tensors).table

    def work():
        for _ in range(100):
            slab, _ = packed(packer, table, tensors)
            assert torch.equal(slab, tensors[0])

    packing = background(work)
    while not packing.done():
        outcome(background(packer.close))
    outcome(packing)
    packer.close()
    assert not packing_threads()


def test_closing_ends_the_threads_and_may_be_done_twice():
    packer = Packer(3)
    tensors = [tensor_of(torch.uint8, (8 * PARALLEL_FROM_BYTES,))]
    packed(packer, plan(tensors).table, tensors)
    assert packing_threads()
    packer.close()
    assert not packing_threads()
    packer.close()
    Packer(3).close()


def test_a_packer_that_is_forgotten_ends_its_threads():
    packer = Packer(2)
    tensors = [tensor_of(torch.uint8, (8 * PARALLEL_FROM_BYTES,))]
    packed(packer, plan(tensors).table, tensors)
    assert packing_threads()
    del packer
    wait_until(lambda: not packing_threads())


@pytest.mark.parametrize("threads", [0, -1])
def test_less_than_one_thread_is_refused(threads):
    with pytest.raises(ValueError, match=f"threads must be at least 1: {threads}; 1 packs in the calling thread"):
        Packer(threads)


# -- how many threads --------------------------------------------------------------------------------------------------


def test_by_default_a_packer_takes_the_usable_cpus_but_not_too_many():
    assert Packer().threads == min(usable_cpus(), MAX_THREADS)

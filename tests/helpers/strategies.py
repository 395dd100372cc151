"""Nested batches for property tests, and the check that a staged batch equals its source.

Nothing here depends on the device, so the GPU tests use it too. `assert_same` walks containers with
Python's own means, independently of the package, so that the two can disagree.
"""

import contextlib
import dataclasses
import datetime as dt
import enum
import functools
import math
import typing
import warnings
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple

import attrs
import numpy as np
import pytest
import torch
from bitwise import bits, telling_stride
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import register_pytree_node

import pinstage as ps

# -- dtypes ----------------------------------------------------------------------------------------


def _storable(dtype):
    try:
        return not torch.empty(1, dtype=dtype).is_quantized
    except (RuntimeError, TypeError):
        return False


EXPERIMENTAL = getattr(torch, "bcomplex32", None)
"""torch 2.15 has few operators for it yet. It has no code in tables, and moves with its own
``.to()``.
"""

with warnings.catch_warnings():
    # Complex32 is "experimental", quantised dtypes are "deprecated".
    warnings.simplefilter("ignore")
    DTYPES = tuple(
        sorted(
            {
                dtype
                for dtype in vars(torch).values()
                if isinstance(dtype, torch.dtype) and dtype is not EXPERIMENTAL and _storable(dtype)
            },
            key=str,
        )
    )
"""Every dtype that torch can store densely, but `EXPERIMENTAL`."""


def _printable(dtype):
    try:
        zeros = torch.zeros(16, dtype=torch.uint8).view(dtype)
        return bool(repr(zeros) + repr(zeros[0]) + repr(zeros[:0]))
    except (RuntimeError, TypeError):
        return False


PRINTABLE_DTYPES = tuple(filter(_printable, DTYPES))
"""The dtypes that torch can print, as hypothesis does with a failing example."""

NUMPY_DTYPES = tuple(map(np.dtype, "?bBhHiIqQefdFD"))
"""Every numeric numpy dtype that torch has."""

# -- containers ------------------------------------------------------------------------------------


class PlainDict(dict):
    """Only a different type."""


class WithNote:
    """Has an attribute, too. Its ``__init__`` must not be called again."""

    def __init__(self, items, note):
        super().__init__(items)
        self.note = note


class AttributeDict(WithNote, dict):
    pass


class AttributeOrderedDict(WithNote, OrderedDict):
    pass


class AttributeDefaultDict(defaultdict):
    note = None


class AttributeList(WithNote, list):
    pass


class AttributeTuple(tuple):  # noqa: SLOT001 - attributes are what it is about
    note = None


Pair = namedtuple("Pair", "first second")


class TypedPair(typing.NamedTuple):
    first: typing.Any
    second: typing.Any = None


@dataclasses.dataclass
class Record:
    first: typing.Any
    second: typing.Any = None

    def __post_init__(self):
        assert not hasattr(self, "born"), "__post_init__ was called again"
        self.born = True


@dataclasses.dataclass
class ChildRecord(Record):
    third: typing.Any = ()


@dataclasses.dataclass(frozen=True)
class FrozenRecord:
    first: typing.Any
    second: typing.Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedRecord:
    first: typing.Any
    second: typing.Any = None


@attrs.define(frozen=True)
class AttrsRecord:
    first: typing.Any
    second: typing.Any = None


class UserBatch(WithNote, UserDict):
    pass


@ps.register_node
class Registered:
    """Slots, a property, a private name and a cached property."""

    __slots__ = ("__dict__", "__private", "_first", "unset")

    def __init__(self, first, second):
        self._first = first
        self.__private = second
        self.third = [first]

    @property
    def first(self):
        return self._first

    @property
    def private(self):
        return self.__private

    @functools.cached_property
    def doubled(self):
        return (self._first, self._first)


class RegisteredChild(Registered):
    pass


class Speaking:
    """Has the `StagingNode` protocol."""

    def __init__(self, values, name):
        self.values = values
        self.name = name

    def tree_flatten(self):
        return tuple(self.values), self.name

    @classmethod
    def tree_unflatten(cls, metadata, children):
        return cls(list(children), metadata)


class KnownToTorch:
    """Registered with torch's pytree, as users do."""

    def __init__(self, values):
        self.values = values


register_pytree_node(
    KnownToTorch, lambda known: (known.values, None), lambda values, _: KnownToTorch(list(values))
)


class Colour(enum.Enum):
    RED = "red"
    BLUE = (1, 2)


def _with_note(container, note):
    container.note = note
    return container


def _touched(registered):
    _ = registered.doubled  # now it is stored
    return registered


class TensorSubclass(torch.Tensor):
    pass


class ArraySubclass(np.ndarray):
    pass


# -- leaves ----------------------------------------------------------------------------------------


def tensor_of(dtype, shape, seed=0):
    """Return a contiguous tensor of random bytes: NaN payloads, negative zeros, bools that are
    neither 0 nor 1.
    """
    count = math.prod(shape)
    random_bytes = np.random.default_rng(seed).integers(
        0, 256, count * dtype.itemsize, dtype=np.uint8
    )
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(random_bytes).view(dtype).view(shape)


_FORMS = {  # name: least number of dimensions, function
    "contiguous": (0, lambda tensor, seed: tensor),
    "permuted": (
        2,
        lambda tensor, seed: tensor.permute(
            *np.random.default_rng(seed).permutation(tensor.ndim).tolist()
        ),
    ),
    "every other": (
        1,
        lambda tensor, seed: tensor.movedim(seed % tensor.ndim, 0)[seed % 2 :: 2].movedim(
            0, seed % tensor.ndim
        ),
    ),
    "offset": (1, lambda tensor, seed: tensor[1:]),
    "expanded": (
        0,
        lambda tensor, seed: tensor.expand(3, *tensor.shape).movedim(0, seed % (tensor.ndim + 1)),
    ),
    "overlapping": (
        1,
        lambda tensor, seed: tensor.unfold(0, 2, 1) if len(tensor) >= 2 else tensor,
    ),
    "channels last": (4, lambda tensor, seed: tensor.movedim(-1, 1)),
}
_COMPLEX_FORMS = {
    "conjugated": (0, lambda tensor, seed: tensor.conj()),
    "negated": (0, lambda tensor, seed: tensor.conj().imag),
}


@st.composite
def tensors(draw, dtypes=PRINTABLE_DTYPES):
    """Tensors of every dtype, small, 0-d, empty and sometimes large, in every form of strides."""
    dtype = draw(st.sampled_from(dtypes))
    large = draw(st.integers(0, 19)) == 19
    if large:
        shape = [draw(st.integers(1, 3)), 33_000, *draw(st.sampled_from([(), (1,), (2,)]))]
    else:
        shape = draw(st.lists(st.integers(0, 5), max_size=5))
    forms = _FORMS | _COMPLEX_FORMS if dtype.is_complex else _FORMS
    _, form = forms[
        draw(st.sampled_from([name for name, (ndim, _) in forms.items() if len(shape) >= ndim]))
    ]
    seed = draw(st.integers(0, 99))
    return form(tensor_of(dtype, shape, seed), seed)


_ARRAY_FORMS = {
    "plain": lambda array: array,
    "fortran": np.asfortranarray,
    "reversed": lambda array: array[..., ::-1] if array.ndim else array,
    "every other": lambda array: array[::2] if array.ndim else array,
    "transposed": lambda array: array.T,
    "big-endian": lambda array: array.astype(array.dtype.newbyteorder(">")),
    "broadcast": lambda array: np.broadcast_to(array, (2, *array.shape)),
    "subclass": lambda array: array.view(ArraySubclass),
}


@st.composite
def arrays(draw, dtypes=NUMPY_DTYPES):
    """Numeric numpy arrays of every dtype and form, writable or not."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    array = (
        random.integers(0, 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        .view(dtype)
        .reshape(shape)
    )
    if dtype.kind == "b":
        array = array.view(np.uint8) > 127
    array = _ARRAY_FORMS[draw(st.sampled_from(sorted(_ARRAY_FORMS)))](array)
    if array.ndim and draw(st.booleans()):
        array = array.view()
        array.flags.writeable = False
    return array


def passthroughs():
    """Tensors that can't be packed: these move with their own ``.to()``."""
    return st.sampled_from(
        (
            lambda: torch.nn.Parameter(torch.randn(3)),
            lambda: torch.randn(2, 3, requires_grad=True),
            lambda: torch.randn(2, requires_grad=True) * 2,
            lambda: torch.eye(3).to_sparse(),
            lambda: torch.randn(4).as_subclass(TensorSubclass),
        )
    ).map(lambda make: make())


def atoms():
    """Leaves that aren't tensors: these are returned as the same objects."""
    return st.one_of(
        st.none(),
        st.integers(),
        st.text(max_size=3),
        st.sampled_from(
            (
                b"bytes", 2.5, True, 1j, Colour.RED, Colour.BLUE, torch.half, torch.Size([2, 3]), torch.device("cpu"),
                dt.date(2024, 2, 29), np.float32(1.5), np.dtype("f4"), np.array(["a", "bc"]),
                np.array(["2024-02-29"], dtype="M8[D]"), np.zeros(2, dtype=[("a", "f4"), ("b", "i8")]),
                np.array([None, "x"], dtype=object), frozenset({1, 2}), object(), int, range(3), slice(1, 2),
            )
        ),
    )  # fmt: skip


# -- batches ---------------------------------------------------------------------------------------

_keys = st.one_of(
    st.text(max_size=3), st.integers(-2, 9), st.sampled_from([None, (1, "a"), Colour.RED])
)


# From items (keys and values, each key once) and a further value.
_MADE_OF_ITEMS = (
    lambda items, note: dict(items),
    lambda items, note: OrderedDict(items),
    lambda items, note: defaultdict(list, items),
    lambda items, note: PlainDict(items),
    lambda items, note: Counter(dict(items)),
    AttributeDict,
    AttributeOrderedDict,
    lambda items, note: _with_note(AttributeDefaultDict(tuple, items), note),
    UserBatch,
)
# From a list of values and a further value.
_MADE_OF_VALUES = (
    lambda values, note: values,
    lambda values, note: tuple(values),
    AttributeList,
    lambda values, note: _with_note(AttributeTuple(values), note),
    lambda values, note: deque(values, maxlen=5),
    lambda values, note: Speaking(values, "name"),
    lambda values, note: KnownToTorch(values),
)
# From two values.
_MADE_OF_TWO = (
    Pair, TypedPair, Record, lambda one, two: ChildRecord(one, two, [one]), FrozenRecord,
    SlottedRecord, AttrsRecord, Registered, lambda one, two: _touched(RegisteredChild(one, two)),
)  # fmt: skip


@st.composite
def _containers(draw, child):
    make = draw(st.sampled_from(_MADE_OF_ITEMS + _MADE_OF_VALUES + _MADE_OF_TWO))
    if make in _MADE_OF_TWO:
        return make(draw(child), draw(child))
    values = draw(st.lists(child, max_size=4))
    if make in _MADE_OF_VALUES:
        return make(values, draw(child))
    keys = draw(st.lists(_keys, min_size=len(values), max_size=len(values), unique=True))
    return make(list(zip(keys, values, strict=True)), draw(child))


@st.composite
def _alike(draw):
    """Leaves with the same dtype and trailing shape, so that they share a run of the slab."""
    dtype = draw(st.sampled_from(PRINTABLE_DTYPES))
    trailing = draw(st.lists(st.integers(1, 4), max_size=2))
    lengths = draw(st.lists(st.integers(0, 6), min_size=4, max_size=7))
    return [tensor_of(dtype, (length, *trailing), seed) for seed, length in enumerate(lengths)]


def batches_of(leaves, max_leaves=12):
    """Nested batches of every container, with leaves of a strategy."""
    return st.recursive(leaves, _containers, max_leaves=max_leaves)


@st.composite
def batches(draw, passthrough=True, max_leaves=12):
    """Nested batches of every container and leaf, some leaves in several places.

    Args:
        passthrough: whether some leaves are tensors that can't be packed.
        max_leaves: the approximate maximum of leaves in a part of the batch.
    """
    shared = draw(st.lists(st.one_of(tensors(), arrays()), min_size=1, max_size=2))
    again = st.integers(0, len(shared) - 1).map(lambda index: shared[index])
    leaves = [tensors(), tensors(), arrays(), atoms(), _alike(), again]
    if passthrough:
        leaves.append(passthroughs())
    trees = batches_of(st.one_of(leaves), max_leaves)
    return draw(
        st.one_of(trees, st.lists(trees, min_size=2, max_size=4), st.tuples(trees, _alike(), trees))
    )


def slab_for(layout):
    """Return memory of just the right size for a layout or an offset table, with any content."""
    return torch.empty(layout.nbytes, dtype=torch.uint8)


def packed(batch):
    """Return a batch's layout, and a slab with its bytes."""
    layout = ps.Layout.of(batch)
    slab = slab_for(layout)
    layout.pack(batch, slab)
    return layout, slab


def through_slab(batch):
    """Pack a batch into a slab of just the right size, and unpack it."""
    layout, slab = packed(batch)
    return layout.unpack(slab, layout.others(batch))


# -- comparison ------------------------------------------------------------------------------------


def packable(tensor):
    """Return whether a tensor can be packed."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_nested or tensor.is_quantized)
    )


def as_tensor(array):
    """Return a tensor with the values of a numeric array, and its strides if torch supports
    them.
    """
    array = np.asarray(array)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    values = torch.from_numpy(array.astype(f"{array.dtype.kind}{array.itemsize}", order="C"))
    if all(step >= 0 and step % array.itemsize == 0 for step in array.strides):
        strided = torch.empty_strided(
            array.shape, [step // array.itemsize for step in array.strides], dtype=values.dtype
        )
        if _is_dense(strided):
            return strided.copy_(values)
    return values


def staged_stride(tensor):
    """Return the stride a tensor has once it is staged: its own if it is empty or dense, else
    contiguous.
    """
    is_kept = not tensor.numel() or _is_dense(tensor)
    return tensor.stride() if is_kept else torch.empty(tensor.shape).stride()


def _is_dense(tensor):
    return torch.empty_like(tensor).stride() == tensor.stride()


def assert_same(original, staged, device="cpu", *, copied=True):
    """Fail unless a staged batch is the original one, on a device.

    Compares structure, types, order of keys, attributes, aliases; of packed leaves dtype, shape,
    stride and every bit; tensors that are not packed with the result of their own ``.to()``; other
    leaves must be the same objects.

    Args:
        original: the batch as it was given.
        staged: the staged batch.
        device: the device that packed leaves must be on.
        copied: whether packed leaves must have their own memory.
    """
    device = torch.device(device)
    staged_of, original_of = {}, {}  # by id of the other

    def compare(original, staged, path):
        if isinstance(original, torch.Tensor) or (
            isinstance(original, np.ndarray) and original.dtype.kind in "biufc"
        ):
            compare_leaf(original, staged, path)
            return
        assert type(staged) is type(original), f"{path}: {type(staged)} instead of {type(original)}"
        if isinstance(original, PackedSequence):
            assert staged.batch_sizes.device.type == "cpu"
            assert torch.equal(original.batch_sizes, staged.batch_sizes), path
            original, staged = (
                original._replace(batch_sizes=None),
                staged._replace(batch_sizes=None),
            )
        if isinstance(original, dict):
            # Whatever a subclass makes of its methods.
            base = OrderedDict if isinstance(original, OrderedDict) else dict
            ours, theirs = list(base.keys(original)), list(base.keys(staged))
            assert theirs == ours, f"{path}: keys {theirs} instead of {ours}"
            for key in ours:
                compare(base.get(original, key), base.get(staged, key), f"{path}[{key!r}]")
            if isinstance(original, defaultdict):
                assert staged.default_factory is original.default_factory, path
        elif isinstance(original, list | tuple | deque) and type(original) is not torch.Size:
            assert len(staged) == len(original), (
                f"{path}: {len(staged)} items instead of {len(original)}"
            )
            for index, (one, other) in enumerate(zip(original, staged, strict=True)):
                compare(one, other, f"{path}[{index}]")
            if isinstance(original, deque):
                assert staged.maxlen == original.maxlen, path
        elif staged is original:
            return
        else:
            assert attributes(original), (
                f"{path}: another {type(original).__name__}, not the same object"
            )
        ours, theirs = attributes(original), attributes(staged)
        assert list(theirs) == list(ours), (
            f"{path}: attributes {list(theirs)} instead of {list(ours)}"
        )
        for name in ours:
            compare(ours[name], theirs[name], f"{path}.{name}")

    def compare_leaf(original, staged, path):
        assert isinstance(staged, torch.Tensor), f"{path}: {type(staged)} instead of a tensor"
        known = staged_of.setdefault(id(original), staged)
        assert known is staged, f"{path}: met before, and came back as another tensor"
        known = original_of.setdefault(id(staged), original)
        assert known is original, f"{path}: came back as the tensor of another leaf"
        if isinstance(original, torch.Tensor) and not packable(original):
            _assert_as_by_to(original, staged, original.to(device), path)
            return
        is_array = isinstance(original, np.ndarray)
        address = original.ctypes.data if is_array else original.data_ptr()
        if is_array:
            original = as_tensor(original)
        assert type(staged) is torch.Tensor, f"{path}: {type(staged)}"
        assert staged.device == device, f"{path}: on {staged.device}"
        assert staged.dtype == original.dtype, f"{path}: {staged.dtype} instead of {original.dtype}"
        assert staged.shape == original.shape, f"{path}: {staged.shape} instead of {original.shape}"
        stride, expected = staged.stride(), staged_stride(original)
        if is_array:
            stride, expected = (telling_stride(staged.shape, one) for one in (stride, expected))
        assert stride == expected, f"{path}: stride {stride} instead of {expected}"
        assert not any((staged.is_conj(), staged.is_neg(), staged.requires_grad)), path
        assert torch.equal(bits(staged), bits(original)), f"{path}: other content"
        if copied and original.numel():
            assert staged.data_ptr() != address, f"{path}: not copied"

    compare(original, staged, "batch")
    staged_of.clear()  # the functions above refer to one another, and would keep views of a slab


def assert_round_trip(batch):
    """Fail unless a batch that is packed into a slab and unpacked again is the same."""
    assert_same(batch, through_slab(batch))


def _assert_as_by_to(original, staged, moved, path):
    """Compare a tensor that was not packed with the result of its own ``.to()``."""
    if moved is original:
        assert staged is original, f"{path}: was there already, and is another tensor now"
        return
    assert type(staged) is type(moved), f"{path}: {type(staged)} instead of {type(moved)}"
    for name in ("dtype", "layout", "device", "requires_grad", "is_nested", "is_quantized"):
        assert getattr(staged, name) == getattr(moved, name), f"{path}: another {name}"
    if original.is_nested:
        pairs = zip(staged.unbind(), moved.unbind(), strict=True)
    elif original.layout is not torch.strided:
        pairs = [(staged.to_dense(), moved.to_dense())]
    elif original.is_quantized:
        pairs = [(staged.dequantize(), moved.dequantize())]
    else:
        pairs = [(staged, moved)]
    for one, other in pairs:
        assert one.shape == other.shape, path
        assert torch.equal(bits(one), bits(other)), f"{path}: other content"


@contextlib.contextmanager
def raises_at(path, match=None):
    """Fail unless a `LayoutError` that names this path is raised."""
    with pytest.raises(ps.errors.LayoutError, match=match) as caught:
        yield caught
    assert caught.value.path == path


def attributes(obj):
    """Return what an object stores by name: slots, then ``__dict__``."""
    stored = {}
    for cls in type(obj).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            mangled = (
                f"_{cls.__name__.lstrip('_')}{name}"
                if name[:2] == "__" and name[-2:] != "__"
                else name
            )
            if name not in ("__dict__", "__weakref__") and hasattr(obj, mangled):
                stored[mangled] = getattr(obj, mangled)
    stored.update(getattr(obj, "__dict__", {}))
    return stored


def leaves_of(batch):
    """Return all leaves of a batch except None, in some order."""
    found = []
    pending = [batch]
    while pending:
        obj = pending.pop()
        if isinstance(obj, torch.Tensor | np.ndarray):
            found.append(obj)
            continue
        if isinstance(obj, PackedSequence):
            obj = obj._replace(batch_sizes=None)
        if isinstance(obj, dict):
            pending.extend(obj.values())
        elif isinstance(obj, list | tuple | deque):
            pending.extend(obj)
        if attributes(obj) and not isinstance(obj, enum.Enum | type):
            pending.extend(attributes(obj).values())
        elif not isinstance(obj, dict | list | tuple | deque | type(None)):
            found.append(obj)
    return found

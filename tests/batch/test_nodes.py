"""Containers: which objects are taken apart, how they are rebuilt, and what is refused."""

import array
import collections
import ctypes
import dataclasses
import enum
import functools
import gc
import operator
import pathlib
import pickle
import re
import sys
import textwrap
import threading
import types
import typing
import warnings
import weakref

import attrs
import numpy as np
import pytest
import strategies as known
import torch
import warm
from doubles import switching_often
from loader_data import unbatched
from strategies import assert_round_trip, assert_same, packed, raises_at, through_slab
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import register_pytree_node

from pinstage import Layout, StagingNode, register_node, register_tensor
from pinstage._batch import _leaves, _nodes
from pinstage.errors import LayoutError


def moved(ordered):
    ordered.move_to_end("b")
    return ordered


def leaf(seed=0):
    return known.tensor_of(torch.float32, (3,), seed)


def refused(*_):
    raise AssertionError("this method was called")


def noted(container):
    container.note = leaf(9)
    return container


class Opaque:
    def __init__(self, hidden):
        self.hidden = hidden


class DefaultDict(collections.defaultdict):
    pass


class Ordered(collections.OrderedDict):
    pass


class FrozenDict(dict):
    """Cannot be filled by the usual means."""

    def __init__(self, *args):
        super().__init__(*args)
        self.frozen = True

    __setitem__ = __iter__ = keys = refused


class FrozenList(list):
    append = extend = refused


@dataclasses.dataclass
class Stream:
    values: typing.Any
    name: str
    factor: dataclasses.InitVar[float] = 1.0
    scaled: typing.Any = dataclasses.field(init=False, default=None)

    def __post_init__(self, factor):
        self.scaled = self.values * factor


@dataclasses.dataclass(frozen=True, slots=True)
class Base:
    first: typing.Any


@dataclasses.dataclass(frozen=True, slots=True)
class Derived(Base):
    second: typing.Any


@attrs.define
class AttrsOpen:
    first: typing.Any
    second: typing.Any = attrs.field(init=False, default=None)

    def __attrs_post_init__(self):
        assert self.second is None


@attrs.frozen(slots=False)
class AttrsFrozen:
    first: typing.Any


@attrs.define(frozen=True)
class AttrsDerived(AttrsFrozen):
    second: typing.Any


@register_node
class Space(types.SimpleNamespace):
    pass


@register_node
class Doubled(collections.namedtuple("Doubled", "one two")):  # noqa: SLOT002 - has attributes on purpose
    def __new__(cls, one):
        return super().__new__(cls, one, [one])


def sequence(**options):
    return pack_sequence([torch.randn(3, 2), torch.randn(2, 2), torch.randn(1, 2)], **options)


T = typing.TypeVar("T")


@dataclasses.dataclass
class Of(typing.Generic[T]):
    value: T


# `strategies.batches` draws the others.
CONTAINERS = {
    "dict subclass with methods of its own": lambda: FrozenDict({"b": leaf(1), "a": leaf(2)}),
    "OrderedDict subclass in another order": lambda: moved(Ordered(b=leaf(1), a=leaf(2))),
    "OrderedDict with attributes": lambda: noted(
        collections.OrderedDict([("b", leaf(1)), (2, leaf(2))])
    ),
    "OrderedDict with attributes and a tensor for a key": lambda: noted(
        collections.OrderedDict({leaf(1): leaf(2)})
    ),
    "a module's state": lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(3)).state_dict(),
    "defaultdict subclass": lambda: DefaultDict(tuple, b=leaf(1), a=leaf(2)),
    "UserList": lambda: collections.UserList([leaf(1), 2]),
    "list subclass": lambda: FrozenList([leaf(1), 2]),
    "torch.return_types": lambda: torch.max(torch.randn(3, 4), dim=0),
    "dataclass with InitVar": lambda: Stream(leaf(1), "wind", factor=2.0),
    "dataclass, frozen with slots, that inherits": lambda: Derived(leaf(1), leaf(2)),
    "dataclass, generic": lambda: Of(leaf(1)),
    "attrs": lambda: AttrsOpen(leaf(1)),
    "attrs, frozen, that inherits": lambda: AttrsDerived(leaf(1), leaf(2)),
    "namespace, registered": lambda: Space(a=leaf(1), b=[leaf(2)]),
    "namedtuple with a constructor, registered": lambda: noted(Doubled(leaf())),
    "packed sequence": sequence,
    "packed sequence, not sorted": lambda: sequence(enforce_sorted=False),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_come_back_as_they_were(kind):
    batch = [CONTAINERS[kind](), {"inner": CONTAINERS[kind]()}]
    leaves = known.leaves_of(batch)
    assert_round_trip(batch)
    assert all(map(operator.is_, leaves, known.leaves_of(batch))), "the original was changed"


# -- dicts -----------------------------------------------------------------------------------------


def test_a_dict_packs_by_a_reordered_layout():
    one, other = {"b": leaf(1), "a": leaf(2)}, {"a": leaf(3), "b": leaf(4)}
    layout, slab = packed(one)
    assert layout == Layout.of(other)
    layout.pack(other, slab)
    assert_same({"b": other["b"], "a": other["a"]}, layout.unpack(slab))


def test_packed_sequences_have_paths():
    assert Layout.of([sequence()]).slots[0].path == "[0].data"


# -- dataclasses and other objects -----------------------------------------------------------------


def test_an_enum_member_stays_itself():
    class Shape(tuple, enum.Enum):  # noqa: SLOT001
        WIDE = (4, 3)

    class Kind(known.FrozenRecord, enum.Enum):
        A = 1, 2

    for member in (Shape.WIDE, Kind.A):
        assert through_slab([member, leaf()])[0] is member


@dataclasses.dataclass
class RecordOfQueue(collections.deque):
    first: typing.Any


def test_a_dataclass_with_extra_state_stays_whole():
    record = RecordOfQueue(leaf())
    with pytest.raises(LayoutError, match="RecordOfQueue"):
        Layout.of(record)


# -- register_node ---------------------------------------------------------------------------------


def test_a_property_is_neither_read_nor_set():
    @register_node
    class Guarded:
        def __init__(self, value):
            self.__dict__["value"] = value

        value = property(refused, refused)
        __setattr__ = __getattr__ = refused

    guarded = Guarded(leaf())
    staged = through_slab(guarded)
    assert torch.equal(staged.__dict__["value"], guarded.__dict__["value"])


def test_slots_of_all_bases_are_staged():
    class Lower:
        __slots__ = "low"  # noqa: PLC0205 - a plain string is one slot

    @register_node
    class Upper(Lower):
        __slots__ = ("high",)

    upper = Upper()
    upper.low, upper.high = leaf(1), leaf(2)
    assert_round_trip(upper)


def test_subclasses_follow_a_later_registration():
    class Parent(Opaque):
        pass

    class Child(Parent):
        pass

    batch = [Child(leaf(1)), Parent(leaf(2))]
    with pytest.raises(LayoutError):
        Layout.of(batch)
    register_node(Parent)
    assert_round_trip(batch)


def test_register_node_works_as_a_decorator():
    def flatten(obj):
        return (obj.value,), None

    @register_node
    class Bare:
        value = leaf(1)

    @register_node()
    class Called:
        def __init__(self):
            self.value = leaf(2)

    @register_node(flatten=flatten, unflatten=lambda children, context: Told())
    class Told:
        value = leaf(3)

    assert isinstance(Bare, type)
    assert len(Layout.of(Bare()).slots) == 0  # class attributes aren't attributes of the object
    assert len(Layout.of(Called()).slots) == 1
    assert len(Layout.of(Told()).slots) == 1
    assert isinstance(through_slab(Told()), Told)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([3], "register_node needs a class: 3; use it as"),
        (
            [Opaque, lambda opaque: ((), None)],
            r"register_node\(Opaque\): flatten and unflatten go together",
        ),
        ([Opaque, None, lambda children, context: None], "go together"),
        *(
            (
                [type("Special", (base,), {})],
                rf"register_node\(Special\): its base {base.__name__} .*; pass flatten and unflatten",
            )
            for base in (collections.deque, set, frozenset, int, bytes, array.array, Exception)
        ),
    ],
)
def test_wrong_registrations_are_refused(arguments, says):
    with pytest.raises(TypeError, match=says):
        register_node(*arguments)


def test_registering_again_in_the_same_way_is_harmless():
    class Once(Opaque):
        pass

    def flatten(once):
        return (once.hidden,), None

    def unflatten(children, context):
        return Once(*children)

    for _ in range(2):
        assert register_node(Once, flatten, unflatten) is Once
        assert_round_trip([Once(leaf())])

    class Twice(Once):
        pass

    for _ in range(2):
        register_node(Twice)
        assert_round_trip([Twice(leaf())])


def test_a_known_class_cannot_be_registered_differently():
    registered = register_node(type("Once", (), {}))
    staged = dataclasses.make_dataclass("Met", ["value"])
    batch = staged(leaf())
    through_slab(batch)
    builtin = dict, list, tuple, collections.OrderedDict, collections.deque
    for cls in (*builtin, registered, staged):
        says = rf"{cls.__name__} is already registered in another way.*; register it once"
        with pytest.raises(ValueError, match=says):
            register_node(cls, lambda obj: ((), None), lambda children, context: None)
    assert_round_trip(batch)


# -- the protocol and torch's pytree ---------------------------------------------------------------


def test_isinstance_recognises_the_protocol():
    assert isinstance(known.Speaking([], ""), StagingNode)
    assert not isinstance(known.Record(1), StagingNode)


def test_the_protocol_has_precedence():
    @dataclasses.dataclass
    class Scaled:
        value: typing.Any
        unscaled: typing.Any

        def tree_flatten(self):
            return (self.value,), None

        @classmethod
        def tree_unflatten(cls, metadata, children):
            return cls(next(iter(children)), "dropped")

    assert through_slab(Scaled(leaf(1), leaf(2))).unscaled == "dropped"


@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "met as a leaf"])
def test_a_class_registered_with_pytree_later_is_known(stager, is_refused):
    Late = type("Late", (Opaque,), {})  # noqa: N806 - a class
    batch = [Late(leaf()), leaf(2)]
    if is_refused:
        for _ in range(2):
            with pytest.raises(LayoutError, match="register_node"):
                Layout.of(batch)
    else:
        assert len(Layout.of([Late("text"), leaf()]).slots) == 1
    register_pytree_node(
        Late, lambda late: ((late.hidden,), None), lambda children, context: Late(*children)
    )
    out = [Late(torch.zeros_like(leaf())), torch.zeros_like(leaf(2))]
    assert stager.to_device(batch, out=out)[1] is out[1]
    assert_same(batch, out)
    for way in (stager.to_host, through_slab, stager.to_device):
        assert_same(batch, way(batch))


# -- what hides tensors ----------------------------------------------------------------------------


class OpaqueSlots:
    __slots__ = ("__hidden",)

    def __init__(self, hidden):
        self.__hidden = hidden


def _cycle(hidden):
    opaque = Opaque([])
    opaque.hidden += [opaque, hidden]
    return opaque


HIDING = {
    "attribute": Opaque,
    "slot": OpaqueSlots,
    "attribute of an attribute": lambda t: Opaque(OpaqueSlots(Opaque(t))),
    "list in an attribute": lambda t: Opaque([1, [{"a": (t,)}]]),
    "set": lambda t: {t},
    "frozenset": lambda t: frozenset({1, t}),
    "object array": lambda t: np.array([None, Opaque(t)], dtype=object),
    "numpy array in an attribute": lambda t: Opaque(t.numpy()),
    "numpy array in an object array": lambda t: np.array([None, t.numpy()], dtype=object),
    "module": lambda t: torch.nn.Linear(2, 2),
    "optimizer": lambda t: torch.optim.SGD([torch.nn.Parameter(t)]),
    "deque subclass": lambda t: type("Window", (collections.deque,), {})([t]),
    "namespace": lambda t: types.SimpleNamespace(a=t),
    "mapping proxy": lambda t: types.MappingProxyType({"a": t}),
    "partial": lambda t: functools.partial(print, t),
    "keyword of a partial": lambda t: functools.partial(print, end=t),
    "values of a dict": lambda t: {"a": t}.values(),
    "items of a dict": lambda t: {"a": t}.items(),
    "exception's attribute": lambda t: noted(ValueError()),
    "cycle": _cycle,
}


@pytest.mark.parametrize("kind", HIDING)
def test_an_object_hiding_a_tensor_names_the_remedy(kind):
    hiding = HIDING[kind](leaf())
    with raises_at("['b'][1]") as caught:
        Layout.of({"a": leaf(), "b": [None, hiding]})
    said = str(caught.value)
    assert said.startswith("batch['b'][1] holds tensors")
    assert type(hiding).__name__ in said
    if isinstance(hiding, set | frozenset | np.ndarray):
        assert "use a list" in said
    else:
        assert f"pinstage.register_node({type(hiding).__qualname__}" in said
        assert "flatten, unflatten" in said
        assert "tree_flatten" in said


def scripted(value):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.script is deprecated from Python 3.14 on
        return torch.jit.script(value)


class FromC:
    """Has items, and stores them where Python can't look."""

    def __init__(self, *items):
        self.__class__._kept[id(self)] = items

    _kept: typing.ClassVar[dict] = {}

    def __len__(self):
        return len(self._kept[id(self)])

    def __getitem__(self, index):
        item = self._kept[id(self)][index]
        if isinstance(item, Exception):
            raise item
        return item


def extra(path):
    module, _, name = path.rpartition(".")
    return getattr(pytest.importorskip(module), name)


def assert_kept(thing):
    assert Layout.of([thing]).others([thing])[0] is thing


WITH_ITEMS = {
    "scripted dict": lambda t: scripted({"a": t}),
    "scripted list": lambda t: scripted([t]),
    "MultiDict": lambda t: extra("multidict.MultiDict")(a=t),
    "MultiDict with a key twice": lambda t: extra("multidict.MultiDict")([("a", 1), ("a", t)]),
    "MultiDictProxy": lambda t: extra("multidict.MultiDictProxy")(
        extra("multidict.MultiDict")(a=t)
    ),
    "HashTrieMap": lambda t: extra("rpds.HashTrieMap")({"a": t}),
    "rpds.List": lambda t: extra("rpds.List")([1, t]),
    "column by name": lambda t: extra("pandas.Series")([t], index=["a"]),
    "column in an attribute": lambda t: Opaque(extra("pandas.Series")([t])),
    "frame": lambda t: extra("pandas.DataFrame")({"a": [1], "b": [t]}),
    "items before an error": lambda t: FromC(t, ValueError()),
    "the sixteenth item": lambda t: FromC(*range(15), t),
    "an item of an item": lambda t: FromC(FromC(t)),
    "ctypes": ctypes.py_object * 1,
}


@pytest.mark.parametrize("kind", WITH_ITEMS)
def test_a_container_that_is_not_pythons_is_refused(kind):
    harmless, hiding = map(WITH_ITEMS[kind], (1.0, leaf()))
    assert_kept(harmless)
    with raises_at(
        "['a'][0]", match=rf"^batch\['a'\]\[0\] holds tensors.*: .*{type(hiding).__name__}; "
    ) as caught:
        Layout.of({"a": [hiding]})
    if isinstance(hiding, Opaque | FromC):
        assert "pinstage.register_node(" in str(caught.value)
    elif "column" not in kind and "frame" not in kind:
        assert f"pinstage.register_node({type(hiding).__qualname__}, flatten, unflatten)" in str(
            caught.value
        )


NO_TENSORS = {
    "an error at once": lambda: FromC(ValueError()),
    "the seventeenth item": lambda: FromC(*range(16), leaf()),
    "three levels": lambda: FromC(FromC(FromC(leaf()))),
    "column of categories": lambda: extra("pandas.Series")(["a", "b"], dtype="category"),
    "column of numbers or none": lambda: extra("pandas.Series")([1, None], dtype="Int64"),
    "frame of numbers and text": lambda: extra("pandas.DataFrame")({"a": [1.0], "b": ["x"]}),
    "a set of rpds": lambda: extra("rpds.HashTrieSet")([1]),
    "keys of a dict of tensors": {"a": leaf()}.keys,
    "an iterator of tensors": lambda: iter([leaf()]),
    "a bound method of what has tensors": lambda: [leaf()].append,
    "an error with a traceback": lambda: raised(leaf()),
}


def raised(tensor):
    try:
        raise ValueError("text")
    except ValueError as error:
        return error


@pytest.mark.parametrize("kind", NO_TENSORS)
def test_only_what_is_looked_at_is_refused(kind):
    assert_kept(NO_TENSORS[kind]())


QUICK = [
    range(3), array.array("f", [1]), memoryview(b"ab"), bytearray(b"ab"), re.match("a", "a"),
    np.float32(1), np.datetime64(1, "s"), pathlib.Path("a"), {}.keys(),
]  # fmt: skip


@pytest.mark.parametrize("quick", QUICK, ids=lambda quick: type(quick).__name__)
def test_classes_without_tensors_are_not_searched(quick, monkeypatch):
    monkeypatch.setattr(_leaves, "_contents", None)
    assert_kept(quick)


def test_images_are_not_searched(monkeypatch):
    image = extra("PIL.Image.new")("RGB", (4, 4))
    monkeypatch.setattr(_leaves, "_contents", None)
    assert_kept(image)


@pytest.mark.parametrize(
    "harmless",
    [
        Opaque({"a": [1, "b", Opaque(2.0)]}),
        _cycle("text"),
        np.array([None, {"a": 1}], dtype=object),
        {1, 2},
        iter([1]),
        threading.Lock(),
        torch.nn.ReLU(),
        types.SimpleNamespace(a=1),
        lambda: None,
        len,
        torch,
        Opaque,
        torch.Generator(),
        Opaque(np.array(["a"])),
    ],
    ids=lambda harmless: type(harmless).__name__,
)
def test_tensorless_objects_are_returned_unchanged(harmless):
    assert through_slab([leaf(), harmless])[1] is harmless


# -- state beside the items ------------------------------------------------------------------------


class Logging(dict):
    """Has an inner container, and a bound method of it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.log = []
        self.write = self.log.append


class LoggingCopied(Logging):
    def __copy__(self):
        made = type(self)(self)
        made.log += self.log
        made.note = self.note
        return made


class LoggingReduced(Logging):
    def __reduce__(self):
        return type(self), (dict(self),)


class Seen(list):
    def __init__(self, *args):
        super().__init__(*args)
        self.seen = set()

    __setitem__ = refused


class SeenCopied(Seen):
    def copy(self):
        return type(self)(self)


class SeenMistyped(Seen):
    def copy(self):
        return list(self)


def test_a_staged_sorted_dict_shares_nothing():
    cls = extra("sortedcontainers.SortedDict")
    original = cls(b=leaf(1), a=leaf(2))
    staged = through_slab({"x": original})["x"]
    staged["c"] = 1
    assert (type(staged), list(staged), list(original)) == (cls, ["a", "b", "c"], ["a", "b"])
    assert_same(dict(original), {key: staged[key] for key in original})


@pytest.mark.parametrize("cls", [LoggingCopied, LoggingReduced])
def test_a_dict_is_copied_in_its_own_way(cls):
    original = cls({"b": leaf(1), "a": [leaf(2)]})
    original.note = leaf(3)
    staged = through_slab([original])[0]
    staged.write("staged")
    assert (type(staged), staged.log, original.log) == (cls, ["staged"], [])
    assert_same(dict(original), dict(staged))
    if cls is LoggingCopied:
        assert staged.note is not original.note
        assert torch.equal(staged.note, original.note)


def test_a_list_is_copied_in_its_own_way():
    original = SeenCopied([leaf(1), 2])
    staged = through_slab([original])[0]
    staged.seen.add(1)
    assert (type(staged), original.seen) == (SeenCopied, set())
    assert_same(list(original), list(staged))


def sample(index):
    made = LoggingCopied({"x": torch.full((3,), index)})
    made.note = None
    made.write(index)
    return made


@pytest.mark.parametrize("workers", [0, 1])
def test_copied_dicts_come_out_of_a_loader(workers):
    for index, batch in enumerate(unbatched(sample, 3, num_workers=workers)):
        batch.write("staged")
        assert (type(batch), batch.log, batch["x"].tolist()) == (
            LoggingCopied,
            [index, "staged"],
            [index] * 3,
        )


def test_batches_unpacked_from_one_slab_share_nothing():
    batch = [SeenCopied([leaf(1)])]
    layout, slab = packed(batch)
    others = layout.others(batch)
    one, other = layout.unpack(slab, others), layout.unpack(slab, others)
    one[0].append(1)
    one[0].seen.add(1)
    assert (len(other[0]), other[0].seen) == (1, set())
    assert pickle.loads(pickle.dumps(layout)) == layout


@pytest.mark.parametrize(
    ("make", "attribute"),
    [
        (lambda: Logging({"a": leaf()}), "write is a method of a list"),
        (lambda: Seen([leaf()]), "seen is a set"),
        (lambda: SeenMistyped([leaf()]), "seen is a set"),
    ],
)
def test_state_that_a_copy_would_share_is_refused(make, attribute):
    with raises_at(
        "['a'][1]", match=rf"its attribute {attribute}, which .*register_node\(\w+, flatten"
    ):
        Layout.of({"a": [1, make()]})


@dataclasses.dataclass
class WithSet:
    value: typing.Any
    tags: set


class SelfDict(dict):
    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


def test_other_classes_keep_the_same_objects():
    record = WithSet(leaf(), {1})
    assert through_slab([record])[0].tags is record.tags
    staged = through_slab([SelfDict(x=leaf(), tags={1})])[0]
    assert (type(staged), staged["tags"]) == (SelfDict, {1})


# -- classes made for one batch --------------------------------------------------------------------

MADE = {
    "namedtuple": lambda: collections.namedtuple("Made", "x y"),
    "dataclass": lambda: dataclasses.make_dataclass("Made", ["x", "y"]),
    "dataclass with slots": lambda: dataclasses.make_dataclass("Made", ["x", "y"], slots=True),
    "leaf": lambda: type("Made", (), {"__init__": lambda self, x, y: None}),
    "dict": lambda: type(
        "Made", (dict,), {"__init__": lambda self, x, y: dict.__init__(self, x=x)}
    ),
}


@pytest.mark.parametrize("kind", MADE)
def test_classes_made_for_one_batch_are_collected(kind):
    made = []
    for _ in range(1300):
        cls = MADE[kind]()
        made.append(weakref.ref(cls))
        through_slab([cls(leaf(), 2)])
        del cls
    gc.collect()
    assert sum(found() is not None for found in made) <= 1100


def test_a_layout_outlasts_the_memory_of_its_classes():
    classes = [MADE[kind]() for kind in ("dataclass", "dataclass with slots", "dict")]
    batch = [cls(leaf(seed), seed) for seed, cls in enumerate(classes)]
    layout = Layout.of(batch)
    paths = [slot.path for slot in Layout.of(batch).slots]
    for _ in range(1100):
        Layout.of([type("Made", (), {})()])
    assert not set(classes) & set(_nodes.HANDLERS)
    assert [slot.path for slot in layout.slots] == paths
    assert layout == Layout.of(batch)
    assert layout != Layout.of([*batch[:2], MADE["dict"]()(leaf(3), 4)])
    assert_round_trip(batch)


def test_a_batch_can_exceed_the_class_cache():
    batch = [MADE["dataclass"]()(leaf(), index) for index in range(1100)]
    for _ in range(2):
        assert [type(item) for item in through_slab(batch)] == [type(item) for item in batch]


def _list_in_itself():
    batch = [leaf()]
    batch.append({"back": batch})
    return batch


def _record_in_itself():
    record = known.Record(leaf())
    record.second = {"back": [record]}
    return record


def _registered_in_itself():
    sample = known.Registered(leaf(), 2)
    sample.third = sample
    return sample


@pytest.mark.parametrize("limit", [None, 10**6])  # deeper than any stack
@pytest.mark.parametrize("make", [_list_in_itself, _record_in_itself, _registered_in_itself])
def test_a_self_referring_batch_is_an_error(make, limit):
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit or before)
    try:
        with pytest.raises(
            LayoutError,
            match=r"batch refers to itself.*; stage the tensors without the back reference",
        ):
            Layout.of(make())
    finally:
        sys.setrecursionlimit(before)


def test_an_error_of_flatten_is_the_callers():
    @register_node(flatten=lambda obj: 1 / 0, unflatten=lambda children, context: None)
    class Broken:
        pass

    with pytest.raises(ZeroDivisionError):
        Layout.of([leaf(), Broken()])


# -- threads and processes -------------------------------------------------------------------------


def test_classes_met_by_several_threads_are_learnt(background):
    threads = 4
    barrier = threading.Barrier(threads)

    def stage(classes):
        barrier.wait(20)
        return through_slab([cls(leaf(seed)) for seed, cls in enumerate(classes)])

    with switching_often():
        for _ in range(150):
            fresh = [dataclasses.make_dataclass(f"Fresh{i}", ["value"]) for i in range(5)]
            for future in [background(stage, fresh) for _ in range(threads)]:
                for seed, one in enumerate(future.result()):
                    assert torch.equal(one.value, leaf(seed))


def test_a_layout_unpickles_in_a_fresh_process(tmp_path, monkeypatch):
    source = textwrap.dedent(
        """
        import collections, dataclasses
        import torch

        @dataclasses.dataclass
        class Record:
            value: object

        class Plain:
            def __init__(self, value):
                self.value = value

        class Child(Plain):
            pass

        class Ordered(collections.OrderedDict):
            pass

        class Speaking:
            def __init__(self, value):
                self.value = value

            def tree_flatten(self):
                return (self.value,), "metadata"

            @classmethod
            def tree_unflatten(cls, metadata, children):
                return cls(*children)

        class Marked(torch.Tensor):
            pass

        class MarkedChild(Marked):
            pass

        def marked():
            tensor = torch.arange(3.0).as_subclass(MarkedChild)
            tensor.note = "here"
            return tensor

        def make():
            return {
                "record": Record([torch.arange(3)]), "plain": Plain(torch.ones(2)), "child": Child(torch.ones(2)),
                "ordered": Ordered(a=torch.zeros(2, 2), note="text"), "speaking": Speaking(torch.ones(1).double()),
                "sparse": torch.eye(2).to_sparse(), "marked": marked(),
            }
        """
    )
    (tmp_path / "batch.py").write_text(source)
    batch = types.ModuleType("batch")
    monkeypatch.setitem(sys.modules, "batch", batch)
    exec(source, vars(batch))
    register_node(batch.Plain)
    register_tensor(batch.Marked)
    made = batch.make()
    layout, slab = packed(made)
    sent = pickle.dumps((layout, bytes(slab.numpy()), str(layout), layout.others(made)))
    receiver = """
import sys, pickle, torch
layout, content, table, others = pickle.loads(sys.stdin.buffer.read())
assert str(layout) == table
slab = torch.empty(layout.nbytes, dtype=torch.uint8)
slab.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
found = layout.unpack(slab, others)
import batch
expected = batch.make()
assert list(found) == list(expected)
assert type(found["record"]) is batch.Record and torch.equal(found["record"].value[0], expected["record"].value[0])
assert type(found["plain"]) is batch.Plain and torch.equal(found["plain"].value, expected["plain"].value)
assert type(found["child"]) is batch.Child
assert type(found["ordered"]) is batch.Ordered and found["ordered"]["note"] == "text"
assert type(found["speaking"]) is batch.Speaking and torch.equal(found["speaking"].value, expected["speaking"].value)
assert found["sparse"].is_sparse
marked = found["marked"]
assert type(marked) is batch.MarkedChild and (marked.note, marked.tolist()) == ("here", [0, 1, 2])
import pinstage
try:
    same = pinstage.Layout.of(expected)
except pinstage.errors.LayoutError as error:
    raise SystemExit(f"the classes are not known: {error}")
assert same == layout
"""
    result = warm.completed(receiver, cwd=tmp_path, input=sent, text=False)
    assert result.returncode == 0, result.stderr.decode()


def test_learning_classes_leaves_warnings_filters_alone(monkeypatch):
    def changed(*_, **__):
        raise AssertionError("another thread's warnings were lost for a moment")

    monkeypatch.setattr("warnings.catch_warnings.__enter__", changed)
    monkeypatch.setattr("warnings.simplefilter", changed)
    registered = register_node(
        type("Registered", (list,), {}), lambda node: (list(node), None), lambda x, _: list(x)
    )
    batch = [
        dataclasses.make_dataclass("Plain", ["x"])(leaf()),
        attrs.make_class("Ours", ["x"])(leaf()),
        type("Own", (dict,), {})(x=leaf()),
        registered([leaf()]),
    ]
    assert len(Layout.of(batch).slots) == 4

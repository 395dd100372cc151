"""Loading checkpoints into existing tensors: as load_state_dict does, in groups."""

import copy
import weakref
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import TensorSubclass, bits
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

import pinstage as ps
from pinstage._stage import _weights
from pinstage._stage._target import Target

ROW = 8192
"""float32 elements of a few groups of the smallest pool."""


class Tied(torch.nn.Module):
    """A tied head, buffers of all kinds, batch norm, and tensors with odd strides."""

    def __init__(self, seed=0, device=None):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(50, 16, device=device)
        self.head = torch.nn.Linear(16, 50, bias=False, device=device)
        self.head.weight = self.embedding.weight
        self.norm = torch.nn.BatchNorm1d(16, device=device)
        self.conv = torch.nn.Conv2d(4, 4, 3, device=device).to(memory_format=torch.channels_last)
        self.register_buffer("count", torch.tensor(seed, device=device))
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool, device=device))
        self.register_buffer("angles", torch.arange(8.0) + seed, persistent=False)


class File:
    """The methods of safetensors' `safe_open`: keys, get_tensor and get_slice, but no items and no
    iteration.
    """

    def __init__(self, tensors):
        self._tensors = tensors
        self.read = []

    def keys(self):
        return list(self._tensors)

    def get_tensor(self, name):
        self.read.append(name)
        return self._tensors[name].clone()

    def get_slice(self, name):
        return SimpleNamespace(get_shape=lambda: list(self._tensors[name].shape))


SOURCES = {
    "dict": dict,
    "mapping": UserDict,
    "file": File,
    "pairs": lambda state: iter(list(state.items())),
}


@pytest.fixture(params=[*SOURCES, "mmap"])
def source(request, tmp_path):
    """Yield a state dict in each readable form: pairs don't give the names beforehand, and some
    mappings no shapes.
    """

    def make(state):
        if request.param in SOURCES:
            return SOURCES[request.param](state)
        torch.save(dict(state), tmp_path / "state")
        return torch.load(tmp_path / "state", mmap=True)

    make.tells_names = request.param != "pairs"
    make.tells_shapes = request.param not in ("pairs", "mapping")
    return make


@pytest.fixture
def in_small_groups(make_stager):
    """A stager that sends groups of less than 32 KiB."""
    return make_stager("64KiB")


def content_of(module):
    return copy.deepcopy(module.state_dict())


def assert_same(module, expected):
    torch.testing.assert_close(module.state_dict(), expected, rtol=0, atol=0)


# -- what is loaded --------------------------------------------------------------------------------


def test_all_tensors_have_the_checkpoints_content(stager, source):
    module, expected = Tied(), content_of(Tied(seed=1))
    objects = dict(module.named_parameters())
    assert stager.load_weights(module, source(expected)) == ([], [])
    assert_same(module, expected)
    assert dict(module.named_parameters()) == objects
    assert module.angles[0] == 0
    assert torch.is_grad_enabled()


def test_dicts_are_loaded_in_place(stager, source):
    found = {
        "a": torch.zeros(3, 4).t(),
        "b": torch.zeros((), dtype=torch.float64),
        "c": torch.zeros(0, 2),
        "d": torch.zeros(3).to_sparse(),
    }
    views = dict(found)
    expected = {name: torch.randn(tensor.shape) for name, tensor in found.items()}
    state = expected | {"d": expected["d"].to_sparse()}
    assert stager.load_weights(found, source(state)) == ([], [])
    for name, tensor in expected.items():
        assert torch.equal(views[name].to_dense().float(), tensor)


@pytest.mark.parametrize("keep", [["['a']"], lambda path, leaf: True], ids=["paths", "function"])
def test_weights_never_stay_on_the_host(make_stager, keep):
    found = {"a": torch.zeros(3), "b": torch.zeros(3)}
    stager = make_stager("1MiB", keep_on_host=keep)
    assert stager.load_weights(found, {name: torch.ones(3) for name in found}) == ([], [])
    assert all(tensor.all() for tensor in found.values())


def test_overlapping_tensors_are_copied_in_the_modules_order(stager, source):
    memory = torch.zeros(4, 4)
    found = {"w": memory, "flat": memory[1:].view(-1), "bits": memory[2:].view(torch.int32)}
    state = {name: torch.full_like(found[name], value) for value, name in enumerate(found, 1)}
    stager.load_weights(found, source(dict(reversed(state.items()))))
    assert memory[:2].mean(1).tolist() == [1, 2]
    assert (found["bits"] == 3).all()


class Wrapper(torch.Tensor):
    """A tensor without memory of its own: another has the values, as in torchao's quantized
    weights.
    """

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values):
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(
            *(arg.values if isinstance(arg, cls) else arg for arg in args), **(kwargs or {})
        )


def test_wrapper_tensors_of_one_shape_are_not_tied(stager, source):
    found = {name: Wrapper(torch.zeros(3)) for name in "abc"}
    stager.load_weights(found, source({name: torch.full((3,), float(ord(name))) for name in found}))
    assert [tensor.values[0] for tensor in found.values()] == [97, 98, 99]


# -- errors ----------------------------------------------------------------------------------------


def test_errors_match_load_state_dict_and_write_nothing(stager, source):
    state = content_of(Tied(seed=1))
    state["more"], state["norm.bias"] = torch.zeros(3), torch.zeros(2, 3)
    del state["conv.bias"]
    module = Tied()
    before = content_of(module)
    with pytest.raises(RuntimeError) as expected:
        Tied().load_state_dict(state)
    with pytest.raises(RuntimeError) as error:
        stager.load_weights(module, source(state))
    found, wanted = str(error.value).splitlines(), str(expected.value).splitlines()
    if source.tells_names:
        assert found == (wanted if source.tells_shapes else wanted[:-1])
        assert_same(module, before)
    else:  # in the source's order
        assert found[-1] == wanted[-1]


def test_a_parameter_on_another_device_is_named(stager, monkeypatch):
    monkeypatch.setattr(Target, "device", torch.device("cuda", 1))
    with pytest.raises(
        RuntimeError, match=r"conv\.weight is on cpu, the stager is for cuda:1; move it"
    ):
        stager.load_weights(Tied(), content_of(Tied()))


class OwnLoading(torch.nn.Linear):
    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)


class ExtraState(torch.nn.Linear):
    def get_extra_state(self):
        return 3

    def set_extra_state(self, state):
        pass


def hooked(name):
    module = torch.nn.Linear(2, 2)
    getattr(module, name)(lambda *_: None)
    return module


def own_method():
    module = torch.nn.Linear(2, 2)
    module._load_from_state_dict = lambda *_: None
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: OwnLoading(2, 2),
        own_method,
        lambda: ExtraState(2, 2),
        lambda: hooked("register_load_state_dict_pre_hook"),
        lambda: hooked("register_load_state_dict_post_hook"),
        lambda: torch.nn.LazyLinear(2),
    ],
    ids=["own", "own method", "extra state", "pre-hook", "post-hook", "lazy"],
)
def test_modules_that_take_part_in_loading_are_refused(stager, make):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), make())
    with pytest.raises(TypeError, match=r"load_weights can't load 1: .* Use load_state_dict"):
        stager.load_weights(module, {})


@pytest.mark.parametrize("kind", SOURCES)
def test_a_tied_tensor_of_another_shape_is_refused(stager, kind):
    module = torch.nn.Sequential(
        torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
    )
    module[1].weight = module[0].weight
    state = {"0.weight": torch.zeros(5, 5), "1.weight": torch.ones(3, 3)}
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        stager.load_weights(module, SOURCES[kind](state))


def norms(device=None):
    return torch.nn.Sequential(
        torch.nn.BatchNorm1d(3, device=device),
        torch.nn.Sequential(torch.nn.InstanceNorm2d(3, track_running_stats=True, device=device)),
        torch.nn.BatchNorm2d(3, track_running_stats=False, device=device),
    )


@pytest.mark.parametrize("versions", ["none", "old", "new", "one new"])
@pytest.mark.parametrize("strict", [True, False])
def test_counters_of_norms_may_be_missing(stager, versions, strict):
    ours, theirs, state = norms(), norms(), norms().state_dict()
    for module in ours, theirs:
        module[0].num_batches_tracked += 7
        module[1][0].num_batches_tracked += 8
    left_out = [name for name in state if name.endswith("num_batches_tracked")]
    for name in left_out:
        del state[name]
    if versions == "none":
        del state._metadata
    for path in {"old": ["0", "1.0"], "one new": ["0"]}.get(versions, []):
        state._metadata[path]["version"] = 1
    missing = {"new": left_out, "one new": left_out[1:]}.get(versions, [])
    if missing and strict:
        with pytest.raises(RuntimeError, match=f'Missing key.*"{missing[0]}"'):
            stager.load_weights(ours, state)
        return
    assert stager.load_weights(ours, state, strict=strict) == (missing, [])
    assert theirs.load_state_dict(state, strict=strict) == (missing, [])
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor)


@pytest.mark.parametrize("kind", SOURCES)
def test_missing_counters_on_meta_begin_at_zero(stager, kind):
    state = {name: tensor for name, tensor in norms().state_dict().items() if tensor.dim()}
    module = norms("meta")
    stager.load_weights(module, SOURCES[kind](state))
    assert module[0].num_batches_tracked.tolist() == 0
    assert module[1][0].num_batches_tracked.tolist() == 0
    assert module.state_dict().keys() == norms().state_dict().keys()


def test_a_cap_too_small_for_weights_is_refused():
    module = torch.nn.Linear(2, 2)
    message = r'too small to load weights: .*1 B\. Pass max_bytes="64KiB" or more'
    with ps.Stager("cpu", max_bytes=1) as stager, pytest.raises(ValueError, match=message):
        stager.load_weights(module, module.state_dict())
    with ps.Stager("cpu", max_bytes="64KiB") as stager:
        assert stager.load_weights(module, module.state_dict()) == ([], [])


def test_weights_of_any_size_fit_a_quota(stager):
    stager.pool.set_quota("stager", max_bytes="256KiB")
    weights = {"w": torch.arange(500_000.0), "b": torch.ones(3)}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    stager.load_weights(loaded, weights)
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


ONE = {"a": torch.ones(1)}


@pytest.mark.parametrize(
    ("target", "tensors", "message"),
    [
        (3, {}, r"loads a torch\.nn\.Module or a dict of tensors: int"),
        ({"a": 3}, {}, "a must be a tensor to load into: int"),
        (ONE, 3, "tensors must be a mapping, pairs of name and tensor.*: a int"),
        (ONE, "model.pt", r"a str\. Pass for example torch\.load\(path"),
        (ONE, "model.safetensors", r"a str\. Pass for example safe_open\(path"),
        (ONE, Path("model.safetensors"), r"Path\. Pass for example safe_open\(path"),
        (ONE, b"model.safetensors", r"a bytes\. Pass for example safe_open\(path"),
        (ONE, ["1.safetensors"], r"that yields a str\. Pass for example safe_open\(path"),
        (ONE, [torch.ones(2)], "pairs of name and tensor.*: an iterable that yields a Tensor"),
    ],
)
def test_other_types_are_refused(stager, target, tensors, message):
    with pytest.raises(TypeError, match=message):
        stager.load_weights(target, tensors)


@pytest.mark.parametrize("kind", ["dict", "mapping", "pairs"])
def test_values_that_are_not_tensors_are_named(stager, kind):
    found = {"a": torch.zeros(1), "b": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r"a in state_dict isn't a tensor"):
        stager.load_weights(found, SOURCES[kind]({"a": 3, "b": torch.ones(1)}))
    state = {"a": torch.ones(1), "step": 3, "b": torch.ones(1)}
    assert stager.load_weights(found, SOURCES[kind](state), strict=False) == ([], ["step"])


SHARING = {
    "nothing": lambda tensor: torch.zeros(2),
    "all": lambda tensor: tensor,
    "memory": lambda tensor: tensor.detach(),
    "flat": lambda tensor: tensor.detach().flatten(),
    "rows": lambda tensor: torch.atleast_1d(tensor.detach())[:2],
    "columns": lambda tensor: torch.atleast_1d(tensor.detach())[..., ::2],
}


class Made(torch.nn.Module):
    """A module of drawn tensors.

    Args:
        rows: for each tensor its module, how it is registered, shape and dtype, what it shares with
            an earlier tensor, and which.
        hides: whether `state_dict` lacks all tensors and has another key.
    """

    def __init__(self, rows, hides):
        super().__init__()
        self.hides = hides
        self.x, self.y = torch.nn.Module(), torch.nn.Module()
        self.y_again = self.y
        self.register_module("gone", None)
        tensors = []
        for number, (path, registered, shape, dtype, shared, earlier) in enumerate(rows):
            if tensors and shared != "nothing":
                tensor = SHARING[shared](tensors[earlier % len(tensors)])
            else:
                tensor = torch.zeros(shape, dtype=dtype)
            if registered == "parameter":
                if not isinstance(tensor, torch.nn.Parameter):
                    tensor = torch.nn.Parameter(tensor, requires_grad=False)
                self.get_submodule(path).register_parameter(f"t{number}", tensor)
            else:
                self.get_submodule(path).register_buffer(
                    f"t{number}", tensor, persistent=registered == "buffer"
                )
            tensors.append(tensor)

    def state_dict(self, *args, **kwargs):
        return {"extra": torch.zeros(1)} if self.hides else super().state_dict(*args, **kwargs)

    def tensors(self):
        return dict(
            [
                *self.named_parameters(remove_duplicate=False),
                *self.named_buffers(remove_duplicate=False),
            ]
        )


ROWS = st.tuples(
    st.sampled_from(["", "x", "y"]),
    st.sampled_from(["parameter", "buffer", "not in checkpoints"]),
    st.lists(st.integers(0, 4), max_size=2),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64]),
    st.sampled_from(sorted(SHARING)),
    st.integers(0, 9),
)
"""A row of `Made`."""


def is_same_memory(tensor, other):
    memory = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (tensor, other)]
    return tensor is other or (tensor.numel() > 0 and memory[0] == memory[1])


def outcome_of(load, *args, **kwargs):
    """Return the result and the error's message."""
    try:
        return load(*args, **kwargs), ""
    except RuntimeError as error:
        return None, str(error)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(ROWS, min_size=1, max_size=7),
    hides=st.booleans(),
    random=st.randoms(use_true_random=False),
    left_out=st.integers(0, 2),
    more=st.sets(
        st.sampled_from(["more", "x", "x.more", "y_again.more.weight", "gone.weight"]), max_size=2
    ),
    wrong=st.sampled_from([0, 0, 0, 1]),
    source=st.sampled_from(sorted(SOURCES)),
    strict=st.booleans(),
    group_bytes=st.sampled_from([1, 64, 1 << 20]),
)
def test_any_checkpoint_ends_as_with_load_state_dict(
    stager, monkeypatch, rows, hides, random, left_out, more, wrong, source, strict, group_bytes
):
    ours, torchs = Made(rows, hides), Made(rows, hides)
    needed = torchs.load_state_dict({}, strict=False).missing_keys
    names = [*random.sample(needed, max(len(needed) - left_out, 0)), *sorted(more)]
    random.shuffle(names)
    tensors, state = torchs.tensors(), {}
    for number, name in enumerate(names):
        shape = tuple(tensors[name].shape) if name in needed else (2,)
        state[name] = torch.full(shape or random.choice([(), (1,)]), number + 1.0)
    for name in names[:wrong]:
        state[name] = torch.zeros(5, 5, 5)
    expected, torchs_error = outcome_of(torchs.load_state_dict, state, strict=False)
    with monkeypatch.context() as patch:
        patch.setattr(_weights, "GROUP_BYTES", group_bytes)
        found, error = outcome_of(
            stager.load_weights, ours, SOURCES[source](state), strict=strict and not torchs_error
        )
    if torchs_error:
        assert error == torchs_error
        return
    loaded = [tensors[name] for name in names if name in needed]
    missing = [
        name
        for name in expected.missing_keys
        if not any(is_same_memory(tensors[name], tensor) for tensor in loaded)
    ]
    wrong_names = [*missing, *expected.unexpected_keys]
    if not (strict and wrong_names):
        assert found.missing_keys == missing
        assert sorted(found.unexpected_keys) == sorted(expected.unexpected_keys)
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in ours.tensors().items())
    elif source == "pairs":
        assert any(f'"{name}"' in error for name in wrong_names)
    else:
        assert all(f'"{name}"' in error for name in wrong_names)
        assert not any(tensor.any() for tensor in ours.tensors().values())


# -- meta ------------------------------------------------------------------------------------------


def test_meta_tensors_are_made_once_for_all_names(stager, source):
    module, state = Tied(device="meta"), content_of(Tied(seed=1))
    module.embedding.weight.requires_grad_(False)
    module.embedding.weight.note = "kept"
    del state["head.weight"]
    angles = module.angles
    stager.load_weights(module, source(state))
    assert_same(module, content_of(Tied(seed=1)))
    assert module.head.weight is module.embedding.weight
    assert (module.embedding.weight.note, module.embedding.weight.requires_grad) == ("kept", False)
    assert isinstance(module.conv.weight, torch.nn.Parameter)
    assert module.conv.weight.requires_grad
    assert module.conv.weight.stride() == Tied().conv.weight.stride()
    assert module.angles is angles
    module.norm(torch.randn(4, 16)).sum().backward()


def test_real_tensors_beside_meta_ones_are_not_touched(stager, source):
    module, state = Tied(), content_of(Tied(seed=1))
    module.conv = torch.nn.Conv2d(4, 4, 3, device="meta")
    weight, norm = module.head.weight, module.norm.weight.clone()
    part = {name: tensor for name, tensor in state.items() if name.startswith("conv")}
    missing, _ = stager.load_weights(module, source(part), strict=False)
    assert "norm.weight" in missing
    assert module.head.weight is weight
    assert torch.equal(module.norm.weight, norm)
    assert torch.equal(module.conv.weight, state["conv.weight"])


@pytest.mark.parametrize("strict", [True, False])
def test_tensors_left_on_meta_are_named_first(stager, source, strict):
    module, state = Tied(), content_of(Tied(seed=1))
    module.angles = module.angles.to("meta")
    before = content_of(module)
    with pytest.raises(RuntimeError, match='Still on meta after loading: "angles"'):
        stager.load_weights(module, source(state), strict=strict)
    assert_same(module, before)


def test_dicts_of_meta_tensors_are_filled(stager, source):
    shared = torch.empty(3, device="meta")
    found = {"a": shared, "b": shared, "c": torch.empty(2, device="meta")}
    stager.load_weights(found, source({"a": torch.ones(3), "c": torch.ones(2)}))
    assert found["a"] is found["b"]
    assert found["a"].sum() == 3


# -- groups ----------------------------------------------------------------------------------------


def test_groups_bound_what_a_generator_holds(in_small_groups):
    found, written = {f"{number}": torch.zeros(ROW // 8) for number in range(20)}, []

    def pairs():
        for number, name in enumerate(found, 1):
            written.append(sum(bool(tensor.any()) for tensor in found.values()))
            yield name, torch.full((ROW // 8,), number)

    assert in_small_groups.load_weights(found, pairs()) == ([], [])
    assert written == [number // 4 * 4 for number in range(20)]
    assert [tensor.unique().item() for tensor in found.values()] == list(range(1, 21))


OF_MANY_CAPS = {
    "permuted": lambda: (
        torch.arange(84_000, dtype=torch.int16).view(4, 1, 3000, 7).transpose(0, 2),
        torch.zeros(7, 4, 1, 3000).permute(3, 2, 1, 0),
    ),
    "unused strides": lambda: (
        torch.arange(1 << 19).view(1, 256, 256, 8).permute(0, 3, 1, 2),
        torch.empty_strided((1, 8, 256, 256), (1 << 19, 1, 2048, 8), dtype=torch.int64),
    ),
    "strided bools": lambda: strided_bytes(torch.bool),
    "strided bits": lambda: strided_bytes(torch.int1),
}


def strided_bytes(dtype):
    bytes_ = torch.randint(256, (2048, 1024), dtype=torch.uint8)
    return bytes_.view(dtype)[:, ::2], torch.zeros((2048, 512), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("kind", OF_MANY_CAPS)
def test_a_tensor_of_many_caps_is_cut(in_small_groups, kind):
    tensor, place = OF_MANY_CAPS[kind]()
    in_small_groups.load_weights({"x": place}, {"x": tensor})
    assert torch.equal(bits(place), bits(tensor.to(place.dtype)))


class Flattened(torch.Tensor):
    __tensor_flatten__ = None


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_what_cannot_be_cut_needs_no_slab(make_stager, kind):
    place = torch.zeros(100_000).as_subclass(Flattened)
    make_stager("64KiB").load_weights({"x": place}, {"x": kind(torch.ones(100_000))})
    assert (place == 1).all()


def test_at_most_two_groups_are_on_the_device(make_stager, monkeypatch):
    monkeypatch.setattr(_weights, "GROUP_BYTES", 1000)
    alive = weakref.WeakSet()
    most = []
    blocks = Target.blocks

    def counted(self, table, *more):
        made = blocks(self, table, *more)
        alive.update(made.tensors)
        most.append(sum(tensor.nbytes for tensor in alive))
        return made

    monkeypatch.setattr(Target, "blocks", counted)
    state = {f"{seed}": torch.full((7, 300, 2), float(seed)) for seed in range(8)}
    found = {name: torch.empty(7, 300, 2, dtype=torch.float64) for name in state}
    make_stager("1MiB").load_weights(found, state)
    torch.testing.assert_close(found, state, rtol=0, atol=0, check_dtype=False)
    assert len(most) > 10
    assert max(most) <= 2 * 1024


def test_each_tensor_of_a_file_is_read_once(stager):
    file = File(content_of(Tied(seed=1)))
    stager.load_weights(Tied(), file)
    assert {*file.keys()} - {*file.read} == {"embedding.weight"}  # the head's is the last
    assert len({*file.read}) == len(file.read)


def test_safetensors_files_are_loaded(stager, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    torch_files = pytest.importorskip("safetensors.torch")
    state = content_of(Tied(seed=1))
    del state["head.weight"]
    torch_files.save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "w.safetensors"
    )
    module = Tied(device="meta")
    with safetensors.safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        assert stager.load_weights(module, file) == ([], [])
    assert_same(module, content_of(Tied(seed=1)))


# -- readers that use their memory again -----------------------------------------------------------

LAYOUTS = {
    "contiguous": lambda: torch.zeros(100, 9),
    "bytes": lambda: torch.zeros(1001, dtype=torch.uint8),
    "half": lambda: torch.zeros(33, dtype=torch.bfloat16),
    "0-d": lambda: torch.zeros(()),
    "turned": lambda: torch.zeros(9, 100).t(),
    "columns": lambda: torch.zeros(100, 9)[:, 2:5],
    "expanded": lambda: torch.zeros(3, 1).expand(3, 9),
}


@pytest.fixture(params=["pairs", "mapping", "dict"])
def reading(request):
    """Yield tensors of these names through a reader that calls a function before it returns
    each.
    """

    def make(names, read):
        if request.param == "pairs":
            return ((name, read(name)) for name in names)

        class Reader(dict if request.param == "dict" else UserDict):
            def __iter__(self):
                return iter(names)

            def __getitem__(self, name):
                return read(name)

        return Reader()

    return make


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("element", ["first", "middle", "last"])
def test_a_tensor_that_was_overwritten_is_named(stager, reading, layout, element):
    buffer = LAYOUTS[layout]()
    names = [f"w{number}" for number in range(3)]
    found = {name: torch.zeros(buffer.shape) for name in names}
    index = tuple({"first": 0, "middle": size // 2, "last": -1}[element] for size in buffer.shape)

    def read(name):
        buffer[index] = names.index(name) + 1
        return buffer

    pattern = rf"w0 was overwritten.*: {buffer.nbytes} bytes of shape .*; yield tensor\.clone\(\)"
    with pytest.raises(RuntimeError, match=pattern):
        stager.load_weights(found, reading(names, read))


def test_the_next_group_may_use_the_memory_again(in_small_groups, reading):
    buffer, found = torch.zeros(ROW), {name: torch.zeros(ROW) for name in "ab"}
    in_small_groups.load_weights(found, reading("ab", lambda name: buffer.fill_(ord(name))))
    assert [tensor.unique().tolist() for tensor in found.values()] == [[97], [98]]


def test_each_tensor_is_read_once(in_small_groups, reading):
    found, read = {name: torch.zeros(ROW) for name in "abc"}, []

    def load(value, sizes):
        def made(name):
            read.append(name)
            return torch.full((sizes[name],), value)

        in_small_groups.load_weights(found, reading("abc", made))

    load(1.0, dict.fromkeys("abc", ROW))
    assert read == [*"abc"]
    with pytest.raises(RuntimeError, match="size mismatch for b"):
        load(2.0, {"a": ROW, "b": 3})
    assert [tensor[0] for tensor in found.values()] == [2, 1, 1]


@pytest.mark.parametrize(
    "kind",
    [torch.Tensor.to_sparse, lambda tensor: tensor.as_subclass(TensorSubclass)],
    ids=["sparse", "subclass"],
)
def test_tensors_that_cannot_be_compared_are_copied_first(stager, kind):
    buffer, found = kind(torch.ones(3)), {name: kind(torch.ones(3)) for name in "ab"}
    values = buffer.values() if buffer.is_sparse else buffer

    def pairs():
        for name in found:
            values.fill_(ord(name))
            yield name, buffer

    stager.load_weights(found, pairs())
    assert [tensor.to_dense().unique().tolist() for tensor in found.values()] == [[97], [98]]


def test_what_is_not_the_tensors_may_change(stager):
    memory, nan = torch.zeros(100, 6), torch.full((100,), torch.nan)

    def pairs():
        yield "a", memory[:, :2]
        memory[:, 2:].fill_(1)
        yield "b", memory[:, 2:]
        yield "c", nan
        yield "tied", nan
        yield "empty", torch.zeros(0)
        yield "turned", memory[:, :2].t()

    shapes = {"a": (100, 2), "b": (100, 4), "c": 100, "tied": 100, "empty": 0, "turned": (2, 100)}
    found = {name: torch.ones(shape) for name, shape in shapes.items()}
    assert stager.load_weights(found, pairs()) == ([], [])
    assert (found["b"].sum(), found["turned"].sum()) == (400, 0)


def test_a_tensor_that_was_freed_is_an_error(stager):
    tensor = torch.zeros(100)[10:]

    def pairs():
        yield "a", tensor
        tensor.untyped_storage().resize_(0)

    with pytest.raises(ps.errors.LayoutError, match=r"'a'.* lacks the memory"):
        stager.load_weights({"a": torch.zeros(90)}, pairs())


# -- DTensors --------------------------------------------------------------------------------------


@pytest.fixture(params=range(6))
def mesh(request):
    """A mesh of 2 x 3 ranks, seen by one of them; its collectives do nothing."""
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=request.param, world_size=6
    )
    # Torch caches meshes by name.
    yield init_device_mesh("cpu", (2, 3), mesh_dim_names=(f"of {request.param}", "b"))
    torch.distributed.destroy_process_group()


PLACEMENTS = [
    (Shard(0), Shard(1)),
    (Shard(1), Replicate()),
    (Shard(0), Shard(0)),
    (Replicate(), Replicate()),
]


@pytest.mark.parametrize("shape", [(12, 9), (5, 7), (1, 2), (13, 1)], ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_dtensors_have_this_ranks_part(stager, mesh, shape, device):
    found, expected = {}, {}
    for number, placements in enumerate(PLACEMENTS):
        local_shape, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        whole = torch.randn(shape)
        local = torch.zeros(local_shape, device=device)
        found[f"{number}"] = torch.nn.Parameter(
            DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())
        )
        part = tuple(
            slice(begin, begin + size) for begin, size in zip(offset, local_shape, strict=True)
        )
        expected[f"{number}"] = whole, whole[part]
    stager.load_weights(found, {name: whole for name, (whole, _) in expected.items()})
    for name, (_, part) in expected.items():
        assert isinstance(found[name], torch.nn.Parameter)
        assert (type(found[name].data), found[name].shape) == (DTensor, torch.Size(shape))
        assert torch.equal(found[name].to_local(), part)


def test_other_placements_are_refused_by_name(stager, mesh):
    found = {
        "w": DTensor.from_local(torch.zeros(3), mesh, (Partial(), Replicate()), run_check=False)
    }
    with pytest.raises(RuntimeError, match=r"w has placements \(Partial"):
        stager.load_weights(found, {"w": torch.zeros(3)})

"""Loading checkpoints into existing tensors: as load_state_dict does, in waves."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

import pinstage as ps
from pinstage._stage import _weights
from pinstage._stage._weights import load_weights

KIB = 1 << 10


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
    """The methods of safetensors' `safe_open`: keys, get_tensor and get_slice, but no items and no iteration."""

    def __init__(self, tensors):
        self._tensors = tensors
        self.read = []

    def keys(self):
        return list(self._tensors)

    def get_tensor(self, name):
        self.read.append(name)
        return self._tensors[name].clone()

    def get_slice(self, name):
        tensor = self._tensors[name]

        class Slice:
            def get_shape(self):
                return list(tensor.shape)

        return Slice()


@pytest.fixture(params=["mapping", "pairs", "file", "mmap"])
def source(request, tmp_path):
    """Yield a state dict in each readable form; only pairs don't give the names beforehand."""

    def make(state):
        if request.param == "mapping":
            return state
        if request.param == "pairs":
            return iter(list(state.items()))
        if request.param == "file":
            return File(state)
        torch.save(dict(state), tmp_path / "state")
        return torch.load(tmp_path / "state", mmap=True)

    make.tells_names = request.param != "pairs"
    return make


def content_of(module):
    return copy.deepcopy(module.state_dict())


def assert_same(module, expected):
    found = module.state_dict()
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


# -- what is loaded ----------------------------------------------------------------------------------------------------


def test_all_tensors_have_the_checkpoints_content(stager, source):
    module, expected = Tied(), content_of(Tied(seed=1))
    objects = dict(module.named_parameters())
    assert stager.load_weights(module, source(expected)) == ([], [])
    assert_same(module, expected)
    assert dict(module.named_parameters()) == objects
    assert module.angles[0] == 0
    assert torch.is_grad_enabled()


def test_dicts_are_loaded_in_place(stager, source):
    found = {"a": torch.zeros(3, 4).t(), "b": torch.zeros((), dtype=torch.float64), "c": torch.zeros(0, 2)}
    views = dict(found)
    expected = {"a": torch.randn(4, 3), "b": torch.tensor(2.0), "c": torch.zeros(0, 2)}
    assert stager.load_weights(found, source(expected)) == ([], [])
    assert all(torch.equal(views[name].to(torch.float32), expected[name]) for name in expected)


def test_dtypes_are_those_of_the_module(stager, source):
    module, expected = Tied().to(torch.bfloat16), content_of(Tied(seed=1))
    stager.load_weights(module, source(expected))
    assert module.head.weight.dtype is torch.bfloat16
    assert torch.equal(module.head.weight, expected["head.weight"].to(torch.bfloat16))


def test_names_and_results_match_load_state_dict(stager, source):
    ours, torchs, state = Tied(), Tied(), content_of(Tied(seed=1))
    state["more"] = torch.zeros(3)
    del state["conv.bias"], state["norm.running_mean"]
    expected = torchs.load_state_dict(state, strict=False)
    assert tuple(stager.load_weights(ours, source(state), strict=False)) == tuple(expected)
    assert_same(ours, content_of(torchs))


def test_a_name_loaded_by_alias_counts(stager, source):
    state = content_of(Tied(seed=1))
    del state["head.weight"]
    module = Tied()
    assert stager.load_weights(module, source(state)) == ([], [])
    assert torch.equal(module.head.weight, state["embedding.weight"])


def test_memory_that_is_shared_counts_as_one(stager):
    whole = torch.zeros(4)
    found = {"a": whole[:2], "b": whole[:2], "c": whole[2:]}
    assert stager.load_weights(found, {"a": torch.ones(2), "c": torch.ones(2)}) == ([], [])
    assert whole.sum() == 4


def test_the_last_of_two_names_counts(stager, source):
    state = content_of(Tied(seed=1))
    state["head.weight"] = torch.full((50, 16), 3.0)
    module, other = Tied(), Tied()
    stager.load_weights(module, source(state))
    other.load_state_dict(state)
    assert_same(module, content_of(other))


# -- errors ------------------------------------------------------------------------------------------------------------


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
    if source.tells_names:
        assert str(error.value) == str(expected.value)
        assert_same(module, before)
    else:  # in the source's order
        assert str(error.value).splitlines()[-1] == str(expected.value).splitlines()[-1]


@pytest.mark.parametrize("wrong", ["missing", "unexpected", "misshapen"])
def test_pairs_are_checked_by_name(stager, wrong):
    state = content_of(Tied(seed=1))
    if wrong == "missing":
        del state["conv.bias"]
    elif wrong == "unexpected":
        state = {"more": torch.zeros(1), **state}
    else:
        state["conv.bias"] = torch.zeros(5)
    message = {"missing": 'Missing.*"conv.bias"', "unexpected": 'Unexpected.*"more"'}
    with pytest.raises(RuntimeError, match=message.get(wrong, r"size mismatch for conv\.bias.*\[5\].*\[4\]")):
        stager.load_weights(Tied(), iter(state.items()))


def test_misshapen_tensors_are_errors_without_strict(stager, source):
    module, state = Tied(), content_of(Tied(seed=1))
    state["conv.bias"] = torch.zeros(5)
    with pytest.raises(RuntimeError, match=r"size mismatch for conv\.bias"):
        stager.load_weights(module, source(state), strict=False)


def test_a_parameter_on_another_device_is_named():
    def never(*_, **__):
        raise AssertionError

    with pytest.raises(RuntimeError, match=r"conv\.weight is on cpu, the stager is for cuda:1; move it"):
        load_weights(never, torch.device("cuda", 1), Tied(), content_of(Tied()), strict=True)


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: OwnLoading(2, 2),
        lambda: ExtraState(2, 2),
        lambda: hooked("register_load_state_dict_pre_hook"),
        lambda: hooked("register_load_state_dict_post_hook"),
        lambda: torch.nn.LazyLinear(2),
    ],
    ids=["own", "extra state", "pre-hook", "post-hook", "lazy"],
)
def test_modules_that_take_part_in_loading_are_refused(stager, make):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), make())
    with pytest.raises(TypeError, match=r"load_weights can't load 1: .* Use load_state_dict"):
        stager.load_weights(module, {})


@pytest.mark.parametrize(
    ("target", "tensors", "message"),
    [
        (3, {}, r"loads a torch\.nn\.Module or a dict of tensors: int"),
        ({"a": 3}, {}, "a must be a tensor to load into: int"),
        ({"a": torch.ones(1)}, 3, "tensors must be a mapping, pairs of name and tensor.*: a int"),
        ({"a": torch.ones(1)}, "model.safetensors", "pairs of name and tensor.*: a str"),
        ({"a": torch.ones(1)}, [torch.ones(2)], "pairs of name and tensor.*: an iterable that yields a Tensor"),
    ],
)
def test_other_types_are_refused(stager, target, tensors, message):
    with pytest.raises(TypeError, match=message):
        stager.load_weights(target, tensors)


@pytest.mark.parametrize("source", [dict, lambda state: iter(state.items())], ids=["mapping", "pairs"])
def test_values_that_are_not_tensors_are_named(stager, source):
    found = {"a": torch.zeros(1), "b": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r"a in state_dict isn't a tensor"):
        stager.load_weights(found, source({"a": 3, "b": torch.ones(1)}))
    state = {"a": torch.ones(1), "step": 3, "b": torch.ones(1)}
    assert stager.load_weights(found, source(state), strict=False) == ([], ["step"])


NAMES = "abcdef"
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64]


class Drawn(torch.nn.Module):
    """Parameters of these shapes and dtypes; those with the same number are one tensor."""

    def __init__(self, shapes, dtypes, numbers):
        super().__init__()
        made = {}
        for name, shape, dtype, number in zip(NAMES, shapes, dtypes, numbers, strict=True):
            tensor = made.setdefault(number, torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))
            self.register_parameter(name, tensor)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=6, max_size=6),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=6, max_size=6),
    numbers=st.lists(st.integers(0, 9), min_size=6, max_size=6),
    names=st.permutations([*NAMES, "x", "y"]),
    count=st.integers(0, 8),
    wrong=st.sets(st.sampled_from(NAMES), max_size=2),
    wave_bytes=st.sampled_from([1, 64, 1 << 20]),
    has_names=st.booleans(),
)
def test_any_checkpoint_ends_as_with_load_state_dict(
    stager, monkeypatch, shapes, dtypes, numbers, names, count, wrong, wave_bytes, has_names
):
    with monkeypatch.context() as patch:
        patch.setattr(_weights, "WAVE_BYTES", wave_bytes)
        ours, torchs = Drawn(shapes, dtypes, numbers), Drawn(shapes, dtypes, numbers)
        state = {}
        for position, name in enumerate(names[:count]):
            shape = tuple(getattr(torchs, name).shape) if name in NAMES else (2,)
            value = position if has_names or name not in NAMES else numbers[NAMES.index(name)]
            state[name] = torch.full((*shape, *([2] if name in wrong else [])), value + 1.0)
        source = state if has_names else iter(state.items())
        if wrong & state.keys():
            with pytest.raises(RuntimeError) as expected:
                torchs.load_state_dict(state, strict=False)
            with pytest.raises(RuntimeError) as found:
                stager.load_weights(ours, source, strict=False)
            if has_names:
                assert sorted(str(found.value).splitlines()) == sorted(str(expected.value).splitlines())
                assert not any(parameter.any() for parameter in ours.parameters())
            return
        expected = torchs.load_state_dict(state, strict=False)
        missing, unexpected = stager.load_weights(ours, source, strict=False)
        loaded = {id(getattr(ours, name)) for name in state if name in NAMES}
        assert missing == [name for name in expected.missing_keys if id(getattr(ours, name)) not in loaded]
        assert unexpected == expected.unexpected_keys
        assert_same(ours, torchs.state_dict())


# -- meta --------------------------------------------------------------------------------------------------------------


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


def test_a_meta_parameter_fails_without_strict(stager, source):
    module, state = Tied(device="meta"), content_of(Tied(seed=1))
    del state["conv.bias"]
    with pytest.raises(RuntimeError, match=r'Still on meta after loading: "conv\.bias"'):
        stager.load_weights(module, source(state), strict=False)


def test_dicts_of_meta_tensors_are_filled(stager, source):
    shared = torch.empty(3, device="meta")
    found = {"a": shared, "b": shared, "c": torch.empty(2, device="meta")}
    stager.load_weights(found, source({"a": torch.ones(3), "c": torch.ones(2)}))
    assert found["a"] is found["b"]
    assert found["a"].sum() == 3


# -- waves -------------------------------------------------------------------------------------------------------------


def test_waves_bound_what_a_generator_holds(stager, monkeypatch):
    monkeypatch.setattr(_weights, "WAVE_BYTES", 4 * KIB)
    found = {f"{number}": torch.zeros(256) for number in range(20)}
    alive, most = set(), 0

    class Host(torch.Tensor):
        pass

    def pairs():
        nonlocal most
        for name in found:
            tensor = torch.full((256,), float(name))
            alive.add(name)
            most = max(most, len(alive))
            yield name, tensor

    sizes = []
    plain = stager.to_device

    def counted(batch, *, out):
        sizes.append(len(batch))
        alive.clear()
        return plain(batch, out=out)

    monkeypatch.setattr(stager, "to_device", counted)
    assert stager.load_weights(found, pairs()) == ([], [])
    assert sizes == [4] * 5
    assert most == 4
    assert all((found[name] == float(name)).all() for name in found)


def test_a_checkpoint_larger_than_the_pool_is_loaded(make_stager):
    stager = make_stager("256KiB")
    found = {f"{number}": torch.zeros(20_000) for number in range(10)}
    expected = {name: torch.randn(20_000) for name in found}
    stager.load_weights(found, expected)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert stager.pool.stats().peak_held_bytes <= 256 * KIB


def test_files_are_read_once_and_in_their_order(stager):
    file = File(content_of(Tied(seed=1)))
    stager.load_weights(Tied(), file)
    wanted = [name for name in file.keys() if name != "embedding.weight"]  # noqa: SIM118 - the head's is the last
    assert sorted(file.read) == sorted(wanted)


def test_safetensors_files_are_loaded(stager, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    torch_files = pytest.importorskip("safetensors.torch")
    state = content_of(Tied(seed=1))
    del state["head.weight"]
    torch_files.save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "w.safetensors")
    module = Tied(device="meta")
    with safetensors.safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        assert stager.load_weights(module, file) == ([], [])
    assert_same(module, content_of(Tied(seed=1)))


# -- DTensors ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=range(6))
def mesh(request):
    """A mesh of 2 x 3 ranks, seen by one of them; its collectives do nothing."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=6)
    yield init_device_mesh("cpu", (2, 3), mesh_dim_names=(f"of {request.param}", "b"))  # torch caches meshes by name
    torch.distributed.destroy_process_group()


PLACEMENTS = [(Shard(0), Shard(1)), (Shard(1), Replicate()), (Shard(0), Shard(0)), (Replicate(), Replicate())]


@pytest.mark.parametrize("shape", [(12, 9), (5, 7), (1, 2), (13, 1)], ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_dtensors_have_this_ranks_part(stager, mesh, shape, device):
    found, expected = {}, {}
    for number, placements in enumerate(PLACEMENTS):
        local_shape, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        whole = torch.randn(shape)
        local = torch.zeros(local_shape, device=device)
        found[f"{number}"] = torch.nn.Parameter(
            DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))
        )
        part = tuple(slice(begin, begin + size) for begin, size in zip(offset, local_shape, strict=True))
        expected[f"{number}"] = whole, whole[part]
    stager.load_weights(found, {name: whole for name, (whole, _) in expected.items()})
    for name, (_, part) in expected.items():
        assert isinstance(found[name], torch.nn.Parameter)
        assert (type(found[name].data), found[name].shape) == (DTensor, torch.Size(shape))
        assert torch.equal(found[name].to_local(), part)


def test_other_placements_are_refused_by_name(stager, mesh):
    found = {"w": DTensor.from_local(torch.zeros(3), mesh, (Partial(), Replicate()), run_check=False)}
    with pytest.raises(RuntimeError, match=r"w has placements \(Partial"):
        stager.load_weights(found, {"w": torch.zeros(3)})


def test_the_results_class_is_public():
    assert ps.IncompatibleKeys([], []) == ([], [])

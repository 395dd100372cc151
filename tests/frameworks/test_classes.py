"""Classes of other libraries are supported out of the box, also in workers."""

import itertools
import sys

import library_batches as made
import pytest
import torch
from class_trips import Case, check, check_loader
from tensordict import LazyStackedTensorDict, TensorDict
from torch.utils._pytree import tree_map

import pinstage as ps


@pytest.fixture(autouse=True)
def without_torchvision_afterwards():
    """Remove the stand-in: other libraries would take it for the whole torchvision."""
    import monai.data  # noqa: F401 - before the stand-in is there

    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]


# -- moves of classes that have no `to`, or one that does something else ---------------------------


def model_to(model, device):
    model.x = model.x.to(device)
    model.more = model.more.to(device)
    return model


def frozen_to(model, device):
    model_to(model.inner, device)
    model.items[:] = [item.to(device) for item in model.items]
    model.__pydantic_private__["_hidden"] = model._hidden.to(device)
    return model


def cache_to(cache, device):
    """Move a cache as if it had been filled on the device."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.to(device), layer.values.to(device)
        layer.device = device
    return cache


def pair_to(cache, device):
    cache_to(cache.self_attention_cache, device)
    cache_to(cache.cross_attention_cache, device)
    return cache


def output_to(output, device):
    output.logits = output.logits.to(device)
    cache_to(output.past_key_values, device)
    return output


def each_to(batch, device):
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)


def memory_mapped_to(batch, device):
    """Return a plain tensor also on the CPU, where tensordict returns the very same mapping."""
    mapped, plain = batch
    moved = mapped.to(device)
    return [
        moved.clone() if type(moved) is torch.Tensor else torch.Tensor(moved.clone()),
        plain.to(device),
    ]


CASES = {
    "pydantic": [Case(made.model, model_to), Case(made.frozen_model, frozen_to)],
    "tensordict": [
        Case(made.plain_td),
        Case(made.locked_td),
        Case(made.td_with_objects),
        Case(made.lazy_stack),
        Case(made.decorated_tensorclass),
        Case(made.inherited_tensorclass),
        Case(made.td_params, passthrough=1),
    ],
    "tensors": [
        Case(made.detection, each_to),
        Case(made.meta_tensor, stays=True),
        Case(made.batch_of_meta_tensors, each_to, stays=True),
        Case(made.memory_mapped, memory_mapped_to),
    ],
    "torch_geometric": [
        Case(made.graph),
        Case(made.graph_batch, stays=True),  # where each graph begins
        Case(made.hetero_graph),
        Case(made.hetero_batch, stays=True),
        Case(made.temporal),
    ],
    "torchrec": [
        Case(made.kjt_with_caches, made.kjt_to),
        Case(made.kjt_of_variable_strides, made.kjt_to, stays=True),
        Case(made.jagged),
        Case(made.keyed),
        Case(made.torchrec_batch),
    ],
    "transformers": [
        Case(made.dynamic_cache, cache_to),
        Case(made.encoder_decoder_cache, pair_to),
        Case(made.model_output, output_to),
        Case(made.encoding),
    ],
}


@pytest.mark.parametrize("way", ["stager", "loader", "to_host"])
@pytest.mark.parametrize("case", [*itertools.chain(*CASES.values())], ids=repr)
def test_a_batch_arrives_as_by_its_own_to(case, way, device):
    check(case, way, device)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("library", CASES)
def test_worker_batches_arrive_as_by_to(library, method, device):
    # monai orders the keys of collated metadata at random in each process.
    cases = [case for case in CASES[library] if case.make is not made.batch_of_meta_tensors]
    for case in cases:
        case.make(0)  # imports the library in this process, too
    check_loader(cases, device, num_workers=1, multiprocessing_context=method)


# -- pydantic --------------------------------------------------------------------------------------


def test_a_staged_model_has_its_own_field_marks(stager):
    original = made.model(1)
    staged = stager.to_device(original)
    assert staged.model_fields_set == {"x", "more"}
    staged.name = "changed"
    assert "name" in staged.model_fields_set
    assert "name" not in original.model_fields_set
    assert staged.model_copy(update={"x": torch.ones(1)}).x.shape == (1,)


# -- tensordict ------------------------------------------------------------------------------------


def test_parts_without_tensors_don_t_decide_the_device(stager):
    empty = TensorDict({"deep": TensorDict({}, [2], device="meta")}, [2], device="meta")
    lazy = LazyStackedTensorDict(
        TensorDict({"x": torch.ones(3)}, []), TensorDict({"x": torch.ones(3)}, [])
    )
    for part in (TensorDict({"x": torch.ones(2)}, [2]), lazy):
        staged = stager.to_device(TensorDict({"part": part, "empty": empty}, [2]))
        assert str(staged.device) == "cpu"


def test_an_empty_td_is_staged_as_it_is(stager):
    empty, _ = stager.to_device([TensorDict({}, [3]), torch.ones(1)])
    assert (empty.batch_size, list(empty.keys())) == ((3,), [])


# -- tensors of other classes ----------------------------------------------------------------------


def test_all_34_leaves_of_a_detection_are_packed(stager):
    stager.to_device(made.detection(2))
    stats = stager.stats()
    assert (stats.packed_leaves, stats.passthrough_leaves) == (34, 0)
    assert stats.copies <= stats.blocks < 10


# -- PyG -------------------------------------------------------------------------------------------


def test_a_layout_cuts_two_graphs_from_two_slabs():
    graph = made.hetero_graph(1)
    layout = ps.Layout.of(graph)
    slab, others = torch.empty(layout.nbytes, dtype=torch.uint8), layout.others(graph)
    layout.pack(graph, slab)
    first = layout.unpack(slab, others)
    layout.unpack(torch.zeros_like(slab), others)
    assert torch.equal(first["paper"].x, graph["paper"].x)


def test_a_batch_splits_into_its_graphs_again(stager):
    batch = made.graph_batch(1)
    staged = stager.to_device(batch)
    # x, edge_index, batch and ptr, x_batch and x_ptr; slices stay on the host as they are.
    assert stager.stats().packed_leaves == 6
    assert staged._slice_dict["x"] is batch._slice_dict["x"]
    assert staged.num_graphs == 3
    for mine, theirs in zip(staged.to_data_list(), batch.to_data_list(), strict=True):
        assert torch.equal(mine.x, theirs.x)
        assert torch.equal(mine.edge_index, theirs.edge_index)
        assert mine.text == theirs.text


# -- transformers ----------------------------------------------------------------------------------


def test_a_staged_cache_goes_on(device):
    with ps.Stager(device, max_bytes="1MiB") as stager:
        staged = stager.to_device(made.dynamic_cache(1))
    assert staged.layers[0].device == staged.layers[0].keys.device == device
    token = torch.ones(3, 4, 1, 2, device=device)
    keys, _ = staged.update(token, token, 0)
    assert keys.shape == (3, 4, 4, 2)

"""PyG's data objects are supported out of the box, also in workers."""

import copy
import gc
import pickle

import library_batches as made
import pytest
import torch
from class_trips import (
    DEVICES,
    Case,
    by_device_and_start_method,
    by_device_and_way,
    check,
    check_workers,
    target,
)

import pinstage as ps

CASES = [
    Case(made.graph),
    Case(made.graph_batch, stays=True),  # where each graph begins
    Case(made.hetero_graph),
    Case(made.hetero_batch, stays=True),
    Case(made.temporal),
    Case(made.temporal_batch, stays=True),
]


@by_device_and_way(*CASES)
def test_data_arrive_as_by_their_own_to(case, way, device):
    check(case, way, device)


@by_device_and_start_method
def test_worker_data_arrive_as_by_to(method, device):
    check_workers(CASES, method, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [made.graph_batch, made.hetero_batch, made.temporal])
def test_stores_belong_to_the_new_object(make, device):
    with ps.Stager(target(device), max_bytes="1MiB") as stager:
        original = make(2)
        staged = stager.to_device(original)
        assert all(store._parent() is staged for store in staged.stores)
        del original
        gc.collect()
        assert all(store._parent() is staged for store in staged.stores)
        assert type(copy.copy(staged)) is type(staged)


def test_a_layout_cuts_two_graphs_from_two_slabs():
    graph = made.hetero_graph(1)
    layout = ps.Layout.of(graph)
    slab, others = torch.empty(layout.nbytes, dtype=torch.uint8), layout.others(graph)
    layout.pack(graph, slab)
    first = layout.unpack(slab, others)
    layout.unpack(torch.zeros_like(slab), others)
    assert torch.equal(first["paper"].x, graph["paper"].x)


def test_a_batch_splits_into_its_graphs_again():
    with ps.Stager("cpu", max_bytes="1MiB") as stager:
        batch, staged = made.graph_batch(1), stager.to_device(made.graph_batch(1))
    assert staged.num_graphs == 3
    for mine, theirs in zip(staged.to_data_list(), batch.to_data_list(), strict=True):
        assert torch.equal(mine.x, theirs.x)
        assert torch.equal(mine.edge_index, theirs.edge_index)
        assert mine.text == theirs.text


def test_slices_stay_on_the_host_as_they_are():
    with ps.Stager("cpu", max_bytes="1MiB") as stager:
        batch = made.graph_batch(1)
        staged = stager.to_device(batch)
        # X, edge_index, batch and ptr, x_batch and x_ptr: and no slices.
        assert stager.stats().packed_leaves == 6
    assert staged._slice_dict["x"] is batch._slice_dict["x"]


def test_a_layout_of_a_batch_can_be_pickled():
    layout = ps.Layout.of(made.hetero_batch(1))
    assert pickle.loads(pickle.dumps(layout)) == layout


@pytest.mark.parametrize("device", DEVICES)
def test_a_loader_of_pyg_is_prefetched(device):
    from torch_geometric.loader import DataLoader

    graphs = [made.graph(number) for number in range(6)]
    expected = [batch.x for batch in DataLoader(graphs, 2)]
    with ps.Stager(target(device), max_bytes="1MiB") as stager:
        found = [batch.x.cpu() for batch in stager.prefetch(DataLoader(graphs, 2))]
    assert all(map(torch.equal, found, expected))

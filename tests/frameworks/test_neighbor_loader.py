"""PyG's loaders of sampled neighbourhoods.

`NeighborLoader` is `NodeLoader` with a compiled sampler, which has wheels for few versions of
torch. These tests use `NodeLoader` with a sampler in Python.
"""

import warnings
from contextlib import nullcontext

import pytest
import torch
from class_trips import assert_alike

import pinstage as ps
from pinstage.errors import StagingWarning

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # PyG's own imports call torch.jit.script
    from torch_geometric.data import Data
    from torch_geometric.loader import NodeLoader
    from torch_geometric.sampler import BaseSampler, SamplerOutput

NODES, TAKEN = 60, 3


def neighbours(edges, nodes):
    """Return the edges into some nodes, at most `TAKEN` of each, drawn at random as the compiled
    samplers draw them.
    """
    found = []
    for node in nodes.tolist():
        into = (edges[1] == node).nonzero().flatten()
        found.append(into[torch.randperm(len(into))[:TAKEN]])
    return torch.cat(found)


def numbered(nodes):
    """Return nodes without repetition, in their first order, and the position of each."""
    places = {}
    for node in nodes.tolist():
        places.setdefault(node, len(places))
    return torch.tensor(list(places)), torch.tensor([places[node] for node in nodes.tolist()])


class OneHop(BaseSampler):
    """Takes some of the neighbours of each node."""

    def __init__(self, data):
        self.data = data

    def sample_from_nodes(self, index, **_):
        edges = self.data.edge_index
        taken = neighbours(edges, index.node)
        node, places = numbered(torch.cat([index.node, edges[0, taken], edges[1, taken]]))
        row, col = places[len(index.node) :].chunk(2)
        counts = [len(index.node), len(node) - len(index.node)], [len(taken)]
        return SamplerOutput(
            node, row, col, taken, None, *counts, metadata=(index.input_id, index.time)
        )

    def sample_from_edges(self, *_, **__):
        raise NotImplementedError

    @property
    def edge_permutation(self):
        return None


def graph():
    generator = torch.Generator().manual_seed(3)
    edges = torch.randint(NODES, (2, 400), generator=generator)
    return Data(
        x=torch.randn(NODES, 5, generator=generator), edge_index=edges, y=torch.arange(NODES)
    )


def loader_of(workers, **options):
    data = graph()
    return NodeLoader(
        data, OneHop(data), batch_size=8, shuffle=True, num_workers=workers, **options
    )


def seeded(workers, **options):
    """Return the batches of two passes over a loader, and the loader with the same seed again."""
    torch.manual_seed(5)
    loader = loader_of(workers, **options)
    batches = [*loader, *loader]
    torch.manual_seed(5)
    return batches, loader_of(workers, **options)


def assert_all_alike(found, expected, device):
    for batch, plain in zip(found, expected, strict=True):
        assert_alike(batch, plain.to(device))


def test_sampled_neighbourhoods_arrive_as_the_loader_makes_them(workers, device):
    expected, plain = seeded(workers)
    loader = ps.wrap_loader(plain, device=device, max_bytes="16MiB")
    assert_all_alike([*loader, *loader], expected, device)
    stats = loader.stats()
    assert (stats.batches, stats.fallback_batches, stats.passthrough_leaves) == (16, 0, 0)


def test_batches_joined_in_the_main_process_are_staged(workers, device):
    expected, plain = seeded(workers, filter_per_worker=False)
    with ps.Stager(device, max_bytes="16MiB") as stager:
        batches = stager.prefetch(plain, depth=0)
        assert_all_alike([*batches, *batches], expected, device)
        assert stager.stats().passthrough_leaves == 0


def test_a_wrapped_joining_loader_yields_the_same(workers):
    expected, plain = seeded(workers, filter_per_worker=False)
    loader = ps.wrap_loader(plain, device="cpu", max_bytes="16MiB")
    says = r"which is slower: its iterator is a .*\.DataLoaderIterator, .*; with filter_per_worker=True"
    with pytest.warns(StagingWarning, match=says) if workers else nullcontext():
        found = [*loader, *loader]
    assert_all_alike(found, expected, "cpu")
    assert loader.stats().batches == 16

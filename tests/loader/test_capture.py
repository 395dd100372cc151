"""In a thread that captures a graph, a request for a batch is refused, and the pass goes on."""

import loader_data as data
import pytest
import torch
from doubles import refuse

import pinstage as ps


@pytest.mark.parametrize("persistent", [False, True])
def test_a_refused_request_loses_no_batch(workers, persistent, capture):
    persistent = persistent and workers > 0
    options = {"batch_size": 4, "num_workers": workers, "persistent_workers": persistent}
    dataset = data.Mapped(data.tensors)
    expected = list(torch.utils.data.DataLoader(dataset, **options))
    loader = ps.DataLoader(dataset, device="cpu", **options)
    with capture():
        refuse(iter, loader)
        refuse(loader.close)
    for _ in range(2):
        batches, found = iter(loader), []
        for _ in expected:
            with capture():
                refuse(next, batches)
                refuse(next, batches)
            found.append(next(batches))
        assert data.same(found, expected)
        with capture():
            refuse(next, batches)
        assert next(batches, None) is None
    loader.close()

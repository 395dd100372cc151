"""In a thread that captures a graph, tensors stay where they are."""

import torch
from doubles import refuse

from pinstage.offload import optimizer_state, save_on_cpu

KIB = 1 << 10


def test_a_refused_step_changes_nothing(pool, capture):
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(32)).sum().backward()
    optimizer.step()
    with capture():
        refuse(optimizer_state, optimizer, pool, min_bytes=KIB)
    offloaded = optimizer_state(optimizer, pool, min_bytes=KIB)
    before = model.weight.clone()
    with capture():
        for call in (offloaded.onload, offloaded.offload, optimizer.step, optimizer.state_dict):
            refuse(call)
        refuse(offloaded.close)
    assert torch.equal(model.weight, before)
    assert offloaded.stats().host_bytes > 0
    optimizer.step()
    assert not torch.equal(model.weight, before)
    offloaded.close()
    assert offloaded.stats().host_bytes == 0


def test_activations_stay_in_a_capture(pool, capture):
    x = torch.randn(32, 32, requires_grad=True)
    offload = save_on_cpu(pool, min_bytes=KIB)
    with capture(), offload:
        y = x.exp()
        y.sum().backward()
    assert torch.equal(x.grad, y)
    assert (offload.stats().copies, offload.stats().stayed) == (0, 1)


def test_no_activation_returns_in_a_capture(pool, capture):
    x = torch.randn(32, 32, requires_grad=True)
    with save_on_cpu(pool, min_bytes=KIB):
        y = x.exp()
    with capture():
        refuse(y.sum().backward)
    y.sum().backward()
    assert torch.equal(x.grad, y)

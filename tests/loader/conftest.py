import pytest
import torch


@pytest.fixture(params=[0, 2], ids=["inline", "workers"])
def workers(request):
    return request.param


@pytest.fixture
def stacked(monkeypatch):
    """The number of stacks that torch made, in a list."""
    made, stack = [], torch.stack
    monkeypatch.setattr(
        torch, "stack", lambda *args, **kwargs: made.append(1) or stack(*args, **kwargs)
    )
    return made

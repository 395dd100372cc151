"""State dicts for the tests of checkpoints, and their comparison."""

import hashlib
import pickle
from typing import Any

import torch

WIDTH = 32


def adam_state(seed: int = 0, layers: int = 4) -> dict[str, Any]:
    """Return the state of a model and of Adam after a step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        *[torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)], torch.nn.BatchNorm1d(WIDTH)
    )
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epochs": [1, 2, 3],
        "name": "run",
    }


def difference(one: Any, other: Any, path: str = "") -> str | None:
    """Return where two states differ in a value, dtype, shape, stride or container class; None if
    they don't.
    """
    if isinstance(one, torch.Tensor):
        same = type(one) is type(other) and (one.dtype, one.stride()) == (
            other.dtype,
            other.stride(),
        )
        return None if same and torch.equal(one, other) else path
    if isinstance(one, dict):
        if not isinstance(other, dict) or list(one) != list(other):
            return path
        parts = [(f"{path}[{key!r}]", one[key], other[key]) for key in one]
    elif isinstance(one, list | tuple):
        if type(one) is not type(other) or len(one) != len(other):
            return path
        parts = [
            (f"{path}[{index}]", *pair) for index, pair in enumerate(zip(one, other, strict=True))
        ]
    else:
        return None if one == other else path
    return next(
        (
            found
            for found in (difference(a, b, where) for where, a, b in parts)
            if found is not None
        ),
        None,
    )


def digest(state: Any) -> str:
    """Return a hash of all values of a state."""
    found = hashlib.sha256()

    def feed(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            local = part.to_local() if hasattr(part, "to_local") else part
            found.update(
                local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(part, dict):
            for key, value in part.items():
                found.update(repr(key).encode())
                feed(value)
        elif isinstance(part, list | tuple):
            for value in part:
                feed(value)
        else:
            found.update(pickle.dumps(part))

    feed(state)
    return found.hexdigest()

"""State dicts for the tests of checkpoints, and their comparison."""

import hashlib
import pickle
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

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


def difference(one: Any, other: Any) -> str | None:
    """Return where two states differ in a value, dtype, shape, stride or container class; None if
    they don't.
    """
    leaves, structure = tree_flatten_with_path(one)
    others, other_structure = tree_flatten_with_path(other)
    if structure != other_structure:
        return f"{structure} instead of {other_structure}"
    pairs = zip(leaves, others, strict=True)
    return next((keystr(path) for (path, a), (_, b) in pairs if not is_same(a, b)), None)


def is_same(leaf: Any, other: Any) -> bool:
    if not isinstance(leaf, torch.Tensor):
        return bool(leaf == other)
    return (
        type(leaf) is type(other)
        and (leaf.dtype, leaf.stride()) == (other.dtype, other.stride())
        and torch.equal(leaf, other)
    )


def digest(state: Any) -> str:
    """Return a hash of all values of a state."""
    found = hashlib.sha256()
    for path, part in tree_flatten_with_path(state)[0]:
        found.update(keystr(path).encode())
        if isinstance(part, torch.Tensor):
            local = part.to_local() if hasattr(part, "to_local") else part
            found.update(
                local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        else:
            found.update(pickle.dumps(part))
    return found.hexdigest()

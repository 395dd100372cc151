"""State dicts for the tests of checkpoints, and their comparison."""

import hashlib
import pickle

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

WIDTH = 32


def adam_state(seed=0, layers=4):
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


def difference(one, other):
    """Return where two states differ in a value, dtype, shape, stride or container class; None if
    they don't.
    """
    # A model's state may be any kind of dict.
    (ours, structure), (theirs, other_structure) = (
        leaves_of({**state, "model": dict(state["model"])}) for state in (one, other)
    )
    if structure != other_structure:
        return f"{structure} and {other_structure}"
    pairs = zip(ours, theirs, strict=True)
    return next((keystr(path) for (path, a), (_, b) in pairs if told(a) != told(b)), None)


def leaves_of(state):
    """Return the leaves of a state with their paths, and its structure; its own class doesn't
    matter.
    """
    return tree_flatten_with_path(dict(state))


def told(leaf):
    """Return all that must be equal in two leaves."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return type(leaf), leaf.dtype, leaf.shape, leaf.stride(), leaf.tolist()


def digest(state):
    """Return a hash of all values of a state."""
    found = hashlib.sha256()
    for path, leaf in leaves_of(state)[0]:
        found.update(keystr(path).encode())
        if isinstance(leaf, torch.Tensor):
            local = leaf.to_local() if hasattr(leaf, "to_local") else leaf
            found.update(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        else:
            found.update(pickle.dumps(leaf))
    return found.hexdigest()

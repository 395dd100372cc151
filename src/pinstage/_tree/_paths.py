"""Where a leaf is, in words."""

from __future__ import annotations

import optree

from ._attributes import Item
from ._registry import REGISTERED


class Itself:
    """The path entry of what stands for its container: a tensor in a tensor of another class."""


def path_text(treespec: optree.PyTreeSpec, position: int) -> str:
    """Return where a leaf is, as one would write it after the batch's name: ``.streams['wind'][3]``."""
    return in_words(treespec.accessors()[position])


def path_texts(treespec: optree.PyTreeSpec) -> list[str]:
    """Return where each leaf is; see `path_text`."""
    return list(map(in_words, treespec.accessors()))


def in_words(accessor: optree.PyTreeAccessor) -> str:
    """Return what optree has as the way to a leaf, in the same words."""
    text = ""
    for entry in accessor:
        key = entry.entry
        if isinstance(key, Item):
            text += f"[{key.key!r}]"
        elif key is Itself:
            continue
        elif entry.type in REGISTERED and isinstance(key, str):
            text += f".{key}"
        else:
            text += entry.codify("")
    return text

"""The structure of a batch."""

from __future__ import annotations

from typing import Any

import optree

from ._nodes import NAMESPACE, NodeType, node_types, path_text, path_texts


class Structure:
    """Which containers a batch is made of, and where each leaf stands. Holds nothing of the batch.

    Equal if the types and keys are. The order in which a dict was filled does not count; `rebuild` keeps it.

    Args:
        native: as the extension knows it; None if it does not.
        treespec: as optree knows it; None if the other one is there, of which it is made when it is asked for.
    """

    __slots__ = ("_native", "_treespec", "num_leaves")

    def __init__(self, native: Any, treespec: optree.PyTreeSpec | None) -> None:
        self._native = native
        self._treespec = treespec
        self.num_leaves: int = native.num_leaves if treespec is None else treespec.num_leaves

    @property
    def treespec(self) -> optree.PyTreeSpec:
        """The structure as optree describes it."""
        if self._treespec is None:
            self._treespec = optree.tree_structure(self._native.skeleton(), namespace=NAMESPACE)
        return self._treespec

    def leaves_of(self, batch: Any, handlers: dict[type, Any]) -> list[Any] | None:
        """Return the leaves of a batch, if it has this very structure, the order of keys included."""
        leaves: list[Any] | None = self._native.leaves(batch, handlers)
        return leaves

    def rebuild(self, leaves: list[Any]) -> Any:
        """Put a batch together from all its leaves, in their order."""
        if self._native is not None:
            return self._native.rebuild(leaves)
        return self.treespec.unflatten(leaves)

    def path(self, leaf: int) -> str:
        """Return where a leaf is, as one would write it after the batch's name."""
        return path_text(self.treespec, leaf)

    def paths(self) -> list[str]:
        """Return where each leaf is."""
        return path_texts(self.treespec)

    def key(self) -> Any:
        """Return what two structures have in common that `rebuild` alike, the order of keys included. Can be hashed."""
        return self.treespec if self._native is None else self._native.key()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return False
        return self is other or (self.num_leaves == other.num_leaves and self.treespec == other.treespec)

    def __hash__(self) -> int:
        return hash(self.treespec)

    def __reduce__(self) -> tuple[Any, ...]:
        # The classes are unpickled first, so that the structure finds them registered.
        return _restore, (node_types(self.treespec), self.treespec)

    def __str__(self) -> str:
        return str(self.treespec)


def _restore(_nodes: tuple[NodeType, ...], treespec: optree.PyTreeSpec) -> Structure:
    return Structure(None, treespec)

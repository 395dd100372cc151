"""A stager's own word on which leaves stay on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..errors import LayoutError
from ._keep import Keep
from ._structure import Structure


class Keeping:
    """Which leaves of a stager's batches stay on the host.

    Args:
        keep: their paths, or those of containers of them, as errors and `Slot` name them; or a function of path and
            leaf.

    Attributes:
        says: the function; None for paths.
        paths: the paths; none for a function.

    Raises:
        TypeError: `keep` is neither.
    """

    def __init__(self, keep: Iterable[str] | Callable[[str, Any], object]) -> None:
        self.says: Callable[[str, Any], object] | None = keep if callable(keep) else None
        self.paths: tuple[str, ...] = ()
        if not callable(keep):
            given: Any = [keep] if isinstance(keep, str) else keep
            self.paths = tuple(given) if isinstance(given, Iterable) else (given,)
            if not all(isinstance(path, str) for path in self.paths):
                raise TypeError(
                    f"keep_on_host takes paths or a function of path and leaf: {keep!r}; a path is \"['lengths']\""
                )
        self._last: tuple[Structure | None, list[str], list[int]] = None, [], []
        self._is_checked = False

    def apply(self, leaves: list[Any], structure: Structure) -> None:
        """Wrap those leaves of a batch that stay.

        Raises:
            LayoutError: there is nothing at one of the paths in the first batch.
        """
        known, paths, places = self._last
        if known is not structure:
            paths = structure.paths()
            places = [index for index, path in enumerate(paths) if any(_is_in(path, kept) for kept in self.paths)]
            self._check(paths)
            self._last = structure, paths, places
        if self.says is not None:
            places = [index for index, path in enumerate(paths) if self.says(path, leaves[index])]
        for index in places:
            if type(leaves[index]) is not Keep:
                leaves[index] = Keep(leaves[index])

    def _check(self, paths: list[str]) -> None:
        """Look once whether each path leads somewhere: later batches may have nothing there."""
        if self._is_checked:
            return
        for kept in self.paths:
            if not any(_is_in(path, kept) for path in paths):
                there = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
                raise LayoutError(
                    f"keep_on_host={kept!r} leads to nothing in this batch; its leaves are at {there}", kept
                )
        self._is_checked = True


def _is_in(path: str, container: str) -> bool:
    return path.startswith(container) and path[len(container) :][:1] in ("", "[", ".")

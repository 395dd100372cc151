"""torchdata.nodes: a node that stages the batches of its source."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torchdata.nodes import BaseNode

import pinstage as ps


class Stage(BaseNode[Any]):
    """Yields the batches of another node on a device, staged ahead; the last node of a pipeline.

    Use it instead of `PinMemory`. Its state counts the batches that were yielded, not those that
    were read ahead, so a resumed pipeline yields the next batch.

    Args:
        source: the node that yields batches.
        stager: the stager that moves the batches, and counts them in `Stager.stats`.
        depth: number of batches staged ahead; see `Stager.prefetch`.

    Raises:
        TypeError, ValueError: as `Stager.prefetch`, when the first batch is requested.
    """

    def __init__(self, source: BaseNode[Any], stager: ps.Stager, *, depth: int = 2) -> None:
        super().__init__()
        self.source = source
        self.stager = stager
        self.depth = depth

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Start again from the beginning, or from a given state."""
        super().reset(initial_state)
        self.source.reset(None if initial_state is None else initial_state["source"])
        self._state = self.source.state_dict()
        # Of the source, after each batch that was read ahead.
        self._states: deque[dict[str, Any]] = deque()
        self._batches = iter(self.stager.prefetch(self._read(), depth=self.depth))

    def next(self) -> Any:
        """Return the next batch, for the caller's current stream."""
        batch = next(self._batches)
        self._state = self._states.popleft()
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the state of the source behind the last batch that was yielded."""
        return {"source": self._state}

    def _read(self) -> Iterator[Any]:
        for batch in self.source:
            self._states.append(self.source.state_dict())
            yield batch

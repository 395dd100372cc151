"""The demo's own batch classes, as a team would write them: nested, ragged, custom, half torch and
half numpy.

`ObservationStream` is a dataclass and needs nothing to be staged. `HourSample` and `RaggedBatch`
are plain classes: pinstage needs one `ps.register_node` line for each. Teams write functions like
`map_tensors` by hand today; the two rivals of the demo use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

import pinstage as ps

Array: TypeAlias = torch.Tensor | np.ndarray[Any, np.dtype[Any]]
"""A leaf: numpy or torch on the host, always torch once staged."""

Move: TypeAlias = Callable[[Array], Array]
"""The function that `map_tensors` calls on each leaf."""


@dataclass(eq=False)
class ObservationStream:
    """The `n` observations of one source: a station, or a carrier; `n` may be 0.

    Attributes:
        source: Airport or carrier code.
        values: float32 `[n, channels]`, NaN where nothing was observed.
        observed: bool `[n, channels]`, which of `values` are valid.
        coordinates: float64 `[n, 2]` (numpy), latitude and longitude in degrees, NaN where unknown.
        times: int64 `[n]` (numpy), seconds since 1970 UTC.
        ids: int32 `[n]`, row number in the weather table, or flight number.
        tails: int64 `[n]` (numpy), hash of the aircraft's tail number, 0 if unknown; None for a
            weather station.
        sectors: uint8 `[n]`, wind direction in eighths of a circle, 8 if unknown; None for flights.
    """

    source: str
    values: Array
    observed: Array
    coordinates: Array
    times: Array
    ids: Array
    tails: Array | None = None
    sectors: Array | None = None

    def map_tensors(self, move: Move) -> ObservationStream:
        """Return a copy with `move` applied to each leaf."""
        return ObservationStream(
            source=self.source,
            values=move(self.values),
            observed=move(self.observed),
            coordinates=move(self.coordinates),
            times=move(self.times),
            ids=move(self.ids),
            tails=None if self.tails is None else move(self.tails),
            sectors=None if self.sectors is None else move(self.sectors),
        )


@ps.register_node
class HourSample:
    """One hour at the three airports: the facts known at its start, and the delays that followed.

    Attributes:
        hour: The hour in ISO 8601, UTC.
        time: int64 `[]`, the same in seconds since 1970.
        weather: The last hours of each airport's station; None where the station was silent.
        departures: Scheduled departures of this hour, one stream per carrier; an empty list at
            night.
        recent: Flights of the preceding hours, one stream per airport, with the known delays.
        calendar: float64 `[4]` (numpy), time of day and of year as sines and cosines.
        target: float32 `[3]`, mean departure delay of this hour at each airport, in half hours.
        target_mask: bool `[3]`, the airports that had departures.
    """

    def __init__(
        self,
        hour: str,
        time: Array,
        weather: dict[str, ObservationStream | None],
        departures: list[ObservationStream],
        recent: list[ObservationStream],
        calendar: Array,
        target: Array,
        target_mask: Array,
    ) -> None:
        self.hour = hour
        self.time = time
        self.weather = weather
        self.departures = departures
        self.recent = recent
        self.calendar = calendar
        self.target = target
        self.target_mask = target_mask

    def streams(self) -> dict[str, list[ObservationStream]]:
        """Return the existing streams by kind, in a fixed order."""
        return {
            "weather": [stream for stream in self.weather.values() if stream is not None],
            "departures": self.departures,
            "recent": self.recent,
        }

    def map_tensors(self, move: Move) -> HourSample:
        """Return a copy with `move` applied to each leaf."""
        return HourSample(
            hour=self.hour,
            time=move(self.time),
            weather={
                airport: None if stream is None else stream.map_tensors(move)
                for airport, stream in self.weather.items()
            },
            departures=[stream.map_tensors(move) for stream in self.departures],
            recent=[stream.map_tensors(move) for stream in self.recent],
            calendar=move(self.calendar),
            target=move(self.target),
            target_mask=move(self.target_mask),
        )


@ps.register_node
class RaggedBatch:
    """Some hours that are not stacked, because no two have the same streams.

    Attributes:
        samples: The hours.
        segments: int64 `[rows]` by kind of stream: the sample to which each row belongs.
        metadata: The origin of the batch; text.
    """

    def __init__(
        self, samples: list[HourSample], segments: dict[str, Array], metadata: dict[str, str]
    ) -> None:
        self.samples = samples
        self.segments = segments
        self.metadata = metadata

    @classmethod
    def collate(cls, samples: list[HourSample], metadata: dict[str, str]) -> RaggedBatch:
        """Collect samples, and record which rows belong to which sample."""
        by_sample = [sample.streams() for sample in samples]
        segments: dict[str, Array] = {}
        for kind in by_sample[0]:
            rows = [sum(len(stream.times) for stream in streams[kind]) for streams in by_sample]
            segments[kind] = torch.from_numpy(np.repeat(np.arange(len(samples)), rows))
        return cls(samples, segments, metadata)

    def streams(self, kind: str) -> list[ObservationStream]:
        """Return all streams of one kind, in the order of `segments`."""
        return [stream for sample in self.samples for stream in sample.streams()[kind]]

    def map_tensors(self, move: Move) -> RaggedBatch:
        """Return a copy with `move` applied to each leaf."""
        return RaggedBatch(
            samples=[sample.map_tensors(move) for sample in self.samples],
            segments={kind: move(rows) for kind, rows in self.segments.items()},
            metadata=dict(self.metadata),
        )

    def fragments(self) -> list[Array]:
        """Return every leaf."""
        found: list[Array] = []

        def note(leaf: Array) -> Array:
            found.append(leaf)
            return leaf

        self.map_tensors(note)
        return found

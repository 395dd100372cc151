"""Write the tables of the README and the docs from the result files, so that no figure is typed by
hand.

    python benchmarks/markdown.py          # prints them
    python benchmarks/markdown.py --write  # puts them between the markers of the pages

Bold is the best of the ways that are compared: of a row, or of a column where each row is a way.
Ways whose spreads overlap with the best one's are bold too; if that is every way, none is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

from comparison.plot import DARK, dark
from comparison.record import source
from comparison.rivals import NAMES
from comparison.table import figure
from pinstage.inspect._bus import PAGEABLE, PINNED, REGISTERED, Point
from pinstage.inspect._doctor import save_plot

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "scaling.png"
BANDWIDTH = ROOT / "docs" / "bandwidth.png"
LOOPS = ROOT / "docs" / "images" / "loops.svg"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
OURS = {"pinstage": "**pinstage**"}
BATCHES = "tensors x bytes of each"
LIMITS = {
    *("bus", "stack_bus", "state_bus", "fill", "batch", "model", "graph", "none", "kept"),
    *("filled_before", "pinstage_lease", "permutation"),
}
"""Ways that show a limit and compete with no other."""

Row = dict[str, Any]
Result = dict[str, Any]
Rows = Mapping[str, Row]
"""Rows of one case, by their ways."""
Ways = Mapping[str, str]
"""What ways are called."""


# -- the parts of a table --------------------------------------------------------------------------


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    whole = (heads, ["---"] * len(heads), *lines)
    return [f"| {' | '.join(cells)} |".replace("| --- ", "|---") for cells in whole]


def by_case(result: Result) -> dict[str, dict[str, Row]]:
    """Return the rows of each case by their variants."""
    cases: dict[str, dict[str, Row]] = {}
    for row in result["rows"]:
        cases.setdefault(row["case"], {})[row["variant"]] = row
    return cases


def best(rows: Rows, field: str = "median", limits: Iterable[str] = LIMITS) -> set[str]:
    """Return the fastest way, and those whose spreads overlap with its own; none if all do."""
    racing = {
        way: row for way, row in rows.items() if way not in limits and row.get(field) is not None
    }
    if not racing:
        return set()
    _, most = spread_of(min(racing.values(), key=lambda row: row[field]), field)
    found = {way for way, row in racing.items() if spread_of(row, field)[0] <= most}
    return found if len(found) < len(racing) else set()


def spread_of(row: Row, field: str = "median") -> tuple[float, float]:
    """Return between what a row's figures are: of all passes if they are few, else of 80%."""
    prefix = field.removesuffix("median")
    low, high = row.get(f"{prefix}p10"), row.get(f"{prefix}p90")
    if field == "median" and row["repeats"] < 10:
        low, high = row.get("minimum", low), row.get("maximum", high)
    return low or row[field], high or row[field]


def cells(
    rows: Rows,
    ways: Iterable[str],
    field: str = "median",
    more: Callable[[Row], str] = lambda row: "",  # noqa: ARG005
    scale: float = 1.0,
    limits: Iterable[str] = LIMITS,
) -> list[str]:
    """Return the figures of ways, the best in bold, with more of each; or why there is none."""
    ways = list(ways)
    shown = {way: rows[way] for way in ways if way in rows}
    bold = set() if field == "gb_per_s" else best(shown, field, limits)
    found = []
    for way in ways:
        row = shown.get(way, {})
        if row.get(field) is None:
            found.append(row["status"] if row.get("status", "ok") != "ok" else "-")
            continue
        text = figure(row[field] * scale)
        found.append((f"**{text}**" if way in bold else text) + more(row))
    return found


def by_ways(
    corner: str, cases: Mapping[str, Rows], ways: Ways, columns: Ways | None = None, **options: Any
) -> list[str]:
    """Return a table with a line for each case and a column for each way; `columns` has further
    columns, and for each its text by cases.
    """
    further: Mapping[str, Any] = columns or {}
    return table(
        [corner, *ways.values(), *further],
        (
            [case, *cells(rows, ways, **options), *(text[case] for text in further.values())]
            for case, rows in cases.items()
        ),
    )


def in_use(ways: Ways, cases: Mapping[str, Rows]) -> Ways:
    """Return the ways that any case has."""
    return {way: text for way, text in ways.items() if any(way in rows for rows in cases.values())}


def by_cases(corner: str, ways: Ways, columns: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Return a table with a line for each way, of columns with their headings."""
    heads, texts = zip(*columns, strict=True)
    return table([corner, *heads], zip(ways.values(), *texts, strict=True))


def folded(short: list[str], whole: list[str], said: Sequence[str] = ()) -> list[str]:
    """Return a table that fits a narrow page, the whole table to unfold, and the text about
    both.
    """
    unfold = [
        '<details markdown="1">',
        "<summary>Every way</summary>",
        "",
        *whole,
        "",
        "</details>",
    ]
    return [*short, "", *unfold, *(line for text in said for line in ("", text))]


def load(name: str) -> Result:
    """Read a result file.

    Raises:
        ValueError: A killed run left the file, and rows are missing, so comparisons would be wrong.
    """
    result = json.loads((RESULTS / f"{name}.json").read_text())
    ran = {row["variant"] for row in result["rows"]}
    if "incomplete" in result and not ran.issuperset(result["settings"]["variants"]):
        raise ValueError(
            f"{name}.json is incomplete: {result['incomplete']}; run it to its end, or with --only"
        )
    return result


def measured(name: str) -> Result | None:
    """Read a result file that says nothing without a GPU; None until there is one."""
    if not (RESULTS / f"{name}.json").exists():
        return None
    result = load(name)
    if not result["machine"]["gpu"]:
        raise ValueError(f"{name}.json was measured without a GPU, and the page is about one")
    return result


TABLES: dict[str, Callable[..., str]] = {}
"""The tables by their names on the pages."""


def said_by(
    name: str, heading: str = "", read: Callable[[str], Result | None] = load
) -> Callable[[Callable[..., list[str]]], Callable[..., str]]:
    """Make a table of a function's lines: with a heading and the source of the figures, those of a
    result file if no other result is given; nothing without either.
    """

    def wrap(lines: Callable[..., list[str]]) -> Callable[..., str]:
        @wraps(lines)
        def text(result: Result | None = None, **options: Any) -> str:
            result = result or read(name)
            found = lines(result, **options) if result else []
            whole = [heading, "", *found] if heading else found
            return "\n".join([*whole, "", source(result)]) if result and found else ""

        TABLES[lines.__name__] = text
        return text

    return wrap


def section(name: str, heading: str = "## Measured") -> Callable[..., Any]:
    """The same, of a file that is measured on a GPU and may not be there yet."""
    return said_by(name, heading, measured)


def times(row: Row, other: Row) -> str:
    """Return how many times as long as the other a row took."""
    medians = row["median"], other["median"]
    return "-" if None in medians else figure(medians[0] / medians[1])


def best_rival(rows: Rows, names: Iterable[str]) -> Row:
    """Return the row of the fastest way of some."""
    measured = (rows[name] for name in names if name in rows and rows[name]["status"] == "ok")
    return min(measured, key=lambda row: row["median"])


def titled(case: str) -> str:
    """Return a case of the comparison as text."""
    return case.replace("x", " x ", 1).replace("-", ", ")


# -- the tables ------------------------------------------------------------------------------------


@said_by("staging")
def staging(result: Result) -> list[str]:
    """Every rival on every batch. Ways that are missing from the file, or could not run, have no
    column.
    """
    shown = result["settings"].get("table")  # if the file has a series too, only these
    named, in_place = {}, []
    for case, rows in by_case(result).items():
        if case.endswith("-in-place"):
            in_place.append(_in_place(case, rows))
        elif not shown or case in shown:
            named[titled(case)] = rows
    ran = {row["variant"] for row in result["rows"] if row["status"] == "ok"}
    ways = in_use({name: text for name, text in (NAMES | OURS).items() if name in ran}, named)
    ratio = {case: times(best_rival(rows, NAMES), rows["pinstage"]) for case, rows in named.items()}
    whole = [
        *by_ways(BATCHES, named, ways, {"ratio": ratio}),
        "",
        "Milliseconds until the call returns while the GPU has 100 ms of kernels to run first:",
        "",
        *by_ways("call beside a busy GPU", named, ways, field="busy_median"),
    ]
    return folded(beside_rival(BATCHES, named, OURS | {"rival": "best rival"}), whole, in_place)


def beside_rival(
    corner: str, cases: Mapping[str, Rows], ways: Ways, rivals: Ways = NAMES
) -> list[str]:
    """Return a table with the best rival, and its name, if it has one, beside its figure."""
    raced, ratio = {}, {}
    for case, rows in cases.items():
        rival = best_rival(rows, rivals)
        name = rivals[rival["variant"]]
        raced[case] = {**rows, "rival": rival | {"name": name and f", {name}"}}
        ratio[case] = times(rival, rows["pinstage"])
    return by_ways(corner, raced, ways, {"ratio": ratio}, more=lambda row: row.get("name", ""))


@said_by("staging")
def staging_short(result: Result) -> list[str]:
    """`.to()`, the best rival, and ours on five batches, a loss and a near one among them."""
    cases, shown = by_case(result), "1x5KiB 64x1KiB 1000x16KiB 1x38MiB 16x16MiB"
    named = {titled(case): cases[case] for case in shown.split()}
    return beside_rival(BATCHES, named, {"to": "`.to()`", "rival": "best other way", **OURS})


GAINS = {
    "more than eight small tensors: graphs, boxes, ragged features": (
        lambda leaves, size: leaves > 8 and size < 64 << 10,
        "one call per tensor becomes a few copies per batch",
    ),
    "tensors of 64 KiB to 1 MiB, together 1 MiB or more": (
        lambda leaves, size: leaves * size >= 1 << 20 and 64 << 10 <= size <= 1 << 20,
        "several threads pack, and the first part is sent while the next one is packed",
    ),
    "a stack of images, or another large tensor": (
        lambda leaves, size: leaves == 1 and size >= 16 << 20,
        "each part is sent while the next one is packed; `pin_memory()` copies all of it first",
    ),
    "several tensors of 16 MiB": (
        lambda leaves, size: leaves > 1 and size >= 16 << 20,
        "with idle CPUs, torch's own threads reach the speed of the bus too",
    ),
    "up to eight small tensors: tokens, labels, MNIST": (
        lambda leaves, size: leaves <= 8 and leaves * size < 1 << 20,
        "microseconds either way: a call has a fixed cost",
    ),
}
"""Kinds of batches: the rows of `staging` of each kind, by tensors and bytes per tensor, and why
they gain.
"""


@said_by("staging")
def gains(result: Result) -> list[str]:
    """The gain of each kind of batch: the range over its rows."""
    lines = []
    for kind, (matches, why) in GAINS.items():
        over = []
        for case, rows in by_case(result).items():
            ours, median = rows["pinstage"], rows["pinstage"]["median"]
            if not case.endswith("in-place") and matches(
                ours["leaves"], ours["nbytes"] / ours["leaves"]
            ):
                rival = best_rival(rows, NAMES)["median"]
                over.append((rows["to"]["median"] / median, rival / median))
        lines.append([kind, *(_range([row[column] for row in over]) for column in (0, 1)), why])
    return table(["your batch", "speed-up over `.to()`", "over the best other way", "why"], lines)


def _range(ratios: list[float]) -> str:
    low, high = (
        f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}" for ratio in (min(ratios), max(ratios))
    )
    return f"{low}x" if low == high else f"{low}x to {high}x"


@said_by("native_threads")
def native_threads(result: Result) -> list[str]:
    """Large leaves by native threads, and by the bus alone."""
    ways = dict(result["settings"]["variants"])
    ways.pop("pinstage", None)  # measured before it had native threads
    columns = [
        (case.replace("x", " x "), cells(rows, ways)) for case, rows in by_case(result).items()
    ]
    few = [column for column in columns if column[0] in ("64 x 1MiB", "1 x 512MiB")]
    return folded(by_cases("ms", ways, few), by_cases("ms", ways, columns))


def _in_place(case: str, rows: Rows) -> str:
    """Return the speed for a batch that was written into page-locked memory, so that nothing is
    packed.
    """
    ways = {
        "pinstage_lease": "copied from there",
        "pinstage": "by `Stager(borrow_pinned=True).to_device`",
    }
    parts = []
    for name, way in ways.items():
        row = rows.get(name, {})
        if row.get("vs_best_rival") is not None:
            ratio = figure(row["vs_best_rival"])
            parts.append(f"{way} {figure(row['median'])} ms, {ratio} of the best rival's speed")
    return (
        f"{case.removesuffix('-in-place').replace('x', ' x ')} written in place into a lease: "
        f"{'; '.join(parts)}.\n"
    )


def scaling() -> str:
    """The picture that `make bench` drew."""
    if not PICTURE.exists():
        return "Not drawn yet: `make bench` does, on a machine with a GPU."
    return pictures(f"Time to stage a batch, {load('series')['machine']['gpu']}", PICTURE)


def pictures(text: str, path: Path) -> str:
    """Show a picture on light pages, and its dark version on dark pages."""
    return f"![{text}]({path.name}#only-light)\n![{text}]({dark(path).name}#only-dark)"


@said_by("rounding_waste")
def waste(result: Result, corner: str = "percent") -> list[str]:
    """Host memory that was allocated but not requested: a line for each way, and a column for each
    case.
    """
    ways = result["settings"]["variants"]
    columns = [(case, cells(rows, ways)) for case, rows in by_case(result).items()]
    return by_cases(corner, ways, columns)


@said_by("memory_startup")
def startup(result: Result) -> list[str]:
    """Time until 1 GiB is page-locked."""
    ways = result["settings"]["variants"]
    first, again = (cells(rows, ways) for rows in by_case(result).values())
    return by_cases("memory", ways, [("1 GiB ready, ms: first", first), ("again", again)])


LOADERS = {
    "torch_to": "torch",
    "torch_pin": "torch, pinned",
    "tensordict": "tensordict",
    "spdl": "SPDL",
}
"""Loaders that compete with ours."""


@said_by("loader")
def loader(result: Result) -> list[str]:
    """Batches of a DataLoader, for every way of bringing them to the device."""
    about, cases = {**LOADERS, "by_hand": "by hand", **OURS}, by_case(result)
    limits = {"by_hand"}  # which isn't a loader

    def more(row: Row) -> str:
        idle = _said(r"(GPU idle [\d.]+%)", row["detail"])
        return f" ({figure(row['main_median'])})" + ("" if idle == "-" else f", {idle}")

    columns = [(case, cells(rows, about, more=more, limits=limits)) for case, rows in cases.items()]
    whole = by_cases("ms per batch (main thread)", about, columns)
    ways = {**OURS, "torch_pin": LOADERS["torch_pin"], "rival": "best rival"}
    short = beside_rival("ms per batch", cases, ways, LOADERS)
    return folded(short, whole, [passes(result)])


@said_by("to_host")
def to_host(result: Result) -> list[str]:
    """From the device to the host, in milliseconds."""
    cases = {name: rows for name, rows in by_case(result).items() if not _is_result(name)}
    ways = {way: f"`{way}`" for way in result["settings"]["variants"] if way in cases["64MiB"]}
    few = {way: ways[way] for way in ("pinstage", "pinned_each", "by_hand")}
    return folded(*(by_ways("ms", cases, some) for some in (few, ways)))


def _is_result(case: str) -> bool:
    return case.startswith("results, ")


@section("to_host", "## Results")
def results(result: Result) -> list[str]:
    """Results of all sizes; nothing until they were measured."""
    cases = {
        titled(name.removeprefix("results, ")): rows
        for name, rows in by_case(result).items()
        if _is_result(name)
    }
    if not cases:
        return []
    ways = {
        "cpu_each": "`.cpu()` each",
        "pinned_each": "pinned `copy_`",
        "by_hand": "gathered",
        "pinstage_copy": "`to_host`",
        "pinstage": "views",
        "fill": "new memory",
    }
    returns = {
        case: figure(rows.get("fetch", {}).get("main_median")) for case, rows in cases.items()
    }
    said = (
        "Milliseconds until the tensors are on the host. `copy_`: each into cached page-locked "
        "memory, one wait. `gathered`: by `torch.cat`, one copy into memory that is kept. `views`: "
        "`fetch(copy=False)`. `new memory`: threads fill as much. `fetch`: until it returns."
    )
    return [*by_ways("tensors", cases, ways, {"`fetch`": returns}), "", said]


@section("page_locked", "## Page-locked batches")
def page_locked(result: Result) -> list[str]:
    """Batches that are page-locked already; nothing until they were measured."""
    ways = {
        "to": "`.to()`",
        "borrow": "`borrow_pinned=True`",
        "default": "`to_device`",
        "batch": "by hand",
        "bus": "bus",
    }
    said = (
        "Milliseconds until all tensors are on the device. `by hand`: one `cuMemcpyBatchAsync` "
        "into memory that exists."
    )
    cases = {titled(case): rows for case, rows in by_case(result).items()}
    return [*by_ways("tensors", cases, ways), "", said + in_turn(result)]


def in_turn(result: Result) -> str:
    """Return a sentence about ways that shared a process; empty if each had its own."""
    return " All ways ran in one process, in turn." * result["settings"].get("in_turn", False)


LOOP_WAYS = {
    "torch_pin": "torch, pinned",
    "torch_to": "torch",
    "pinstage": "`ps.DataLoader`",
    "wrap_loader": "`ps.wrap_loader`",
    "prefetch": "`prefetch`",
    "prefetch_pin": "`prefetch`, pinned",
    "model": "model alone",
}
"""What the short table shows, and calls it."""
LOOP_BATCHES = {
    "segmentation": "32 images of 3 x 384 x 384 bytes and masks of int64",
    "lidar": "32 dataclasses of 20,000 to 30,000 points, boxes and labels",
    "columns": "120 columns of 512 floats, in a dict",
    "tokens": "2 tensors of 16 x 4,096 integers",
}
"""The batches of each loop."""
LOOP_CONDITIONS = (
    "Samples are in memory, where torch's loader can be faster without workers. The model is a "
    "chain of matrix products that takes a fixed time."
)


@section("loops", "")
def loops(result: Result) -> list[str]:
    """Milliseconds per step of training loops; below, the range of the passes, and the share of the
    time for which the GPU was busy.
    """
    cases, about = by_case(result), result["settings"]["variants"]

    def more(row: Row) -> str:
        few = row["repeats"] < 2 or row.get("minimum") is None
        spread = "" if few else f" ({figure(row['minimum'])} to {figure(row['maximum'])})"
        return spread + _busy(row)

    columns = [(case, cells(rows, about, more=more)) for case, rows in cases.items()]
    batches = [
        f"- `{name}`: {batch}."
        for name, batch in LOOP_BATCHES.items()
        if any(case.startswith(name) for case in cases)
    ]
    said = f"The time of whole loops over their steps. {LOOP_CONDITIONS} {passes(result)}".strip()
    said += " The limit of open files is raised: at 1,024, torch's loader fails on `lidar`."
    whole = by_cases("ms per step", about, columns)
    return folded(short_loops(result), whole, ["\n".join(batches), said])


def loops_short(name: str = "loops") -> str:
    """Milliseconds per step of training loops, by torch's loader and by the three lines of the
    README.
    """
    result = load(name)
    pinned = "`pinned`: torch's loader with `pin_memory=True`. " if name == "loops" else ""
    said = f"{pinned}{LOOP_CONDITIONS} {passes(result)} {source(result)}".strip()
    return "\n".join([*short_loops(result), "", said])


def short_loops(result: Result) -> list[str]:
    """Return the table of the loops with the ways that `LOOP_WAYS` names, and what a batch is."""
    ways = {way: text for way, text in LOOP_WAYS.items() if way in result["settings"]["variants"]}
    cases = by_case(result)
    moved = {case: _moved(next(iter(rows.values()))) for case, rows in cases.items()}
    return by_ways("ms per step", cases, ways, {"a batch": moved} if all(moved.values()) else {})


def _moved(row: Row) -> str:
    """Return what a batch consists of; empty in older files."""
    if not row["nbytes"]:
        return ""
    return f"{figure(row['nbytes'] / 1e6)} MB, {row['leaves']:,} tensors"


def passes(result: Result) -> str:
    """Return how many passes the figures are medians of, how many steps a pass takes at least, and
    how much the passes differ; empty if the file doesn't say it. A killed run has fewer passes of
    some ways.
    """
    rows = [row for row in result["rows"] if row.get("minimum") is not None]
    counts = sorted({row["repeats"] for row in rows})
    if not counts:
        return ""
    steps = [int(said) for row in rows for said in re.findall(r"of (\d+) timed", row["detail"])]
    length = f" of at least {min(steps)} steps" if steps else ""
    if counts[-1] == 1:
        return f"A single pass{length}."
    most = max(abs(end / row["median"] - 1) for row in rows for end in spread_of(row))
    number = " or ".join(map(str, counts))
    return (
        f"Medians of {number} alternating passes{length}; a pass differs from its median by at most "
        f"{most:.0%}."
    )


LOOPS_PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 440 {height}" width="440" height="{height}" role="img"
  aria-labelledby="t d">
  <title id="t">Training loops with torch's DataLoader and with pinstage's</title>
  <desc id="d">{desc}</desc>
  <style>
    text {{ font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1b1f24; }}
    .case {{ font-weight: 700; }} .gain {{ font-size: 19px; font-weight: 700; fill: #1a4fa3; }}
    .note {{ font-size: 12px; fill: #57606a; }}
    .sheet {{ fill: #fff; }} .before {{ fill: #b9c2cd; }} .after {{ fill: #4c8bf5; }}
    @media (prefers-color-scheme: dark) {{
      text {{ fill: #e4e7eb; }} .gain {{ fill: #8ab4ff; }} .note {{ fill: #a8b0bb; }}
      .sheet {{ fill: #1d2027; }} .before {{ fill: #5b6470; }} .after {{ fill: #3f78d8; }}
    }}
  </style>
  <rect class="sheet" width="440" height="{height}" rx="8"/>
{bars}
</svg>
"""
"""Narrow, so that it is readable on a telephone."""


def loops_picture() -> str:
    """Return the loops as bars, as SVG: steps/s with torch's loader and with ours, each in the best
    of its ways, with and without workers, for batches of the same bytes.
    """
    result = load("loops")
    bars = [
        '  <rect class="before" x="16" y="16" width="12" height="12" rx="2"/>',
        '  <text x="34" y="27">torch\'s DataLoader, the best of its ways</text>',
        '  <rect class="after" x="16" y="36" width="12" height="12" rx="2"/>',
        '  <text x="34" y="47">ps.DataLoader(..., device="cuda:0")</text>',
    ]
    described, y = [], 68
    for name, batch in LOOP_BATCHES.items():
        before = _best_of_loop(result, name, ("torch_pin", "torch_to"))
        after = _best_of_loop(result, name, ("pinstage",))
        gain = before["median"] / after["median"]
        scale = 408 / max(1 / before["median"], 1 / after["median"])
        moved = _moved(after)
        workers = [row["case"].partition(", ")[2] for row in (before, after)]
        pinned = ", pin_memory" * (before["variant"] == "torch_pin")
        bars += [
            f'  <text class="case" x="16" y="{y + 12}">{name}{moved and f": {moved}"}</text>',
            f'  <text class="gain" x="424" y="{y + 14}" text-anchor="end">{gain:.1f}x</text>',
            f'  <text class="note" x="16" y="{y + 29}">{batch}</text>',
            f'  <text class="note" x="16" y="{y + 45}">torch: {workers[0]}{pinned}; pinstage: {workers[1]}</text>',
        ]
        for row, kind, top in ((before, "before", y + 52), (after, "after", y + 74)):
            width = round(scale / row["median"])
            busy = _busy(row).replace("busy", "GPU busy")
            at = f'x="{8 + width}" text-anchor="end"' if width > 220 else f'x="{24 + width}"'
            bars.append(
                f'  <rect class="{kind}" x="16" y="{top}" width="{width}" height="20" rx="3"/>'
            )
            bars.append(
                f'  <text {at} y="{top + 15}">{figure(1e3 / row["median"])} steps/s{busy}</text>'
            )
        speeds = (figure(1e3 / row["median"]) for row in (before, after))
        described.append(f"{name}: {' and '.join(speeds)} steps/s.")
        y += 114
    for line in [*textwrap.wrap(LOOP_CONDITIONS, 56), *textwrap.wrap(source(result), 56)]:
        bars.append(f'  <text class="note" x="16" y="{y + 12}">{line}</text>')
        y += 17
    return LOOPS_PICTURE.format(
        height=y + 12,
        bars="\n".join(bars),
        desc=" ".join(described),
    )


def _best_of_loop(result: Result, name: str, ways: Sequence[str]) -> Row:
    """Return the fastest row of some ways in a loop: with workers, and without if a batch is known
    to have the same bytes.
    """
    cases = [rows for case, rows in by_case(result).items() if case.startswith(f"{name}, ")]
    nbytes = cases[0]["pinstage"]["nbytes"]
    same = [rows for rows in cases if nbytes and rows["pinstage"]["nbytes"] == nbytes] or cases[:1]
    return min((best_rival(rows, ways) for rows in same), key=lambda row: row["median"])


FRAMEWORKS = {
    "webdataset": (
        "In the main process, a thread packs for `webdataset`, by `prefetch(background=True)`."
    ),
    "nodes": (
        "`nodes` doesn't use torch's loader, and no worker packs. Its columns are "
        "`prefetch(background=True)` and `torchdata.Stage`."
    ),
    "slow": (
        "`slow` is a generator that takes 6 ms for a batch: without and with a thread that packs."
    ),
}
"""What differs in a loop."""
STEP_TIMES = (
    "Time of a training step, and the share of the time for which the GPU was busy. The last "
    "column is the time with `pin_memory=True` over that with workers that pack."
)


@section("frameworks")
def frameworks(result: Result) -> list[str]:
    """Loops of frameworks."""
    ways = {"pin_memory": "`pin_memory=True`", "pinstage_main": "packed in the main process",
            "pinstage": "**packed by workers**", "model": "the model alone"}  # fmt: skip
    cases = by_case(result)
    ways = in_use(ways, cases)
    speed_up = {case: times(rows["pin_memory"], rows["pinstage"]) for case, rows in cases.items()}
    said = [STEP_TIMES]
    failed = [row for row in result["rows"] if row["status"] != "ok"]
    if not failed:
        said.append("Losses are the same in every way that moves batches, bit for bit.")
    for row in failed:
        why = re.sub(r" \(pid\(s\) [\d, ]+\)|, from .*", "", row["detail"])
        said.append(f"`{row['case']}`, {ways[row['variant']]}, failed: {why}.")
    if "model" in ways:
        said.append("The model alone has one batch, on the device before the loop begins.")
    said += [text for case, text in FRAMEWORKS.items() if case in cases]
    lines = by_ways("ms per step", cases, ways, {"speed-up": speed_up}, more=_busy)
    return [*lines, "", " ".join([*said, passes(result)]).strip()]


CHECKPOINTS = {
    "none": "no save",
    "blocking": "torch, blocking",
    "blocking_cached": "the same, cached",
    "default_pinned_shared_thread": "torch, pinned, shared, in a thread",
    "pinstage": "`CheckpointStager()`",
    "pinstage_step": 'the same, `hold="step"`',
}
"""What the short table shows, and calls it."""


@section("checkpoint")
def checkpoint(result: Result) -> list[str]:
    """How long training stands still for a save."""
    cases = by_case(result)
    step = {"step": cases["step"]}
    about, few = in_use(result["settings"]["variants"], step), in_use(CHECKPOINTS, step)

    def columns(ways: Ways, headings: Ways) -> list[tuple[str, list[str]]]:
        saves = [
            (heading.format(name), cells(cases[case], ways, field))
            for name, field in (("the call", "main_median"), ("on the host", "median"))
            for case, heading in headings.items()
        ]
        return [*saves, ("a step", cells(cases["step"], ways))]

    short = columns(few, {"later": "{}"})
    whole = columns(about, {"first": "{}, first", "later": "later"})
    details = (cases["step"][way]["detail"] for way in about)
    whole.append(("memory", [_said(r"([\d.]+ GB) more resident", said) for said in details]))
    nbytes = max(row["nbytes"] for row in result["rows"])
    said = (
        f"A state of {nbytes / 1e9:.1f} GB in 2,150 tensors; the short table is of saves after the "
        "first. The call is the time until `async_save` returned, and the next column that until "
        "all is on the host. In the step a save begins, and all tensors are changed at its end, "
        "as soon as the stager allows it. Memory is what stays resident on the host between saves."
    )
    return folded(by_cases("ms", few, short), by_cases("ms", about, whole), [said])


OFFLOADS = {
    "kept": "all stays on the device",
    "recomputed": "torch's checkpointing",
    "save_on_cpu_pinned": "torch's `save_on_cpu`, pinned",
    "torchtune": "torchtune's `OffloadActivations`",
    "bus": "the bus alone",
    "pinstage": "`save_on_cpu(pool)`",
    "pinstage_reserved": "`pool.reserve()` before",
}
"""What the short table shows, and calls it."""


@section("offload")
def offload(result: Result) -> list[str]:
    """Activations and an optimizer's state on the host."""
    cases = by_case(result)
    first, later = cases["first step"], cases["later steps"]
    about = {way: text for way, text in result["settings"]["variants"].items() if way in later}

    def columns(ways: Ways) -> list[tuple[str, list[str]]]:
        details = [later[way]["detail"] for way in ways]
        return [
            ("first", cells(first, ways)),
            ("later", cells(later, ways)),
            ("peak on the device", [_said(r"peak ([\d.]+ GiB)", said) for said in details]),
            ("over the bus alone", [times(later[way], later["bus"]) for way in ways]),
            ("page-locked", [_said(r"page-locked ([\d.]+ GB)", said) for said in details]),
        ]

    few = {way: text for way, text in OFFLOADS.items() if way in about}
    short = by_cases("ms per step", few, columns(few)[:3])
    whole = by_cases("ms per step", about, columns(about))
    out, back = (
        {way: figure(row["median"]) for way, row in cases[case].items()}
        for case in ("state out", "state back")
    )
    nbytes = cases["state out"]["state_bus"]["nbytes"]
    said = (
        f"An optimizer's state of {nbytes / 1e9:.1f} GB leaves in {out['state_pinstage']} ms and "
        f"returns in {back['state_pinstage']}; the bus alone takes {out['state_bus']} and "
        f"{back['state_bus']}. The bus "
        "alone moves all activations, out and then back; `save_on_cpu(pool)` keeps the last ones "
        "on the device."
    )
    return folded(short, whole, [said])


@section("refusals")
def refusals(result: Result) -> list[str]:
    """What is left of the speed where page-locking is refused."""
    ways, columns = result["settings"]["variants"], []
    for case, rows in by_case(result).items():
        full = rows["all"]["median"]
        share = [f"{full / rows[way]['median']:.0%}" for way in ways]
        # Nothing competes here: it is one way with less and less memory.
        columns += [(case, cells(rows, ways, limits=ways)), ("of full speed", share)]
    return by_cases("ms per batch", ways, columns)


def ways_by_cases(result: Result, *, rates: Sequence[str] = (), said: str) -> list[str]:
    """Return each way's medians, with GB/s for some cases, and text."""
    ways, columns = result["settings"]["variants"], []
    for case, rows in by_case(result).items():
        columns.append((case, cells(rows, ways)))
        if case in rates:
            columns.append(("GB/s", cells(rows, ways, "gb_per_s")))
    return [*by_cases("ms", ways, columns), "", said]


@section("frozen")
def frozen(result: Result) -> list[str]:
    """The ways to keep modules, and a stack of blocks, on the host."""
    about = result["settings"]["variants"]
    stack = by_case(result)["stack"]
    said = (
        "Three modules of 2 GB. `first`: page-locking for all three. `onload`, `offload`: one "
        "module, until it is on the device, or its device memory is free. `in turn`: all three, "
        "each used once, with the device memory of two. `in turn, buffers`: the same with a buffer "
        "in each, so that the host waits at the end of each use. The bus alone copies as many "
        "bytes and computes nothing."
    )
    said = "\n".join([said, "", *_frozen_stack(stack, about)])
    settings = {"variants": {name: text for name, text in about.items() if name not in stack}}
    rows = [row for row in result["rows"] if row["case"] != "stack"]
    modules = result | {"settings": settings, "rows": rows}
    return ways_by_cases(modules, rates=["onload"], said=said)


def _frozen_stack(stack: Rows, about: Ways) -> list[str]:
    """Return the lines about a stack of blocks."""
    columns = [
        ("ms per pass", cells(stack, stack)),
        ("GB/s", cells(stack, stack, "gb_per_s")),
        ("over the bus alone", [times(row, stack["stack_bus"]) for row in stack.values()]),
        (
            "peak on the device",
            [_said(r"peak ([\d.]+ GB)", row["detail"]) for row in stack.values()],
        ),
    ]
    lines = by_cases("one stack", {name: about[name] for name in stack}, columns)
    said = (
        "24 equal transformer blocks of 3.6 GB in all, and a norm; a pass has 4,096 tokens. A way "
        "whose outputs differ from the plain stack's in any bit says `incorrect`. The peak is of "
        "the memory that torch allocated, input and output included."
    )
    return [*lines, "", said]


@section("out")
def out(result: Result) -> list[str]:
    """Batches into existing tensors."""
    ways = {
        "pinstage_out": "`out=`",
        "by_hand": "by hand",
        "pinstage": "new tensors",
        "copy": "`copy_`",
        "pin_copy": "pinned `copy_`",
        "graph": "graph alone",
    }
    cases = by_case(result)
    said = (
        "Until the batch is in its place; `replay`: a step of a loop that replays a CUDA graph. "
        "Weights go by `load_weights`, capped at 256 MiB; `pinned`: of page-locked "
        "tensors, with `borrow_pinned=True`; `by hand`: `to_device`, then `torch._foreach_copy_`; `copy_`: "
        "with `non_blocking=True`; pinned: before the timer; `new tensors`, `graph alone`: nothing "
        "written in place."
    )
    limits = LIMITS | {"pin_copy", "pinstage"}
    lines = by_ways("ms", cases, in_use(ways, cases), limits=limits)
    return [*lines, "", said + in_turn(result)]


@section("in_memory")
def in_memory(result: Result) -> list[str]:
    """The ways to batches of rows."""
    ways = {
        "torch_loader": "torch's loader",
        "pinstage_loader": "`ps.DataLoader`",
        "rows": "`ps.rows`",
        "index": "`x[i]`",
        "index_select": "select",
        "c_gather": "C gather",
        "bus": "bus",
        "permutation": "shuffle",
    }
    cases = by_case(result)
    gains = dict.fromkeys(cases, "-")
    gains |= {case: f"{figure(gain)}x" for case, (_, gain) in _rows_a_second(result).items()}
    batches = {case: f"{rows:,}" for case, rows in result["settings"]["batches"].items()}
    said = (
        "Until a batch is on the device, without the first step of a pass, whose permutation is "
        "`shuffle`. `x[i]`: `x[i].pin_memory().to()`. `select`: `index_select` into page-locked "
        "memory that is kept. `C gather`: C with OpenMP, into one slab. `bus`: the copy alone. "
        "`batch`: its rows. Speed-up: of `ps.DataLoader` over torch's loader."
    )
    further = {"batch": batches, "speed-up": gains}
    return [*by_ways("ms", cases, in_use(ways, cases), further), "", said]


def _rows_a_second(result: Result) -> dict[str, tuple[float, float]]:
    """Return how many rows `ps.DataLoader` reads in a second, and the factor over torch's loader,
    of each case that has both.
    """
    speeds = {}
    for case, rows in by_case(result).items():
        ours, theirs = (
            rows.get(f"{name}_loader", {}).get("median") for name in ("pinstage", "torch")
        )
        if ours and theirs:
            batch = result["settings"]["batches"][case]
            speeds[case] = 1e3 * batch / ours, theirs / ours
    return speeds


HEADLINE = {
    "13 floats, label": "rows of 13 floats and a label",
    "images 3x64x64, label": "images of 3 x 64 x 64 bytes",
    "token windows": "windows of 1,025 tokens",
}
"""Cases of data in memory, of three sizes, as a sentence names them."""


def in_memory_headline() -> str:
    """The rows a second of data in memory; nothing until they were measured."""
    result = measured("in_memory")
    if result is None:
        return ""
    speeds = _rows_a_second(result)
    parts = [f"{_spoken(speeds[case][0])} {rows}" for case, rows in HEADLINE.items()]
    factors = [figure(speeds[case][1]) for case in HEADLINE]
    return (
        f"On an {result['machine']['gpu']}, `ps.DataLoader`, after its shuffle, reads from memory, "
        f"each second, {', '.join(parts[:-1])} or {parts[-1]}: {', '.join(factors[:-1])} and "
        f"{factors[-1]} times as many as torch's loader."
    )


def _spoken(number: float) -> str:
    return f"{figure(number / 1e6)} million" if number >= 1e6 else figure(number)


@section("weights")
def weights(result: Result) -> list[str]:
    """The ways to load weights from a file."""
    said = (
        "8 GB in 300 tensors, until all are on the device. `cold`: the file was dropped from the "
        "page cache, and everything is used for the first time. `warm`: the file is in the page "
        "cache. For a file, `load_weights` checks all names and shapes before it writes. "
        "`fastsafe_open` and `SafetensorsStreamer` read with O_DIRECT where the host and the "
        "file system allow it: from the disk, also when the file is in the page cache."
    )
    return ways_by_cases(result, rates=["cold", "warm"], said=said)


@section("loader_refused")
def loader_refused(result: Result) -> list[str]:
    """A loader where CUDA refuses to register memory."""
    rows = [row | {"case": row["case"].removeprefix("refused: ")} for row in result["rows"]]
    resident = [re.findall(r"(\d+) resident", row["detail"]) for row in rows]
    grown = max(int(late) - int(early) for early, late in filter(None, resident))
    said = (
        "Milliseconds per batch, until it is on the device; four workers. Over 2,000 batches of "
        f"16 MiB, the process grew by {grown} MiB at most."
    )
    return ways_by_cases(result | {"rows": rows}, said=said)


@section("page_locking")
def page_locking(result: Result) -> list[str]:
    """How a large range is page-locked, with its picture."""
    cases = by_case(result)
    nbytes = next(row["nbytes"] for row in result["rows"] if row["case"] == "last byte, idle")
    figures = {
        "first byte, s": ("first byte, idle", 1e-3),
        "last byte, s": ("last byte, idle", 1e-3),
        "resident, %": ("resident, idle", 1),
        "a neighbour's call, ms": ("neighbour's call, idle", 1),
        "own launch, ms": ("own launch, idle", 1),
        "beside a busy GPU, ms": ("own launch, busy", 1),
        "freed, s": ("given back, idle", 1e-3),
        "freed beside a busy GPU, s": ("given back, busy", 1e-3),
    }
    ways = result["settings"]["variants"]
    lines = table(
        [f"{nbytes / 2**30:g} GiB", *ways.values()],
        (
            [text, *cells(cases.get(case, {}), ways, scale=scale)]
            for text, (case, scale) in figures.items()
        ),
    )
    said = (
        f"Medians of {result['rows'][0]['repeats']} runs. Of calls, the worst while the memory is "
        "made ready: `cudaMemGetInfo` in another process, and the launch of a kernel, with its "
        "end, in another thread."
    )
    return [*lines, "", said]


def _busy(row: Row) -> str:
    idle = _said(r"GPU idle ([\d.]+)%", row["detail"])
    return "" if idle == "-" else f", busy {100 - float(idle):.0f}%"


def _said(pattern: str, detail: str) -> str:
    found = re.search(pattern, detail)
    return found[1] if found else "-"


def trace_loops() -> str:
    """What `pinstage trace` promises beside what was saved: of the recorded loops, by the script
    that recorded them.
    """
    sys.path.append(str(ROOT / "scripts"))
    import record_traces

    folder = ROOT / "tests" / "traces" / "loops"
    about = json.loads((folder / "loops.json").read_text())
    rows, _ = record_traces.check(folder)
    said = (
        f"{about['device']}, torch {about['torch']}; medians of {about['rounds']} rounds of "
        f"{about['steps']} steps"
    )
    return "\n".join([*rows, "", f"{said}; in ms."])


@said_by("trace_reading")
def trace_reading(result: Result) -> list[str]:
    """How long a large trace takes to read."""
    (row,) = result["rows"]
    return [f"{row['case']}, {row['detail']}: {figure(row['median'])} s."]


def demo() -> str:
    """What the demo printed: `demo.txt` is the log of `scripts/gpu_check.sh demo` under a line with
    its commit.
    """
    commit, _, printed = (RESULTS / "demo.txt").read_text().partition("\n")
    took = re.search(r"^ *time in total, s +(.*)$", printed, re.MULTILINE)
    assert took is not None
    to, pinned, stager, loader = took[1].split()
    said = (
        f"In total, the year takes {to} s with `.to()`, {pinned} with `pin_memory()` and `.to()`, "
        f"{stager} with a `Stager` and {loader} with a `DataLoader` of four workers. What it "
        f"printed ({commit}):"
    )
    return f"{said}\n\n```text\n{printed}```"


def doctor() -> str:
    """What doctor printed: `doctor.txt` is the log of `scripts/gpu_check.sh doctor` under a line
    with its commit.

    Beside it stands what `--plot` drew there, copied to `docs/bandwidth.png`, and `draw_bandwidth`
    for dark pages.
    """
    commit, _, printed = (RESULTS / "doctor.txt").read_text().partition("\n")
    machine = (
        "without a GPU, where nothing is measured"
        if "no NVIDIA driver here" in printed
        else "with a GPU"
    )
    printed = re.sub(
        r"^(?:== |written: |kept for pinstage trace: ).*\n", "", printed, flags=re.MULTILINE
    ).strip("\n")
    text = f"What it printed on a machine {machine} ({commit}):\n\n```text\n{printed}\n```"
    picture = pictures("Bandwidth by size, for each kind of memory, in both directions", BANDWIDTH)
    return text + f"\n\n{picture}" * BANDWIDTH.exists()


def draw_bandwidth() -> None:
    """Draw doctor's picture again for dark pages, from what it printed."""
    from matplotlib import rc_context

    printed = (RESULTS / "doctor.txt").read_text()
    points = []
    for way, size, unit, *rates in re.findall(
        r"^(host to device|device to host) +([\d.]+) (KiB|MiB) +([\d.]+)[ #]+([\d.]+)[ #]+([\d.]+)[ #]*$",
        printed,
        re.M,
    ):
        nbytes = int(float(size) * {"KiB": 1 << 10, "MiB": 1 << 20}[unit])
        for kind, rate in zip((PAGEABLE, PINNED, REGISTERED), rates, strict=True):
            points.append(Point(way, kind, nbytes, nbytes / float(rate) / 1e9))
    link = re.search(r"^.* PCIe .*: ([\d.]+) GB/s$", printed, re.M)
    gpu = re.search(r"NVIDIA [A-Z]+\d+", printed)
    assert link is not None
    assert gpu is not None
    with rc_context(DARK):
        save_plot(points, dark(BANDWIDTH), title=gpu[0], link_rate=float(link[1]) * 1e9)


@section("weather_batch")
def weather_batch(result: Result) -> list[str]:
    """The weather batch before and after."""
    rows = {(row["case"], row["variant"]): row for row in result["rows"]}
    ways = ("before", "after")
    lines = [["copies to the device", *(rows["staging", way]["detail"] for way in ways)]]
    for case, text in (
        ("staging", "the host stages, or a copy runs, ms"),
        ("GPU waits for staging", "of it, the GPU idles, ms"),
        ("step, profiled", "the step, under the profiler, ms"),
        ("step", "**the step, without it, ms**"),
    ):
        lines.append([text, *(figure(rows[case, way]["median"]) for way in ways)])
    predicted = rows["saving, predicted", "before"]["median"]
    saved = rows["step", "before"]["median"] - rows["step", "after"]["median"]
    said = (
        f"From the first trace alone, `pinstage trace` predicted a saving of {figure(predicted)} "
        f"ms per step. Measured, without the profiler: {figure(saved)} ms."
    )
    return [*table(["of a step, medians", *ways], lines), "", said]


@section("frame_bandwidth")
def frame_bandwidth(result: Result) -> list[str]:
    """The ways to send a frame."""
    about, cases = result["settings"]["variants"], by_case(result)
    of_all = {case: rows for case, rows in cases.items() if "filled_before" in rows}
    few, whole = [], []
    for case, rows in of_all.items():
        found = [rows[way]["vs_best_rival"] for way in about]
        share = ["-" if ratio is None else f"{ratio:.0%}" for ratio in found]
        ms = (f"{case}, ms", cells(rows, about)), (f"{case}, of the bus", share)
        whole += [ms[0], (f"{case}, GB/s", cells(rows, about, "gb_per_s")), ms[1]]
        few = ms
    early = cases["filled again too early"]["reused"]
    said = f"The pinned buffer filled again without waiting: {early['detail']}."
    return folded(by_cases("way", about, few), by_cases("way", about, whole), [said])


TABLES |= {
    "staging_busy": lambda: staging(load("staging_busy")),
    "latency": lambda: waste(load("pool_latency"), corner="one cycle, us"),
    "loops_short": loops_short,
    "loops_cpu": partial(loops_short, "loops_cpu"),
    "in_memory_headline": in_memory_headline,
    "scaling": scaling,
    "demo": demo,
    "trace_loops": trace_loops,
    "doctor": doctor,
}

UNTIL_READY = (
    "Milliseconds from the call until every leaf is ready on the device. The ratio is the best "
    "rival's time divided by pinstage's; below 1, pinstage is slower."
)
CAPTIONS = {
    "staging": UNTIL_READY,
    "staging_busy": (
        "The same while other processes compute on half of the CPUs, beside `.to()` and "
        "`multi_tensor_copier` only."
    ),
    "native_threads": "Milliseconds that C++ threads take to pack and copy large leaves.",
    "startup": "Milliseconds until the memory can be used.",
    "latency": "Microseconds, on one thread.",
    "loader": (
        "Milliseconds from batch to batch, with 8 workers; in brackets the main thread's share, and "
        "for `step` the time that the loop waited. `ready`: samples are in memory, and nothing uses "
        "the batches. `step`: each batch has a training step on the GPU, the same in all rows. "
        "`decode`: the workers decode JPEG images.\n\n"
        "`torch`: its loader, then `.to(device)` for each tensor. `pinned`: with `pin_memory=True` "
        "and `non_blocking=True`. `tensordict`: workers consolidate each batch, which is pinned and "
        "sent as one. `SPDL`: `get_pytorch_dataloader`, then `transfer_tensor_h2d` in a thread. "
        "`by hand`: no loader, but fixed shared slots, one byte for a batch, one copy, and views."
    ),
    "to_host": (
        "Milliseconds until everything is on the host. `frames`: ten frames of 3 x 3840 x 2160 "
        "floats, to the device and back. `cpu_each`: `.cpu()` on each tensor. `pinned_each`: into "
        "pinned memory that torch's cache kept. `by_hand` and `bus`: into pinned memory that is "
        "kept, on a second stream; by hand small tensors are gathered and frames packed, for the "
        "bus neither. `pinstage`: "
        "`fetch(tensors, copy=False).result()`. `pinstage_copy`: `to_host(tensors)`."
    ),
    "waste": (
        "Percent of the page-locked memory that rounding takes, over the demo's ragged batches, "
        "each in a slab."
    ),
}
"""How to read the tables of the page of all measurements, which has no other text."""


def filled(text: str) -> str:
    """Return a page with its tables as the result files have them now."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        caption = f"{CAPTIONS[name]}\n\n" if name in CAPTIONS else ""
        return f"<!-- table: {name} -->\n{caption}{TABLES[name]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def main() -> None:
    """Print the tables, or write them into the pages and draw what belongs to them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="into the README and the docs")
    if parser.parse_args().write:
        for page in PAGES:
            page.write_text(filled(page.read_text()))
        LOOPS.write_text(loops_picture())
        draw_bandwidth()
    else:
        for name, table in TABLES.items():
            try:
                text = table()
            except FileNotFoundError as error:
                text = f"not measured yet: there is no {Path(error.filename).name}"
            print(f"{name}\n\n{text or 'not measured yet'}\n")


if __name__ == "__main__":
    main()

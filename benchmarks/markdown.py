"""Write the tables of the README and the docs from the result files, so that no figure is typed by
hand.

    python benchmarks/markdown.py          # prints them
    python benchmarks/markdown.py --write  # puts them between the markers of the pages
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from comparison.plot import DARK, dark
from pinstage.inspect._bus import PAGEABLE, PINNED, REGISTERED, Point
from pinstage.inspect._doctor import save_plot

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "scaling.png"
BANDWIDTH = ROOT / "docs" / "bandwidth.png"
PAGE_LOCKING = ROOT / "docs" / "images" / "page_locking.png"
LOOPS = ROOT / "docs" / "images" / "loops.svg"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
NAMES = {
    "to": "`.to()` each",
    "pin_to": "pin + `.to()` each",
    "tensordict_consolidate": "tensordict consolidate",
    "tensordict_consolidate_prebuilt": "the same, built before",
    "tensordict_non_blocking_pin": "tensordict non_blocking_pin",
    "spdl_transfer": "SPDL",
    "multi_tensor_copier": "multi_tensor_copier (C++)",
    "multi_tensor_copier_openmp": "the same with OpenMP",
}
SHORT_NAMES = {name: text.removesuffix(" each") for name, text in NAMES.items()} | {
    "multi_tensor_copier": "C++",
    "multi_tensor_copier_openmp": "C++, OpenMP",
}
OURS = {"pinstage": "**pinstage**"}


def folded(short: list[str], whole: list[str], said: list[str]) -> str:
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
    return "\n".join([*short, "", *unfold, "", *said])


def best_rival(rows: dict[str, dict[str, Any]], names: dict[str, str]) -> dict[str, Any]:
    """Return the row of the fastest way that isn't ours."""
    return min(
        (row for name, row in rows.items() if name in names and row["status"] == "ok"),
        key=lambda row: row["median"],
    )


def load(name: str) -> dict[str, Any]:
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


def figure(value: float | None) -> str:
    """Three digits are all that a median on a shared machine is worth."""
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 1000 else f"{float(f'{value:.3g}'):,.0f}"


def source(result: dict[str, Any]) -> str:
    """Return the source of the figures: machine, versions, commit and date."""
    machine, versions = result["machine"], result["versions"]
    commit = re.sub(r"^([0-9a-f]{10})[0-9a-f]+", r"\1", result["commit"])
    return (
        f"{_device(machine)}, {machine['cores']} cores, torch {versions['torch']}, Python "
        f"{versions['python']}; commit {commit}, {result['date'][:10]}"
    )


def _device(machine: dict[str, Any]) -> str:
    return (
        f"{machine['gpu']}, driver {machine['driver']}"
        if machine["gpu"]
        else f"{machine['cpu']}, no GPU"
    )


def staging(result: dict[str, Any] | None = None) -> str:
    """Every rival on every batch. Ways that are missing from the file, or could not run, have no
    column.
    """
    result = result or load("staging")
    shown = result["settings"].get("table")  # if the file has a series too, only these
    rows = [row for row in result["rows"] if not shown or row["case"] in shown]
    ran = {row["variant"] for row in rows if row["status"] == "ok"}
    rivals, ours = ([name for name in names if name in ran] for names in (NAMES, OURS))
    heads = [NAMES[name] for name in rivals]
    for name in ours:
        heads += [OURS[name], "beside the best rival"]
    whole = [
        "| tensors x bytes of each | " + " | ".join(heads) + " |",
        "|---" * (len(heads) + 1) + "|",
    ]
    ours_names = [OURS[name] for name in ours]
    short = [
        "| tensors x bytes of each | " + " | ".join(ours_names) + " | best rival | ratio |",
        "|---" * (len(ours) + 3) + "|",
    ]
    beside = [
        (
            f"| call beside a busy GPU | {' | '.join(NAMES[name] for name in rivals)} | "
            f"{' | '.join(ours_names)} |"
        )
    ]
    beside.append("|---" * (len(rivals) + len(ours) + 1) + "|")
    in_place = []
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = {row["variant"]: row for row in rows if row["case"] == case}
        if case.endswith("-in-place"):
            in_place.append(_in_place(case, of_case))
            continue
        cells = [figure(of_case.get(name, {}).get("median")) for name in rivals]
        best = best_rival(of_case, NAMES)
        medians = [f"**{figure(of_case.get(name, {}).get('median'))}**" for name in ours]
        ratios = [of_case.get(name, {}).get("vs_best_rival") for name in ours]
        for median, ratio in zip(medians, ratios, strict=True):
            cells += [median, "-" if ratio is None else f"{ratio:.2f} x"]
        title = case.replace("x", " x ", 1).replace("-", ", ")
        whole.append(f"| {title} | {' | '.join(cells)} |")
        busy = [figure(of_case.get(name, {}).get("busy_median")) for name in (*rivals, *ours)]
        beside.append(f"| {title} | {' | '.join(busy)} |")
        rival = f"{figure(best['median'])}, {SHORT_NAMES[best['variant']]}"
        short.append(f"| {title} | {' | '.join(medians)} | {rival} | {ratios[0]:.2f} |")
    said = "Milliseconds until the call returns while the GPU has 100 ms of kernels to run first:"
    whole += ["", said, "", *beside]
    return folded(short, whole, [*in_place, source(result)])


def staging_busy() -> str:
    """The same while other processes compute on half of the CPUs."""
    return staging(load("staging_busy"))


def staging_short() -> str:
    """`.to()`, the best rival, and ours on five batches, a loss and a near one among them."""
    result = load("staging")
    names = NAMES | {"multi_tensor_copier_openmp": "multi_tensor_copier, OpenMP"}
    lines = head(["tensors x bytes of each", "`.to()`", "best other way", "**pinstage**", "ratio"])
    for case in ("1x5KiB", "64x1KiB", "1000x16KiB", "1x38MiB", "16x16MiB"):
        rows = {
            row["variant"]: row
            for row in result["rows"]
            if row["case"] == case and row["status"] == "ok"
        }
        best = best_rival(rows, NAMES)
        ours = rows["pinstage"]
        lines.append(
            f"| {case.replace('x', ' x ', 1).replace('-', ', ')} | {figure(rows['to']['median'])} "
            f"| {figure(best['median'])}, {names[best['variant']].replace(' each', '')} | "
            f"**{figure(ours['median'])}** | {ours['vs_best_rival']:.2f} |"
        )
    return "\n".join([*lines, "", source(result)])


GAINS = {
    "many small tensors: graphs, boxes, ragged features": (
        lambda leaves, size: leaves >= 50 and size < 64 << 10,
        "one call per tensor becomes a few copies per batch",
    ),
    "some to many tensors of 64 KiB to 1 MiB": (
        lambda leaves, size: leaves >= 8 and 64 << 10 <= size <= 1 << 20,
        "several threads pack, and the first part is sent while the next one is packed",
    ),
    "a stack of images, or another large tensor": (
        lambda leaves, size: leaves == 1 and size >= 16 << 20,
        (
            "it goes through memory that is page-locked already; page-locking a copy of it each time "
            "costs more"
        ),
    ),
    "several tensors of 16 MiB": (
        lambda leaves, size: leaves > 1 and size >= 16 << 20,
        "with idle CPUs, torch's own threads reach the speed of the bus too",
    ),
    "a few small tensors: tokens, labels, MNIST": (
        lambda leaves, size: leaves < 50 and leaves * size < 1 << 20,
        "microseconds either way: a call has a fixed cost",
    ),
}
"""Kinds of batches: the rows of `staging` of each kind, by tensors and bytes per tensor, and why
they gain.
"""


def gains() -> str:
    """The gain of each kind of batch: the range over its rows of `staging`."""
    result = load("staging")
    lines = head(["your batch", "speed-up over `.to()`", "over the best other way", "why"])
    for kind, (matches, why) in GAINS.items():
        over = []
        for case, rows in by_case(result).items():
            ours = rows["pinstage"]
            if not case.endswith("in-place") and matches(
                ours["leaves"], ours["nbytes"] / ours["leaves"]
            ):
                best = best_rival(rows, NAMES)["median"]
                over.append((rows["to"]["median"] / ours["median"], best / ours["median"]))
        cells = [_range([row[column] for row in over]) for column in (0, 1)]
        lines.append(f"| {kind} | {' | '.join(cells)} | {why} |")
    return "\n".join([*lines, "", source(result)])


def _range(ratios: list[float]) -> str:
    low, high = (
        f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}" for ratio in (min(ratios), max(ratios))
    )
    return f"{low}x" if low == high else f"{low}x to {high}x"


def native_threads() -> str:
    """Large leaves by native threads, and by the bus alone."""
    result = load("native_threads")
    cases = list(dict.fromkeys(row["case"] for row in result["rows"]))

    def table(cases: list[str]) -> list[str]:
        lines = ["| ms | " + " | ".join(case.replace("x", " x ") for case in cases) + " |"]
        lines.append("|---" * (len(cases) + 1) + "|")
        ways = dict(result["settings"]["variants"])
        del ways["pinstage"]  # measured before it had native threads
        for variant, about in ways.items():
            rows = {row["case"]: row for row in result["rows"] if row["variant"] == variant}
            lines.append(
                f"| {about} | {' | '.join(figure(rows[case]['median']) for case in cases)} |"
            )
        return lines

    return folded(table(["64x1MiB", "1x512MiB"]), table(cases), [source(result)])


def _in_place(case: str, rows: dict[str, dict[str, Any]]) -> str:
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
            parts.append(f"{way} {figure(row['median'])} ms, {row['vs_best_rival']:.0%} of the bus")
    return (
        f"{case.removesuffix('-in-place').replace('x', ' x ')} written in place into a lease: "
        f"{'; '.join(parts)}.\n"
    )


def scaling() -> str:
    """The picture that `make bench` drew."""
    if not PICTURE.exists():
        return "Not drawn yet: `make bench` does, on a machine with a GPU."
    return pictures(
        "Time to stage a batch against its leaves and its bytes, pinstage and the rivals", PICTURE
    )


def pictures(text: str, path: Path) -> str:
    """Show a picture on light pages, and its dark version on dark pages."""
    return f"![{text}]({path.name}#only-light)\n![{text}]({dark(path).name}#only-dark)"


def waste() -> str:
    """Host memory that was allocated but not requested."""
    result = load("rounding_waste")
    cases = list(dict.fromkeys(row["case"] for row in result["rows"]))
    lines = ["| percent | " + " | ".join(cases) + " |", "|---" * (len(cases) + 1) + "|"]
    for variant in dict.fromkeys(row["variant"] for row in result["rows"]):
        of_variant = [row for row in result["rows"] if row["variant"] == variant]
        cells = [
            figure(row["median"]) if row["status"] == "ok" else row["status"] for row in of_variant
        ]
        lines.append(f"| {result['settings']['variants'][variant]} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", source(result)])


def startup() -> str:
    """Time until 1 GiB is page-locked."""
    result = load("memory_startup")
    lines = ["| memory | 1 GiB ready, ms: first | again |", "|---|---|---|"]
    for variant in dict.fromkeys(row["variant"] for row in result["rows"]):
        first, again = (row["median"] for row in result["rows"] if row["variant"] == variant)
        lines.append(f"| `{variant}` | {figure(first)} | {figure(again)} |")
    return "\n".join([*lines, "", source(result)])


def latency() -> str:
    """The cost of a lease."""
    result = load("pool_latency")
    rows = result["rows"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    lines = ["| one cycle, us | " + " | ".join(cases) + " |", "|---" * (len(cases) + 1) + "|"]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        cells = [figure(row["median"]) for row in rows if row["variant"] == variant]
        lines.append(f"| {result['settings']['variants'][variant]} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", source(result)])


def loader() -> str:
    """Batches of a DataLoader, for every way of bringing them to the device."""
    result = load("loader")
    about = result["settings"]["variants"]
    rivals = {name: text for name, text in about.items() if name not in ("by_hand", "pinstage")}
    cases = list(dict.fromkeys(row["case"] for row in result["rows"]))
    whole = [
        "| ms per batch (main thread) | " + " | ".join(cases) + " |",
        "|---" * (len(cases) + 1) + "|",
    ]
    for variant in dict.fromkeys(row["variant"] for row in result["rows"]):
        cells = []
        for row in (row for row in result["rows"] if row["variant"] == variant):
            idle = _said(r"(GPU idle [\d.]+%)", row["detail"])
            idle = "" if idle == "-" else f", {idle}"
            shown = f"{figure(row['median'])} ({figure(row['main_median'])}){idle}"
            cells.append(shown if row["status"] == "ok" else row["status"])
        whole.append(f"| {about[variant]} | {' | '.join(cells)} |")
    short = [
        "| ms per batch | **pinstage** | `pin_memory=True` | best rival | ratio |",
        "|---" * 5 + "|",
    ]
    for case in cases:
        rows = {row["variant"]: row for row in result["rows"] if row["case"] == case}
        best, ours = best_rival(rows, rivals)["median"], rows["pinstage"]["median"]
        pinned = figure(rows["torch_pin"]["median"])
        short.append(
            f"| {case} | **{figure(ours)}** | {pinned} | {figure(best)} | {best / ours:.2f} |"
        )
    said = passes(result) or "Medians of single batches, not whole loops over their steps."
    return folded(short, whole, [said, "", source(result)])


def to_host() -> str:
    """From the device to the host: milliseconds, and ours as a share of the speed of the bus."""
    result = load("to_host")
    rows = {(row["case"], row["variant"]): row for row in result["rows"]}
    cases = list(dict.fromkeys(row["case"] for row in result["rows"]))
    variants = list(dict.fromkeys(row["variant"] for row in result["rows"]))

    def table(variants: list[str]) -> list[str]:
        heads = " | ".join(f"`{name}`" for name in variants)
        lines = [f"| ms | {heads} | **share of the bus** |", "|---" * (len(variants) + 2) + "|"]
        for case in cases:
            bus, ours = rows[case, "bus"]["median"], rows[case, "pinstage"]["median"]
            cells = [figure(rows[case, name]["median"]) for name in variants]
            lines.append(f"| {case} | {' | '.join(cells)} | **{bus / ours:.0%}** |")
        return lines

    return folded(table(["pinstage", "by_hand"]), table(variants), [source(result)])


LOOP_WAYS = {
    "torch_pin": "`pin_memory=True`",
    "torch_to": "`pin_memory=False`",
    "pinstage": "`ps.DataLoader`",
    "wrap_loader": "`ps.wrap_loader`",
    "prefetch": "`prefetch`",
    "model": "model alone",
}
"""What the short table shows, and calls it."""
LOOP_BATCHES = {
    "segmentation": "32 images of 3 x 384 x 384 bytes and masks; 16 without workers",
    "lidar": "32 dataclasses of 20,000 to 30,000 points, boxes and labels",
    "columns": "120 columns of 512 floats, in a dict",
    "tokens": "2 tensors of 16 x 4,096 integers",
}
"""The batches of each loop."""
LOOP_CONDITIONS = (
    "Samples are in memory, where torch's loader can be faster without workers. The model is a "
    "chain of matrix products that takes a fixed time."
)


def loops(result: dict[str, Any] | None = None) -> str:
    """Milliseconds per step of training loops; below, the range of the passes, and the share of the
    time for which the GPU was busy. Nothing until measured.
    """
    result = result or measured("loops")
    if result is None:
        return ""
    cases = by_case(result)
    about = result["settings"]["variants"]
    whole = head(["ms per step", *cases])
    for way, text in about.items():
        cells = [f"{spread(rows[way])}{_busy(rows[way])}" for rows in cases.values()]
        whole.append(f"| {text} | {' | '.join(cells)} |")
    batches = [
        f"- `{name}`: {batch}."
        for name, batch in LOOP_BATCHES.items()
        if any(case.startswith(name) for case in cases)
    ]
    said = f"The time of whole loops over their steps. {LOOP_CONDITIONS} {passes(result)}".strip()
    return folded(short_loops(result), whole, [*batches, "", said, "", source(result)])


def loops_short(name: str = "loops") -> str:
    """Milliseconds per step of training loops, by torch's loader and by the three lines of the
    README.
    """
    result = load(name)
    said = f"{LOOP_CONDITIONS} {passes(result)} {source(result)}".strip()
    return "\n".join([*short_loops(result), "", said])


def short_loops(result: dict[str, Any]) -> list[str]:
    """Return the table of the loops with the ways that `LOOP_WAYS` names."""
    named = [way for way in LOOP_WAYS if way in result["settings"]["variants"]]
    lines = head(["ms per step", *(LOOP_WAYS[way] for way in named)])
    for case, rows in by_case(result).items():
        lines.append(f"| {case} | {' | '.join(shown(rows[way]) for way in named)} |")
    return lines


def spread(row: dict[str, Any]) -> str:
    """Return a row's median, and the fastest and the slowest pass in brackets."""
    if row.get("minimum") is None or row["repeats"] < 2:
        return shown(row)
    return f"{shown(row)} ({figure(row['minimum'])} to {figure(row['maximum'])})"


def passes(result: dict[str, Any]) -> str:
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
    most = max(
        max(row["maximum"] / row["median"] - 1, 1 - row["minimum"] / row["median"]) for row in rows
    )
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
    """Return the loops with workers as bars, as SVG: steps/s with torch's loader, with or without
    pinning, and with ours.
    """
    result = load("loops")
    bars = [
        '  <rect class="before" x="16" y="16" width="12" height="12" rx="2"/>',
        '  <text x="34" y="27">torch\'s DataLoader, with pin_memory if faster</text>',
        '  <rect class="after" x="16" y="36" width="12" height="12" rx="2"/>',
        '  <text x="34" y="47">ps.DataLoader(..., device="cuda:0")</text>',
    ]
    described, without, y = [], [], 68
    for case, rows in by_case(result).items():
        torchs = [
            row for name, row in rows.items() if name.startswith("torch") and row["status"] == "ok"
        ]
        before, after = min(torchs, key=lambda row: row["median"]), rows["pinstage"]
        if case.endswith("no workers"):
            without.append(f"{figure(1e3 / before['median'])} ({case.partition(',')[0]})")
            continue
        gain = before["median"] / after["median"]
        scale = 408 / max(1 / before["median"], 1 / after["median"])
        bars += [
            f'  <text class="case" x="16" y="{y + 12}">{case}</text>',
            f'  <text class="gain" x="424" y="{y + 14}" text-anchor="end">{gain:.1f}x</text>',
            f'  <text class="note" x="16" y="{y + 29}">{LOOP_BATCHES[case.partition(",")[0]]}</text>',
        ]
        for row, kind, top in ((before, "before", y + 36), (after, "after", y + 58)):
            width = round(scale / row["median"])
            text = (
                f"{figure(1e3 / row['median'])} steps/s{_busy(row).replace(', busy', ', GPU busy')}"
            )
            at = f'x="{8 + width}" text-anchor="end"' if width > 220 else f'x="{24 + width}"'
            bars.append(
                f'  <rect class="{kind}" x="16" y="{top}" width="{width}" height="20" rx="3"/>'
            )
            bars.append(f'  <text {at} y="{top + 15}">{text}</text>')
        described.append(
            f"{case}: {figure(1e3 / before['median'])} and {figure(1e3 / after['median'])} steps/s."
        )
        y += 98
    said = LOOP_CONDITIONS
    if without:
        said += f" Without workers, torch reaches {', '.join(without)} steps/s."
    for line in [*textwrap.wrap(said, 56), *textwrap.wrap(source(result), 56)]:
        bars.append(f'  <text class="note" x="16" y="{y + 12}">{line}</text>')
        y += 17
    return LOOPS_PICTURE.format(
        height=y + 12,
        bars="\n".join(bars),
        desc=" ".join(described),
    )


def frameworks(result: dict[str, Any] | None = None, only: str | None = None) -> str:
    """Loops of frameworks, with their heading, or one of them; nothing until they were measured."""
    result = result or measured("frameworks")
    if result is None:
        return ""
    ways = {"pin_memory": "`pin_memory=True`", "pinstage_main": "packed in the main process",
            "pinstage": "**packed by workers**", "model": "the model alone"}  # fmt: skip
    measured_ways = {row["variant"] for row in result["rows"] if only in (None, row["case"])}
    ways = {name: title for name, title in ways.items() if name in measured_ways}
    lines = head(["ms per step", *ways.values(), "speed-up"])
    for case, rows in by_case(result).items():
        if only not in (None, case):
            continue
        cells = [
            f"{shown(rows[name])}{_busy(rows[name])}" if name in rows else "-" for name in ways
        ]
        lines.append(
            f"| {case} | {' | '.join(cells)} | {times(rows['pin_memory'], rows['pinstage'])} |"
        )
    said = (
        "Time of a training step, and the share of the time for which the GPU was busy. The last "
        "column is the time with `pin_memory=True` over that with workers that pack."
    )
    rows = [row for row in result["rows"] if only in (None, row["case"])]
    failed = [row for row in rows if row["status"] != "ok"]
    if not failed:
        said += " Losses are the same in every way that moves batches, bit for bit."
    for row in failed:
        why = re.sub(r" \(pid\(s\) [\d, ]+\)|, from .*", "", row["detail"])
        said += f" `{row['case']}`, {ways[row['variant']]}, failed: {why}."
    if any(row["variant"] == "model" for row in rows):
        said += " The model alone has one batch, on the device before the loop begins."
    cases = {row["case"] for row in rows}
    if "webdataset" in cases and only is None:
        said += (
            " In the main process, a thread packs for `webdataset`, by `prefetch(background=True)`."
        )
    if "nodes" in cases:
        said += (
            " `nodes` doesn't use torch's loader, and no worker packs. Its columns are "
            "`prefetch(background=True)` and `torchdata.Stage`."
        )
    if "slow" in cases:
        said += (
            " `slow` is a generator that takes 6 ms for a batch: without and with a thread that "
            "packs."
        )
    said = f"{said} {passes(result)}".strip()
    return "\n".join([*([] if only else ["## Measured", ""]), *lines, "", said, "", source(result)])


CHECKPOINTS = {
    "none": "no save",
    "blocking": "torch, blocking",
    "blocking_cached": "the same, cached",
    "default_pinned_shared_thread": "torch, pinned, shared, in a thread",
    "pinstage": "`CheckpointStager()`",
    "pinstage_step": 'the same, `hold="step"`',
}
"""What the short table shows, and calls it."""


def checkpoint(result: dict[str, Any] | None = None) -> str:
    """How long training stands still for a save, with its heading; nothing until it was
    measured.
    """
    result = result or measured("checkpoint")
    if result is None:
        return ""
    about, cases = result["settings"]["variants"], by_case(result)
    ran = [name for name in about if name in cases["step"]]

    short = head(["ms", "the call", "on the host", "a step"])
    whole = head(
        ["ms", "the call, first", "later", "on the host, first", "later", "a step", "memory"]
    )
    for name in ran:
        first, later, step = (cases[case].get(name, {}) for case in ("first", "later", "step"))
        few = [shown(later, "main_median"), shown(later), shown(step)]
        memory = (
            "-" if step["median"] is None else _said(r"([\d.]+ GB) more resident", step["detail"])
        )
        if name in CHECKPOINTS:
            short.append(f"| {CHECKPOINTS[name]} | {' | '.join(few)} |")
        cells = [shown(first, "main_median"), few[0], shown(first), *few[1:], memory]
        whole.append(f"| {about[name]} | {' | '.join(cells)} |")
    nbytes = max(row["nbytes"] for row in result["rows"])
    said = (
        f"A state of {nbytes / 1e9:.1f} GB in 2,150 tensors; the short table is of saves after the "
        "first. The call is the time until `async_save` returned, and the next column that until "
        "all is on the host. In the step a save begins, and all tensors are changed at its end, "
        "as soon as the stager allows it. Memory is what stays resident on the host between saves."
    )
    return "## Measured\n\n" + folded(short, whole, [said, "", source(result)])


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


def offload(result: dict[str, Any] | None = None) -> str:
    """Activations and an optimizer's state on the host, with their heading; nothing until they were
    measured.
    """
    result = result or measured("offload")
    if result is None:
        return ""
    about, cases = result["settings"]["variants"], by_case(result)
    first, later = cases["first step"], cases["later steps"]
    ran = [name for name in about if name in later]

    short = head(["ms per step", "first", "later", "peak on the device"])
    whole = head(
        ["ms per step", "first", "later", "over the bus alone", "peak on the device", "page-locked"]
    )
    for name in ran:
        times_taken = [shown(first[name]), shown(later[name])]
        peak, locked = (
            _said(what, later[name]["detail"])
            for what in (r"peak ([\d.]+ GiB)", r"page-locked ([\d.]+ GB)")
        )
        if name in OFFLOADS:
            short.append(f"| {OFFLOADS[name]} | {' | '.join([*times_taken, peak])} |")
        cells = [*times_taken, times(later[name], later["bus"]), peak, locked]
        whole.append(f"| {about[name]} | {' | '.join(cells)} |")
    out, back = cases["state out"], cases["state back"]
    said = (
        f"An optimizer's state of {out['state_bus']['nbytes'] / 1e9:.1f} GB leaves in "
        f"{shown(out['state_pinstage'])} ms and returns in {shown(back['state_pinstage'])}; the "
        f"bus alone takes {shown(out['state_bus'])} and {shown(back['state_bus'])}. The bus "
        "alone moves all activations, out and then back; `save_on_cpu(pool)` keeps the last ones "
        "on the device."
    )
    return "## Measured\n\n" + folded(short, whole, [said, "", source(result)])


def refusals(result: dict[str, Any] | None = None) -> str:
    """What is left of the speed where page-locking is refused, with its heading; nothing until it
    was measured.
    """
    result = result or measured("refusals")
    if result is None:
        return ""
    cases = by_case(result)
    lines = head(
        ["ms per batch", *(heading for case in cases for heading in (case, "of full speed"))]
    )
    for variant, about in result["settings"]["variants"].items():
        cells = []
        for rows in cases.values():
            cells += [
                shown(rows[variant]),
                f"{rows['all']['median'] / rows[variant]['median']:.0%}",
            ]
        lines.append(f"| {about} | {' | '.join(cells)} |")
    return "\n".join(["## Measured", "", *lines, "", source(result)])


def ways_by_cases(
    result: dict[str, Any] | None = None, *, name: str, rates: Sequence[str], said: str
) -> str:
    """Return each way's medians, with GB/s for some cases, and a heading; nothing until they were
    measured.
    """
    result = result or measured(name)
    if result is None:
        return ""
    cases = by_case(result)
    lines = head(
        [
            "ms",
            *(
                heading
                for case in cases
                for heading in [case, *(["GB/s"] if case in rates else [])]
            ),
        ]
    )
    for variant, about in result["settings"]["variants"].items():
        cells = []
        for case, rows in cases.items():
            cells.append(shown(rows[variant]))
            cells += [shown(rows[variant], "gb_per_s")] if case in rates else []
        lines.append(f"| {about} | {' | '.join(cells)} |")
    return "\n".join(["## Measured", "", *lines, "", said, "", source(result)])


def frozen(result: dict[str, Any] | None = None) -> str:
    """Return the ways to keep modules, and a stack of blocks, on the host, with their heading;
    nothing until they were measured.
    """
    result = result or measured("frozen")
    if result is None:
        return ""
    cases = by_case(result)
    stack = cases.pop("stack")
    said = (
        "Three modules of 2 GB. `first`: page-locking for all three. `onload`, `offload`: one "
        "module, until it is on the device, or its device memory is free. `in turn`: all three, "
        "each used once, with the device memory of two. `in turn, buffers`: the same with a buffer "
        "in each, so that the host waits at the end of each use. The bus alone copies as many "
        "bytes and computes nothing."
    )
    about = result["settings"]["variants"]
    said = "\n".join([said, "", *_frozen_stack(stack, about)])
    settings = {"variants": {name: text for name, text in about.items() if name not in stack}}
    rows = [row for row in result["rows"] if row["case"] in cases]
    modules = result | {"settings": settings, "rows": rows}
    return ways_by_cases(modules, name="frozen", rates=["onload"], said=said)


def _frozen_stack(stack: dict[str, dict[str, Any]], about: dict[str, str]) -> list[str]:
    """Return the lines about a stack of blocks."""
    lines = head(["one stack", "ms per pass", "GB/s", "over the bus alone", "peak on the device"])
    for name, row in stack.items():
        cells = [shown(row), shown(row, "gb_per_s"), times(row, stack["stack_bus"])]
        peak = _said(r"peak ([\d.]+ GB)", row["detail"])
        lines.append(f"| {about[name]} | {' | '.join([*cells, peak])} |")
    said = (
        "24 equal transformer blocks of 3.6 GB in all, and a norm; a pass has 4,096 tokens. A way "
        "whose outputs differ from the plain stack's in any bit says `incorrect`. The peak is of "
        "the memory that torch allocated, input and output included."
    )
    return [*lines, "", said]


def out(result: dict[str, Any] | None = None) -> str:
    """Batches into existing tensors, with their heading; nothing until they were measured."""
    result = result or measured("out")
    if result is None:
        return ""
    ways = {
        "pinstage_out": "`out=`",
        "by_hand": "by hand",
        "pinstage": "new tensors",
        "copy": "`copy_`",
        "pin_copy": "pinned `copy_`",
        "graph": "graph alone",
    }
    cases = by_case(result)
    ran = [way for way in ways if any(way in rows for rows in cases.values())]
    lines = head(["ms", *(ways[way] for way in ran)])
    for case, rows in cases.items():
        cells = [shown(rows[way]) if way in rows else "" for way in ran]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    said = (
        "Until the batch is in its place; `replay`: a step of a loop that replays a CUDA graph. "
        "The weights go by `load_weights`, through a cap of 256 MiB; `pinned`: of page-locked "
        "tensors, with `borrow_pinned=True`; `by hand`: `to_device`, then `torch._foreach_copy_`; `copy_`: a "
        "loop with `non_blocking=True`, at the end from memory that `pin_memory()` made before."
    )
    return "\n".join(["## Measured", "", *lines, "", said, "", source(result)])


def in_memory(result: dict[str, Any] | None = None) -> str:
    """Return the ways to batches of rows, with their heading; nothing until they were measured."""
    result = result or measured("in_memory")
    if result is None:
        return ""
    ways = {
        "torch_loader": "torch's loader",
        "pinstage_loader": "`ps.DataLoader`",
        "rows": "`ps.rows`",
        "index": "`x[i]`",
        "index_select": "`index_select`",
        "c_gather": "C gather",
        "bus": "bus",
        "permutation": "permutation",
    }
    cases = by_case(result)
    ran = [way for way in ways if any(way in rows for rows in cases.values())]
    lines = head(["ms", *(ways[way] for way in ran), "rows/s", "speed-up"])
    for case, rows in cases.items():
        cells = [shown(rows[way]) if way in rows else "" for way in ran]
        ours, theirs = (rows.get(f"{name}_loader", {}) for name in ("pinstage", "torch"))
        rate = gain = "-"
        if ours.get("median") and theirs.get("median"):
            gain = f"{theirs['median'] / ours['median']:,.0f}x"
            rate = f"{result['settings']['batches'][case] / ours['median'] / 1e3:,.1f} M"
        lines.append(f"| {case} | {' | '.join(cells)} | {rate} | {gain} |")
    said = (
        "Until a batch is on the device, without the first step of a pass, whose permutation has a "
        "column of its own. `x[i]`: `x[i].pin_memory().to()`. `index_select`: into page-locked "
        "memory that is kept. `C gather`: C with OpenMP, into one slab. `bus`: the copy alone. The "
        "speed-up is that of `ps.DataLoader` over torch's loader."
    )
    return "\n".join(["## Measured", "", *lines, "", said, "", source(result)])


def weights(result: dict[str, Any] | None = None) -> str:
    """Return the ways to load weights from a file, with their heading; nothing until they were
    measured.
    """
    said = (
        "8 GB in 300 tensors, until all are on the device. `cold`: the file was dropped from the "
        "page cache, and everything is used for the first time. `warm`: the file is in the page "
        "cache. For a file, `load_weights` checks all names and shapes before it writes. "
        "`fastsafe_open` and `SafetensorsStreamer` read with O_DIRECT where the host and the "
        "file system allow it: from the disk, also when the file is in the page cache."
    )
    return ways_by_cases(result, name="weights", rates=["cold", "warm"], said=said)


loader_refused = partial(
    ways_by_cases,
    name="loader_refused",
    rates=[],
    said="Milliseconds per batch, until it is on the device; four workers. Over 2,000 batches of 16 MiB, "
    "neither the pool's memory nor the resident memory of the process grew.",
)


def page_locking(result: dict[str, Any] | None = None) -> str:
    """How a large range is page-locked, with its heading and picture; nothing until it was
    measured.
    """
    result = result or measured("page_locking")
    if result is None:
        return ""
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
    lines = head([f"{nbytes / 2**30:g} GiB", *ways.values()])
    for figure, (case, scale) in figures.items():
        cells = []
        for variant in ways:
            row = cases.get(case, {}).get(variant, {"median": None, "ours": False})
            cells.append(shown(row | {"median": row["median"] and row["median"] * scale}))
        lines.append(f"| {figure} | {' | '.join(cells)} |")
    said = (
        f"Medians of {result['rows'][0]['repeats']} runs. Of calls, the worst while the memory is "
        "made ready: `cudaMemGetInfo` in another process, and the launch of a kernel, with its "
        "end, in another thread."
    )
    picture = [pictures("The times of the table", PAGE_LOCKING).replace("](", "](../images/"), ""]
    return "\n".join(
        [
            "## Measured",
            "",
            *lines,
            "",
            said,
            "",
            *(picture * PAGE_LOCKING.exists()),
            source(result),
        ]
    )


def by_case(result: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the rows of each case by their variants."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        cases.setdefault(row["case"], {})[row["variant"]] = row
    return cases


def head(heads: Sequence[str]) -> list[str]:
    """Return the first two lines of a table."""
    return ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]


def shown(row: dict[str, Any], field: str = "median") -> str:
    """Return a figure of a row in bold where it is ours, or why there is none."""
    if row.get(field) is None:
        return row["status"] if row.get("status", "ok") != "ok" else "-"
    return f"**{figure(row[field])}**" if row["ours"] else figure(row[field])


def times(row: dict[str, Any], other: dict[str, Any]) -> str:
    """Return how many times as long as the other a row took."""
    return (
        "-"
        if None in (row["median"], other["median"])
        else f"{row['median'] / other['median']:.2f}"
    )


def _busy(row: dict[str, Any]) -> str:
    idle = _said(r"GPU idle ([\d.]+)%", row["detail"])
    return "" if idle == "-" else f", busy {100 - float(idle):.0f}%"


def _said(pattern: str, detail: str) -> str:
    found = re.search(pattern, detail)
    return found[1] if found else "-"


def trace_loops() -> str:
    """What `pinstage trace` promises beside what was saved: of the recorded loops, by the script
    that recorded them.
    """
    spec = importlib.util.spec_from_file_location(
        "record_traces", ROOT / "scripts" / "record_traces.py"
    )
    assert spec is not None
    assert spec.loader is not None
    # Dataclasses look a class's module up.
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    folder = ROOT / "tests" / "traces" / "loops"
    about = json.loads((folder / "loops.json").read_text())
    rows, _ = script.check(folder)
    said = (
        f"{about['device']}, torch {about['torch']}; medians of {about['rounds']} rounds of "
        f"{about['steps']} steps"
    )
    return "\n".join([*rows, "", f"{said}; in ms."])


def trace_reading() -> str:
    """How long a large trace takes to read."""
    result = load("trace_reading")
    (row,) = result["rows"]
    return f"{row['case']}, {row['detail']}: {figure(row['median'])} s.\n\n{source(result)}"


def demo() -> str:
    """What the demo printed: `demo.txt` is the log of `scripts/gpu_check.sh demo` under a line with
    its commit.
    """
    commit, _, printed = (RESULTS / "demo.txt").read_text().partition("\n")
    later = "" if "DataLoader" in printed else " The fourth way came later."
    return f"What it printed on a machine with a GPU ({commit}).{later}\n\n```text\n{printed}```"


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


def measured(name: str) -> dict[str, Any] | None:
    """Read a result file that says nothing without a GPU; None until there is one."""
    if not (RESULTS / f"{name}.json").exists():
        return None
    result = load(name)
    if not result["machine"]["gpu"]:
        raise ValueError(f"{name}.json was measured without a GPU, and the page is about one")
    return result


def weather_batch(result: dict[str, Any] | None = None) -> str:
    """The weather batch before and after, with its heading; nothing until it was measured."""
    result = result or measured("weather_batch")
    if result is None:
        return ""
    rows = {(row["case"], row["variant"]): row for row in result["rows"]}
    ways = ("before", "after")
    lines = ["## Measured", "", "| of a step, medians | before | after |", "|---|---|---|"]
    lines.append(
        "| copies to the device | "
        + " | ".join(rows["staging", way]["detail"] for way in ways)
        + " |"
    )
    for case, text in (
        ("staging", "the host stages, or a copy runs, ms"),
        ("GPU waits for staging", "of it, the GPU idles, ms"),
        ("step, profiled", "the step, under the profiler, ms"),
        ("step", "**the step, without it, ms**"),
    ):
        lines.append(
            f"| {text} | " + " | ".join(figure(rows[case, way]["median"]) for way in ways) + " |"
        )
    predicted = rows["saving, predicted", "before"]["median"]
    saved = rows["step", "before"]["median"] - rows["step", "after"]["median"]
    said = (
        f"From the first trace alone, `pinstage trace` predicted a saving of {figure(predicted)} "
        f"ms per step. Measured, without the profiler: {figure(saved)} ms."
    )
    return "\n".join([*lines, "", said, "", source(result)])


def frame_bandwidth(result: dict[str, Any] | None = None) -> str:
    """The ways to send a frame, with their heading; nothing until they were measured."""
    result = result or measured("frame_bandwidth")
    if result is None:
        return ""
    about = result["settings"]["variants"]
    rows = {(row["case"], row["variant"]): row for row in result["rows"]}
    cases = list(
        dict.fromkeys(row["case"] for row in result["rows"] if row["variant"] == "filled_before")
    )

    def table(cases: list[str], units: Sequence[str]) -> list[str]:
        heads = [f"{case}, {unit}" for case in cases for unit in units]
        lines = ["| way | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
        for variant in about:
            cells = []
            for row in (rows[case, variant] for case in cases):
                share = row["vs_best_rival"]
                shown = (
                    figure(row["median"]),
                    figure(row["gb_per_s"]),
                    "-" if share is None else f"{share:.0%}",
                )
                cells += [
                    text
                    for text, unit in zip(shown, ("ms", "GB/s", "of the bus"), strict=True)
                    if unit in units
                ]
            lines.append(f"| {about[variant]} | {' | '.join(cells)} |")
        return lines

    units = ("ms", "GB/s", "of the bus")
    tables = table(cases[-1:], ("ms", "of the bus")), table(cases, units)
    early = next((row for case, row in rows.items() if case[0] == "filled again too early"))
    said = f"The pinned buffer filled again without waiting: {early['detail']}."
    return "## Measured\n\n" + folded(*tables, [said, "", source(result)])


TABLES = {
    "staging": staging,
    "staging_busy": staging_busy,
    "staging_short": staging_short,
    "gains": gains,
    "native_threads": native_threads,
    "startup": startup,
    "latency": latency,
    "loader": loader,
    "loader_refused": loader_refused,
    "loops": loops,
    "loops_short": loops_short,
    "loops_cpu": partial(loops_short, "loops_cpu"),
    "frameworks": frameworks,
    "checkpoint": checkpoint,
    "offload": offload,
    "frozen": frozen,
    "out": out,
    "weights": weights,
    "in_memory": in_memory,
    "page_locking": page_locking,
    "refusals": refusals,
    "to_host": to_host,
    "waste": waste,
    "scaling": scaling,
    "demo": demo,
    "trace_loops": trace_loops,
    "doctor": doctor,
    "trace_reading": trace_reading,
    "weather_batch": weather_batch,
    "frame_bandwidth": frame_bandwidth,
}


UNTIL_READY = (
    "Milliseconds from the call until every leaf is ready on the device. The ratio is the best "
    "rival's time divided by pinstage's; below 1, pinstage is slower."
)
CAPTIONS = {
    "staging": UNTIL_READY,
    "staging_busy": (
        "The same while other processes compute on half of the CPUs. Batches of one to three leaves "
        "differ from process to process."
    ),
    "native_threads": "Milliseconds that C++ threads take to pack and copy large leaves.",
    "startup": "Milliseconds until the memory can be used.",
    "latency": "Microseconds, on one thread.",
    "loader": (
        "Milliseconds from batch to batch, with 8 workers; in brackets the main thread's share, and "
        "for `step` the time that the loop waited. `ready`: samples are in memory, and nothing uses "
        "the batches. `step`: each batch has a training step of 10 ms on the GPU. `decode`: the "
        "workers decode JPEG images."
    ),
    "to_host": (
        "Milliseconds until everything is on the host. `frames`: ten frames of 3 x 3840 x 2160 "
        "floats, to the device and back. `cpu_each`: `.cpu()` on each tensor. `pinned_each`: into "
        "pinned memory that is kept. `by_hand`: gathered and copied by hand. `bus`: the copies "
        "alone. `pinstage`: `fetch(tensors, copy=False).result()`. `pinstage_copy`: "
        "`to_host(tensors)`."
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

"""The tables of the README and the docs, from the result files: no figure is typed by hand.

python benchmarks/markdown.py            # prints them
python benchmarks/markdown.py --write    # puts them between the markers `<!-- table: NAME -->` and `<!-- end -->`
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")
NAMES = {
    "to": "`.to()` each",
    "pin_to": "pin + `.to()` each",
    "tensordict_consolidate": "tensordict consolidate",
    "tensordict_consolidate_prebuilt": "the same, built before",
    "tensordict_non_blocking_pin": "tensordict non_blocking_pin",
    "spdl_transfer": "SPDL",
}


def load(name: str) -> dict[str, Any]:
    """Read a result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def figure(value: float | None) -> str:
    """Three digits are all that a median on a shared machine is worth."""
    return "-" if value is None else f"{value:.3g}"


def source(result: dict[str, Any]) -> str:
    """Where figures come from."""
    machine, versions = result["machine"], result["versions"]
    return (
        f"{machine['gpu']}, driver {machine['driver']}, {machine['cores']} cores, torch {versions['torch']}, Python "
        f"{versions['python']}; commit {result['commit']}, {result['date'][:10]}"
    )


def staging() -> str:
    """Every rival on every batch."""
    result = load("staging")
    rows = result["rows"]
    rivals = [name for name in NAMES if any(row["variant"] == name for row in rows)]
    lines = [
        "| leaves x size | " + " | ".join(NAMES[name] for name in rivals) + " | **pinstage** | beside the best rival |",
        "|---" * (len(rivals) + 3) + "|",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = {row["variant"]: row for row in rows if row["case"] == case}
        ours = of_case["pinstage"]
        cells = [figure(of_case[name]["median"]) for name in rivals]
        lines.append(
            f"| {case.replace('x', ' x ')} | {' | '.join(cells)} | **{figure(ours['median'])}** | "
            f"{ours['vs_best_rival']:.2f} x |"
        )
    return "\n".join([*lines, "", source(result)])


def startup() -> str:
    """How long until 1 GiB is page-locked."""
    result = load("memory_startup")
    lines = ["| memory | 1 GiB ready, ms: first | again |", "|---|---|---|"]
    for variant in dict.fromkeys(row["variant"] for row in result["rows"]):
        first, again = (row["median"] for row in result["rows"] if row["variant"] == variant)
        lines.append(f"| `{variant}` | {figure(first)} | {figure(again)} |")
    return "\n".join([*lines, "", source(result)])


def latency() -> str:
    """What a lease costs."""
    result = load("pool_latency")
    rows = result["rows"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    lines = ["| one cycle, us | " + " | ".join(cases) + " |", "|---" * (len(cases) + 1) + "|"]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        cells = [figure(row["median"]) for row in rows if row["variant"] == variant]
        lines.append(f"| {result['settings']['variants'][variant]} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", source(result)])


TABLES = {"staging": staging, "startup": startup, "latency": latency}


def filled(text: str) -> str:
    """Return a page with its tables as the result files have them now."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def main() -> None:
    """Print the tables, or write them into the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into the README and the docs")
    if parser.parse_args().write:
        for page in PAGES:
            page.write_text(filled(page.read_text()))
    else:
        for name, table in TABLES.items():
            print(f"{name}\n\n{table()}\n")


if __name__ == "__main__":
    main()

"""The README and the docs are short, and name no figure that no result file has."""

import re
from pathlib import Path

import pytest
from words import CODE, PAGES, words

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

MOST_WORDS = 19_000
"""Limit for all pages together; 22,947 before they were shortened."""
MOST_WORDS_OF = {
    "README.md": 1_000,
    "benchmarks/NOTES.md": 4_500,
    "docs/concepts.md": 1_500,
    "docs/performance.md": 1_900,
}

CONSTANTS = {"12.5%", "25%", "60%", "0.1 seconds", "60 seconds"}
"""Of rounding, estimates, a check and timeouts. The model of `pinstage trace` has more."""
FIGURE = re.compile(
    r"\d[\d.,]*[\s-]*(?:[mnuµ]?s|(?:milli|micro|nano)?sec(?:onds?)?|minutes?|hours?|[KMG]i?B/s|"
    r"[a-z]+/s|%|percent|times|fold|[x\u00d7])(?!\w| \d)"
    r"|\b(?:ratio|factor|speed-up) of \d[\d.]*|\b(?:twice|half) (?:as|the)\b|\b(?:halves|doubles) the\b"
)
"""A measured time, rate or ratio; not the 3 x 224 of a shape."""
GENERATED = re.compile(r"<!-- table: .*?<!-- end -->|```text\n.*?```", re.DOTALL)
"""Tables, and what commands print."""
NO_RESULTS = re.compile(
    r"\b[\w-]+\.(?:json|txt)\b|\bcommit `?[0-9a-f]{7}|\b(?:AVX|SSE|CLDEMOTE|MOVNT)\w*"
)
"""Names of result files, commits and CPU instructions."""


def test_tables_count_and_code_does_not(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A title\n\nFive words, and a [link](page.md).\n\n```python\nx = 1\n```\n\n| a | b |\n|---|---|\n\n"
        "<!-- table: staging -->\n| a |\n<!-- end -->\n\n  ```sh\n  make\n  ```\n"
    )
    assert words(page) == 3 + 5 + 6 + 4 + 3 + 3


def test_all_pages_together_are_short():
    counts = {page.relative_to(ROOT).as_posix(): words(page) for page in PAGES}
    assert {"docs/concepts.md", "docs/guides/loaders.md"} < counts.keys()
    assert not any(page.startswith("docs/reference/") for page in counts)
    assert sum(counts.values()) <= MOST_WORDS


@pytest.mark.parametrize(("page", "most"), MOST_WORDS_OF.items())
def test_a_page_is_short(page, most):
    assert words(ROOT / page) <= most


def test_figures_are_told_from_sizes_and_shapes():
    text = (
        "4.0 ms, 8 s, 5 microseconds, 55 GB/s, 300 batches/s, 2.3x and 3 times as fast, 40\u00d7, 3-fold, "
        "12% of 3 x 224 bytes, 4 MiB or 64 x 1 MiB, a ratio of 1.08, twice as fast, a leaf seen twice"
    )
    found = [match[0] for match in FIGURE.finditer(text)]
    assert found == [
        "4.0 ms", "8 s", "5 microseconds", "55 GB/s", "300 batches/s", "2.3x", "3 times", "40\u00d7",
        "3-fold", "12%", "ratio of 1.08", "twice as",
    ]  # fmt: skip


def test_measured_figures_are_in_generated_parts_only():
    """Also in code and in tables written by hand."""
    pages = {ROOT / "README.md", *DOCS.rglob("*.md")} - {DOCS / "trace.md"}
    texts = {page.relative_to(ROOT): GENERATED.sub("", page.read_text()) for page in pages}
    found = [(page, match[0]) for page, text in texts.items() for match in FIGURE.finditer(text)]
    assert [(page, figure) for page, figure in found if figure not in CONSTANTS] == []
    assert {figure for _, figure in found} == CONSTANTS


def test_pages_name_no_files_commits_or_instructions():
    pages = {ROOT / "README.md", *PAGES}
    patterns = GENERATED.pattern, CODE.pattern, "<!--.*?-->", r"^\|.*?$", "`[^`]*`"
    texts = {page: page.read_text() for page in pages}
    for pattern in patterns:
        texts = {
            page: re.sub(pattern, "", text, flags=re.MULTILINE | re.DOTALL)
            for page, text in texts.items()
        }
    named = [
        (page, found[0]) for page, text in texts.items() for found in NO_RESULTS.finditer(text)
    ]
    assert named == []

"""Read the pages for words and turns that a reader would stumble over. `make docs` calls it.

proselint has the rules of style, without those for typography. What this project words in one way is listed below.
Code, tables and names in backticks are left out.
"""

import re
import sys
from pathlib import Path

from proselint.checks import __register__ as checks
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

INSTEAD = {
    r"(?-i:(?<!\+)[cg]pus?)": "CPU, CPUs, GPU, GPUs",
    r"for ever": "forever",
    r"\w+ish to say": "say it",
    r"so as to": "to",
    r"in order to": "to",
    r"whilst|hereby|thereby|therein|thereof|whereby|hitherto|upon": "a plain word",
    r"amongst": "among",
    r"utili[sz]e\w*": "use",
    r"blazing\w*|seamless\w*|effortless\w*|simply|obviously|of course": "leave it out",
    r"by now": "leave it out, or say since when",
    r"what not": "name it",
    r"page locked|pagelocked": "page-locked",
}
"""Patterns that are not to stand in prose, and what is."""

LEFT_OUT = dict.fromkeys(("typography", "lexical_illusions", "weasel_words", "misc.but", "annotations"), False)


def prose(text: str) -> str:
    """Return a page without code, tables, comments and addresses, its lines at their numbers."""
    for pattern in (r"^(```|~~~).*?^\1$", r"<!--.*?-->", r"`[^`]*`", r"\]\([^)]*\)", r"^\|.*?$", r"^ {4,}.*?$"):
        text = re.sub(pattern, lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.MULTILINE | re.DOTALL)
    return text


def findings(page: Path) -> list[str]:
    """Return what is wrong with a page, a line each."""
    text = prose(page.read_text())
    name = page.relative_to(ROOT)
    found = [
        (text.count("\n", 0, match.start()) + 1, f"{match[0]!r}: {instead}")
        for pattern, instead in INSTEAD.items()
        for match in re.finditer(rf"\b(?:{pattern})\b", text, re.IGNORECASE)
    ]
    result = LintFile(str(name), text).lint({"max_errors": 1000, "checks": LEFT_OUT | DEFAULT["checks"] | LEFT_OUT})
    found += [(item.pos[0], item.check_result.message) for item in result]
    return [f"{name}:{line}: {message}" for line, message in sorted(found)]


if __name__ == "__main__":
    CheckRegistry().register_many(checks)
    wrong = [line for page in PAGES for line in findings(page)]
    sys.stderr.write("".join(f"{line}\n" for line in wrong))
    sys.exit(bool(wrong))

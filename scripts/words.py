"""Count the words of the README and the docs, without the reference: of each page, and all.

    python scripts/words.py

Code, tables and generated parts don't count. On 2026-11-27, before the pages were shortened, there
were 24,270 words.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if page.parent != DOCS / "reference"),
]
NOT_COUNTED = re.compile(
    r"^ *(```|~~~).*?^ *\1|<!-- table: .*?<!-- end -->|<!--.*?-->|^\|.*?$", re.MULTILINE | re.DOTALL
)


def words(page: Path) -> int:
    """Return the number of words of a page."""
    return len(re.findall(r"\S*\w\S*", NOT_COUNTED.sub(" ", page.read_text())))


if __name__ == "__main__":
    counts = {page.relative_to(ROOT).as_posix(): words(page) for page in PAGES}
    lines = [f"{count:6,} {page}" for page, count in counts.items()]
    sys.stdout.write("\n".join([*lines, f"{sum(counts.values()):6,} in all", ""]))

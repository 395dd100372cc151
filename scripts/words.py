"""Count the words of the docs, without the reference and the page of all measurements.

    python scripts/words.py

Tables count, also generated ones, as `wc -w` counts them; fenced code doesn't.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    page
    for page in sorted(DOCS.rglob("*.md"))
    if page.parent != DOCS / "reference" and page.name != "measurements.md"
]
CODE = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)


def words(page: Path) -> int:
    """Return the number of words of a page."""
    return len(CODE.sub(" ", page.read_text()).split())


if __name__ == "__main__":
    counts = {page.relative_to(ROOT).as_posix(): words(page) for page in PAGES}
    lines = [f"{count:6,} {page}" for page, count in counts.items()]
    sys.stdout.write("\n".join([*lines, f"{sum(counts.values()):6,} in all", ""]))

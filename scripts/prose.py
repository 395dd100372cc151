"""Check pages, docstrings, comments and messages for words that readers stumble over, and pages for
long sentences.

proselint checks style, except typography. `INSTEAD` has the patterns of this project, `HEADLESS`
patterns of incomplete sentences. Code and names in backticks are ignored.
"""

import ast
import re
import sys
from pathlib import Path

from proselint.checks import __register__ as checks
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
MODULES = sorted(path for folder in ("src", "examples") for path in (ROOT / folder).rglob("*.py"))
EXTENSION = sorted((ROOT / "src").rglob("*.[ch]"))
MOST_WORDS = 42
"""Limit for a sentence on a page."""

UNITS = r"(?:[mun]s|[KMG]i?B|s|bytes|copies|steps|batches|calls|times|leaves|figures|line)"
INSTEAD = {
    r"(?-i:(?<![+\x22])[cg]pus?)": "CPU, CPUs, GPU, GPUs",
    r"for ever": "forever",
    r"at the most": "at most",
    r"as ever": "leave it out",
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
    r"what (?:is|was)": "a noun phrase",
    r"nobody|somebody|whoever": "name the subject",
    r"(?:is|are|was|be) told|(?:it|they|we) tells?|is told": "warns, reports, shows",
    r"ones? that": "repeat the noun",
    r"of ours|of theirs|so (?:many|much|few)|anew|as well(?! as)|not any more": "our, the number, again, also",
    r"for everybody|where there is none": "always, otherwise",
    r"(?<!there )(?:is|are|was) no(?! (?:longer|more|less|faster|slower|way|need|other|use|such|room))": "isn't a",
    rf"{UNITS} an? (?:step|second|leaf|batch|call|tensor|copy|minute|save)(?![\w-])": "per step, steps/s",
    r"(?:comes?|came|coming) back": "is returned",
    r"of which an? \w+ is": "that has",
    r"times as fast": "1.7x faster, a speed-up of 1.7",
    r"travels?|travell?(?:ed|ing)|comes? home|lies|lay|dies|died": "is sent, is stored, is freed",
}
"""Patterns to avoid in prose, and the replacement."""

START = r"(?:(?<=\A)|(?<=\n\n)|(?<=[.!?] )|(?<=[.!?]\n)|(?<=- )|(?<=\*\*))"
HEADLESS = {
    rf"{START}(?:What|Who|How (?:often|long|many|much|far))\b[^?.:]*[.:](?!\w)": "a noun phrase, or a question mark",
    rf"{START}To [\w-]+ (?:[\w-]+ )*?(?:takes|costs|is|needs|would)\b": "start with a noun, or a gerund",
}
"""Patterns of sentences without a usual subject."""

LEFT_OUT = dict.fromkeys(
    ("typography", "lexical_illusions", "weasel_words", "misc.but", "annotations"), False
)
CODE = r"`+[^`]*`+"
QUOTED = r"(?<!\w)'[^'\n]*'(?!\w)|\"[^\"\n]*\"|\.c?g?pu\(\)|--\w+"


def blanked(text: str, *patterns: str) -> str:
    """Return a text with the patterns replaced by spaces, which keeps line numbers."""
    for pattern in patterns:
        text = re.sub(
            pattern,
            lambda found: re.sub(r"[^\n]", " ", found[0]),
            text,
            flags=re.MULTILINE | re.DOTALL,
        )
    return text


def prose(text: str) -> str:
    """Return a page without code, generated tables, comments and addresses."""
    return blanked(
        text,
        r"^(```|~~~).*?^\1$",
        "<!-- table: .*?<!-- end -->",
        "<!--.*?-->",
        r"^ {4,}.*?$",
        CODE,
        r"\]\([^)]*\)",
    )


def words(text: str, first: int = 1) -> list[tuple[int, str]]:
    """Return what `INSTEAD` and `HEADLESS` find in a text whose first line has the given number."""
    found = [
        (rf"\b(?:{pattern})\b", instead, re.IGNORECASE) for pattern, instead in INSTEAD.items()
    ]
    found += [(pattern, instead, 0) for pattern, instead in HEADLESS.items()]
    return [
        (first + text.count("\n", 0, match.start()), f"{' '.join(match[0].split())!r}: {instead}")
        for pattern, instead, flags in found
        for match in re.finditer(pattern, text, flags)
    ]


def long_sentences(page: str) -> list[tuple[int, str]]:
    """Return the sentences of a page that have too many words; code in backticks counts as one
    word.
    """
    text = re.sub(
        CODE,
        lambda found: "x" * len(found[0]),
        blanked(page, r"^(```|~~~).*?^\1$", "<!--.*?-->", r"^\|.*?$"),
    )
    found = []
    for match in re.finditer(r"\S(?:(?!(?<=[.:!?])\s|\n\n|\n *(?:- |\d\. )).)*", text, re.DOTALL):
        count = len(match[0].split())
        if count > MOST_WORDS:
            found.append(
                (
                    1 + text.count("\n", 0, match.start()),
                    f"a sentence of {count} words: two or three",
                )
            )
    return found


def findings(page: Path) -> list[str]:
    """Return the findings on a page, one per line."""
    text = prose(page.read_text())
    name = page.relative_to(ROOT)
    result = LintFile(str(name), text).lint(
        {"max_errors": 1000, "checks": LEFT_OUT | DEFAULT["checks"] | LEFT_OUT}
    )
    found = words(text) + long_sentences(page.read_text())
    found += [(item.pos[0], item.check_result.message) for item in result]
    return [f"{name}:{line}: {message}" for line, message in sorted(found)]


def findings_in_docstrings(module: Path) -> list[str]:
    """Return what `words` finds in a module's docstrings, comments and messages, one per line."""
    text = module.read_text()
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            found += words(
                blanked(node.value, CODE, QUOTED, r"https?:\S+", r"^ +\w+:"), node.lineno
            )
    for number, line in enumerate(text.splitlines(), 1):
        _, mark, comment = line.partition("# ")
        found += words(blanked(comment, CODE), number) if mark and '"' not in comment else []
    return [f"{module.relative_to(ROOT)}:{line}: {message}" for line, message in sorted(found)]


def findings_in_c(source: Path) -> list[str]:
    """Return what `words` finds in the comments of a C file, one per line."""
    text = source.read_text()
    found = []
    for match in re.finditer(r"/\*\s*(.*?)\*/", text, re.DOTALL):
        found += words(
            blanked(match[1], CODE, QUOTED, r"^ \*"), 1 + text.count("\n", 0, match.start())
        )
    return [f"{source.relative_to(ROOT)}:{line}: {message}" for line, message in sorted(found)]


if __name__ == "__main__":
    CheckRegistry().register_many(checks)
    wrong = [line for page in PAGES for line in findings(page)]
    wrong += [line for module in MODULES for line in findings_in_docstrings(module)]
    wrong += [line for source in EXTENSION for line in findings_in_c(source)]
    sys.stderr.write("".join(f"{line}\n" for line in wrong))
    sys.exit(bool(wrong))

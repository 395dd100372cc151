"""Fenced blocks of Markdown pages."""

import re

SKIPPED = re.compile(r"<!-- skip: .+? -->\n```python\n.*?^```", re.MULTILINE | re.DOTALL)


def blocks(path, language):
    """Return the blocks of a language without a title. A comment ``<!-- skip: why -->`` excludes
    the next block of Python.
    """
    text = SKIPPED.sub("", path.read_text())
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def check_printed(shown, printed):
    """Fail unless a program printed what a page shows around its "...". Times differ between
    runs.
    """
    shown, printed = (re.sub(r"[\d.]+ (us|ms)", "TIME", text) for text in (shown, printed))
    head, tail = shown.split("...\n")
    assert head in printed
    assert tail in printed

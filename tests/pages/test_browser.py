"""The site and the report of a trace, as a browser shows them. Skipped, with the reason, without a
browser.

``PINSTAGE_REQUIRE_BROWSER=1`` makes a missing browser, or a missing mkdocs, a failure.
"""

import importlib.util
import io
import json
import os
import re
import shutil
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from processes import output_of

ROOT = Path(__file__).parents[2]
IMAGES = sorted((ROOT / "docs" / "images").glob("*.svg"))
BROWSERS = "chromium", "chromium-browser", "google-chrome"
DARK = "--blink-settings=preferredColorScheme=0"


def missing(what):
    if os.environ.get("PINSTAGE_REQUIRE_BROWSER") == "1":
        pytest.fail(f"PINSTAGE_REQUIRE_BROWSER=1, and {what}")
    pytest.skip(what)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """The command of a browser without a window."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        missing("there is no Chromium on the path")
    profile = tmp_path_factory.mktemp("profile")
    return [found, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    if importlib.util.find_spec("mkdocs") is None:
        missing("mkdocs is not installed: make docs")
    folder = tmp_path_factory.mktemp("site")
    options = ("--strict", "--quiet", "--site-dir", folder)
    output_of([sys.executable, "-m", "mkdocs", "build", *options], cwd=ROOT)
    return folder


@pytest.fixture
def screenshot(browser, tmp_path):
    """A function that returns the pixels, ``[height, width, 3]``, of a file as a browser shows
    it.
    """
    pillow = pytest.importorskip("PIL.Image")

    def shoot(path, *options, width=900, height=1400):
        target = tmp_path / "screen.png"
        command = [
            *browser, "--hide-scrollbars", "--virtual-time-budget=3000",
            f"--window-size={width},{height}", f"--screenshot={target}", *options, path.as_uri(),
        ]  # fmt: skip
        output_of(command)
        return np.asarray(pillow.open(io.BytesIO(target.read_bytes())).convert("RGB"))

    return shoot


def share_that_stands_out(pixels, least):
    """Return the share of pixels, of text and lines, that differ from the background."""
    return (np.abs(pixels - np.median(pixels, axis=(0, 1))).max(axis=2) > least).mean()


MEASURE = """
<body><pre id="found"></pre><script>
const pages = PAGES, found = [];

function brokenWords(page) {
  const broken = [], range = page.createRange();
  for (const cell of page.querySelectorAll(".md-typeset :is(th, td)")) {
    const texts = page.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      for (const word of texts.currentNode.data.matchAll(/[^\\s/-]+/g)) {
        range.setStart(texts.currentNode, word.index);
        range.setEnd(texts.currentNode, word.index + word[0].length);
        if (new Set([...range.getClientRects()].map(box => box.top)).size > 1) broken.push(word[0]);
      }
    }
  }
  return broken;
}

(async () => {
  for (const page of pages) {
    const frame = document.createElement("iframe");
    Object.assign(frame.style, {width: "1280px", height: "2000px"});
    frame.src = page;
    document.body.append(frame);
    await new Promise(done => frame.onload = done);
    for (const width of [1280, 390]) {
      frame.style.width = width + "px";
      await new Promise(done => setTimeout(done, 300));
      const root = frame.contentDocument.documentElement;
      const tables = [...root.querySelectorAll(".md-typeset__scrollwrap")].filter(t => !t.closest("details"));
      const pictures = [...root.querySelectorAll(".md-typeset img")];
      const code = [...root.querySelectorAll(".md-typeset pre > code")].filter(c => !c.closest(".language-text"));
      const scrolls = element => element.scrollWidth > element.clientWidth + 1;
      found.push([page, width, root.scrollWidth, root.querySelectorAll("h1").length,
        [...tables, ...code].filter(scrolls).map(t => t.innerText.slice(0, 60)),
        pictures.filter(p => p.getBoundingClientRect().right > width).map(p => p.src),
        brokenWords(frame.contentDocument)]);
    }
    frame.remove();
  }
  document.getElementById("found").textContent = JSON.stringify(found);
})();
</script></body>
"""
"""Opens each page in a frame as wide as a screen. Lists what is wider, tables and code that scroll,
except folded parts and printed text, and words of tables that are on two lines.
"""


@pytest.fixture(scope="module")
def measured(site, browser):
    """What `MEASURE` found: page, width, width of the page, headings, scrolling tables and code,
    pictures, broken words.
    """
    pages = sorted(page.relative_to(site).as_posix() for page in site.rglob("index.html"))
    (site / "measure.html").write_text(MEASURE.replace("PAGES", json.dumps(pages)))
    options = "--allow-file-access-from-files", "--dump-dom", "--virtual-time-budget=90000"
    dom = output_of([*browser, *options, (site / "measure.html").as_uri()])
    (site / "measure.html").unlink()
    found = json.loads(unescape(re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)[1]))
    assert len(found) == 2 * len(pages)
    assert [row for row in found if row[3] != 1] == []  # all pages were loaded
    return found


def test_nothing_is_wider_than_the_screen(measured):
    assert [row for row in measured if row[2] > row[1] or row[5]] == []


def test_a_wide_screen_shows_whole_tables_and_code(measured):
    assert [(row[0], row[4]) for row in measured if row[1] == 1280 and row[4]] == []


def test_words_in_tables_are_not_broken(measured):
    assert [(row[0], row[1], row[6]) for row in measured if row[6]] == []


class Assets(HTMLParser):
    """The files that a page loads."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag in ("img", "script", "iframe", "source"):
            self.found.append(given.get("src"))
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.found.append(given.get("href"))


def test_the_site_is_complete_and_loads_nothing_external(site):
    pages = sorted(site.rglob("index.html"))
    assert len(pages) > 15
    for page in pages:
        for asset in filter(None, Assets(page.read_text()).found):
            assert not re.match(r"(https?:)?//", asset), (page, asset)
            if not asset.startswith("data:"):
                assert (page.parent / re.split("[?#]", asset)[0]).is_file(), (page, asset)


def test_examples_of_docstrings_are_shown_as_code(site):
    pages = sorted((site / "reference").rglob("index.html"))
    assert [page for page in pages if "<p>::</p>" in page.read_text()] == []
    stager = (site / "reference" / "stager" / "index.html").read_text()
    assert stager.count('<div class="language-python highlight">') >= 3


@pytest.mark.parametrize(
    "page", ["", "concepts", "cases/weather_batch", "reference", "reference/stager"]
)
def test_a_page_is_readable_in_light_and_dark(site, screenshot, page):
    path = site / page / "index.html"
    light, dark = (screenshot(path, *options)[100:] for options in ((), (DARK,)))  # no header
    assert np.median(light) > 240
    assert np.median(dark) < 60
    for pixels in (light, dark):
        assert 0.01 < share_that_stands_out(pixels, 80) < 0.5


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.stem)
def test_a_picture_is_readable_in_light_and_dark(screenshot, image):
    size = re.search(r'width="(\d+)" height="(\d+)"', image.read_text())
    width, height = map(int, size.groups())
    light, dark = (
        screenshot(image, *options, width=width, height=height + 100)[:height]
        for options in ((), (DARK,))
    )
    assert np.median(light) > 200
    assert np.median(dark) < 80
    for pixels in (light, dark):
        assert share_that_stands_out(pixels, 100) > 0.02

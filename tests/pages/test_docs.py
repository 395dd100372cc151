"""The snippets of the documentation run unchanged, and its names exist."""

import ast
import operator
import os
import re
import shutil
import sys
import textwrap
from pathlib import Path

import markdown
import pytest
import torch
import torch.distributed
from fences import blocks
from processes import completed, output_of

import pinstage

# Warnings of torch and Python 3.12 about the snippets' workers, and of tensordict's import.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # Torchdata's, of torch 2.13.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

RUN_ELSEWHERE = {
    "index.md",  # test_the_lines_of_use_run
    "audit.md",  # test_trace_page.py
    "cases/frame_bandwidth.md",  # test_examples.py
    "cases/weather_batch.md",
    "guides/several_gpus.md",  # test_the_guide_to_several_gpus_runs
    "trace.md",  # inspect/test_recording.py
    *(f"frameworks/{path.name}" for path in (DOCS / "frameworks").glob("*.md")),
}
GUIDES = {path.relative_to(DOCS).as_posix() for path in (DOCS / "guides").glob("*.md")}
REFERENCE = sorted(path for path in (DOCS / "reference").glob("*.md") if path.stem != "index")
RUN_FROM_TOP_TO_BOTTOM = [
    "quickstart.md",
    "tutorial.md",
    "concepts.md",
    "metrics.md",
    "performance.md",
    *sorted(GUIDES - RUN_ELSEWHERE),
    *(f"reference/{path.name}" for path in REFERENCE),
]


def scripts(path):
    """Return the blocks that are whole files: name, text, and the output that the page gives."""
    pattern = r'^```python title="(\S+\.py)"\n(.*?)^```(?:\n\n```text\n(.*?)^```)?'
    return re.findall(pattern, path.read_text(), re.MULTILINE | re.DOTALL)


def run(page, names):
    """Run a page's blocks from top to bottom, on the CPU, and return the names that they define."""
    snippets = blocks(DOCS / page, "python")
    assert snippets
    for number, block in enumerate(snippets):
        here = re.sub(r'"cuda:\d"', '"cpu"', block)
        exec(compile(here, f"{page}, block {number}", "exec"), names)
    return names


@pytest.mark.parametrize("page", RUN_FROM_TOP_TO_BOTTOM)
def test_a_page_s_snippets_run_in_order(page, capsys):
    names = run(page, {"__name__": "page"})
    # On the page about tests.
    for test in [value for name, value in names.items() if name.startswith("test_")]:
        test()
    for value in names.values():
        if isinstance(value, pinstage.Stager):
            value.close()
    if page == "tutorial.md":
        printed = capsys.readouterr().out
        for shown in blocks(DOCS / page, "text"):
            assert shown in printed


def test_code_has_at_most_80_columns():
    """Also that of docstrings, which the reference shows, but not what programs print."""
    paths = [ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    block = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
    lines = [
        (path.relative_to(ROOT), line)
        for path in paths
        for kind, code in block.findall(path.read_text())
        if kind != "text"
        for line in textwrap.dedent(code).splitlines()
    ]
    assert {".md", ".py"} == {path.suffix for path, _ in lines}
    assert [(path, line) for path, line in lines if len(line) > 80] == []


def test_commands_in_docstrings_begin_their_lines():
    folders = ("benchmarks", "examples", "scripts")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    lines = [
        (path.name, line)
        for path in paths
        for line in (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
    ]
    command = re.compile(r"\b(?:python|torchrun)(?!\w)")
    assert sum(bool(command.match(line.strip())) for _, line in lines) > 20
    assert [line for line in lines if re.search(rf"\S {command.pattern}", line[1])] == []


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_install_line_is_before_the_first_program(page):
    text = (ROOT / page).read_text()
    assert 0 < text.find("\npip install .") < text.index("```python")


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_lines_of_use_run(page):
    samples = [{"x": torch.ones(3)}]
    names = {
        "__name__": "use",
        "loader": torch.utils.data.DataLoader(samples),
        "source": samples,
        "dataset": samples,
        "train_step": lambda batch: None,
    }
    for block in blocks(ROOT / page, "python"):
        here = block.replace('"cuda:0"', '"cpu"').replace("num_workers=8", "num_workers=1")
        exec(compile(here, page, "exec"), names)
    assert names["stager"].stats().batches == 1
    names["stager"].close()


def test_the_guide_to_several_gpus_runs():
    """In its own process: torch caches the groups of sharded tensors (2.13, DTensor's sharding
    cache). A child forked later frees them, and hangs waiting for threads that it doesn't have."""
    code = "import test_docs; test_docs.run_the_guide_to_several_gpus()"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-W", "ignore", "-c", code]
    output_of(command, env=os.environ | {"PYTHONPATH": paths})


def run_the_guide_to_several_gpus():
    trained = []
    names = {
        "device": torch.device("cpu"),
        "dataset": [{"x": torch.full((3,), float(index))} for index in range(64)],
        "train_step": trained.append,
        "model": torch.nn.Linear(3, 1),
        "host_batches": [{"x": torch.ones(4, 3)}] * 25,
    }
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        run("guides/several_gpus.md", names)
    finally:
        torch.distributed.destroy_process_group()
    assert len(trained) == 4
    assert names["stager"].pool.frozen
    for stager in (*names["stagers"], names["stager"]):
        stager.close()
    names["pool"].close()


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_the_script_works_with_each_start_method(method, tmp_path):
    [(name, text, shown)] = scripts(DOCS / "guides" / "loaders.md")
    (tmp_path / name).write_text(text.replace('"cuda:0"', '"cpu"'))
    assert output_of([sys.executable, "-W", "ignore", name, method], cwd=tmp_path) == shown


def test_no_page_has_snippets_that_never_run():
    for path in sorted(DOCS.rglob("*.md")):
        page = path.relative_to(DOCS).as_posix()
        if blocks(path, "python"):
            assert page in RUN_FROM_TOP_TO_BOTTOM or page in RUN_ELSEWHERE, page
        assert not scripts(path) or page in ("audit.md", "guides/loaders.md"), page


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("DDP", "guides/several_gpus.md"),
        ("multi-GPU", "guides/several_gpus.md"),
        ("dataclasses", "guides/batch_classes.md"),
        ("GH200", "guides/platforms.md"),
    ],
)
def test_a_search_finds_its_page(words, page):
    """The site's search prefers titles. It finds words, divided by spaces and hyphens, by their
    beginnings: "(GH200)" isn't found."""
    title, paragraph, *_ = (DOCS / page).read_text().split("\n\n")
    assert re.search(rf"(?<![^\s-]){words}", f"{title} {paragraph}")


def error_names():
    """The public classes of `pinstage.errors`."""
    return {
        name
        for name, kind in vars(pinstage.errors).items()
        if isinstance(kind, type) and name[0] != "_"
    }


def test_every_error_has_its_section():
    page = (DOCS / "reference" / "errors.md").read_text()
    assert set(re.findall(r"^## (\w+)$", page, re.MULTILINE)) == error_names()


BESIDE = {
    *(f"memory.{name}" for name in pinstage.memory.__all__),
    "metrics.PoolCollector",
    "metrics.TorchHostCollector",
    "inspect",
    "inspect.step_times",
    "inspect.StepTimes",
    "inspect.StepTime",
    "checkpoint.CheckpointStager",
    *(f"offload.{name}" for name in pinstage.offload.__all__),
}
"""Public names that are not in `pinstage.__all__`."""
MADE_BY_CALLS = {
    "PoolUsage",
    "HostTransfer",
    "Lease",
    "LoaderStats",
    "PoolStats",
    "Prefetcher",
    "StagerStats",
    "Transfer",
}


IN_SIGNATURES = {
    "Fence",
    "IncompatibleKeys",
    "memory.Block",
    "OwnerStats",
    "RegionHandle",
    "Rows",
    "Size",
    "Slot",
    "StagingNode",
    "WrappedLoader",
}
"""Types that are described on the page of a call that takes or returns them."""


def names_of(page):
    """The names that a page of the reference describes."""
    return re.findall(r"^::: pinstage\.([\w.]+)$", page.read_text(), re.MULTILINE)


def test_every_public_name_is_in_the_reference_once():
    shown = [name for page in REFERENCE for name in names_of(page)]
    assert len(shown) == len(set(shown))
    elsewhere = {name for name in shown if name[0] == "_"}  # types of the calls that are public
    errors = {f"errors.{name}" for name in error_names()}
    assert set(shown) - elsewhere == {*pinstage.__all__} | errors | BESIDE
    assert all(isinstance(operator.attrgetter(name)(pinstage), type) for name in elsewhere)


@pytest.mark.parametrize(
    "name",
    sorted(
        {*pinstage.__all__, *(f"memory.{name}" for name in pinstage.memory.__all__)} - IN_SIGNATURES
    ),
)
def test_every_public_name_has_a_page_and_example(name):
    title = f"# {name.rpartition('.')[2]}\n"
    [page] = [page for page in REFERENCE if page.read_text().startswith(title)]
    assert names_of(page)[0] == name
    [example] = blocks(page, "python")
    assert name in example or name in MADE_BY_CALLS


def test_the_reference_overview_and_menu_are_complete():
    overview, menu = (
        (DOCS / "reference" / "index.md").read_text(),
        (ROOT / "mkdocs.yml").read_text(),
    )
    for page in REFERENCE:
        assert f"]({page.name})" in overview, page
        assert f"reference/{page.name}" in menu, page


def test_every_table_is_what_the_result_files_say():
    tables = set()
    for page in markdown.PAGES:
        text = page.read_text()
        assert markdown.filled(text) == text, page
        tables.update(re.findall(r"^<!-- table: (\w+) -->$", text, re.MULTILINE))
    assert tables == set(markdown.TABLES)
    assert all(
        "| **pinstage** |" in (ROOT / page).read_text()
        for page in ("README.md", "docs/measurements.md")
    )


def test_the_picture_of_loops_matches_its_result_file():
    assert markdown.LOOPS.read_text() == markdown.loops_picture()


def test_pictures_can_be_read_on_a_telephone():
    """At 366 pixels, it has at least 8; a larger picture is a link to itself."""
    pages = {page: page.read_text() for page in DOCS.rglob("*.md")}
    shown = {
        (page.parent / name).resolve()
        for page, text in pages.items()
        for name in re.findall(r"(?<!\[)!\[[^\]]*\]\((\S+\.svg)\)", text)
    }
    assert {path.stem for path in shown} >= {"loops", "data_flow"}
    for path in shown:
        picture = path.read_text()
        width = float(re.search(r'viewBox="0 0 (\d+)', picture)[1])
        smallest = min(map(float, re.findall(r"font(?:-size)?: ([\d.]+)px", picture)))
        assert smallest * 366 / width >= 8, path


def git(*arguments):
    if shutil.which("git") is None:
        return None
    done = completed(["git", *arguments], cwd=ROOT)
    return done.stdout.strip() if done.returncode == 0 else None


def test_every_cited_commit_is_in_this_repository():
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("this isn't a clone with its history, or git isn't installed")
    pages = [ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    cited = {
        commit
        for page in pages
        for commit in re.findall(r"\bcommit `?([0-9a-f]{7,40})\b", page.read_text())
    }
    assert len(cited) > 10
    assert [commit for commit in cited if git("cat-file", "-t", commit) != "commit"] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100

"""A release is consistent: local and hosted CI run the same steps, and the tag script refuses
mismatches.
"""

import re
import shutil
import tomllib
from pathlib import Path

import pytest
from processes import completed, output_of

import pinstage

ROOT = Path(__file__).parents[2]


def text_of(path):
    return (ROOT / path).read_text()


HOSTED = text_of(".github/workflows/ci.yml")
PROJECT = tomllib.loads(text_of("pyproject.toml"))["project"]
PYTHONS = re.findall(r":: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)


def oldest(package):
    (version,) = re.findall(rf"{package}>=([\d.]+)", " ".join(PROJECT["dependencies"]))
    return version


def test_hosted_ci_has_the_steps_of_ci():
    here = re.findall(r"^(?:\w+=\w+ )?step ([\w-]+)", text_of(".ci/run"), re.MULTILINE)
    matrix = re.search(r"step: \[(.*)\]", HOSTED)[1].split(", ")
    there = [step.strip("'").split()[0] for step in matrix] + re.findall(
        r"run: make ([a-z-]+)", HOSTED
    )
    assert sorted(here) == sorted(there)
    assert "HYPOTHESIS_PROFILE: thorough" in HOSTED
    page = text_of("docs/contributing.md")
    assert "make demo" in page
    assert "make bench-smoke" in page


def test_hosted_ci_covers_every_python_and_oldest_torch():
    *pinned, newest = PYTHONS  # the newest has no wheel of the torch that constraints.txt pins
    assert re.search(r"python: \[(.*)\]", HOSTED)[1] == ", ".join(
        f'"{python}"' for python in pinned
    )
    assert f'{{python: "{newest}", torch: newest}}' in HOSTED
    assert all(f"python{python}" in HOSTED for python in pinned)  # wheels
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert f"Python {PYTHONS[0]} to {newest}" in text_of("README.md")
    assert f'torch: "{oldest("torch")}.0"' in HOSTED
    assert oldest("torch") in text_of("docs/releases.md")


def test_the_page_on_platforms_names_supported_versions():
    page = text_of("docs/guides/platforms.md")
    rows = dict(re.findall(r"^\| ([\w-]+) \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE))
    assert rows["Python"].startswith(f"{PYTHONS[0]} to {PYTHONS[-1]};")
    for package in ("torch", "cuda-python"):
        assert rows[package] == f"{oldest(package)} and later"
    run = re.search(r"^\| torch \| ([^|]+) \|", page, re.MULTILINE)[1]
    pinned = re.search(r"^torch==(\d+\.\d+)", text_of("constraints.txt"), re.MULTILINE)
    assert pinned[1] in run


@pytest.fixture
def clone(tmp_path):
    """A repository with what the tag script reads, and a function that runs git in it."""
    if shutil.which("git") is None:
        pytest.skip("git isn't installed")
    names = ("src/pinstage/__init__.py", "CITATION.cff", "CHANGELOG.md", "scripts/tag.sh")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    log = tmp_path / "CHANGELOG.md"
    heading = f"## [{pinstage.__version__}], not released yet"
    log.write_text(
        re.sub(rf"^## \[{pinstage.__version__}\].*$", heading, log.read_text(), flags=re.MULTILINE)
    )

    def git(*arguments):
        return output_of(["git", *arguments], cwd=tmp_path)

    git("init", "-q", "-b", "main")
    for key, value in {"user.name": "x", "user.email": "x@y", "commit.gpgsign": "false"}.items():
        git("config", key, value)
    git("add", ".")
    git("commit", "-qm", "all")
    return tmp_path, git


def tag(folder, *arguments):
    return completed(["scripts/tag.sh", *arguments], cwd=folder)


def test_the_tag_dates_and_quotes_the_changelog(clone):
    folder, git = clone
    done = tag(folder)
    assert done.returncode == 0, done.stderr
    version = pinstage.__version__
    assert re.search(
        rf"^## \[{version}\] - \d{{4}}-\d\d-\d\d$",
        (folder / "CHANGELOG.md").read_text(),
        re.MULTILINE,
    )
    message = git("tag", "-l", "--format=%(contents)", f"v{version}")
    assert message.startswith(f"pinstage {version}\n")
    assert "### Added" in message
    assert git("describe", "--exact-match").strip() == f"v{version}"
    assert tag(folder, "--check", f"v{version}").returncode == 0


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (
            lambda folder, _: (folder / "CITATION.cff").write_text("x\n"),
            "the working tree has changes",
        ),
        (lambda _, git: git("switch", "-qc", "other"), "releases are tagged on main"),
        (
            lambda _, git: git("tag", f"v{pinstage.__version__}"),
            "exists already: raise __version__",
        ),
    ],
    ids=["dirty", "branch", "twice"],
)
def test_a_tag_that_doesn_t_fit_is_refused(clone, prepare, words):
    folder, git = clone
    prepare(folder, git)
    before = git("log", "--oneline", "--all")
    done = tag(folder)
    assert done.returncode == 1
    assert words in done.stderr
    assert git("log", "--oneline", "--all") == before


def test_a_tag_of_another_version_fails_the_check(clone):
    folder, _ = clone
    done = tag(folder, "--check", "v9.9.9")
    assert done.returncode == 1
    assert (
        f"the tag is v9.9.9, but src/pinstage/__init__.py has version {pinstage.__version__}"
        in done.stderr
    )

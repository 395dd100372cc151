"""The extension in C, and the README as a package index shows it. All else is in pyproject.toml.

Where it cannot be built, pinstage is installed without it, and takes the plain path; with ``PINSTAGE_NATIVE=1`` in the
environment that is an error. ``PINSTAGE_NATIVE=0`` leaves it out.

An index has no folders beside the README. ``PINSTAGE_REPOSITORY``, the address of the repository, makes its links
absolute; ``make release`` sets it.
"""

import os
import re
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/pinstage/_native")

wish = os.environ.get("PINSTAGE_NATIVE")
# Free-threaded Python has no limited API before 3.15.
lacking = (
    "Linux" if sys.platform != "linux" else "the limited API" if sysconfig.get_config_var("Py_GIL_DISABLED") else None
)
if wish == "1" and lacking:
    raise SystemExit(
        f"PINSTAGE_NATIVE=1, but the extension needs {lacking}, which is not here; unset it for the plain path"
    )

core = Extension(
    "pinstage._native._core",
    sources=sorted(map(str, NATIVE.glob("*.c"))),
    depends=["setup.py", *map(str, NATIVE.glob("*.h"))],
    # No -march: what the cpu has is found out at run time, in pack.c.
    extra_compile_args=[
        "-std=gnu11",
        "-O3",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Wno-missing-field-initializers",
    ],
    libraries=["dl", "pthread"],  # parts of libc since glibc 2.34; wheels are for older ones too
    py_limited_api=True,  # of the version that core.h says
    optional=wish != "1",
)
built = wish != "0" and not lacking

repository = os.environ.get("PINSTAGE_REPOSITORY", "").rstrip("/")
readme = Path("README.md").read_text()
urls = {}
if repository:
    readme = re.sub(r"\]\((?!\w+:|#)([^)]+)\)", rf"]({repository}/blob/main/\1)", readme)
    urls = {
        "Repository": repository,
        "Issues": f"{repository}/issues",
        "Documentation": f"{repository}/blob/main/docs/index.md",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    }

setup(
    long_description=readme,
    long_description_content_type="text/markdown",
    project_urls=urls,
    ext_modules=[core] if built else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if built else {},
)

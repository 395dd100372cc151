"""The C extension, and the README for package indexes. Everything else is in pyproject.toml.

An index doesn't have the files that the README links to. ``PINSTAGE_REPOSITORY``, the address of
the repository, makes these links absolute; ``PINSTAGE_SITE`` points links to the docs at that site.
``make release`` sets both.
"""

import os
import re
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

NATIVE = Path("src/pinstage/_native")

if sys.platform != "linux":
    raise SystemExit(
        f"pinstage runs on Linux only: this is {sys.platform}; use Linux, or WSL2 on Windows"
    )
if sysconfig.get_config_var("Py_GIL_DISABLED"):  # docs/contributing.md lists what it would need
    raise SystemExit(
        f"pinstage does not run on free-threaded Python yet: this is {sys.version.split()[0]} "
        "without the interpreter lock; use the usual build of Python"
    )


class BuildExtension(build_ext):
    """Compile the extension, or report what is missing."""

    def build_extension(self, ext: Extension) -> None:
        """Compile one extension."""
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError) as error:
            raise SystemExit(
                f"pinstage's extension in C could not be compiled: {error}; install a C compiler "
                f"and the headers of Python {sys.version_info[0]}.{sys.version_info[1]} (Debian "
                "and Ubuntu: apt install gcc python3-dev; Fedora: dnf install gcc python3-devel), "
                "or install pinstage from a wheel"
            ) from error


core = Extension(
    "pinstage._native._core",
    sources=sorted(map(str, NATIVE.glob("*.c"))),
    depends=["setup.py", *map(str, NATIVE.glob("*.h"))],
    # No -march: pack.c detects CPU features at run time.
    extra_compile_args=[
        "-std=gnu11",
        "-O3",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Wno-missing-field-initializers",
    ],
    libraries=["dl", "pthread"],  # parts of libc since glibc 2.34; wheels support older versions
    py_limited_api=True,  # its version is in core.h
)

repository, site = (
    os.environ.get(name, "").rstrip("/") for name in ("PINSTAGE_REPOSITORY", "PINSTAGE_SITE")
)
readme = Path("README.md").read_text(encoding="utf-8")  # whatever the locale
urls = {}
if site:
    readme = re.sub(
        r"\]\(docs/(?:index|([\w/]+?)(?:/index)?)\.md(#[^)]+)?\)", rf"]({site}/\1/\2)", readme
    )
    readme = readme.replace(f"{site}//", f"{site}/")
if repository:
    readme = re.sub(r"(?<=\]\()(?=docs/[\w/.-]+\.(?:svg|png)\))", f"{repository}/raw/main/", readme)
    readme = re.sub(r"(?<=\]\()(?!\w+:|#)", f"{repository}/blob/main/", readme)
    urls = {
        "Repository": repository,
        "Issues": f"{repository}/issues",
        "Documentation": site or f"{repository}/blob/main/docs/index.md",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    }

setup(
    long_description=readme,
    long_description_content_type="text/markdown",
    project_urls=urls,
    ext_modules=[core],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)

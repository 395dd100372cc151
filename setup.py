"""The extension in C. All else is in pyproject.toml, which cannot say where it can be built.

``PINSTAGE_NATIVE=1`` makes it an error where it cannot be built; without it pinstage is installed all the same, and goes
the plain path. ``PINSTAGE_NATIVE=0`` leaves it out.
"""

import os
import sys
import sysconfig
from glob import glob

from setuptools import Extension, setup

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
    sources=sorted(glob("src/pinstage/_native/*.c")),
    depends=["setup.py", *glob("src/pinstage/_native/*.h")],
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
setup(
    ext_modules=[core] if built else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if built else {},
)

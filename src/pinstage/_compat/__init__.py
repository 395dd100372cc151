"""Private names of torch and CPython: all that pinstage uses.

Where a wrong answer would corrupt data (who uses a storage, where a tensor's memory is, whether it was changed), a
probe looks at what a name *does*, when it is first needed. If it fails, public functions do the same, more slowly, and
a warning says so once; or an error, where there are none. `problems` tries all, for ``pinstage doctor``. Other names
are those of the versions that ``pyproject.toml`` asks for and ``constraints.txt`` pins.
"""

"""All private names of torch and CPython that pinstage uses.

Where a wrong answer would corrupt data (who uses a storage, where a tensor's memory is, whether it
was changed), a probe checks what a name *does* when it is first needed. If the probe fails, public
functions do the same, more slowly, and there is one warning; without such functions, an error is
raised. ``pinstage doctor`` shows the probes that fail. Other names aren't probed: they are in the
versions that ``pyproject.toml`` requires and ``constraints.txt`` pins. `prepared` has what the core
knows of Accelerate's loaders.
"""

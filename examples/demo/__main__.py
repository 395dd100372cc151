"""The program `python examples/demo`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this folder here; its parent makes the modules importable as the package `demo`.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

    from demo.command import main

    sys.exit(main())

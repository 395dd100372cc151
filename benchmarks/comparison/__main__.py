"""The program `python benchmarks/comparison`, which is also its own child process."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts the folder that it runs here; its modules are found as those of the package
    # `comparison`.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

    from comparison.command import PROGRAM

    sys.exit(PROGRAM.main())

"""The program `python examples/demo`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts the folder that it runs here; its modules are found as those of the package `demo`.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

    from demo.command import main

    sys.exit(main())

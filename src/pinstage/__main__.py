"""``python -m pinstage`` is the command `pinstage`."""

from ._cli import main

if __name__ == "__main__":
    main()

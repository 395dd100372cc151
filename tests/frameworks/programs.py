"""Runs the programs of examples/frameworks, in one process or two, and reads what each rank
reports.
"""

import json
import sys
from pathlib import Path

from processes import output_of
from torchrun import environment, torchrun

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"


def reports(name, out, *options, ranks=2):
    """Return each rank's report."""
    out.mkdir(parents=True, exist_ok=True)
    arguments = (EXAMPLES / name, "--out", out, *options)
    if ranks == 1:
        output_of([sys.executable, *arguments], env=environment(OMP_NUM_THREADS="1"))
    else:
        torchrun(*arguments, ranks=ranks)
    return [json.loads(path.read_text()) for path in sorted(out.glob("rank*.json"))]


def both_ways(name, out, cases):
    """Train with a program, in two processes, in each case, ``{case: options}``; return each rank's
    results by case.

    The processes start only once, since that takes longer than the training.
    """
    torchrun(Path(__file__).parent / "both_ways.py", name, out, json.dumps(cases))
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]

"""One rank of torchrun: runs a program of examples/frameworks in each case, in the framework's way
and in ours.
"""

import importlib
import json
import sys
from pathlib import Path

import torch
from accelerate.state import GradientState

if __name__ == "__main__":
    name, out, cases = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "frameworks"))
    program = importlib.import_module(name)
    found = {}
    for case, words in json.loads(cases).items():
        for way in ("plain", "pinstage"):
            found[f"{case} {way}"] = program.train(program.read_options([*words, "--way", way]))
            GradientState._reset_state()
    rank = torch.distributed.get_rank()
    Path(out, f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()

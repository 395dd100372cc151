"""Runs a script under torchrun, and leaves none of its processes behind.

Each rank runs this file too, which works around two bugs that gloo's threads meet on busy CPUs, in one of fifty runs:

- A child that is forked while one of them enters the interpreter, to drop a tensor, waits forever for a lock of
  CPython's (python/cpython#112275, until 3.11.9). So a rank pauses before it forks, until they have nothing left to do.
- They outlive `destroy_process_group` where DDP or FSDP2 still hold the group, and one that drops a tensor while the
  interpreter ends aborts the process (pytorch/pytorch#179291). So the rank leaves without taking the interpreter down.
"""

import os
import runpy
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment, with which another one finds pinstage."""
    path = os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path} | variables


def torchrun(script: Path, *arguments: object, ranks: int = 2) -> str:
    """Run a script in so many processes of this host and return what they printed; fail if it fails.

    The processes find each other through a port that torchrun chooses itself.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(ranks), __file__, str(script), *map(str, arguments)]
    variables = environment(OMP_NUM_THREADS="1")  # which torchrun would choose too, but not without a warning
    process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        printed, _ = process.communicate()
    except BaseException as error:  # pytest's, of a test that takes too long, or an interrupt
        process.terminate()  # not killed: it has to end its ranks, which are in process groups of their own
        printed, _ = process.communicate()
        error.add_note(f"{script.name} printed:\n{printed}")
        raise
    assert process.returncode == 0, printed
    return printed


if __name__ == "__main__":
    os.register_at_fork(before=partial(time.sleep, 0.1))
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)  # as Python does with a script that it runs itself
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an error has left before, with its traceback and its status

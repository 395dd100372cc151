"""Runs a script under torchrun, and leaves none of its processes behind.

Each rank runs this file too. It works around two bugs of gloo's threads, which occur in one of
fifty runs on busy CPUs:

- A child that is forked while such a thread enters the interpreter, to drop a tensor, waits forever
  for a lock of CPython (python/cpython#112275, until 3.11.9). So a rank waits before it forks,
  until these threads are idle.
- The threads outlive `destroy_process_group` if DDP or FSDP2 still holds the group, and a thread
  that drops a tensor during interpreter shutdown aborts the process (pytorch/pytorch#179291). So a
  rank exits without that shutdown.
"""

import os
import runpy
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import warm

SRC = Path(__file__).parents[2] / "src"


def environment(**variables):
    """Return this process's environment, with a path to pinstage."""
    path = os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path} | variables


def torchrun(script, *arguments, ranks=2):
    """Run a script in `ranks` processes on this host and return their output; fail if it fails.

    The processes find each other through a port that torchrun chooses itself.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        str(ranks),
        "--no-python",
        *warm.command(__file__, script, *arguments),
    ]
    variables = environment(OMP_NUM_THREADS="1")  # torchrun's default too, but with a warning
    process = subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        printed, _ = process.communicate()
    except BaseException as error:  # pytest's timeout, or an interrupt
        # Not killed, since it has to end its ranks, which have their own process groups.
        process.terminate()
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
    os._exit(0)  # an error has already exited, with its traceback and status

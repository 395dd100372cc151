"""Starts programs of Python that have torch already: ``command("-c", ...)`` is ``[sys.executable,
"-c", ...]``.

Importing torch takes three CPU seconds. One process does so, but doesn't import pinstage, and forks
for each program. The fork has the arguments, environment, folder and standard streams of the
process that `command` starts, runs the program as its main module, and ends as Python ends; that
process then ends in the same way. Not passed on are signals, other descriptors and options of
Python. All programs have the same hash seed, another one than this process has. Their collections
skip what torch has made.
"""

import atexit
import functools
import marshal
import os
import signal
import socket
import sys


def command(*arguments):
    """Return a command that does what Python does with these arguments: ``-c``, ``-m`` or a script
    come first.
    """
    return [sys.executable, "-I", "-S", __file__, str(_server()), *map(str, arguments)]


def completed(code, **options):
    """Run the code of a program to its end; return its status and, as text, its output.

    Options are those of `subprocess.run`.
    """
    import processes

    return processes.completed(command("-c", code), **options)


@functools.cache
def _server():
    """Start the process that forks; return the number in its address."""
    import subprocess

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address(os.getpid()))
        listener.listen()
        number = listener.fileno()
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        server = subprocess.Popen(
            [sys.executable, __file__, "serve", str(number), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=[number],
            env=environment,
        )
    atexit.register(server.wait)  # runs after the next
    atexit.register(server.kill)
    return os.getpid()


def address(number):
    return f"\0pinstage tests {number}"


def ask(number, arguments):
    """Let the server run a program; return its exit status."""
    ignores = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    request = marshal.dumps((arguments, dict(os.environ), os.getcwd(), ignores))  # noqa: PTH109 - pathlib is slow
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address(number))
        socket.send_fds(connection, [len(request).to_bytes(4, "little")], [0, 1, 2])
        connection.sendall(request)
        return int(connection.recv(16))


def serve(listener, parent):
    """Fork for each request; return in each fork, with the program's arguments.

    The process ends when its parent ends, however that happens. The end of a pipe would not tell:
    a worker of a DataLoader, which is a fork of the parent, holds the pipe open, too.
    """
    import contextlib
    import gc
    import select

    import torch  # noqa: F401

    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parents_end = os.pidfd_open(parent)
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        asking = {connection: end for end, (_, connection) in running.items()}
        ready, _, _ = select.select([parents_end, listener, *running, *asking], [], [])
        for one in ready:
            if one == parents_end:
                os._exit(0)
            if one is listener:
                connection, _ = listener.accept()
                size, streams, _, _ = socket.recv_fds(connection, 4, 3)
                request = connection.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
                pid = os.fork()
                if pid == 0:
                    for other in (listener, connection, *asking):
                        other.detach()  # the numbers will be those of other files
                    return become(request, streams)
                for stream in streams:
                    os.close(stream)
                running[os.pidfd_open(pid)] = pid, connection
            elif one in running:
                pid, connection = running.pop(one)
                os.close(one)
                _, status = os.waitpid(pid, 0)
                with connection, contextlib.suppress(BrokenPipeError):
                    connection.send(b"%d" % os.waitstatus_to_exitcode(status))
            elif asking[one] in running:  # the one that asked was killed
                signal.pidfd_send_signal(asking[one], signal.SIGKILL)


def become(request, streams):
    """Let this process have the properties of the one that asked; return the program's
    arguments.
    """
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1000)
    arguments, environment, folder, ignores_interrupts = marshal.loads(request)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    signal.signal(
        signal.SIGINT, signal.SIG_IGN if ignores_interrupts else signal.default_int_handler
    )
    sys.path[:1] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return arguments


def run(kind, *arguments):
    """Run a program as the main module."""
    import runpy
    import types

    if kind == "-m":
        sys.argv[:] = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    if kind == "-c":
        sys.argv[:] = ["-c", *arguments[1:]]
        code = compile(arguments[0], "<string>", "exec")
    else:
        sys.argv[:] = [kind, *arguments]
        sys.path[0] = os.path.dirname(kind)  # noqa: PTH120
        main.__file__ = kind
        with open(kind, "rb") as file:  # noqa: PTH123
            code = compile(file.read(), kind, "exec")
    exec(code, vars(main))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        run(*serve(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])))
    else:
        status = ask(int(sys.argv[1]), sys.argv[2:])
        if status < 0:
            if status != -signal.SIGKILL:
                signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        os._exit(status)

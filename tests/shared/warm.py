"""Python processes that start at once: forks of one that has imported what they need, torch and pandas for instance.

Such a process is a child of this one, with a session, signals and an exit code of its own; only the seconds of imports
are saved. What a test says about the start of a process takes `subprocess`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

SUBREAPER = 36  # of prctl: whether orphans among the descendants become children


class Forked(subprocess.Popen[str]):
    """`Popen([sys.executable, FILE, ...])` and `Popen([sys.executable, "-c", CODE, ...])`, by a fork."""

    connection: ClassVar[socket.socket]  # to the process with the imports

    def _execute_child(self, *given: Any) -> None:
        asked = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments
        request = {
            "words": list(map(str, asked["args"][1:])),
            "folder": str(asked["cwd"] or Path.cwd()),
            "environment": dict(os.environ if asked["env"] is None else asked["env"]),
            "session": asked["start_new_session"],
        }
        ends = [asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        with adopting():
            streams = [number if end == -1 else end for number, end in enumerate((ends[0], ends[3], ends[5]))]
            socket.send_fds(self.connection, [json.dumps(request).encode()], streams)
            self.pid = int(self.connection.recv(32))
        self._child_created = True
        self._close_pipe_fds(*ends)


@contextmanager
def adopting() -> Iterator[None]:
    prctl = ctypes.CDLL(None).prctl
    prctl(SUBREAPER, 1, 0, 0, 0)
    yield
    prctl(SUBREAPER, 0, 0, 0, 0)


@contextmanager
def warmed(*modules: str) -> Iterator[type[subprocess.Popen[str]]]:
    """`Popen` by forks of a process that has imported some modules; the usual one elsewhere than on Linux."""
    if sys.platform != "linux":
        yield subprocess.Popen
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, str(theirs.fileno()), *modules]
    source = str(Path(importlib.import_module("proxsps").__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]), ours:  # the end of which ends it
        theirs.close()
        yield type("Forked", (Forked,), {"connection": ours})


# In the process with the imports


def serve(connection: socket.socket) -> dict[str, Any]:
    """Fork as often as asked to; a fork returns what it is to run."""
    while True:
        content, streams, *_ = socket.recv_fds(connection, 2**20, 3)
        if not content:
            sys.exit()
        read, write = os.pipe()
        middle = os.fork()
        if not middle and (child := os.fork()):
            os.write(write, str(child).encode())
            os._exit(0)  # makes an orphan of its child
        if middle:
            os.waitpid(middle, 0)
            connection.send(os.read(read, 32))
        else:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
        for end in (read, write, *streams):
            os.close(end)
        if not middle:
            return json.loads(content)


def become(request: dict[str, Any]) -> None:
    if request["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin, sys.stdout = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rw"))
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])


def run(words: list[str]) -> None:
    """As `python FILE ...` or `python -c CODE ...` does."""
    sys.argv, module = words, types.ModuleType("__main__")
    if words[0] == "-c":
        sys.path[0], name, code = "", "<string>", words.pop(1)
    else:
        sys.path[0], name, code = str(Path(words[0]).parent), words[0], Path(words[0]).read_text()
        module.__file__ = name  # a process of a pool imports it again
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module  # the second is its name in a pool
    exec(compile(code, name, "exec"), vars(module))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that forks share what was imported
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        request = serve(connection)
    become(request)
    run(request["words"])

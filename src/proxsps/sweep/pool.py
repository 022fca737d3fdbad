"""Tasks in processes that notice each other's death, or one after the other in this process.

The parent keeps track of the task of each process. If a process dies, its task is passed to a new one, once. After that
an `EngineError` names the task. A process has one thread, and ends by itself if its parent is gone, even during a
computation: this module imports nothing large, so that it watches its parent before it loads what its tasks need.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

Advance = Callable[[int], None]  # called with the number of epochs of single runs that were finished

ATTEMPTS = 2  # for a task whose process dies
START = "spawn"  # a fork after torch has started threads may hang
PATIENCE = 1.0  # seconds to wait for the exit code of a dead process


class EngineError(RuntimeError):
    """An engine cannot run, or cannot continue. The message is one line that says what to do."""


def first_line(error: Exception) -> str:
    """The first line of an error's text, to be put in parentheses; the name of its class if it has no text."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


class RemoteError(Exception):
    """The traceback of an error in a process of the pool, as text; the cause of the error that the parent raises."""


@dataclass
class _Task:
    content: Any  # what to do, and with what
    name: str
    attempts: int = 0
    told: int = 0  # epochs that were reported to the caller
    repeated: int = 0  # epochs reported by this attempt

    def tell(self, count: int, advance: Advance) -> None:
        """Report epochs that no earlier attempt has reported."""
        self.repeated += count
        if self.repeated > self.told:
            news, self.told = self.repeated - self.told, self.repeated
            advance(news)


class _Worker:
    """A process and the task that it has."""

    def __init__(self, task: _Task) -> None:
        context: Any = multiprocessing.get_context(START)
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other,), daemon=True)
        self.process.start()
        other.close()  # so that the death of the process ends the connection
        self.give(task)

    def give(self, task: _Task) -> None:
        self.task = task
        task.attempts, task.repeated = task.attempts + 1, 0
        with suppress(OSError):  # if the process is dead, `receive` finds out
            self.connection.send(task.content)

    def receive(self) -> tuple[str, Any]:
        """The next message; "died" if the process is dead, and an error if the task has had all its attempts."""
        try:
            kind, content = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(PATIENCE)
            code = self.process.exitcode
            reason = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            if self.task.attempts < ATTEMPTS:
                return "died", reason
            raise EngineError(
                f"The process of {self.task.name} died {ATTEMPTS} times ({reason}), perhaps because of too little "
                "memory. What was finished is kept; the same command continues from there."
            ) from None
        return kind, content

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.process.close()


def run_tasks(
    work: Callable[[Any, Advance], Any], tasks: Sequence[tuple[Any, str]], workers: int, advance: Advance
) -> Generator[Any, None, None]:
    """Results of `work(task, tell)` as they are finished. Leaving the generator ends the processes at once.

    Args:
        work: a function of a module; what it raises is raised here. `tell` counts finished epochs.
        tasks: for each task, the argument of `work`, and a name for messages.
        workers: number of processes; 0: one task after the other in this process.
        advance: receives the numbers that tasks report, without those that a second attempt repeats.
    """
    if not workers:
        yield from (work(task, advance) for task, _ in tasks)
        return
    waiting = deque(_Task((work, task), name) for task, name in tasks)
    pool: dict[Any, _Worker] = {}  # by connection

    def start(task: _Task) -> None:
        worker = _Worker(task)
        pool[worker.connection] = worker

    try:
        while waiting and len(pool) < workers:
            start(waiting.popleft())
        while pool:
            for connection in wait(list(pool)):
                worker = pool[connection]
                kind, content = worker.receive()
                if kind == "told":
                    worker.task.tell(content, advance)
                elif kind == "done":
                    if waiting:
                        worker.give(waiting.popleft())
                    else:
                        pool.pop(connection).end()
                    yield content
                elif kind == "failed":
                    error, text = content
                    raise error from RemoteError(text)
                else:
                    pool.pop(connection).end()
                    start(worker.task)
    finally:
        for worker in pool.values():
            worker.end()


# In the processes


def _serve(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends this one
    watch_parent()
    import torch  # takes seconds, in which the parent is watched already

    torch.set_num_threads(1)
    while True:
        try:
            content = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            work, task = pickle.loads(content)  # raises if this process cannot import what the task needs
            answer = ("done", work(task, lambda count: connection.send(("told", count))))
        except Exception as error:
            answer = ("failed", (sendable(error), traceback.format_exc()))
        connection.send(answer)


def sendable(error: Exception) -> Exception:
    """The error, or its text if it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def watch_parent() -> None:
    """End this process as soon as the one that started it is gone, even if that one was killed."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch-parent").start()

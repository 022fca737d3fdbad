"""Tasks in processes that notice each other's death.

The parent keeps track of the task of each process. If a process dies, its task is passed to a new one, once. After that
an `EngineError` names the task. A process whose parent is gone ends by itself, even during a computation. This module
imports nothing large, so that a process watches its parent before it loads what its tasks need.
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

Tell = Callable[[int], None]  # called with the number of finished epochs

ATTEMPTS = 2  # for a task whose process dies
START = "spawn"  # a fork after torch has started threads may hang
PATIENCE = 1.0  # seconds that a process has to end after the parent ends it


class EngineError(RuntimeError):
    """An engine cannot run, or cannot continue. The message is one line that says what to do."""


def first_line(error: Exception) -> str:
    """The first line of an error's text, to be put in parentheses; the name of its class if it has no text."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


class RemoteError(Exception):
    """The traceback of an error in a process of the pool, as text; the cause of the error that the parent raises."""


@dataclass
class _Task:
    content: Any
    name: str
    attempts: int = 0
    told: int = 0  # epochs that were reported to the caller
    repeated: int = 0  # epochs reported by this attempt


class _Worker:
    """A process and the task that it has."""

    def __init__(self, context: Any, work: Callable[[Any, Tell], Any]) -> None:
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other,), daemon=True)
        self.process.start()
        other.close()  # so that the death of the process ends the connection
        self.task: _Task | None = None
        self._send(work)

    def give(self, task: _Task) -> None:
        self.task = task
        task.attempts, task.repeated = task.attempts + 1, 0
        self._send(task.content)

    def _send(self, content: Any) -> None:
        with suppress(OSError):  # if the process is dead, `receive` finds out
            self.connection.send(content)

    def has_news(self) -> bool:
        """Whether there is a message, or the process is dead."""
        try:
            return self.connection.poll() or not self.process.is_alive()
        except OSError:  # the end of a connection on Windows
            return True

    def receive(self) -> tuple[str, Any] | None:
        """The next message, or None if the process is dead and has left none."""
        try:
            return self.connection.recv() if self.connection.poll() else None
        except (EOFError, OSError, pickle.UnpicklingError):  # nothing more, or a message that was cut short
            return None

    def end(self) -> None:
        self.connection.close()
        self.process.terminate()

    def wait(self) -> None:
        self.process.join(PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


def run_tasks(
    work: Callable[[Any, Tell], Any], tasks: Sequence[tuple[Any, str]], workers: int, advance: Tell
) -> Generator[Any, None, None]:
    """Results of `work(task, tell)` as they are finished. Leaving the generator ends the processes at once.

    Args:
        work: a function of a module; what it raises is raised here. `tell` counts finished epochs.
        tasks: for each task, the argument of `work`, and a name for messages.
        workers: number of processes.
        advance: receives the numbers that tasks report, without those that a second attempt repeats.
    """
    context = multiprocessing.get_context(START)
    waiting = deque(_Task(*task) for task in tasks)
    pool: list[_Worker] = []
    try:
        pool += [_Worker(context, work) for _ in range(min(workers, len(waiting)))]
        for worker in pool:
            worker.give(waiting.popleft())
        while busy := [(worker, worker.task) for worker in pool if worker.task is not None]:
            wait([end for worker, _ in busy for end in (worker.connection, worker.process.sentinel)])
            for worker, task in busy:
                if not worker.has_news():
                    continue
                message = worker.receive()
                if message is None:
                    pool[pool.index(worker)] = _replace(context, work, worker, task)
                elif message[0] == "told":
                    _pass_on(task, message[1], advance)
                else:
                    worker.task = None
                    if waiting:
                        worker.give(waiting.popleft())
                    yield _unpack(*message)
    finally:
        for worker in pool:
            worker.end()
        for worker in pool:
            worker.wait()


def _replace(context: Any, work: Callable[[Any, Tell], Any], worker: _Worker, task: _Task) -> _Worker:
    """A new process with the task of a dead one."""
    worker.process.join(PATIENCE)
    code = worker.process.exitcode
    reason = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    if task.attempts == ATTEMPTS:
        raise EngineError(
            f"The process of {task.name} died {ATTEMPTS} times ({reason}), perhaps because of too little memory. "
            "What was finished is kept; the same command continues from there."
        )
    worker.end()
    worker.wait()
    fresh = _Worker(context, work)
    fresh.give(task)
    return fresh


def _pass_on(task: _Task, count: int, advance: Tell) -> None:
    task.repeated += count
    if task.repeated > task.told:
        news, task.told = task.repeated - task.told, task.repeated
        advance(news)


def _unpack(kind: str, content: Any) -> Any:
    if kind == "done":
        return content
    error, text = content
    raise error from RemoteError(text)


# In the processes


def _serve(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends this one
    watch_parent()
    work = connection.recv()
    while True:
        try:
            content = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            task = pickle.loads(content)  # raises if this process cannot import what the task needs
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

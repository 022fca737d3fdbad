"""`proxsps` on the command line: experiments, training, theory.

Nothing is loaded before `main`, so that an interrupt or a missing package at the start is reported in one line.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from proxsps import _install

INTERRUPTED = 130  # exit code, as shells have it


def main() -> None:
    """Run the command that was typed."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a path may have letters that the terminal cannot show
    with loading():
        app = _commands()
    try:
        app()
    except SystemExit as end:
        _settle_output(end)
        raise


@contextmanager
def loading() -> Iterator[None]:
    """For imports of large packages: an interrupt during the import ends the process at once and prints one line.

    An exception in the middle of an import might be caught there and replaced by another one. A process that was
    started in the background ignores interrupts, and keeps doing so.
    """
    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not heeds or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end_start)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _commands() -> Any:
    try:
        from proxsps.cli.commands import app
    except ModuleNotFoundError as error:
        if (text := _install.explained(error)) is None:
            raise
        sys.stderr.write(f"Error: {text}\n")
        raise SystemExit(2) from None
    return app


def _end_start(*_: object) -> None:
    os.write(2, b"Interrupted before anything was run.\n")
    os._exit(INTERRUPTED)


def _settle_output(end: SystemExit) -> None:
    """Flush the output; if that fails, print an error here, before Python does at its end."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not end.code and not isinstance(error, BrokenPipeError):
            sys.stderr.write(f"Error: The output cannot be written ({error.strerror}).\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        end.code = end.code or 2


def __getattr__(name: str) -> Any:
    if name == "app":
        from proxsps.cli.commands import app

        return app
    raise AttributeError(f"module 'proxsps.cli' has no attribute {name!r}")


__all__ = ["app", "loading", "main"]

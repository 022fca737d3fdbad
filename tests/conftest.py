"""What every run of the suite relies on, however it is started: the same examples, and interrupts that arrive."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from proxsps.methods import METHODS, Method

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def interrupts_arrive() -> Iterator[None]:
    """In the background (`nohup`, `&`) a process ignores interrupts, and so would all that the tests start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def table() -> Iterator[dict[str, Method]]:
    """The table of methods, to which a test may add its own: afterwards it is as it was."""
    before = dict(METHODS)
    yield METHODS
    METHODS.clear()
    METHODS.update(before)

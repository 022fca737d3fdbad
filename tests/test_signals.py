"""The suite itself, started in the background."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

WAIT = "import time; print('ready', flush=True); time.sleep(30)"


def test_an_interrupt_reaches_what_a_test_starts():
    with subprocess.Popen([sys.executable, "-c", WAIT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) != 0


@pytest.mark.skipif(os.name == "nt", reason="there is no such way to start a process")
def test_so_it_does_in_a_suite_that_was_started_with_nohup():
    test = f"{Path(__file__)}::{test_an_interrupt_reaches_what_a_test_starts.__name__}"
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    pytest_again = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", test]
    done = subprocess.run([sys.executable, "-c", ignoring, *pytest_again], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout

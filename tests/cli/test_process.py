"""`proxsps` as a process: interrupted while it starts, with an output that is full, on systems that lack names."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import proxsps

ROOT = Path(__file__).parents[2]

# Interrupts itself when a module is looked for: in the middle of the imports.
START = """
import signal, sys

module, disposition = sys.argv[1:3]
del sys.argv[1:3]

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

if disposition == "ignored":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.meta_path.insert(0, Interrupt())
from proxsps.cli import main
main()
"""


def run(
    code: str, *words: str, popen: type[subprocess.Popen[str]] = subprocess.Popen, **options: object
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(proxsps.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command, options = [sys.executable, "-c", code, *words], {"stdout": subprocess.PIPE, **options}
    with popen(command, text=True, env=environment, stderr=subprocess.PIPE, **options) as process:
        output, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def test_the_command_is_main():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"proxsps": "proxsps.cli:main"}


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("typer", ["list"]),
        ("torch", ["run", "matrix-fac1"]),
        ("pandas", ["claims", "matrix-fac1"]),
        ("torch", ["reproduce", "matrix-fac1"]),
        ("pandas", ["theory", "verify"]),
        ("torch", ["train", "synthetic-resnet8"]),
    ],
    ids=str,
)
def test_an_interrupt_during_the_start_is_one_line(module, words, tmp_path):
    done = run(START, module, "heeded", *words, cwd=tmp_path)
    assert done.returncode == 130
    assert done.stderr == "Interrupted before anything was run.\n"
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_that_is_ignored_stays_ignored():
    """As `nohup proxsps ... &` is."""
    done = run(START, "rich", "ignored", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"proxsps {proxsps.__version__}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no /dev/full")
@pytest.mark.parametrize("words", [["list", "--json"], ["--help"]], ids=" ".join)
def test_an_output_that_is_full_is_one_line(words):
    with Path("/dev/full").open("w") as full:
        done = run("from proxsps.cli import main; main()", *words, stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: The output cannot be written")
    assert done.stderr.count("\n") == 1


# Windows has none of these; macOS lacks the first two.
LACKING = """
import os, signal, sys
import matplotlib.figure, pandas, pooch, pyarrow.parquet, rich.progress, torch, typer  # may need what follows

for name in ("sched_getaffinity", "sched_setaffinity", "fork", "forkpty", "register_at_fork", "getpgid", "getpgrp",
             "killpg", "setsid", "setpgid", "getsid", "getuid", "geteuid", "getgid", "nice", "getpriority",
             "statvfs", "fstatvfs", "sync", "mkfifo", "chown", "lchown", "fchown", "fchmod", "chroot", "uname",
             "getloadavg", "wait3", "wait4", "openpty", "ttyname", "pread", "pwrite", "sendfile", "posix_spawn",
             "posix_fallocate", "posix_fadvise", "O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC", "WNOHANG", "sysconf"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGPIPE", "SIGCHLD", "SIGSTOP",
             "SIGCONT", "SIGTSTP", "alarm", "setitimer", "pthread_kill", "pthread_sigmask", "sigwait", "siginterrupt"):
    if hasattr(signal, name):
        delattr(signal, name)
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog"):
    sys.modules[name] = None

from typer.testing import CliRunner
from proxsps.cli import app

tiny = "--width=2 --size=8 --images=80 --validation-images=30 --batch-size=16 --device=cpu --epochs=1"
for words in ("list", "data", "run matrix-fac1 --seeds 1 --epochs 1", "run matrix-fac1 --seeds 1 --epochs 1",
              "report interpolation", "theory verify mapping-upper",
              f"train synthetic-resnet8 {tiny} --method adamw"):
    result = CliRunner().invoke(app, words.split())
    if result.exit_code:
        raise SystemExit(f"{words}: {result.output}") from result.exception
print("done")
"""


def test_commands_work_without_the_names_that_only_unix_has(forked, tmp_path):
    done = run(LACKING, cwd=tmp_path, popen=forked)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"

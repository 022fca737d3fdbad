"""Files that are replaced as a whole, by one function for the whole package."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from proxsps._files import replace_file

SOURCES = Path(__file__).parent.parent / "src" / "proxsps"


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    file = tmp_path / "new" / "folder" / "file.txt"
    for content in (b"one", b"other"):
        replace_file(file, content)
        assert file.read_bytes() == content
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("fault", ["write", "fsync", "replace"])
def test_a_fault_keeps_the_old_file(tmp_path, monkeypatch, fault):
    file = tmp_path / "file.txt"
    replace_file(file, b"old")

    def fail(*words):
        raise OSError(28, "No space left on device")

    owner, name = (Path, "write_bytes") if fault == "write" else (os, fault)
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(OSError, match="No space left"):
        replace_file(file, b"new")
    monkeypatch.undo()
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_content_is_on_the_disk_before_its_name_and_then_the_folder(tmp_path, monkeypatch):
    done, sync, rename = [], os.fsync, os.replace

    def noted_sync(handle):
        done.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}"))))
        sync(handle)

    def noted_rename(old, new):
        done.append(("rename", Path(old)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_rename)
    replace_file(tmp_path / "file.txt", b"new")
    partial = tmp_path / f"file.txt.{os.getpid()}.partial"
    assert done == [("sync", partial), ("rename", partial), ("sync", tmp_path)]


def test_no_other_module_renames_files():
    users = [path.name for path in SOURCES.rglob("*.py") if "os.replace(" in path.read_text()]
    assert users == ["_files.py"]


def test_no_other_module_reads_or_writes_pickles():
    """What torch writes is sealed, and what it says about files that hold code is not passed on."""
    users = {path.name for path in SOURCES.rglob("*.py") if re.search(r"torch\.(load|save)\(", path.read_text())}
    assert users == {"_sealed.py"}

"""An integration without its framework says what is missing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from proxsps.integrations.requirements import framework


@pytest.mark.parametrize("name", ["lightning", "accelerate", "transformers"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, f"proxsps.integrations.{name}", raising=False)
    text = rf"proxsps\.integrations\.{name} needs the package {name}, which is not installed: pip install"
    with pytest.raises(ModuleNotFoundError, match=text):
        importlib.import_module(f"proxsps.integrations.{name}")


def test_a_package_that_the_framework_lacks_is_not_blamed_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_installed.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'no_such_package'$"):
        framework("half_installed", "this test", "pip install half_installed")

"""One clear error if the framework of an integration is not installed."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from proxsps._install import missing


def framework(package: str, needed_by: str, install: str) -> ModuleType:
    """Import a package that an integration needs.

    Args:
        package: its name, or that of a module in it.
        needed_by: the integration that imports it.
        install: the command that installs it.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != package.split(".")[0]:
            raise  # something else is missing
        raise missing(needed_by, [package.split(".")[0]], install) from error

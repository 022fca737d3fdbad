"""How optional parts are installed. All texts and errors of the package use the install line from here."""

from __future__ import annotations

from importlib.util import find_spec

PUBLISHED = False  # whether package indexes have proxsps; until then it is installed from a clone

# What the extra `experiments` installs, by the names under which it is imported.
EXPERIMENTS = ("filelock", "matplotlib", "pandas", "PIL", "pooch", "pyarrow", "rich", "scipy", "sklearn", "typer")


def extra(*names: str) -> str:
    """The command that installs the package with these extras."""
    chosen = f"[{','.join(names)}]"
    return f"pip install 'proxsps{chosen}'" if PUBLISHED else f"pip install '.{chosen}' in a clone of proxsps"


def missing(needed_by: str, packages: list[str], install: str) -> ModuleNotFoundError:
    """The error of a part that needs packages which are not installed."""
    noun, verb = ("package", "is") if len(packages) == 1 else ("packages", "are")
    names = " and ".join(packages) if len(packages) < 3 else f"{', '.join(packages[:-1])} and {packages[-1]}"
    text = f"{needed_by} needs the {noun} {names}, which {verb} not installed: {install}."
    return ModuleNotFoundError(text, name=packages[0])


def require(needed_by: str, extra_name: str, *packages: str) -> None:
    """Raise an error that names the extra, if one of its packages is not installed. Nothing is imported."""
    absent = [package for package in packages if not _installed(package)]
    if absent:
        raise missing(needed_by, absent, extra(extra_name))


def explained(error: ModuleNotFoundError) -> str | None:
    """What a user of the command line has to install; None if the missing module does not belong to its extra."""
    package = (error.name or "").partition(".")[0]
    return str(missing("proxsps", [package], extra("experiments"))) if package in EXPERIMENTS else None


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ModuleNotFoundError, ValueError):  # another finder raises; a module without a spec
        return False

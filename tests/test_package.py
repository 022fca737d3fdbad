"""The package as a stranger gets it: the cost of importing, the contents of the wheel, and that it trains by itself."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import proxsps

ROOT = Path(__file__).parent.parent
HEAVY = ["torch", "jax", "matplotlib", "pandas", "numpy", "numba", "array_api_compat"]
TARGETS = ["setup", "demo", "test", "check", "bench", "docs", "clean", "help"]

# With nothing but the base dependencies: other packages of this environment are made impossible to import.
TRAIN = """
import pathlib, sys
sys.modules.update(dict.fromkeys(["numba", "scipy", "pandas", "matplotlib", "cvxpy", "jax"]))
import torch, proxsps
assert pathlib.Path(proxsps.__file__).is_relative_to(sys.argv[1]), proxsps.__file__
torch.manual_seed(0)
x = torch.randn(64, 5)
y = x @ torch.ones(5, 1)
model = torch.nn.Linear(5, 1)
for options in ({"weight_decay": 1e-3}, {"regularizer": proxsps.L1(1e-3)}):
    opt = proxsps.ProxSPS(model.parameters(), **options)
    for _ in range(50):
        opt.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        opt.step(loss=loss)
assert loss < 0.01, loss
print("trained")
"""


def run(code: str, *arguments: str, **kwargs) -> str:
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, **kwargs)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A directory with the wheel and the sdist."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return out


def test_import_loads_no_framework():
    assert run(f"import sys, proxsps; print([m for m in {HEAVY} if m in sys.modules])") == "[]"


def test_regularizers_load_no_framework_but_numpy():
    code = "import sys; from proxsps import L1; print([m for m in ('torch', 'jax', 'pandas') if m in sys.modules])"
    assert run(code) == "[]"


@pytest.mark.parametrize("name", proxsps.__all__)
def test_every_public_name_resolves(name):
    assert getattr(proxsps, name) is not None
    assert name in dir(proxsps)


def test_public_names_of_the_parts_are_public_names_of_the_package():
    from proxsps import optim, regularizers

    functions = {"check_loss", "check_regularizer", "polynomial_avg_fn", "polynomial_multi_avg_fn"}
    functions |= {"model_groups", "renew_statistics", "roles"}
    classes = {name for part in (optim, regularizers) for name in part.__all__ if isinstance(getattr(part, name), type)}
    assert classes | {"UnitLasso"} == set(proxsps.__all__) - {"__version__", *functions}


def test_modules_are_attributes_that_are_loaded_on_first_use():
    found = {path.stem for path in (ROOT / "src/proxsps").iterdir() if path.suffix == ".py" or path.is_dir()}
    public = {name for name in found if not name.startswith("_")}
    assert public <= set(dir(proxsps))
    code = (
        f"import sys, proxsps; assert {public!r} <= set(dir(proxsps)); assert 'torch' not in sys.modules; "
        "print(proxsps.regularizers.__name__, proxsps.methods.__name__, 'torch' in sys.modules)"
    )
    assert run(code) == "proxsps.regularizers proxsps.methods False"
    assert [getattr(proxsps, name).__name__ for name in sorted(public)] == [
        f"proxsps.{name}" for name in sorted(public)
    ]


WITHOUT_EXTRAS = """
import importlib, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(error)
"""
EXTRAS = {
    "proxsps.report": "experiments",
    "proxsps.figures": "experiments",
    "proxsps.sweep": "experiments",
    "proxsps.training": "experiments",
    "proxsps.integrations.lightning": "lightning",
    "proxsps.sparsity.callbacks.lightning": "lightning",
    "proxsps.sparsity.callbacks.transformers": "transformers",
}


def test_a_module_without_its_packages_names_itself_and_the_extra():
    text = run(WITHOUT_EXTRAS, "filelock,lightning,matplotlib,pandas,pyarrow,transformers", *EXTRAS)
    for (module, extra), line in zip(EXTRAS.items(), text.splitlines(), strict=True):
        assert re.fullmatch(rf"{re.escape(module)} needs the packages? .*\[{extra}\].*", line), line


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="NoSuchOptimizer"):
        _ = proxsps.NoSuchOptimizer


def test_version_is_the_same_everywhere():
    yaml = pytest.importorskip("yaml")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert proxsps.__version__ == version
    assert importlib.metadata.version("proxsps") == version
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_citation_names_the_paper():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    paper = citation["preferred-citation"]
    assert paper["title"] == "A Stochastic Proximal Polyak Step Size"
    assert [author["family-names"] for author in paper["authors"]] == ["Schaipp", "Gower", "Ulbrich"]


def test_wheel_holds_the_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"proxsps", f"proxsps-{proxsps.__version__}.dist-info"}
    assert "proxsps/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "proxsps").rglob("*.py")}
    assert sources <= set(names)
    assert not [name for name in names if "test" in name or "__pycache__" in name]


def test_sdist_can_be_worked_with(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = ["pyproject.toml", "Makefile", "constraints.txt", "mkdocs.yml", "README.md", "LICENSE", "CONTRIBUTING.md"]
    assert {*wanted, "src/proxsps/py.typed", "tests/test_package.py", "examples/sparse.py", "docs/index.md"} <= names


def test_metadata_passes_twine(built):
    pytest.importorskip("twine")
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.iterdir())]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_wheel_trains_by_itself(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    assert run(TRAIN, str(target), cwd=tmp_path, env=environment) == "trained"


def functions(node):
    """All functions but those inside functions without types."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield child
        if not isinstance(child, ast.FunctionDef) or child.returns is not None:
            yield from functions(child)


def test_only_functions_that_numba_compiles_have_no_types():
    """In this folder mypy skips functions without annotations, so that those of Python must have them."""
    paths = sorted((ROOT / "src/proxsps/optim/kernels").glob("*.py"))
    seen = []
    for path in paths:
        for node in functions(ast.parse(path.read_text())):
            if node.returns is None:
                seen.append(path)
                names = {ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list}
                assert names & {"compiled", "inlined", "numba.njit", "intrinsic"}, (
                    f"{path.name}: {node.name} has no types"
                )
    assert len(set(seen)) > 3


def test_make_help_lists_the_targets():
    result = subprocess.run(["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert set(re.findall(r"make (\w+)", result.stdout)) == set(TARGETS)


def test_constraints_pin_every_direct_dependency():
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + [
        item for extra in ("fast", "dev", "docs", "experiments", "sparsity") for item in extras[extra]
    ]
    assert {re.match(r"[\w.-]+", item)[0].lower() for item in wanted} <= pins.keys()
    assert not [version for version in pins.values() if "+" in version]


OWN_NAMES = ("experiments/no_lr", "figures", "integrations", "problems", "sparsity", "sweep", "training")


@pytest.mark.parametrize("folder", OWN_NAMES)
def test_no_two_classes_of_a_folder_share_a_name(folder):
    """A name that stands for two things is read as the wrong one."""
    homes: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src/proxsps" / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(path.name)
    assert homes
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}

"""Every code block of the README and the documentation runs, every docstring example too, and the site builds."""

from __future__ import annotations

import doctest
import importlib
import math
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch

import proxsps
from proxsps.methods import METHODS, RUNNABLE

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# That of several processes has its test among those of processes.
EXAMPLES = [script for script in sorted((ROOT / "examples").glob("*.py")) if script.name != "data_parallel.py"]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OWN_EXPERIMENT = (ROOT / "docs" / "your-own-experiment.md").read_text()
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def blocks(page: Path) -> list[tuple[int, str]]:
    text = page.read_text()
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in BLOCK.finditer(text)]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def modules() -> list[str]:
    found = pkgutil.walk_packages(proxsps.__path__, "proxsps.")
    return ["proxsps", *(module.name for module in found)]


# Lightning's advice on the number of processes that load data, and its use of a class that torch has renamed.
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
# Dynamo warns of caches in array_api_compat, which it traces through.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name)
def test_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch, table):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, source in blocks(page):
        # Blank lines in front, so that an error shows the line of the page.
        exec(compile("\n" * line + source, str(page), "exec"), namespace)


def test_pages_that_must_have_examples_have_them():
    counts = {name(page): len(blocks(page)) for page in PAGES}
    for page in ("README.md", "docs/getting-started.md", "docs/optimizers.md", "docs/regularizers.md"):
        assert counts[page] > 0, page
    assert counts["docs/write-your-own-regularizer.md"] >= 4


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_is_only_found_in_blocks_that_are_run(page):
    """A block marked in another way (py, Python, indented, with options) would escape the test above."""
    text = BLOCK.sub("", page.read_text())
    assert not re.search(r"^\s*(```|~~~)\s*\{?\.?(py|python|pycon)\b", text, re.MULTILINE | re.IGNORECASE)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name)
def test_lines_of_code_fit_the_page(page):
    long = [line for _, source in blocks(page) for line in source.splitlines() if len(line) > 88]
    assert not long


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name)
def test_links_to_files_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("module", modules())
def test_docstring_examples(module):
    if module.startswith("proxsps.optim.kernels."):
        pytest.importorskip("numba")
    results = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


def test_every_public_name_is_in_the_reference():
    reference = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    for public in set(proxsps.__all__) - {"__version__"}:
        homes = ("proxsps", "proxsps.regularizers")
        assert any(f"::: {home}.{public}\n" in reference for home in homes), public


def test_every_regularizer_is_in_the_table():
    table = (ROOT / "docs" / "regularizers.md").read_text()
    from proxsps import regularizers

    for public in regularizers.__all__:
        kind = getattr(regularizers, public)
        if isinstance(kind, type) and kind is not regularizers.Regularizer:
            assert f"| `{public}(" in table, public


def test_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs")
    site = tmp_path / "site"
    # Not --quiet, which silences warnings before --strict counts them.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    pages = {page.name: page.read_text() for page in site.rglob("*.html")}
    assert "<math" in pages["index.html"]
    assert "no-lr-transformer-narrow.svg" in pages["index.html"], "pictures for phones on the home page"
    assert "CONTRIBUTING" not in pages["index.html"]
    assert not any('class="arithmatex"' in page for page in pages.values()), "a formula was left as LaTeX"
    assert "proxsps.ProxSPS</span>" in pages["optim.html"], "headings of the reference are import paths"
    assert (site / "css" / "math.woff").stat().st_size > 100_000, "the font in which brackets grow"


@pytest.mark.parametrize("script", EXAMPLES, ids=name)
def test_examples_run(script, tmp_path, monkeypatch, capsys, table):
    """In this process, which has loaded most of what they import."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
        plt.close("all")
    printed = capsys.readouterr()
    assert printed.err == ""
    if script.name == "sparse.py":
        assert printed.out.count("features kept: [0, 1, 2, 3, 4];") == 2


def test_the_first_table_is_filled_in_from_the_store(tmp_path):
    settings = [("schedule-free-sps", None, "none"), ("adamw", 1e-3, "none"), ("adamw", 1e-2, "none")]
    settings += [("adamw", 1e-2, "cosine"), ("schedule-free", 1e-2, "none"), ("schedule-free", 0.1, "none")]
    settings += [("prox-sps-momentum", None, "none"), ("prox-sps-adam", None, "none"), ("prox-sps-adam", 1.0, "none")]
    values = [0.90, 0.91, math.nan, 0.915, 0.93, 0.94, 0.95, 0.92, 0.99]  # AdamW diverges with 1e-2
    rows = [
        {"task": "digits", "metric": "accuracy", "ending": ending, "method": method, "lr": lr, "value": value + change}
        for (method, lr, ending), value in zip(settings, values, strict=True)
        for change in (-0.005, 0.005)
    ]
    (tmp_path / "no-lr").mkdir()
    pd.DataFrame(rows).to_parquet(tmp_path / "no-lr" / "trials.parquet")
    page = tmp_path / "page.md"
    for _ in range(2):  # a second time, in the place of the first
        page.write_text(page.read_text() if page.exists() else (ROOT / "README.md").read_text())
        command = [sys.executable, str(ROOT / "docs" / "tables" / "when_to_use.py"), str(tmp_path), str(page)]
        subprocess.run(command, check=True, capture_output=True)
    cells = "|  | 90.0 ±.5 | **95.0** ±.5 |  | 91.0 ±.5 | 91.5 ±.5 | 94.0 ±.5 |  |".replace(" ±", "\N{NO-BREAK SPACE}±")
    row = f"| digits: % correct ↑ {cells}"
    assert page.read_text().count(row) == 1
    assert page.read_text().count("<!-- when-to-use -->") == 2


def test_the_tests_that_the_page_on_reliability_names_are_there():
    named = re.findall(r"`([\w/]*(?:\.py)?)(?:::(\w+))?`", (ROOT / "docs" / "reliability.md").read_text())
    file, missing = "", []
    for own, test in named:
        file = own if own.endswith(".py") else file  # "::test" is in the file before it
        if (own.endswith(".py") or test) and f"def {test}" not in (ROOT / "tests" / file).read_text():
            missing.append(f"{file}::{test}")
    assert len(named) > 130
    assert not missing


def test_the_table_of_methods_is_that_of_the_package():
    rows = re.findall(r"^\| `([\w-]+)` \| `([\w.]+)` \| (?:`([\w.]+)`)? ?\| (.*?) \|$", OWN_EXPERIMENT, re.MULTILINE)
    words = {True: "part of the loss", False: "applied by its prox"}
    entries = [METHODS[name] for name in RUNNABLE]
    expected = [(m.name, m.home, m.optax.replace(":", "."), words[m.coupled]) for m in entries]
    assert [row[:3] for row in rows] == [row[:3] for row in expected]
    assert [row[3] for row in rows if row[0] != "adamw"] == [row[3] for row in expected if row[0] != "adamw"]

"""The report: content, escaping, self-containedness, atomic writing."""

from dataclasses import dataclass
from html.parser import HTMLParser

import pandas as pd
import pytest
from matplotlib.figure import Figure

from proxsps import report

VOID = {"meta", "br", "img", "link", "input", "hr"}


@dataclass
class Fact:
    name: str
    gist: str
    quantity: str
    rule: str
    measured: object
    verdict: str
    part: str = ""
    strict: str = ""
    published: tuple[str, str] | None = None


class Page(HTMLParser):
    """Checks that tags nest, and collects texts, tags and attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self):
        return " ".join("".join(self.texts).split())

    def named(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def figure(marker="o"):
    drawing = Figure(figsize=(4, 2))
    drawing.subplots().plot([1, 2, 3], [2, 1, 3], marker)
    return drawing


@pytest.fixture
def sections():
    claims = [
        Fact(
            "stable",
            "ProxSPS converges where SPS stalls",
            "largest gap",
            "< 1e-4 & finite",
            2.5e-5,
            "holds",
            strict="3e-5",
            published=("holds", "4e-5"),
        ),
        Fact("some", "most norms", "ratio", "all", "3; 4", "holds in part", "3 of 4", published=("does not hold", "2")),
        Fact("small", "smaller <norms>", "ratio of norms", "<= 1", "1.01 at lambda = 1e-2; alpha_0", "does not hold"),
    ]
    table = pd.DataFrame({"method": ["a<b", "c"], "val_error": [1.23456e-5, float("nan")], "runs": [10, 3]})
    return [
        report.Section("First & foremost", "What it is.\n\nAnd why.", claims, [("A caption <1>", figure())], table),
        report.Section("Second", "No claims.", figures=[("Other", figure("s")), ("Third", figure("o"))]),
    ]


@pytest.fixture
def page(sections, tmp_path):
    path = report.write_report(
        tmp_path / "out" / "report.html",
        sections,
        title="Results <of> today",
        environment=report.describe_environment(),
        speed={"runs per second": 55.5555, "matrix-fac1": "5.4 s"},
    )
    return Page(path.read_text(encoding="utf-8"))


def test_header_counts_the_claims(page):
    assert "Results <of> today" in page.text
    assert "1 of 3 claims hold, 1 in part. On the paper's own curves: 1 of 2." in page.text


def test_claims_with_verdict_in_word_and_colour(page):
    for words in ("ProxSPS converges where SPS stalls", "largest gap", "< 1e-4 & finite", "2.5e-05", "smaller <norms>"):
        assert words in page.text
    verdicts = [attributes["class"] for attributes in page.named("span") if "verdict" in attributes.get("class", "")]
    assert verdicts == [f"verdict {look}" for look in ("fails", "partly", "fails", "holds", "holds")]  # worst first
    assert "does not hold" in page.text


def test_a_claim_is_one_line_that_unfolds(page, sections):
    """Sentence, number and both verdicts first; letters for their names."""
    lines = [
        line for line in report.render(sections, title="t", environment={}, speed={}).splitlines() if "<summary" in line
    ]
    heads = [Page(line[line.index("<summary") : line.index("</summary>") + 10]).text for line in lines]
    assert heads[0] == "smaller <norms>1.01 at λ = 1e-2does not hold\u2013"
    assert "α₀" not in heads[0]  # the number is what comes before the first semicolon
    assert "α₀" in page.text
    for words in ("Rule≤ 1", "A stricter rule3e-5", "Holds in part3 of 4", "Paper's own curves4e-5"):
        assert words in page.text


def test_a_picture_can_come_first(sections):
    text = report.render(sections, title="t", environment={}, speed={}, first=("Overview", figure()))
    assert text.index('aria-label="Overview"') < text.index('id="claims"') < text.index('aria-label="A caption')


def test_sections_figures_and_tables(page):
    for words in ("First & foremost", "And why.", "A caption <1>", "Second", "a<b", "1.235e-05", "10"):
        assert words in page.text
    assert "nan" not in page.text.lower().split()
    pictures = page.named("svg")
    assert [picture["aria-label"] for picture in pictures] == ["A caption <1>", "Other", "Third"]
    assert all(picture["role"] == "img" and "viewbox" in picture for picture in pictures)


def test_speed_environment_and_citation(page):
    for words in ("55.56", "5.4 s", "Python", "torch", "numpy", "CPUs", "Platform", "Date"):
        assert words in page.text
    assert "@article{schaipp2023stochastic," in page.text
    assert "A Stochastic Proximal Polyak Step Size" in page.text


def test_nothing_is_loaded_from_elsewhere(page):
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "iframe", "object", "embed"}
    outside = set()
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href"):
            target = attributes.get(name, "#")
            if not target.startswith(("#", "data:")):
                outside.add((tag, target))
    assert outside == {("a", report.PAPER)}
    assert "url(http" not in (style := report.render([], title="", environment={}, speed={}))
    assert "@import" not in style


def test_ids_are_unique_and_every_reference_meets_one(page):
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        for name in ("href", "xlink:href"):
            if attributes.get(name, "").startswith("#"):
                assert attributes[name][1:] in ids
        if attributes.get("clip-path", "").startswith("url(#"):
            assert attributes["clip-path"][5:-1] in ids


def test_readable_on_a_phone_and_in_the_dark(page, sections):
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.named("meta")
    assert page.tags[0][0] == "html"
    text = report.render(sections, title="t", environment={}, speed={})
    assert "prefers-color-scheme: dark" in text
    assert text.count('<div class="scroll"') == text.count("<table")


def test_long_tables_are_folded(sections):
    rows = pd.DataFrame({"lr": range(30)})
    text = report.render([report.Section("S", "d", table=rows)], title="t", environment={}, speed={})
    assert "Numbers (30 rows)" in Page(text).text
    assert "Numbers (" not in report.render(sections, title="t", environment={}, speed={})


def test_page_without_anything():
    page = Page(report.render([], title="Empty", environment={}, speed={}))
    assert "There are no claims to check." in page.text
    assert page.text.count("Not recorded.") == 2


def test_a_failed_write_keeps_the_old_report(sections, tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(report.os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        report.write_report(path, sections, title="t", environment={}, speed={})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_same_input_same_bytes(sections):
    first, second = (report.render(sections, title="t", environment={}, speed={}) for _ in range(2))
    assert first == second

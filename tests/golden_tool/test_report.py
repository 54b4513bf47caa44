"""The report as text, JSON and a page."""

import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

import pytest
import torch

from deepinfer.golden import Report, compare
from deepinfer.golden.html import plot, to_html
from deepinfer.golden.report import PromptReport
from deepinfer.golden.token_differences import TokenDivergence
from tests.golden_tool.faults import FAULTS
from tests.golden_tool.recordings import PROMPT, clean_model, fresh_model, record_tiny

VOID = ("meta", "br", "line")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Report]:
    """One that is equal, one that differs."""
    folder = tmp_path_factory.mktemp("reports")
    patterns = ["layers.*", "layers.*.hc_ffn.pre", "**.ids"]
    golden = record_tiny(folder / "golden", patterns=patterns)
    model = fresh_model()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        FAULTS["nibbles swapped"].plant(model, patch)
        other = record_tiny(folder / "<other>", model, patterns=patterns)
    return compare(golden, golden, model=clean_model()), compare(golden, other, model=clean_model())


def test_the_text_leads_to_the_module(reports: tuple[Report, Report]) -> None:
    equal, differs = map(str, reports)
    assert "VERDICT: equal within tolerance" in equal
    assert "FIRST OUTSIDE" not in equal
    assert "VERDICT: differs" in differs
    first = differs[differs.index("FIRST OUTSIDE") :].splitlines()[0]
    assert re.search(r"layers\.5 \(layers\.5\): relative difference .* worst element at row \d+\[\d+, \d+\]: \S+ instead of", first)
    assert "the two recordings have another weights" in differs


def test_json_has_everything(reports: tuple[Report, Report]) -> None:
    data = json.loads(json.dumps(reports[1].to_dict(), allow_nan=False))
    assert (data["verdict"], data["exit_code"], data["module"]) == ("differs", 1, "layers.5")
    prompt = data["prompts"][0]
    assert len(prompt["positions"]) == len(PROMPT) + 1
    assert {"kl", "max_logprob_difference", "position"} == set(prompt["positions"][0])
    assert prompt["tensors"][0]["name"] == "layers.0.hc_ffn.pre"
    assert reports[0].to_dict()["exit_code"] == 0


def divergence(index: int, kind: Literal["tie", "error"] = "error") -> TokenDivergence:
    return TokenDivergence(index=index, position=10 + index, ours=5, theirs=9, gap=2.0, top2_gap=1.0, kind=kind)


def test_the_first_changed_token_is_told_from_those_behind_it() -> None:
    changed = [divergence(1), *(divergence(index) for index in (3, 4, 5)), divergence(6, "tie")]
    prompt = PromptReport(index=0, where="other", num_prompt_tokens=10, num_tokens=8, divergences=changed, token_gap=0.25)
    report = Report(golden="g", other="o", precision="native", basis="b", notes=[], prompts=[prompt], num_prompts=1)
    first, behind = (
        "the first chosen otherwise is token 2 of 8, at position 11: 9 instead of 5, gap 2 (a tie up to 0.25), top-2 gap 1: "
        "an error",
        "4 more behind it, judged on the other build's own tokens (1 tie, 3 errors): may follow from it",
    )
    text, page = str(report), unescape(to_html(report))
    for shown in (text, page):
        assert first in shown
        assert behind in shown
        assert "prompts, positions and rows from 0, generated tokens from 1" in shown
    alone = str(replace(report, prompts=[replace(prompt, divergences=changed[:1])]))
    assert first in alone
    assert "behind it" not in alone
    assert "1 token that no tie explains" in alone


class Checker(HTMLParser):
    """Tags that are open, and whatever could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "xlink:href", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(reports: tuple[Report, Report], tmp_path: Path) -> None:
    for report in reports:
        page = to_html(report)
        checker = Checker()
        checker.feed(page)
        checker.close()
        assert checker.open == []
        assert checker.loads == []
        assert not {"script", "link", "img", "iframe"} & set(checker.seen)
        assert "url(" not in page
        assert "@import" not in page
        assert checker.seen.count("svg") == 3
        assert checker.seen.count("circle") == 2 * (len(PROMPT) + 1) + len(report.prompts[0].tensors)
    assert "&lt;other&gt;" in page
    assert "<other>" not in page
    assert "layers.5" in page


def test_a_plot_takes_zeros_and_infinities() -> None:
    picture = plot([3, 4, 5], [0.0, 1e-3, float("inf")], "position", limit=1e-2, marks=[4])
    heights = [float(y) for y in re.findall(r"<circle cx='[\d.]+' cy='([\d.]+)'", picture)]
    assert heights[0] > heights[1] > heights[2]
    assert picture.count("#b42318") == 2
    assert "nan" not in picture
    assert plot([0], [0.0], "position").count("<circle") == 1

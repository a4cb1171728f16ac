"""What-if on the engine: made-up accept lengths through real launches of the fake SGLang."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from pipeline.report import load_report, render
from tests.fakes.fake_study import full_study
from tests.fakes.running import with_fake

CYCLE_MS = 3.785  # of the study's winner at one stream
SPACE = """\
study: gpu2
workload: {prompts: {chat: open, extract: extract}, output_tokens: 96}
load: {concurrency: [8, 1], requests_per_level: 3, max_repeats: 2, warmup_requests: 1}
sglang:
  model: smollm2
  draft_models: {EAGLE3: eagle3}
  tensor_parallel_size: 2
  space: {speculation: {none: , EAGLE3: {num_steps: [3], eagle_topk: [1], num_draft_tokens: [4]}}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = full_study().write(tmp_path)
    (made / "space.yaml").write_text(SPACE)
    facts = json.loads((made / "study.json").read_text())
    (made / "study.json").write_text(json.dumps({**facts, "id": "abc", "overrides": {}}))
    return made


def simulate(*words: str) -> subprocess.CompletedProcess[str]:
    knobs = {"FAKE_SGLANG_STEP_MS": str(CYCLE_MS), "FAKE_SGLANG_TTFT_MS": "2", "FAKE_SGLANG_ACCEPT_LENGTH": "2.1"}
    return with_fake("pipeline.simulate", *words, **knobs)


@pytest.mark.slow
def test_the_what_if_is_confirmed_and_changes_nothing_else(folder: Path) -> None:
    ledger, before = (folder / "records.jsonl").read_bytes(), load_report(str(folder))
    out = simulate(str(folder), "2.5", "3.5", "--level", "chat.c1", "--json")
    assert out.returncode == 0, out.stderr
    low, high = json.loads(out.stdout)
    assert [low["accept_length"], high["accept_length"]] == pytest.approx([2.5, 3.5], rel=0.05)  # not the fake's 2.1
    assert high["measured"]["value"] / low["measured"]["value"] == pytest.approx(1.4, rel=0.15)
    assert abs(low["error"]) < 0.25 and abs(high["error"]) < 0.25

    report = load_report(str(folder))
    assert (folder / "records.jsonl").read_bytes() == ledger
    assert not (folder / "reference.json").exists() and not (folder / "trials" / "000").exists()
    assert (report.ranking, report.verdict) == (before.ranking, before.verdict)
    assert [run.asked for run in report.simulated] == [2.5, 3.5]
    text = render(report)
    assert "What if, on the engine" in text and "predicted tok/s" in text and "rank nowhere" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("9",), "no accept length of 9"),
        (("2.5", "--level", "open.c3"), "was not measured at open.c3"),
    ],
)
def test_what_cannot_be_simulated_is_refused_before_a_launch(folder: Path, words: tuple[str, ...], said: str) -> None:
    out = simulate(str(folder), *words)
    assert out.returncode == 2 and said in out.stderr
    assert not (folder / "simulated").exists()

"""What MLflow's table and charts are told to show."""

from __future__ import annotations

import json

import pytest

from pipeline.config import NgramSpeculation, Speculation
from pipeline.mlflow_view import compare_url, study_note, summary_metrics, summary_params, view_tag, view_url
from pipeline.reporting.build import build
from pipeline.spec import ObjectiveSpec
from tests.fakes.fake_study import BASELINE, WINNER, FakeStudy, config, eagle, full_study


def test_a_trials_summary_agrees_with_its_model() -> None:
    study = FakeStudy(noise=0.0)
    baseline, winner = study.trial(BASELINE, "baseline"), study.trial(WINNER)
    found = summary_metrics(winner, baseline)
    assert found["speedup_vs_baseline"] == pytest.approx(1.7, abs=0.05)
    assert found["break_even_accept_length"] == pytest.approx(
        found["accept_length"] / found["speedup_vs_baseline"], abs=0.002
    )
    assert summary_metrics(baseline, baseline) == {"speedup_vs_baseline": 1.0}


def test_a_trial_without_figures_has_no_summary() -> None:
    study = full_study()
    failed = next(record for record in study.records if record.status == "failed")
    assert summary_metrics(failed, study.records[0]) == {}
    assert summary_metrics(study.records[0], None) == {}


def test_every_trial_states_the_common_parameters() -> None:
    names = {"draft_steps", "draft_tokens", "own_all_reduce", "fusion", "nccl_algo", "nccl_proto", "attention"}
    for record in full_study().records:
        assert summary_params(record.config).keys() == names
    found = summary_params(config(eagle(3), nccl_proto="LL", custom_all_reduce=False))
    assert (found["nccl_proto"], found["nccl_algo"], found["own_all_reduce"]) == ("LL", "default", "off")
    assert summary_params(config())["draft_tokens"] == "0"


def test_drafts_are_numbers_so_that_mlflow_draws_every_run() -> None:
    def drafts(speculation: Speculation, **resolved: int) -> tuple[str | None, str | None]:
        found = summary_params(config(speculation), resolved)
        return found.get("draft_steps"), found.get("draft_tokens")

    assert drafts(eagle(3)) == ("3", "4")
    assert drafts(NgramSpeculation(num_draft_tokens=8)) == ("8", "8")
    unsaid = eagle(3).model_copy(update={"num_steps": None, "num_draft_tokens": None})
    assert drafts(unsaid, speculative_num_steps=5, speculative_num_draft_tokens=6) == ("5", "6")
    assert drafts(unsaid) == (None, None)  # unknown: never "default", never 0


def test_the_view_shows_the_settings_that_varied() -> None:
    name, value = view_tag("gpu2", full_study().records)
    state = json.loads(value)
    assert name == "mlflow.sharedViewState.fastverify-gpu2"
    assert "params.`speculation.EAGLE3.num_steps`" in state["selectedColumns"]
    assert "params.`speculation.EAGLE3.eagle_topk`" not in state["selectedColumns"]  # 1 wherever it exists
    assert "fastverify.study` = 'gpu2'" in state["searchFilter"]
    parallel = next(chart for chart in state["compareRunCharts"] if chart["type"] == "PARALLEL")
    assert {"algorithm", "nccl_algo", "nccl_proto"} <= set(parallel["selectedParams"])
    assert "attention" not in parallel["selectedParams"]  # the same everywhere: no axis
    assert len(value) < 5000  # MLflow's limit of an experiment tag's value


def test_the_studys_own_page_begins_with_the_verdict() -> None:
    study = full_study()
    note = study_note(build("gpu2", study.records, ObjectiveSpec()))
    assert note.startswith("### EAGLE3 steps=3")
    for part in ("**winner**", "**why**", "**noise floor**", "report.html", "sglang.launch_server"):
        assert part in note


def test_links_are_quoted() -> None:
    assert view_url("http://h", "1", "a study").endswith("viewStateShareKey=fastverify-a%20study&compareRunsMode=TABLE")
    assert compare_url("http://h", "1", ["x"]) == "http://h/#/compare-runs?runs=%5B%22x%22%5D&experiments=%5B%221%22%5D"

"""Records in a real MLflow store: what is logged, what is never logged, and that nothing is lost while it is down."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import EngineConfig, NgramSpeculation
from pipeline.errors import InputError, UserError
from pipeline.mlflow_trial import trial_metrics, trial_params, trial_tags
from pipeline.records import Launch, TrialRecord
from pipeline.store import Study
from pipeline.tracking import (
    Ending,
    InBackground,
    MlflowTracker,
    NullTracker,
    check_uri,
    main,
    without_password,
)
from tests.fakes.fake_study import full_study
from tests.fakes.toy_search import level, record

CONFIG = EngineConfig(engine="embedded", model="m", speculation=NgramSpeculation(num_draft_tokens=4))
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture
def study(tmp_path: Path) -> Iterator[Study]:
    space = tmp_path / "space.yaml"
    space.write_text("study: s\n")
    yield Study.create(f"s{tmp_path.name[-6:]}", space, {"id": tmp_path.name, "tags": {"engine": "embedded"}}, tmp_path)


def figures(tok_per_s: float = 100.0) -> TrialRecord:
    return record(1, CONFIG, tok_per_s, params={"speculation.NGRAM.num_draft_tokens": 4, "collectives.nccl_algo": None})


def test_figures_go_under_workload_and_name_with_the_load_as_step() -> None:
    metrics = {(key, step): value for key, value, step in trial_metrics(figures())}
    assert metrics["extract/output_tok_per_s", 8] == 100.0
    assert metrics["extract/p95_ttft_ms", 8] == 50.0
    assert metrics["phase/launch_s", 0] == 60.0


def test_what_is_unknown_is_absent_never_nan_or_zero() -> None:
    keys = {key for key, _, _ in trial_metrics(figures())}
    assert "extract/accept_length" not in keys
    assert "extract/p99_ttft_ms" not in keys
    odd = level(100.0).model_copy(update={"accept_rate": math.nan, "accept_length": math.inf})
    spoiled = figures().model_copy(update={"measurement": figures().measurement.model_copy(update={"levels": (odd,)})})  # type: ignore[union-attr]
    assert all(math.isfinite(value) for _, value, _ in trial_metrics(spoiled))


def test_names_and_values_fit_mlflow() -> None:
    params = trial_params(figures().model_copy(update={"params": {"sglang:spec": "x" * 9000}}))
    assert params["sglang_spec"] == "x" * 9000  # cut when logged; the record has it all
    assert trial_tags(figures(), "s")["mlflow.note.content"].startswith("**search**")


def test_the_note_holds_the_command_to_paste() -> None:
    launch = Launch(argv=("python", "-m", "x", "--name", "a b"), env={"NCCL_ALGO": "Ring"})
    note = trial_tags(figures().model_copy(update={"launch": launch}), "s")["mlflow.note.content"]
    assert "NCCL_ALGO=Ring" in note
    assert "--name 'a b'" in note


def test_trials_become_children_of_the_study_and_sync_adds_only_what_is_missing(study: Study, uri: str) -> None:
    tracker = MlflowTracker(study, uri)
    tracker.open()
    study.append(figures())
    tracker.trial(figures())
    study.append(record(2, CONFIG, None))
    assert tracker.sync() == 1
    assert tracker.sync() == 0
    runs = runs_of(study, uri)
    parent = next(run for run in runs if run.data.tags["fastverify.trial"] == "study")
    children = [run for run in runs if run is not parent]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    failed = next(run for run in children if run.data.tags["status"] == "failed")
    assert failed.info.status == "FAILED"
    assert failed.data.tags["failure_class"] == "collective"
    assert "objective" not in failed.data.metrics


def test_a_run_has_the_trials_own_times_and_figures_that_can_be_read(study: Study, uri: str) -> None:
    made = figures(1234.56789).model_copy(update={"started_at": "2026-05-04T09:00:00+00:00"})
    study.append(made)
    MlflowTracker(study, uri).sync()
    run = next(run for run in runs_of(study, uri) if run.data.tags["fastverify.trial"] == "1")
    assert run.info.end_time - run.info.start_time == pytest.approx(1000 * sum(made.phases_s.values()))
    assert run.info.start_time == 1_777_885_200_000
    assert run.data.metrics["extract/output_tok_per_s"] == 1234.57


def test_the_outcome_and_the_report_are_on_the_parent(study: Study, uri: str, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    report.write_text("<html></html>")
    tracker = MlflowTracker(study, uri)
    tracker.finish({"winner": "NGRAM", "noise_floor": 0.01, "gain_over_baseline": None}, [report])
    (parent,) = runs_of(study, uri)
    assert parent.data.metrics == {"noise_floor": 0.01}
    assert parent.data.tags["winner"] == "NGRAM"
    assert parent.info.status == "FINISHED"


@pytest.mark.parametrize("ending", ["KILLED", "FAILED"])
def test_a_study_that_was_stopped_is_not_finished_and_runs_again_when_resumed(
    study: Study, uri: str, ending: Ending
) -> None:
    MlflowTracker(study, uri).finish({}, [], ending)
    assert runs_of(study, uri)[0].info.status == ending
    resumed = MlflowTracker(study, uri)
    resumed.open()
    assert runs_of(study, uri)[0].info.status == "RUNNING"
    resumed.finish({}, [])
    (parent,) = runs_of(study, uri)
    assert parent.info.status == "FINISHED"


def test_mlflow_down_warns_and_loses_nothing(study: Study, uri: str, caplog: pytest.LogCaptureFixture) -> None:
    tracker = MlflowTracker(study, "http://127.0.0.1:9")
    tracker.open()
    study.append(figures())
    tracker.trial(figures())
    assert "logs it later" in caplog.text
    assert MlflowTracker(study, uri).sync() == 1


def test_a_mute_mlflow_holds_no_trial_up(study: Study, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    class Mute(MlflowTracker):
        def open(self) -> None:
            release.wait(30)

    tracker = InBackground(Mute(study, "http://127.0.0.1:9"), patience_s=0.2)
    began = time.monotonic()
    tracker.open()
    tracker.trial(figures())
    tracker.finish({}, [])
    assert time.monotonic() - began < 5
    assert "did not take all within" in caplog.text
    release.set()


def test_in_the_background_all_is_logged_by_the_end(study: Study, uri: str) -> None:
    tracker = InBackground(MlflowTracker(study, uri))
    tracker.open()
    study.append(figures())
    tracker.trial(figures())
    tracker.finish({"winner": "NGRAM"}, [])
    parent = next(run for run in runs_of(study, uri) if run.data.tags["fastverify.trial"] == "study")
    assert len(runs_of(study, uri)) == 2
    assert (parent.data.tags["winner"], parent.data.tags["engine"]) == ("NGRAM", "embedded")


def test_system_metrics_go_to_the_study_where_they_are_asked_for(
    study: Study, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    tracker = MlflowTracker(study, uri, system_metrics=True)
    tracker.open()
    until = time.monotonic() + 20
    while not any(name.startswith("system/") for name in runs_of(study, uri)[0].data.metrics):
        assert time.monotonic() < until
        time.sleep(0.1)
    tracker.finish({}, [])
    assert runs_of(study, uri)[0].info.status == "FINISHED"


@pytest.mark.parametrize("uri", ["http://h:5000", "sqlite:///a.db", "postgresql+psycopg2://u@h/d", "none"])
def test_a_store_is_a_uri(uri: str) -> None:
    check_uri(uri)


@pytest.mark.parametrize("uri", ["nonsense", "htp://h", "", "sqlite"])
def test_other_words_are_no_store(uri: str) -> None:
    with pytest.raises(InputError, match=r"--tracking-uri.*expected http"):
        check_uri(uri)


def test_the_null_tracker_takes_everything() -> None:
    tracker = NullTracker()
    tracker.trial(figures())
    tracker.finish({}, [])


def runs_of(study: Study, uri: str) -> list:  # type: ignore[type-arg]
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("fastverify")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], f"tags.`fastverify.study` = '{study.name}'"))


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql+psycopg2://me:p@ss@db:5432/x", "postgresql+psycopg2://db:5432/x"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("sqlite:////home/a@b/mlflow.db", "sqlite:////home/a@b/mlflow.db"),
    ],
)
def test_a_password_is_never_printed(uri: str, shown: str) -> None:
    assert without_password(uri) == shown


@pytest.mark.parametrize(("uri", "said"), [("nonsense", "is no MLflow store"), ("http://127.0.0.1:9", "not answer")])
def test_logging_later_to_a_store_that_is_none_or_away_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, said: str
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    folder = full_study().write(tmp_path)
    with pytest.raises(UserError, match=said):
        main(str(folder), uri)


def test_a_finished_study_logged_later_has_its_outcome_report_and_view(tmp_path: Path, uri: str) -> None:
    from mlflow import MlflowClient

    late = Study.open(str(full_study().write(tmp_path)))

    def parent() -> Any:
        (found,) = [run for run in runs_of(late, uri) if run.data.tags["fastverify.trial"] == "study"]
        return found

    late.add_facts(finished=False)
    main(str(late.folder), uri)
    assert (parent().info.status, parent().data.tags.get("winner")) == ("RUNNING", None)
    late.add_facts(finished=True)
    main(str(late.folder), uri)
    assert parent().info.status == "FINISHED"
    assert parent().data.tags["winner"]
    client = MlflowClient(uri)
    assert "report.html" in [file.path for file in client.list_artifacts(parent().info.run_id)]
    view = f"mlflow.sharedViewState.fastverify-{late.name}"
    assert view in client.get_experiment(parent().info.experiment_id).tags

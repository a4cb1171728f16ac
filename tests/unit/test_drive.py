"""The driver without a cluster: exit codes, what a resumed study must share, what the end says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import drive
from pipeline.drive import Job
from pipeline.errors import InputError
from pipeline.live import Board
from pipeline.records import Topology
from pipeline.space import EngineChoice, Overrides, load_space
from pipeline.store import RUNS, Study
from pipeline.tracking import Ending, NullTracker
from tests.fakes.toy_search import record

SPACE = "study: s\nembedded: {model: smollm2-135m, space: {speculation: {none: , NGRAM: }}}\nload: {concurrency: [8]}\n"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "s.yaml").write_text(SPACE)
    spec = load_space(tmp_path / "s.yaml")
    return Job(
        "s", tmp_path / "s.yaml", spec.for_engine("embedded"), EngineChoice("embedded", "no GPU on this machine"),
        Topology(), None, Overrides(trials=4), tmp_path / "runs",
    )  # fmt: skip


def ended(**more: Any) -> Any:
    return SimpleNamespace(**{"interrupted": False, "left": None, "done": None, "halted": None, **more})


def resumed(job: Job, **more: Any) -> Study:
    return drive._resumed(Job(**{**vars(job), "resume": "s", **more}))


def test_exit_codes(job: Job) -> None:
    study = drive._created(job)
    assert drive._exit_code(study, ended(interrupted=True)) == 130
    assert drive._exit_code(study, ended(halted="the time for this run is over")) == 0
    assert drive._exit_code(study, ended(done="the baseline gave no figures")) == 1
    study.append(record(0, job.space.baseline(), 100.0, "baseline"))
    assert drive._exit_code(study, ended(done="every phase is complete")) == 0
    assert drive._exit_code(study, ended(done="every phase is complete", left="still there: pid 1")) == 1


def test_two_drivers_and_a_resumed_study(job: Job) -> None:
    study = drive._created(job)
    with pytest.raises(InputError, match="another process runs"):
        resumed(job)
    assert study._lock is not None
    study._lock.close()
    assert resumed(job, overrides=Overrides(trials=9)).facts["overrides"] == {"trials": 9}


def test_a_study_goes_on_only_where_its_figures_compare(job: Job) -> None:
    drive._created(job)._lock.close()  # type: ignore[union-attr]
    with pytest.raises(InputError, match="embedded without GPUs, here it would be sglang on 2 x H200"):
        resumed(job, topology=Topology(gpu_count=2, gpu_model="H200"), choice=EngineChoice("sglang", "x"))
    job.space_file.write_text(SPACE.replace("NGRAM", "STANDALONE"))
    with pytest.raises(InputError, match="another space file"):
        resumed(job)


def test_the_end_says_how_to_go_on_and_what_is_left(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    study = drive._created(job)
    study.append(record(0, job.space.baseline(), 100.0, "baseline"))
    drive._close(job, study, ended(halted="interrupted", left="still there: pid 1"), NullTracker(), Board(tty=False))
    said = capsys.readouterr().out
    assert "still there: pid 1" in said
    assert f"--resume s --runs {job.runs}" in said
    assert not study.facts["finished"]
    drive._close(job, study, ended(done="enough"), NullTracker(), Board(tty=False))
    assert (study.facts["finished"], study.facts["ended"]) == (True, "enough")
    assert (study.folder / "report.html").is_file()


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        (None, "python -m pipeline.ui --runs "),
        ("none", "nothing logged"),
        ("http://me:secret@host:5000", "on http://host:5000"),
    ],
)
def test_the_end_says_where_mlflow_shows_the_study(job: Job, uri: str | None, said: str) -> None:
    assert drive._pages(replace(job, tracking_uri=uri)).startswith(said)
    assert drive._pages(replace(job, runs=RUNS, tracking_uri=None)).startswith("make ui")


class Told(NullTracker):
    """Remembers how the study's run ended."""

    def __init__(self) -> None:
        self.endings: list[tuple[str, str]] = []

    def finish(self, outcome: dict[str, Any], artifacts: list[Path], ending: Ending = "FINISHED") -> None:
        self.endings.append((ending, str(outcome.get("why"))))


@pytest.mark.parametrize(
    ("how", "ending"),
    [
        ({"done": "every phase is complete"}, "FINISHED"),
        ({"halted": "interrupted", "interrupted": True}, "KILLED"),
        ({"halted": "the time for this run is over"}, "KILLED"),
        ({"done": "every phase is complete", "left": "still there: pid 1"}, "FAILED"),
    ],
)
def test_mlflow_hears_how_the_study_ended(job: Job, how: dict[str, Any], ending: str) -> None:
    study, tracker = drive._created(job), Told()
    study.append(record(0, job.space.baseline(), 100.0, "baseline"))
    drive._close(job, study, ended(**how), tracker, Board(tty=False))
    assert [told for told, _ in tracker.endings] == [ending]


@pytest.mark.parametrize(("error", "ending"), [(KeyboardInterrupt(), "KILLED"), (OSError("disk full"), "FAILED")])
def test_a_driver_that_dies_says_so_in_mlflow(error: BaseException, ending: str) -> None:
    tracker = Told()
    with pytest.raises(type(error)), drive._ending_told(tracker):
        raise error
    assert tracker.endings == [(ending, f"the driver ended: {str(error) or type(error).__name__}")]


def test_winners_of_earlier_studies_on_such_a_machine_are_tried_first(job: Job) -> None:
    point = {"speculation.algorithm": "NGRAM"}
    study = drive._created(job)
    assert drive._earlier_winners(job) == []
    study.add_facts(finished=True, winner_params=point)
    assert drive._earlier_winners(job) == [point]
    other = Job(**{**vars(job), "topology": Topology(gpu_count=1, gpu_model="H200")})
    assert drive._earlier_winners(other) == []
    study.add_facts(winner_params={"speculation.algorithm": "EAGLE3"})
    assert drive._earlier_winners(job) == []  # no longer in this space


def test_every_model_of_the_embedded_engine_is_here_before_the_first_trial(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("pipeline.models.resolve", asked.append)
    spec = load_space(job.space_file, Overrides(model="org/mine"))
    drive.fetch_models(spec.for_engine("embedded"))
    assert asked == ["org/mine"]

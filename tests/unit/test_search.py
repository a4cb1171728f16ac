"""Tune's searcher, the desk and second tries, without a cluster: what is proposed, kept, judged, and when it stops."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from pipeline import search, sweeping
from pipeline.config import EngineConfig
from pipeline.errors import ClusterError, FastverifyError
from pipeline.proposer import Done, Proposal, Proposer, Wait
from pipeline.records import Failure, FailureClass, Role, Topology, TrialRecord
from pipeline.ruler import MeasurePlan
from pipeline.search import Adapter, Bench, Desk, run_proposal
from pipeline.spec import Limits, LoadSpec, ObjectiveSpec
from pipeline.store import Study
from pipeline.trial import Outcome
from serve.deployment import TAKEN_AWAY
from tests.fakes import toy_search
from tests.fakes.toy_search import record

CONFIG = EngineConfig(engine="sglang", model="toy")


@pytest.fixture
def study(tmp_path: Path) -> Study:
    (tmp_path / "space.yaml").write_text("study: s\n")
    return Study.create("s", tmp_path / "space.yaml", {"id": "x"}, tmp_path / "runs")


@pytest.fixture
def bench(study: Study) -> Bench:
    plan = MeasurePlan(load=LoadSpec(concurrency=(1,)), salt="x")
    return Bench("toy", str(study.folder), plan, ObjectiveSpec(), Limits(), Topology())


@pytest.fixture
def shown() -> list[str]:
    return []


@pytest.fixture
def desk(study: Study, bench: Bench, shown: list[str], monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(search, "sweep_by_ray", lambda *_: [])
    return Desk(
        study, bench, (), (lambda kept: shown.append(f"kept {kept.number}"),),
        lambda proposal, _: shown.append(f"start {proposal.number}"),
        lambda proposal, phase: shown.append(f"{proposal.number} {phase}"),
    )  # fmt: skip


def proposer(ledger: list[TrialRecord] | None = None) -> Proposer:
    return toy_search.Study(ledger=ledger or []).proposer()


def answer(adapter: Adapter, trial_id: str, speed: Callable[[EngineConfig], float | None]) -> Proposal | None:
    """Let Tune ask and answer once; the proposal, or None at the end."""
    asked = adapter.suggest(trial_id)
    if asked == Adapter.FINISHED:
        return None
    proposal: Proposal = asked["proposal"]
    value, params = speed(proposal.config), proposal.params
    done = record(proposal.number, proposal.config, value, proposal.role, params=params, **proposal.facts)
    adapter.on_trial_result(trial_id, {"phase": "launch"})
    adapter.on_trial_complete(trial_id, {"record": done.model_dump_json(), "greedy": "[]"})
    return proposal


def test_under_tune_a_study_goes_as_it_does_offline(desk: Desk, study: Study) -> None:
    offline = toy_search.Study()
    offline.run()
    adapter = Adapter(proposer(), desk, slots=1)
    launched = []
    while proposal := answer(adapter, f"t{len(launched)}", toy_search.toy_speed):
        launched.append((proposal.role, proposal.config_id))
    assert launched == [(p.role, p.config_id) for p in offline.launches]
    assert adapter.done == offline.end
    assert [r.number for r in study.records()] == [r.number for r in offline.ledger]


def test_a_node_is_given_one_trial_at_a_time(desk: Desk, shown: list[str]) -> None:
    adapter = Adapter(proposer(), desk, slots=1)
    assert adapter.suggest("a")["proposal"].role == "baseline"
    assert adapter.suggest("b") is None
    adapter.on_trial_result("a", {"phase": "measure"})
    adapter.on_trial_result("b", {"phase": "unknown to us"})
    assert shown == ["start 0", "0 measure"]


def test_a_trial_that_dies_without_a_word_is_tried_once_more(desk: Desk, study: Study) -> None:
    adapter = Adapter(proposer(), desk, slots=1)
    first = adapter.suggest("a")
    adapter.on_trial_complete("a", error=True)
    assert study.records() == [], "somebody killed it: the configuration is not to blame"
    assert answer(adapter, "b", toy_search.toy_speed) == first["proposal"]
    (kept,) = study.records()
    assert kept.status == "ok"
    assert kept.notes[-1] == "second try: the first one's process was killed"


def test_a_trial_that_dies_twice_or_crashes_is_a_record_that_says_so(desk: Desk, study: Study) -> None:
    adapter = Adapter(proposer(), desk, slots=1)
    for trial_id in ("a", "b"):
        adapter.suggest(trial_id)
        adapter.on_trial_complete(trial_id, error=True)
    adapter.suggest("c")
    adapter.on_trial_complete("c", {"crash": "Traceback …\nKeyError: 'x'"})
    died, crashed = study.records()
    assert died.failure is not None and crashed.failure is not None
    assert died.failure.failure_class is FailureClass.KILLED
    assert (crashed.failure.failure_class, crashed.reason) == (FailureClass.CRASH, "KeyError: 'x'")
    assert adapter.halted is None


def test_what_is_left_behind_stops_the_study(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "sweep_by_ray", lambda *_: ["port 1: sglang (pid 2) cannot be killed"])
    adapter = Adapter(proposer(), desk, slots=1)
    adapter.suggest("a")
    adapter.on_trial_complete("a", error=True)
    assert adapter.left is not None
    assert "pid 2" in adapter.left
    assert adapter.suggest("b") == Adapter.FINISHED


def test_where_ray_died_the_trial_is_not_blamed(
    desk: Desk, study: Study, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(*_: object) -> list[str]:
        raise ray.exceptions.LocalRayletDiedError

    for module in (search, sweeping):
        monkeypatch.setattr(module, "sweep_by_ray", dead)
    adapter = Adapter(proposer(), desk, slots=1)
    adapter.suggest("a")
    adapter.on_trial_complete("a", error=True)
    assert study.records() == [], "it comes back when the study is resumed"
    assert adapter.suggest("b") == Adapter.FINISHED
    with pytest.raises(ClusterError, match=r"Ray has died \(LocalRayletDiedError\); go on with --resume"):
        adapter.raise_fault()
    assert sweeping.sweep(bench, ("10.0.0.1",)) == [], "this node was looked at without Ray"
    assert "on other nodes could not be looked for" in sweeping.sweep(bench, ("10.0.0.1", "10.0.0.2"))[0]


def test_a_full_disk_ends_the_run_with_one_line(desk: Desk, study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: TrialRecord) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(study, "append", full)
    adapter = Adapter(proposer(), desk, slots=1)
    answer(adapter, "a", toy_search.toy_speed)
    assert adapter.suggest("b") == Adapter.FINISHED
    with pytest.raises(FastverifyError, match=r"trial 0 could not be recorded.*No space left"):
        adapter.raise_fault()


def test_a_fault_of_ours_is_raised_as_it_is(desk: Desk) -> None:
    adapter = Adapter(proposer(), desk, slots=1)
    adapter.suggest("a")
    adapter.on_trial_complete("a", {"record": "no JSON", "greedy": "[]"})
    with pytest.raises(ValueError, match="JSON"):
        adapter.raise_fault()


def test_when_time_is_up_what_runs_may_end_and_nothing_starts(desk: Desk) -> None:
    adapter = Adapter(proposer(), desk, slots=2, stop_after_s=100.0)
    adapter.suggest("a")
    adapter._began -= 200
    assert adapter.suggest("b") is None
    adapter.on_trial_complete("a", error=True)
    assert adapter.suggest("b") == Adapter.FINISHED
    assert (adapter.halted, adapter.done) == ("the time for this run is over", None)


def test_an_interrupt_is_said(desk: Desk) -> None:
    adapter = Adapter(proposer(), desk, slots=1)
    adapter.interrupt()
    assert adapter.suggest("a") == Adapter.FINISHED
    assert adapter.interrupted


def test_what_needs_no_launch_is_kept_and_the_end_is_told(desk: Desk, study: Study) -> None:
    class Script(Proposer):
        def __init__(self) -> None:
            self.answers: list[Any] = [Wait(), Done("enough")]

        def propose(self) -> Any:
            return self.answers.pop(0)

        def drain(self) -> list[TrialRecord]:
            return [record(len(self.answers), CONFIG, None, status="pruned", reason="rule")]

    adapter = Adapter(Script(), desk, slots=1)
    assert adapter.suggest("a") is None
    assert adapter.suggest("a") == Adapter.FINISHED
    assert adapter.done == "enough"
    assert len(study.records()) == 2


# ---- second tries


def failed(kind: FailureClass, phase: str = "launch") -> Failure:
    return Failure(failure_class=kind, cause="x", phase=phase)


def tries(
    monkeypatch: pytest.MonkeyPatch, bench: Bench, failure: Failure, role: Role = "search"
) -> tuple[list[tuple[EngineConfig, str]], TrialRecord]:
    """Run a proposal whose first try fails so; the tries that were made, and the record."""
    made: list[tuple[EngineConfig, str]] = []

    def attempt(proposal: Proposal, _: Bench, __: Any, suffix: str = "") -> Outcome:
        made.append((proposal.config, suffix))
        done = record(3, proposal.config, 100.0 if suffix else None, role)
        return Outcome(done if suffix else done.model_copy(update={"failure": failure}))

    monkeypatch.setattr(search, "_attempt", attempt)
    return made, run_proposal(Proposal(3, role, CONFIG), bench, lambda _: None).record


def test_too_little_memory_is_tried_again_with_less(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made, done = tries(monkeypatch, bench, failed(FailureClass.OOM_LOWER))
    assert [suffix for _, suffix in made] == ["", "retry"]
    assert done.config.mem_fraction_static == 0.75
    assert "changed: mem_fraction_static not stated -> 0.75" in done.notes[-1]
    assert done.phases_s["first_try"] == 120.0  # GPU time is spent by both


@pytest.mark.parametrize(
    ("failure", "role", "count"),
    [
        (failed(FailureClass.CAPTURE), "search", 1),
        (failed(FailureClass.PORT), "confirm", 2),
        (failed(FailureClass.OOM_LOWER), "confirm", 1),  # another configuration than was asked for
        (failed(FailureClass.OOM_LOWER), "ablation", 1),
        (failed(FailureClass.KILLED), "search", 2),
        (failed(FailureClass.KILLED, TAKEN_AWAY), "search", 1),  # the driver itself took it away
    ],
)
def test_what_is_worth_a_second_try(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, failure: Failure, role: Role, count: int
) -> None:
    made, _ = tries(monkeypatch, bench, failure, role)
    assert len(made) == count


def test_no_study_takes_down_the_applications_of_another(bench: Bench) -> None:
    other = Bench("toy-2", bench.folder, bench.plan, bench.objective, bench.limits, bench.topology)
    assert not other.app(0).startswith(bench.apps)
    assert bench.app(12).startswith(bench.apps)

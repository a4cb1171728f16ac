"""One trial against a made-up engine: its order, and that every failure becomes a record with a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import pytest

from pipeline.config import EngineConfig, NgramSpeculation
from pipeline.errors import EngineError, MeasurementError, TeardownError
from pipeline.lossless import GreedyOutput, Reference
from pipeline.records import Failure, FailureClass, Launch, LevelResult, TeardownProof, Topology
from pipeline.spec import ObjectiveSpec
from pipeline.trial import Outcome, TrialRequest, judge, run_trial
from tests.fakes.toy_search import level

CONFIG = EngineConfig(engine="embedded", model="m", speculation=NgramSpeculation(num_draft_tokens=4))
PROOF = TeardownProof(group_dead=True, ports_free=True, seconds=0.1)
DEAD = EngineError(Failure(failure_class=FailureClass.CAPTURE, cause="capture failed"))


@dataclass
class FakeEngine:
    """Raises where it is told to, and writes down what happened."""

    fails_to_start: Exception | None = None
    fails_to_stop: Exception | None = None
    launch: Launch | None = None
    resolved: dict[str, Any] = field(default_factory=dict)
    teardown: TeardownProof | None = None
    phases_s: dict[str, float] = field(default_factory=dict)
    base_url: str = "http://127.0.0.1:1"

    def __enter__(self) -> FakeEngine:
        self.launch = Launch(argv=("engine",), log_path="engine.log")
        self.phases_s["deploy"] = 1.0
        if self.fails_to_start:
            self.teardown = PROOF
            raise self.fails_to_start
        self.resolved = {"version": "1"}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.teardown = PROOF
        if self.fails_to_stop:
            raise self.fails_to_stop

    def check(self) -> None:
        return None


@dataclass
class Figures:
    levels: tuple[LevelResult, ...] = (level(100.0),)
    greedy: tuple[GreedyOutput, ...] = (GreedyOutput(prompt_id="p", text="a b c"),)
    notes: tuple[str, ...] = ()


def run(engine: FakeEngine, measure: Callable[..., Any] = lambda *_, **__: Figures()) -> Outcome:
    request = TrialRequest("s", 3, "search", CONFIG, {"x": 1}, ObjectiveSpec(), Topology(), facts={"node": "n"})
    return run_trial(
        request, engine, measure, lambda *_: {"engine_version": "1"}, phases.append, lambda: {"0": list(phases)}
    )


phases: list[str] = []


@pytest.fixture(autouse=True)
def _clear() -> None:
    phases.clear()


def raising(error: Exception) -> Callable[..., Any]:
    def measure(*_: Any, **__: Any) -> Any:
        raise error

    return measure


def test_a_good_trial_has_figures_proof_and_phases() -> None:
    record = run(FakeEngine()).record
    assert (record.status, record.number, record.node, record.engine_version) == ("ok", 3, "n", "1")
    assert record.measurement is not None
    assert record.measurement.objective is not None
    assert record.measurement.objective.value == 100.0
    assert record.teardown == PROOF
    assert {"deploy", "measure"} <= set(record.phases_s)
    assert phases == ["launch", "teardown"]
    assert record.gpu_state == {"0": ["launch"]}  # as it was under load, not after the teardown


@pytest.mark.parametrize(
    ("engine", "measure", "expected"),
    [
        (FakeEngine(fails_to_start=DEAD), None, FailureClass.CAPTURE),
        (FakeEngine(), raising(DEAD), FailureClass.CAPTURE),
        (FakeEngine(), raising(MeasurementError("saturated")), FailureClass.MEASUREMENT),
        (FakeEngine(fails_to_stop=TeardownError("left a process")), None, FailureClass.TEARDOWN),
    ],
)
def test_every_failure_is_a_record_with_a_class_a_reason_and_no_score(
    engine: FakeEngine, measure: Callable[..., Any] | None, expected: FailureClass
) -> None:
    record = (run(engine, measure) if measure else run(engine)).record
    assert record.status == "failed"
    assert record.failure is not None
    assert record.failure.failure_class is expected
    assert record.reason
    assert record.measurement is None
    assert record.teardown == PROOF
    assert record.launch is not None  # also of an engine that never became ready


def test_what_the_engine_died_of_is_said_when_its_teardown_fails_too() -> None:
    record = run(FakeEngine(fails_to_stop=TeardownError("left a process")), raising(DEAD)).record
    assert record.failure is not None
    assert record.failure.failure_class is FailureClass.TEARDOWN
    assert record.failure.cause == "left a process; before that: capture: capture failed"


def test_a_trial_stopped_early_keeps_its_levels_and_has_no_value() -> None:
    record = run(FakeEngine(), lambda *_, **__: Figures(notes=("stopped early: cannot win",))).record
    assert record.status == "stopped"
    assert record.measurement is not None
    assert record.measurement.levels
    assert record.measurement.objective is None


def test_other_text_than_the_baselines_marks_the_trial_as_not_lossless() -> None:
    reference = Reference(outputs=(GreedyOutput(prompt_id="p", text="a b d"),))
    judged = judge(run(FakeEngine()), reference)
    assert judged.lossless is not None
    assert not judged.lossless.passed


def test_a_failed_trial_is_not_judged() -> None:
    outcome = run(FakeEngine(fails_to_start=DEAD))
    assert judge(outcome, None) == outcome.record

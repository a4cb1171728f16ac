"""One trial: deploy, ready, warm up, measure, record, tear down. Knows no Tune, Ray or HTTP.

Whatever goes wrong becomes a record with a reason; the caller never sees an engine's exception.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from pipeline.config import EngineConfig
from pipeline.errors import EngineError, MeasurementError, TeardownError
from pipeline.lossless import GreedyOutput, Reference, compare
from pipeline.metrics import objective, with_accept_rate
from pipeline.phases import timed
from pipeline.records import (
    Failure,
    FailureClass,
    Launch,
    LevelResult,
    Measurement,
    Role,
    TeardownProof,
    Topology,
    TrialRecord,
)
from pipeline.sanity import broken_rules
from pipeline.spec import ObjectiveSpec

OnPhase = Callable[[str], None]
StopEarly = Callable[[tuple[LevelResult, ...]], str | None]


class Engine(Protocol):
    """A deployed engine (`serve.deployment.Deployed`)."""

    launch: Launch | None
    resolved: dict[str, Any]
    teardown: TeardownProof | None
    phases_s: dict[str, float]

    def __enter__(self) -> Engine: ...

    def __exit__(self, *exc: object) -> None: ...

    @property
    def base_url(self) -> str: ...

    def check(self) -> None: ...


class Measured(Protocol):
    """What a ruler brings back."""

    @property
    def levels(self) -> tuple[LevelResult, ...]: ...

    @property
    def greedy(self) -> tuple[GreedyOutput, ...]: ...

    @property
    def notes(self) -> tuple[str, ...]: ...


class Measure(Protocol):
    """A ruler's `measure`, bound to its plan."""

    def __call__(
        self, base_url: str, *, watch: Callable[[], None], on_phase: OnPhase, stop_early: StopEarly | None
    ) -> Measured: ...


ReadBack = Callable[[EngineConfig, dict[str, Any], str], dict[str, Any]]


@dataclass(frozen=True)
class TrialRequest:
    """What is to be tried, and the facts that its record carries."""

    study: str
    number: int
    role: Role
    config: EngineConfig
    params: dict[str, Any]
    objective: ObjectiveSpec
    topology: Topology
    stop_early: StopEarly | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # versions, git_commit, node, engine_version


@dataclass(frozen=True)
class Outcome:
    """A trial's record, and its greedy outputs for the lossless check."""

    record: TrialRecord
    greedy: tuple[GreedyOutput, ...] = ()


def run_trial(
    request: TrialRequest,
    engine: Engine,
    measure: Measure,
    read_back: ReadBack,
    on_phase: OnPhase,
    gpu_state: Callable[[], dict[str, Any]] = dict,
) -> Outcome:
    """Run one trial to its end and return its record; failures are records too."""
    facts: dict[str, Any] = {"started_at": datetime.now(UTC).isoformat(timespec="seconds")}
    phases: dict[str, float] = {}
    greedy: tuple[GreedyOutput, ...] = ()
    try:
        on_phase("launch")
        with engine:
            with timed(phases, "measure"):
                measured = measure(
                    engine.base_url, watch=engine.check, on_phase=on_phase, stop_early=request.stop_early
                )
            facts["gpu_state"] = gpu_state()  # after the teardown it would be that of idle GPUs
            on_phase("teardown")
        greedy = measured.greedy
        facts |= _figures(request, measured)
    except EngineError as error:
        facts |= _failed(error.failure)
    except MeasurementError as error:
        facts |= _failed(Failure(failure_class=FailureClass.MEASUREMENT, cause=str(error), phase="measure"))
    except TeardownError as error:
        facts |= _failed(Failure(failure_class=FailureClass.TEARDOWN, cause=_with_first(error), phase="teardown"))
    facts |= {"launch": engine.launch, "resolved": engine.resolved, "teardown": engine.teardown}
    if engine.launch is not None and engine.resolved:
        facts |= read_back(request.config, engine.resolved, engine.launch.log_path)
    return Outcome(_record(request, facts, phases | engine.phases_s), greedy)


def judge(outcome: Outcome, reference: Reference | None) -> TrialRecord:
    """Add the lossless check and the sanity rules to a measured trial.

    Args:
        outcome: what `run_trial` returned.
        reference: the baseline's greedy outputs, None when there is no baseline to hold against.
    """
    record = outcome.record
    if record.status not in ("ok", "stopped") or record.measurement is None:
        return record
    # A trial stopped early was not asked: it cannot win anyway.
    levels = record.measurement.levels
    lossless = compare(reference, outcome.greedy, levels, record.config) if reference and outcome.greedy else None
    broken = broken_rules(levels, record.config, outcome.greedy, record.log_accept_length, record.resolved)
    return record.model_copy(update={"lossless": lossless, "broken": broken})


def _figures(request: TrialRequest, measured: Measured) -> dict[str, Any]:
    """Status, measurement and notes; a trial stopped early has levels, and no value of the objective."""
    stopped = next((note for note in measured.notes if note.startswith("stopped early")), None)
    value = None if stopped else objective(measured.levels, request.objective.goals[0])
    levels = with_accept_rate(measured.levels, getattr(request.config.speculation, "num_draft_tokens", None))
    return {
        "status": "stopped" if stopped else "ok",
        "reason": stopped,
        "measurement": Measurement(levels=levels, objective=value),
        "notes": measured.notes,
    }


def _with_first(error: TeardownError) -> str:
    """What is left, and what the engine had died of before, if it had."""
    first = error.__context__
    return f"{error}; before that: {first}" if isinstance(first, EngineError | MeasurementError) else str(error)


def _failed(failure: Failure) -> dict[str, Any]:
    return {"status": "failed", "failure": failure, "reason": failure.cause}


def _record(request: TrialRequest, facts: dict[str, Any], phases: dict[str, float]) -> TrialRecord:
    fixed: dict[str, Any] = {
        "study": request.study,
        "number": request.number,
        "role": request.role,
        "config": request.config,
        "config_id": request.config.config_id,
        "params": request.params,
        "topology": request.topology,
        "phases_s": phases,
    }
    return TrialRecord(**{**request.facts, **fixed, **facts})

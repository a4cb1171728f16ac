"""Runs the proposer under Ray Tune: one trial a node, each an engine deployed through Ray Serve.

The proposer decides, the ledger remembers, Tune schedules. Tune's own state is never read back.
"""

from __future__ import annotations

import logging
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from pydantic import TypeAdapter
from ray import tune
from ray.tune.search import Searcher as TuneSearcher

from pipeline.config import EngineConfig
from pipeline.errors import ClusterError, FastverifyError, MeasurementError
from pipeline.lossless import GreedyOutput, Reference
from pipeline.proposer import Done, Proposal, Proposer, Wait
from pipeline.readback import read_back
from pipeline.records import Failure, FailureClass, Topology, TrialRecord
from pipeline.reporting.command import pasteable
from pipeline.ruler import MeasurePlan, Ruler
from pipeline.spec import Limits, ObjectiveSpec
from pipeline.store import Study
from pipeline.sweeping import sweep_by_ray
from pipeline.tokens import token_counter
from pipeline.topology import gpu_state
from pipeline.trial import Outcome, TrialRequest, judge, run_trial
from serve.deployment import TAKEN_AWAY, Deployed, EngineOptions
from serve.engines.logs import second_try
from serve.environment import SLOT

log = logging.getLogger(__name__)

_GREEDY = TypeAdapter(tuple[GreedyOutput, ...])


@dataclass(frozen=True)
class Bench:
    """What every trial of a study shares: how to measure, where to write, which facts to record."""

    study: str
    folder: str
    plan: MeasurePlan
    objective: ObjectiveSpec
    limits: Limits
    topology: Topology
    facts: dict[str, Any] = field(default_factory=dict)
    profile: bool = False  # each algorithm's first trial, after its measurement

    def trial_dir(self, number: int) -> Path:
        """The trial's folder on the node where it runs."""
        return self.trials / f"{number:03d}"

    @property
    def trials(self) -> Path:
        """The folder of all trials' folders."""
        return Path(self.folder) / "trials"

    @property
    def apps(self) -> str:
        """What the names of this study's Serve applications begin with, and no other study's on a shared cluster."""
        return f"trial-{self.study}-{self.plan.salt}-"

    def app(self, number: int) -> str:
        """What the names of a trial's Serve applications begin with; a second try has one of its own."""
        return f"{self.apps}{number:03d}"


def run_proposal(proposal: Proposal, bench: Bench, on_phase: Callable[[str], None]) -> Outcome:
    """Run one proposal in this process; failures worth it get one second try, with what changed recorded."""
    outcome = _attempt(proposal, bench, on_phase)
    failure = outcome.record.failure
    again = _again(proposal, failure) if failure is not None else None
    if again is None or failure is None:
        return outcome
    config, changed = again
    on_phase(f"second try after {failure.failure_class}")
    retried = _attempt(replace(proposal, config=config), bench, on_phase, suffix="retry")
    update = {
        "notes": (*retried.record.notes, f"second try after {failure.text()}; changed: {changed}"),
        "phases_s": {"first_try": sum(outcome.record.phases_s.values()), **retried.record.phases_s},
    }
    return replace(retried, record=retried.record.model_copy(update=update))


def _again(proposal: Proposal, failure: Failure) -> tuple[EngineConfig, str] | None:
    """What to launch a second time, and what changed; None when it is not worth it.

    Ablation and confirmation compare configurations: another one than was asked for would answer nothing.
    """
    again = second_try(proposal.config, failure) if failure.phase != TAKEN_AWAY else None
    if again is None or (again[0] != proposal.config and proposal.role not in ("baseline", "seed", "search")):
        return None
    return again


def _attempt(proposal: Proposal, bench: Bench, on_phase: Callable[[str], None], suffix: str = "") -> Outcome:
    folder = bench.trial_dir(proposal.number) / suffix
    options = EngineOptions(str(folder), bench.limits)
    engine = Deployed(proposal.config, options, app_name=bench.app(proposal.number) + suffix)
    ruler = Ruler(bench.plan, count_tokens=token_counter(proposal.config.model))
    request = TrialRequest(
        study=bench.study,
        number=proposal.number,
        role=proposal.role,
        config=proposal.config,
        params=dict(proposal.params),
        objective=bench.objective,
        topology=bench.topology,
        stop_early=proposal.stop_early,
        facts={**bench.facts, **proposal.facts, "node": _node_ip()},
    )

    def measure(base_url: str, **hooks: Any) -> Any:
        measured = ruler.measure(base_url, baseline=proposal.role == "baseline", **hooks)
        _write_traces(folder, measured.windows)
        (folder / "greedy.json").write_bytes(_GREEDY.dump_json(measured.greedy, indent=1))
        if bench.profile and (note := _profile(base_url, proposal.config, Path(bench.folder))):
            return replace(measured, notes=(*measured.notes, note))
        return measured

    return run_trial(request, engine, measure, read_back, on_phase, gpu_state)


def _profile(base_url: str, config: EngineConfig, study: Path) -> str | None:
    """Profile the engine unless its algorithm has a profile; a note when that fails, since figures stand without."""
    mark = study / "profiles" / f"{config.speculation.algorithm}.profiled"
    if mark.exists():
        return None
    from pipeline.capture import profile_running

    try:
        profile_running(base_url, config, study / "profiles" / config.config_id)
    except MeasurementError as error:
        return f"no profile: {error}"
    mark.touch()
    return None


def _write_traces(folder: Path, windows: dict[str, Any]) -> None:
    """Keep raw timestamps beside the summaries, without the texts."""
    adapter = TypeAdapter(Any)
    with (folder / "traces.jsonl").open("wb") as out:
        for level, repeats in windows.items():
            for repeat, window in enumerate(repeats):
                for trace in window.traces:
                    line = {"level": level, "repeat": repeat, "trace": replace(trace, text=None)}
                    out.write(adapter.dump_json(line) + b"\n")


def _node_ip() -> str:
    return str(ray.util.get_node_ip_address())


def trainable(config: dict[str, Any], bench: Bench) -> None:
    """Tune's function: run the proposal, report phases, then the record, once."""
    try:
        outcome = run_proposal(config["proposal"], bench, lambda phase: tune.report({"phase": phase}))
    except Exception:  # the process boundary: a fault of ours must reach the ledger in words too
        tune.report({"crash": traceback.format_exc()})
        return
    greedy = _GREEDY.dump_json(outcome.greedy).decode()
    tune.report({"record": outcome.record.model_dump_json(), "greedy": greedy})


class Adapter(TuneSearcher):
    """Tune's searcher: asks the proposer, hands records to the ledger, the tracker and the board."""

    def __init__(self, proposer: Proposer, desk: Desk, *, slots: int, stop_after_s: float | None = None) -> None:
        super().__init__()
        self._proposer, self._desk, self._slots = proposer, desk, slots
        self._began, self._stop_after_s = time.monotonic(), stop_after_s
        self._live: dict[str, Proposal] = {}
        self._started: dict[str, float] = {}
        self._last_s = 0.0  # what the next trial may take
        self._again: list[Proposal] = []
        self._killed: set[int] = set()
        self._fault: Exception | None = None
        self.done: str | None = None  # why the study is over
        self.halted: str | None = None  # why this driver stopped before that
        self.interrupted = False
        self.left: str | None = None  # what a trial left behind, in words

    def suggest(self, trial_id: str) -> Any:
        """The next proposal, None to wait, or Tune's word for the end."""
        if self.halted is None and self._out_of_time():
            self.halted = "the time for this run is over"
        if self.halted is not None:
            return None if self._live else TuneSearcher.FINISHED
        if len(self._live) >= self._slots:
            return None
        answer = self._again.pop() if self._again else self._proposer.propose()
        for record in self._proposer.drain():
            self._desk.keep(record)  # Tune passes on what a searcher raises here
        if isinstance(answer, Done):
            self.done = answer.reason
            return TuneSearcher.FINISHED
        if isinstance(answer, Wait):
            return None
        self._live[trial_id], self._started[trial_id] = answer, time.monotonic()
        self._desk.started(answer, self._proposer.launches_left())
        return {"proposal": answer}

    def _out_of_time(self) -> bool:
        if self._stop_after_s is None:
            return False
        return time.monotonic() - self._began + self._last_s > self._stop_after_s

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Show the phase that a trial has entered."""
        if "phase" in result and trial_id in self._live:
            self._desk.phase(self._live[trial_id], result["phase"])

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Take in a trial's end. Tune logs what a searcher raises and goes on: a fault is kept for `raise_fault`."""
        proposal = self._live.pop(trial_id, None)
        if proposal is None:
            return
        wall_s = time.monotonic() - self._started.pop(trial_id)
        try:
            self._take_in(proposal, result, wall_s)
        except Exception as fault:
            self._fault, self.halted = fault, f"trial {proposal.number} could not be recorded: {fault}"

    def interrupt(self) -> None:
        """A person, or the machine going down, ended this driver; what was in flight is lost and comes back."""
        self.halted, self.interrupted = "interrupted", True

    def raise_fault(self) -> None:
        """Raise what went wrong while a trial was recorded."""
        if isinstance(self._fault, OSError):
            raise FastverifyError(str(self.halted)) from self._fault
        if self._fault is not None:
            raise self._fault

    def _take_in(self, proposal: Proposal, result: dict[str, Any] | None, wall_s: float) -> None:
        """Judge and keep the record; a trial that died without one gets one that says so."""
        if result and "record" in result:
            outcome = Outcome(
                TrialRecord.model_validate_json(result["record"]), _GREEDY.validate_json(result["greedy"])
            )
        else:
            outcome = Outcome(self._desk.lost(proposal, (result or {}).get("crash")))
            if _was_killed(outcome.record) and proposal.number not in self._killed:
                self._killed.add(proposal.number)
                self._again.append(proposal)  # once more, as after an engine was killed from outside
                return
        record = _with_rest(self._desk.judged(outcome), wall_s)
        if proposal.number in self._killed:
            record = record.model_copy(
                update={"notes": (*record.notes, "second try: the first one's process was killed")}
            )
        self._last_s = sum(record.phases_s.values())
        self._desk.keep(record)
        self._proposer.observe(record)
        if record.failure is not None and record.failure.failure_class is FailureClass.TEARDOWN:
            self.left = f"trial {record.number} left something behind on {record.node}: {record.failure.cause}"
            self.halted = self.left

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune pickles its searcher for a restore that never comes."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is the state."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is the state."""


def _was_killed(record: TrialRecord) -> bool:
    return record.failure is not None and record.failure.failure_class is FailureClass.KILLED


def _with_rest(record: TrialRecord, wall_s: float) -> TrialRecord:
    """The record with what no phase accounts for: Tune, the trial's process, the judgement."""
    rest = max(0.0, wall_s - sum(record.phases_s.values()))
    return record.model_copy(update={"phases_s": {**record.phases_s, "rest": rest}})


@dataclass
class Desk:
    """The driver's side of a trial: judge, store, track, show."""

    study: Study
    bench: Bench
    nodes: Sequence[str]
    keepers: Sequence[Callable[[TrialRecord], None]]
    on_start: Callable[[Proposal, int | None], None]
    on_phase: Callable[[Proposal, str], None]

    def started(self, proposal: Proposal, left: int | None) -> None:
        """Show a launch."""
        self.on_start(proposal, left)

    def phase(self, proposal: Proposal, phase: str) -> None:
        """Show a phase."""
        self.on_phase(proposal, phase)

    def keep(self, record: TrialRecord) -> None:
        """The ledger first; whatever else wants the record afterwards."""
        self.study.append(record)
        if record.launch is not None:
            (self.study.trial_dir(record.number) / "launch.sh").write_text(pasteable(record.launch) + "\n")
        for keeper in self.keepers:
            keeper(record)

    def judged(self, outcome: Outcome) -> TrialRecord:
        """The record with lossless check and sanity rules; the baseline's answers become the reference."""
        if outcome.record.role == "baseline" and outcome.greedy:
            self.study.write_reference(Reference.of(outcome.greedy).model_dump_json())
        text = self.study.reference()
        return judge(outcome, Reference.model_validate_json(text) if text else None)

    def lost(self, proposal: Proposal, crash: str | None = None) -> TrialRecord:
        """The record of a trial whose own process failed or died; its engine is taken down.

        Raises:
            ClusterError: it died because Ray did; the trial comes back when the study is resumed.
        """
        lines = tuple((crash or "the trial's own process died before it could report").strip().splitlines())
        kind, cause = FailureClass.CRASH if crash else FailureClass.KILLED, lines[-1]
        try:
            left = sweep_by_ray(self.bench, self.nodes, proposal.number)
        except ray.exceptions.RayError as error:
            raise ClusterError(f"Ray has died ({type(error).__name__}); go on with --resume") from error
        if left:
            kind, cause = FailureClass.TEARDOWN, f"{cause}; left: {'; '.join(left)}"
        failure = Failure(failure_class=kind, cause=cause, phase="trial", log_tail=lines[-40:])
        return TrialRecord(
            study=self.bench.study, number=proposal.number, role=proposal.role, status="failed",
            config=proposal.config, config_id=proposal.config_id, params=dict(proposal.params), reason=cause,
            failure=failure, topology=self.bench.topology, **{**self.bench.facts, **proposal.facts},
        )  # fmt: skip


def run_search(adapter: Adapter, bench: Bench, storage: Path) -> None:
    """Drive the adapter with Ray Tune until it says that it is finished.

    The trial holds the node's slot and no GPU: the deployment asks for those, and one that waited for
    GPUs that its own trial holds would wait for ever.
    """

    def resources(config: dict[str, Any]) -> tune.PlacementGroupFactory:
        node = config["proposal"].node
        return tune.PlacementGroupFactory([{"CPU": 0, SLOT: 1, **({f"node:{node}": 0.001} if node else {})}])

    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(trainable, bench=bench), resources),
        tune_config=tune.TuneConfig(
            search_alg=adapter,
            num_samples=-1,
            reuse_actors=True,  # importing everything anew takes seconds a trial
            trial_name_creator=lambda trial: f"trial-{trial.trial_id}",
            trial_dirname_creator=lambda trial: f"trial-{trial.trial_id}",
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(storage.resolve()),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=0),
        ),
    )
    # What it says at length, records say in words; its own state is not read back, so that a full disk is no loss.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    try:
        tuner.fit()
    finally:
        shutil.rmtree(storage / "tune", ignore_errors=True)  # Tune's own state, which nothing reads back
    adapter.raise_fault()

"""The driver of a study: preflight, cluster, search, outcome. What `pipeline.tune` does after checking its input."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError, PreflightError
from pipeline.interrupts import Interrupts
from pipeline.live import Board
from pipeline.store import RUNS, Study, check_root
from pipeline.tracking import (
    Ending,
    InBackground,
    MlflowTracker,
    NullTracker,
    Tracker,
    check_uri,
    conclude,
    default_uri,
    without_password,
)

if TYPE_CHECKING:
    from pipeline.config import EngineConfig
    from pipeline.engine_space import Space
    from pipeline.proposer import Proposal, Proposer, Violated
    from pipeline.records import Topology, TrialRecord
    from pipeline.screening import Screening
    from pipeline.search import Adapter, Bench
    from pipeline.selection import Selection
    from pipeline.space import EngineChoice, Overrides

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A checked request for a study."""

    study: str
    space_file: Path
    space: Space
    choice: EngineChoice
    topology: Topology
    release: str | None
    overrides: Overrides
    runs: Path
    resume: str | None = None
    tracking_uri: str | None = None
    address: str | None = None
    stop_after_s: float | None = None
    profile: bool = False
    as_json: bool = False

    @property
    def gpus_per_trial(self) -> int:
        """GPUs that a trial holds."""
        return self.space.tensor_parallel_size if self.space.engine == "sglang" else 0


@dataclass(frozen=True)
class Ended:
    """A study, and how the command ends: 0, 130 when interrupted, 1 when nothing was measured or something is left."""

    study: Study
    exit_code: int


def drive(job: Job) -> Ended:
    """Run a study, or what is left of it, to its end; print and log the outcome.

    An interrupt ends the trial in flight, takes its engine down and leaves a study that can be resumed. A study gets
    its folder only when all is ready for its first trial.
    """
    from pipeline.cluster import check_nodes, cluster

    check_root(job.runs)
    check_uri(_tracking_uri(job))
    resumed = _resumed(job) if job.resume is not None else None
    with Board(quiet=job.as_json) as board:
        _prepare(job, board)
        with Interrupts() as interrupts, cluster(job.address, job.topology.gpu_count) as nodes:
            interrupts.listen()
            if job.address is not None:
                for warning in check_nodes(nodes, job.topology, job.gpus_per_trial, job.runs):
                    board.say(f"watch: {warning}")
            study = resumed or _created(job)
            board.say(f"study: {study.folder}")
            tracker = _tracker(job, study)
            with _ending_told(tracker):
                adapter = _search(job, study, nodes, board, tracker, interrupts)
        with _ending_told(tracker):
            if job.profile and adapter.done is not None and job.space.engine == "sglang":
                _profile(study, board)
            _close(job, study, adapter, tracker, board)
    return Ended(study, _exit_code(study, adapter))


@contextmanager
def _ending_told(tracker: Tracker) -> Iterator[None]:
    """What ends the driver ends the study's run in MLflow too: it would stand there as running for ever."""
    try:
        yield
    except BaseException as error:
        ending: Ending = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        tracker.finish({"why": f"the driver ended: {str(error) or type(error).__name__}"}, [], ending)
        raise


def _exit_code(study: Study, adapter: Adapter) -> int:
    if adapter.interrupted:
        return 130
    measured = any(record.status == "ok" for record in study.records())
    return 1 if adapter.left or (adapter.done is not None and not measured) else 0


def _prepare(job: Job, board: Board) -> None:
    """Say what is going to run, look whether the machine is ready, have the weights here."""
    from pipeline.topology import preflight

    board.say(f"engine: {job.choice.engine} ({job.choice.reason})")
    for name in job.space.dropped:
        board.say(f"dropped: {name}")
    for warning in preflight(job.gpus_per_trial, job.runs):
        board.say(f"watch: {warning}")
    fetch_models(job.space)


def _profile(study: Study, board: Board) -> None:
    """Profile baseline, winner and best of each algorithm; the cluster is gone, so the GPUs are free."""
    from pipeline.capture import profile_study

    board.say("profiling the baseline, the winner and the best of each algorithm")
    profile_study(study)


def fetch_models(space: Space) -> None:
    """Have the weights here before the first trial, so that no launch pays for a download; SGLang fetches its own."""
    from pipeline.models import MODELS, resolve

    for name in (space.model, *space.draft_models.values()):
        if name in MODELS or space.engine == "embedded":
            resolve(name)


def _created(job: Job) -> Study:
    study = Study.create(job.study, job.space_file, _facts(job), job.runs)
    study.lock()
    return study


def _resumed(job: Job) -> Study:
    """The study to go on with, locked.

    Raises:
        InputError: there is none, another driver holds it, or its figures could not stand beside those of this job.
    """
    study = Study.open(str(job.resume), job.runs)
    study.lock()
    study.mend()
    if study.space_file.read_text() != job.space_file.read_text():
        raise InputError(
            f"{study.folder} was made with another space file", key="--resume",
            expected=f"the same content as {study.space_file}",
        )  # fmt: skip
    facts = study.facts
    made_on = facts["engine"], facts["topology"].get("gpu_count"), facts["topology"].get("gpu_model")
    here = job.choice.engine, job.topology.gpu_count, job.topology.gpu_model
    if made_on != here:
        raise InputError(
            f"{study.folder} was made with {_machine(*made_on)}, here it would be {_machine(*here)}", key="--resume",
            expected="the machine and engine that it began on, or a new study",
        )  # fmt: skip
    study.add_facts(overrides=_stated(job.overrides))
    return study


def _machine(engine: str, count: int, model: str | None) -> str:
    return f"{engine} on {count} x {model}" if count else f"{engine} without GPUs"


def _stated(overrides: Overrides) -> dict[str, Any]:
    return {name: value for name, value in asdict(overrides).items() if value is not None}


def _facts(job: Job) -> dict[str, Any]:
    from pipeline.facts import git_commit, versions

    return {
        "id": secrets.token_hex(6),
        "engine": job.choice.engine,
        "engine_reason": job.choice.reason,
        "release": job.release,
        "overrides": _stated(job.overrides),
        "objective": job.space.objective.model_dump(mode="json"),
        "model": job.space.model,
        "topology": job.topology.model_dump(mode="json"),
        "versions": versions(),
        "git_commit": git_commit(),
        "tags": {"engine": job.choice.engine, "engine_reason": job.choice.reason, "model": job.space.model},
        "finished": False,
    }


def _tracking_uri(job: Job) -> str:
    return job.tracking_uri or default_uri(job.runs)


def _tracker(job: Job, study: Study) -> Tracker:
    uri = _tracking_uri(job)
    if uri == "none":
        return NullTracker()
    tracker = InBackground(MlflowTracker(study, uri, system_metrics=job.topology.gpu_count > 0))
    tracker.open()
    return tracker


def _search(
    job: Job, study: Study, nodes: tuple[str, ...], board: Board, tracker: Tracker, interrupts: Interrupts
) -> Adapter:
    """Search on a running cluster; whatever happens, no engine of the study outlives this."""
    from pipeline.collectives import study_screen
    from pipeline.search import Adapter, Desk, run_search
    from pipeline.sweeping import sweep

    bench = _bench(job, study)
    baseline = job.space.canonical(job.space.baseline(), job.release, job.topology).config
    desk = Desk(
        study=study,
        bench=bench,
        nodes=nodes,
        keepers=(board.finish, tracker.trial),
        on_start=lambda proposal, left: _show(board, proposal, baseline, left),
        on_phase=lambda proposal, phase: board.phase(proposal.number, phase),
    )
    screen = study_screen(study.folder, job.space, job.release, job.topology, board.say)
    adapter = Adapter(_proposer(job, study, nodes, screen), desk, slots=len(nodes), stop_after_s=job.stop_after_s)
    if left := sweep(bench, nodes):  # what a driver that was killed left behind
        raise PreflightError(f"engines of {study.folder} are still there: {'; '.join(left)}")
    try:
        run_search(adapter, bench, study.folder)
    except KeyboardInterrupt:
        adapter.interrupt()
    finally:
        interrupts.hold()
        if left := sweep(bench, nodes):
            adapter.left = f"still there: {'; '.join(left)}"
    return adapter


def _show(board: Board, proposal: Proposal, baseline: EngineConfig, left: int | None) -> None:
    board.expect(left)
    board.start(proposal.number, proposal.role, proposal.config.words(beside=baseline))


def _bench(job: Job, study: Study) -> Bench:
    from pipeline.ruler import MeasurePlan
    from pipeline.search import Bench

    facts = study.facts
    return Bench(
        study=study.name,
        folder=str(study.folder.resolve()),
        plan=MeasurePlan.from_space(job.space, salt=facts["id"]),
        objective=job.space.objective,
        limits=job.space.limits,
        topology=job.topology,
        facts={"versions": facts["versions"], "git_commit": facts["git_commit"]},
        profile=job.space.search.profile and job.space.engine == "sglang",
    )


def _proposer(job: Job, study: Study, nodes: tuple[str, ...], screen: Screening | None) -> Proposer:
    from pipeline.proposer import Proposer

    space, release, topology = job.space, job.release, job.topology

    def check(config: EngineConfig) -> Sequence[Violated]:
        """The rules, and what the collective benchmark screened out."""
        found = space.examine(config, release, topology)
        return found.violations or (screen.refuses(found.canonical.config) if screen else ())

    return Proposer(
        space,
        space.search,
        space.objective,
        check=check,
        canonical=lambda config: space.canonical(config, release, topology).config,
        records=study.records(),
        study=study.name,
        gpus_per_trial=job.gpus_per_trial,
        nodes=nodes if len(nodes) > 1 else (),
        extra_seeds=_earlier_winners(job),
    )


def _earlier_winners(job: Job) -> list[dict[str, Any]]:
    """Points that won earlier studies of this model on this kind of machine, as far as they lie in this space."""
    from pipeline.store import finished_studies

    if not job.space.search.warm_start:
        return []
    same = {"model": job.space.model, "engine": job.choice.engine, "gpu_model": job.topology.gpu_model}
    points = [facts["winner_params"] for facts in finished_studies(job.runs) if _same_machine(facts, same)]
    return [point for point in points if job.space.contains(point) is None]


def _same_machine(facts: dict[str, Any], same: dict[str, Any]) -> bool:
    seen = {"model": facts["model"], "engine": facts["engine"], "gpu_model": facts["topology"].get("gpu_model")}
    return bool(facts.get("winner_params")) and seen == same


def _close(job: Job, study: Study, adapter: Adapter, tracker: Tracker, board: Board) -> None:
    """Write the report, tell MLflow, print. A study that is not over says how to go on."""
    from pipeline.report import render, study_objective
    from pipeline.selection import select

    records = study.records()
    selection = select(records, study_objective(study))
    if adapter.done is not None:
        study.add_facts(finished=True, ended=adapter.done, **_winner(selection, records))
    report, html = conclude(tracker, study, selection, _ending(adapter))
    board.say(render(report, "text").rstrip("\n"))
    board.say(f"\nreport: {html}\nMLflow: {_pages(job)} (study {study.name})")
    if adapter.left:
        board.say(adapter.left)
    if adapter.done is None:
        runs = "" if job.runs == RUNS else f" --runs {job.runs}"
        again = f"python -m pipeline.tune --resume {study.name}{runs}"
        board.say(f"stopped: {adapter.halted}. Go on with: {again}")


def _pages(job: Job) -> str:
    """Where to look at a study in MLflow, in words."""
    uri = _tracking_uri(job)
    if uri == "none":
        return "nothing logged"
    if not uri.startswith(f"sqlite:///{job.runs.resolve()}"):
        return f"on {without_password(uri)}"
    command = "make ui" if job.runs == RUNS else f"python -m pipeline.ui --runs {job.runs}"
    return f"{command}, then open http://127.0.0.1:5000"


def _ending(adapter: Adapter) -> Ending:
    """A study that can be resumed is not finished; one that left something behind has failed."""
    if adapter.left:
        return "FAILED"
    return "KILLED" if adapter.done is None else "FINISHED"


def _winner(selection: Selection, records: list[TrialRecord]) -> dict[str, Any]:
    if selection.winner is None:
        return {}
    won = selection.winner.config_id
    params = next((record.params for record in records if record.config_id == won and record.params), None)
    return {"winner": won, "winner_params": params}

"""Studies and trials in MLflow: one parent run a study, one child a trial.

MLflow is the second place. The ledger comes first, and whatever MLflow misses while it is down is
logged later by `sync`, which knows by a tag what is there. Only the driver talks to MLflow.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pipeline.errors import InputError, PreflightError
from pipeline.mlflow_trial import STUDY_TAG, trial_metrics, trial_params, trial_tags
from pipeline.mlflow_view import summary_metrics, view_tag
from pipeline.records import TrialRecord
from pipeline.store import RUNS, Study

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from pipeline.reporting.model import Report
    from pipeline.selection import Selection

log = logging.getLogger(__name__)

EXPERIMENT = "fastverify"
TRIAL_TAG = "fastverify.trial"
MAX_PARAM = 500
PATIENCE_S = 60.0  # for MLflow, before the first trial and after the last
_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file")
Ending = Literal["FINISHED", "KILLED", "FAILED"]  # MLflow's words: the study is over, goes on later, broke
_STATUS = {"ok": "FINISHED", "reused": "FINISHED", "stopped": "FINISHED", "pruned": "KILLED", "failed": "FAILED"}


class Tracker(Protocol):
    """Where finished trials and the study's outcome are shown."""

    def trial(self, record: TrialRecord) -> None: ...

    def finish(self, outcome: dict[str, Any], artifacts: list[Path], ending: Ending = "FINISHED") -> None: ...


class NullTracker:
    """Tracks nothing; the ledger has it all."""

    def trial(self, record: TrialRecord) -> None:
        """Ignore the record."""

    def finish(self, outcome: dict[str, Any], artifacts: list[Path], ending: Ending = "FINISHED") -> None:
        """Ignore the outcome."""


class InBackground:
    """A tracker in a thread of its own: while MLflow is slow or down, trials go on."""

    def __init__(self, tracker: MlflowTracker, patience_s: float = PATIENCE_S) -> None:
        self._tracker, self._patience_s = tracker, patience_s
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def open(self) -> None:
        """Open the study's run; waits for that, within the limit, so that no trial shares its cores with it."""
        opened = threading.Event()
        self._queue.put(self._tracker.open)
        self._queue.put(opened.set)
        opened.wait(self._patience_s)

    def trial(self, record: TrialRecord) -> None:
        """Have the record logged."""
        self._queue.put(lambda: self._tracker.trial(record))

    def finish(self, outcome: dict[str, Any], artifacts: list[Path], ending: Ending = "FINISHED") -> None:
        """Have the outcome logged, and wait for all that is not yet there, within the limit."""
        self._queue.put(lambda: self._tracker.finish(outcome, artifacts, ending))
        self._queue.put(None)
        self._thread.join(self._patience_s)
        if self._thread.is_alive():
            log.warning("MLflow did not take all within %.0f s; %s", self._patience_s, self._tracker.later())

    def _work(self) -> None:
        while (action := self._queue.get()) is not None:
            action()


def check_uri(uri: str) -> None:
    """Whether MLflow could mean a store by this; it would take any word for a new folder's name.

    Raises:
        InputError: it could not.
    """
    scheme, found, _ = uri.partition(":/")
    if uri != "none" and not (found and scheme.partition("+")[0] in _SCHEMES):
        raise InputError(
            f"{uri!r} is no MLflow store", key="--tracking-uri",
            expected="http://HOST:PORT, sqlite:///FILE or none",
        )  # fmt: skip


def without_password(uri: str) -> str:
    """A store's address for people to read."""
    return re.sub(r"//[^/]*@", "//", uri)


def default_uri(root: Path = RUNS) -> str:
    """`MLFLOW_TRACKING_URI`, else a sqlite file beside the studies."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(root / 'mlflow.db').resolve()}"


class MlflowTracker:
    """Logs to an MLflow store; a failure of MLflow is a warning, and the record is logged later."""

    def __init__(self, study: Study, uri: str, *, system_metrics: bool = False) -> None:
        self._study, self.uri, self._system_metrics = study, uri, system_metrics
        self._client: MlflowClient | None = None
        self._parent: str | None = None
        self._monitor: Any = None  # of mlflow's system metrics

    def later(self) -> str:
        """How what is missing gets logged later, in words."""
        return f"`python -m pipeline.tracking {self._study.folder}` logs it later"

    def open(self) -> None:
        """Connect, create the experiment and the parent run. Called once, in the driver, before trials."""
        self._guard("open", self._begin)

    def _begin(self) -> None:
        self._open()
        if self._parent is None or self._client is None:
            return
        self._client.update_run(self._parent, status="RUNNING")  # a resumed study; and a monitor stops with its run
        if self._system_metrics:
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            self._monitor = SystemMetricsMonitor(  # type: ignore[no-untyped-call]
                self._parent, resume_logging=True, tracking_uri=self.uri
            )
            self._monitor.start()

    def trial(self, record: TrialRecord) -> None:
        """Log one record as a child run."""
        self._guard(f"trial {record.number}", lambda: self._log_trial(record))

    def finish(self, outcome: dict[str, Any], artifacts: list[Path], ending: Ending = "FINISHED") -> None:
        """Log what MLflow missed, then the study's outcome, its report and how it ended."""
        self._guard("study", lambda: self._finish(outcome, artifacts, ending))

    def _guard(self, what: str, action: Any) -> None:
        from mlflow.exceptions import MlflowException

        try:
            if what != "open" and self._parent is None:
                self._open()
            action()
        except (MlflowException, OSError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            log.warning("MLflow did not take %s (%s); %s", what, first, self.later())

    def _open(self) -> None:
        self._client = client = quiet_client(self.uri)
        experiment = _experiment(client, self.uri)
        found = _search(
            client, experiment, f"tags.`{STUDY_TAG}` = '{self._study.name}' and tags.`{TRIAL_TAG}` = 'study'"
        )
        self._parent = found[0].info.run_id if found else self._create_parent(experiment)
        self._experiment = experiment

    def _create_parent(self, experiment: str) -> str:
        facts = self._study.facts
        tags = {STUDY_TAG: self._study.name, TRIAL_TAG: "study", "mlflow.runName": self._study.name}
        tags |= {key: str(value) for key, value in facts.get("tags", {}).items()}
        assert self._client is not None
        run = self._client.create_run(experiment, tags=tags)
        self._client.log_artifact(run.info.run_id, str(self._study.space_file))
        self._study.add_facts(mlflow_run_id=run.info.run_id, mlflow_uri=self.uri, mlflow_experiment_id=experiment)
        return str(run.info.run_id)

    def _log_trial(self, record: TrialRecord) -> None:
        from mlflow.entities import Metric, Param, RunTag

        assert self._client is not None
        first = next((r for r in self._study.records() if r.role == "baseline"), None)
        words = record.config.words(beside=first.config if first else None)
        tags = {"mlflow.parentRunId": str(self._parent), "mlflow.runName": f"{record.number:03d} {words}"}
        began, ended = _times(record)
        run_id = self._client.create_run(self._experiment, start_time=began, tags=tags).info.run_id
        stamp = int(self._study.ledger.stat().st_mtime * 1000)
        summary = ((name, value, 0) for name, value in summary_metrics(record, first).items())
        figures = (*summary, *trial_metrics(record))
        self._client.log_batch(
            run_id,
            metrics=[Metric(key, _short(value), stamp, step) for key, value, step in figures],
            params=[Param(key, value[:MAX_PARAM]) for key, value in trial_params(record).items()],
            tags=[RunTag(key, value) for key, value in trial_tags(record, self._study.name).items()],
        )
        folder = self._study.trial_dir(record.number)
        log_path = record.launch.log_path if record.launch else ""  # of the second try, where there was one
        for file in (folder / "record.json", folder / "launch.sh", Path(log_path)):
            if file.is_file():
                self._client.log_artifact(run_id, str(file))
        # The tag comes last: a run without it was cut short and is logged again.
        self._client.set_tag(run_id, TRIAL_TAG, str(record.number))
        self._client.set_terminated(run_id, status=_STATUS[record.status], end_time=ended)

    def _finish(self, outcome: dict[str, Any], artifacts: list[Path], ending: Ending) -> None:
        assert self._client is not None and self._parent is not None
        if self._monitor is not None:
            self._monitor.finish()
        self.sync()
        for key, value in outcome.items():
            if isinstance(value, float | int) and math.isfinite(value):
                self._client.log_metric(self._parent, key, _short(float(value)))
            elif value is not None:
                self._client.set_tag(self._parent, key, str(value)[:5000])
        for path in artifacts:
            self._client.log_artifact(self._parent, str(path))
        self._client.set_experiment_tag(self._experiment, *view_tag(self._study.name, self._study.records()))
        self._client.set_terminated(self._parent, status=ending)

    def sync(self) -> int:
        """Log the records that MLflow lacks; return how many there were."""
        if self._parent is None:
            self._open()
        assert self._client is not None
        there = _search(self._client, self._experiment, f"tags.`{STUDY_TAG}` = '{self._study.name}'")
        known = {run.data.tags.get(TRIAL_TAG) for run in there}
        missing = [record for record in self._study.records() if str(record.number) not in known]
        for record in missing:
            self._log_trial(record)
        return len(missing)


def quiet_client(uri: str) -> MlflowClient:
    """A client that gives up soon and prints nothing: MLflow's own retry for an hour, while GPUs idle."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _times(record: TrialRecord) -> tuple[int | None, int | None]:
    """Start and end of a launched trial, ms since 1970: else MLflow would show how long the logging took."""
    if record.started_at is None:
        return None, None
    began = int(datetime.fromisoformat(record.started_at).timestamp() * 1000)
    return began, began + int(sum(record.phases_s.values()) * 1000)


def _short(value: float) -> float:
    """Six significant digits: MLflow shows every digit there is. The record keeps them all."""
    return float(f"{value:.6g}")


def _experiment(client: MlflowClient, uri: str) -> str:
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is not None and found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    if found is not None:
        return str(found.experiment_id)
    root = Path(uri.removeprefix("sqlite:///")).parent if uri.startswith("sqlite:///") else None
    location = (root / "mlartifacts").resolve().as_uri() if root is not None else None
    return str(client.create_experiment(EXPERIMENT, artifact_location=location))


def _search(client: MlflowClient, experiment: str, query: str) -> list[Any]:
    runs: list[Any] = []
    page = client.search_runs([experiment], filter_string=query, max_results=500)
    runs += page
    while page.token:
        page = client.search_runs([experiment], filter_string=query, max_results=500, page_token=page.token)
        runs += page
    return runs


def main(study: str, uri: str | None = None) -> None:
    """Log the trials of STUDY that MLflow lacks and, where it is over, its outcome, report and view."""
    from mlflow.exceptions import MlflowException

    from pipeline.report import study_objective
    from pipeline.selection import select

    opened = Study.open(study)
    store = uri or default_uri(opened.folder.parent)
    check_uri(store)
    try:
        tracker = MlflowTracker(opened, store)
        print(f"{tracker.sync()} trials logged to {without_password(store)}")
        if opened.facts.get("finished"):
            conclude(tracker, opened, select(opened.records(), study_objective(opened)))
    except MlflowException as error:
        raise PreflightError(f"MLflow at {without_password(store)} does not answer: {error}") from error


def conclude(tracker: Tracker, study: Study, selection: Selection, ending: Ending = "FINISHED") -> tuple[Report, Path]:
    """Write the study's report and tell `tracker` the outcome; the report and its file."""
    from pipeline.mlflow_view import outcome
    from pipeline.report import study_report, write_html

    report = study_report(study)
    html = write_html(report, study.folder / "report.html")
    tracker.finish(outcome(selection, report), [html], ending)
    return report, html


if __name__ == "__main__":
    import typer

    from pipeline.cli import run_command

    app = typer.Typer(add_completion=False)
    app.command()(main)
    run_command(app)

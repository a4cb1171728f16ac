"""`python -m pipeline.promote STUDY|RUN`: confirm a winner, pass every gate, put it in service; or go back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli import run_command

if TYPE_CHECKING:
    from pipeline.config import EngineConfig
    from pipeline.promoting import Bench
    from pipeline.promotion import Decision, Evidence
    from pipeline.registry import Registry

Say = Callable[[str], None]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
ROUNDS = 3  # the fewest whose interval can be narrow: Student's t at two rounds is 13 standard errors


@app.command()
def promote(
    what: Annotated[str | None, typer.Argument(help="A study's folder or name, `latest`, or an MLflow run id.")] = None,
    force: Annotated[bool, typer.Option(help="Promote against the gates; it is recorded.")] = False,
    rollback: Annotated[bool, typer.Option(help="Make the previous champion the champion again.")] = False,
    rounds: Annotated[int, typer.Option(min=2, help="Launches of winner and incumbent, in turns.")] = ROUNDS,
    soak_minutes: Annotated[float | None, typer.Option(help="Default: 10 where there are GPUs, else none.")] = None,
    model: Annotated[str | None, typer.Option(help="With --rollback: the served model, if there are several.")] = None,
    runs: Annotated[Path, typer.Option(help="Where studies are kept.")] = Path("runs"),
    tracking_uri: Annotated[str | None, typer.Option(help="MLflow server, which holds the registry.")] = None,
    address: Annotated[
        str | None, typer.Option(help="The cluster that serves (`auto`); otherwise one is made to measure on.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the decision as JSON, nothing else.")] = False,
) -> None:
    """Promote a study's winner to champion, if it may become one."""
    from pipeline.errors import InputError
    from pipeline.tracking import check_uri, default_uri

    if (what is None) != rollback:
        raise InputError("either STUDY or --rollback", expected="one of them")
    if address is not None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # what `python -m serve` starts with
    uri = tracking_uri or default_uri(runs)
    check_uri(uri)
    if uri == "none":
        raise InputError("a champion needs a registry", key="--tracking-uri", expected="an MLflow store")
    say: Say = (lambda _: None) if json_ else typer.echo
    if what is None:
        roll_back(open_registry(uri, model, runs), runs / "champion.json", address, say)
        return
    job = Job(what, runs, uri, address, force, rounds, soak_minutes)
    decision = _promote(job, say)
    if json_:
        typer.echo(json.dumps(decision.model_dump(mode="json"), indent=2))
    if decision.promote is None and not decision.stands:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Job:
    """One request for a promotion."""

    what: str
    runs: Path
    uri: str
    address: str | None
    force: bool
    rounds: int
    soak_minutes: float | None

    @property
    def file(self) -> Path:
        """Where the champion of these runs is written."""
        return self.runs / "champion.json"


def _promote(job: Job, say: Say) -> Decision:
    from pipeline import promoting
    from pipeline.candidate import find_candidate, find_incumbent
    from pipeline.cluster import cluster
    from pipeline.facts import git_commit, versions
    from pipeline.registry import Registry, answering, registered_name
    from pipeline.topology import probe

    candidate = find_candidate(job.what, job.runs, job.uri)
    with answering(job.uri):
        registry = Registry(job.uri, registered_name(candidate.config.model))
        incumbent = find_incumbent(registry, job.file)
    say(f"candidate: {candidate.config.words()} ({candidate.why})")
    if incumbent.config is None:
        say("incumbent: the baseline; there is no champion yet")
    else:
        say(f"incumbent: champion {incumbent.version}: {incumbent.config.words()}")
    if candidate.config == incumbent.config:
        return _stands(job, registry, say)
    here = probe()
    soak = job.soak_minutes if job.soak_minutes is not None else (10.0 if here.gpu_count else 0.0)
    facts = {"versions": versions(), "git_commit": git_commit()}
    bench = promoting.Bench(candidate, promoting.fresh_folder(candidate), here, facts, say)
    with cluster(job.address, here.gpu_count):
        _check_room(candidate.config)
        evidence = promoting.gather(bench, incumbent, rounds=job.rounds, soak_minutes=soak)
        decision = promoting.judge_promotion(bench, evidence, force=job.force)
        for line in decision.lines():
            say(line)
        if decision.promote is not None:
            _install(job, bench, evidence, decision, registry)
    return decision


def _stands(job: Job, registry: Registry, say: Say) -> Decision:
    """The candidate is the champion already: nothing is launched, and a lost champion file comes back."""
    from pipeline.installing import install, registered_service
    from pipeline.promotion import STANDS, Decision
    from pipeline.registry import CHAMPION

    version = registry.by_alias(CHAMPION)
    if version is not None and not job.file.is_file():
        install(registered_service(registry, version, job.file), job.file, live=False, say=say)
    say(STANDS)
    return Decision(promote=None, reason=STANDS, stands=True)


def _check_room(config: EngineConfig) -> None:
    from pipeline.errors import PreflightError
    from serve.switching import gpus_free, running

    if running() and not gpus_free(config):
        raise PreflightError(
            "the champion in service holds the GPUs that the measurement needs: stop it (make serve), promote, "
            "and start it again"
        )


def _install(job: Job, bench: Bench, evidence: Evidence, decision: Decision, registry: Registry) -> None:
    from pipeline.installing import install, register, service_of
    from pipeline.registry import answering
    from serve.switching import running

    candidate = bench.candidate
    config = next(c for c in (candidate.config, candidate.baseline) if c.config_id == decision.promote)
    service = service_of(config, candidate, evidence.launches, job.file)
    install(service, job.file, live=job.address is not None and running(), say=bench.say)
    with answering(job.uri, f"{job.file} is written, but not registered: "):
        version = register(registry, service, candidate, evidence, decision, job.file)
    bench.say(f"registered: models:/{version.name}/{version.version}, alias champion")


def roll_back(registry: Registry, file: Path, address: str | None, say: Say) -> None:
    """Make the previous champion the champion; in service too, where one serves."""
    from pipeline.cluster import cluster
    from pipeline.installing import go_back, previous_service
    from pipeline.registry import answering

    with answering(registry.uri):
        service, version = previous_service(registry, file)
        with cluster(address, 0) if address is not None else nullcontext():
            go_back(registry, service, version, file, live=address is not None, say=say)


def open_registry(uri: str, model: str | None, runs: Path) -> Registry:
    """The registry of the model that these runs serve, or of `model`."""
    from pipeline.errors import InputError
    from pipeline.registry import Registry, answering, registered_name
    from serve.service import Service

    file = runs / "champion.json"
    if model is None and not file.is_file():
        expected = "a file written by `python -m pipeline.promote`, or --model with a model of the registry"
        raise InputError("there is no champion yet", source=str(file), expected=expected)
    name = model or Service.read(file).spec.config.model
    with answering(uri):
        return Registry(uri, registered_name(name))


if __name__ == "__main__":
    run_command(app)

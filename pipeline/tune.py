"""`python -m pipeline.tune SPACE`: search, confirm, report. The main job."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli import run_command

if TYPE_CHECKING:
    from pipeline.engine_space import Space
    from pipeline.records import Topology
    from pipeline.space import EngineChoice, Overrides, SpaceSpec

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def tune(
    space: Annotated[
        Path | None, typer.Argument(help="The space file, such as tune_spaces/verify.yaml; --resume has its own.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="auto, sglang or embedded; overrides the file.")] = None,
    model: Annotated[str | None, typer.Option(help="Model folder, hub id or small model's name.")] = None,
    draft_model: Annotated[
        list[str] | None, typer.Option(help="Draft model, as MODEL or ALGORITHM=MODEL; may be repeated.")
    ] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(help="GPUs an engine.")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(help="Load level; may be repeated.")] = None,
    trials: Annotated[int | None, typer.Option(help="Launches of seeds and search.")] = None,
    time_budget: Annotated[float | None, typer.Option(help="Hours until no new trial is started.")] = None,
    stop_after: Annotated[
        float | None, typer.Option(help="Seconds after which this driver starts no trial; --resume goes on.")
    ] = None,
    sampler: Annotated[str | None, typer.Option(help="tpe, gp, random, quasi-random or grid.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the search, 0 or more.")] = None,
    resume: Annotated[str | None, typer.Option(help="Go on with a study: its folder, its name or `latest`.")] = None,
    runs: Annotated[Path, typer.Option(help="Where studies are kept.")] = Path("runs"),
    tracking_uri: Annotated[str | None, typer.Option(help="MLflow server; `none` tracks nothing.")] = None,
    address: Annotated[str | None, typer.Option(help="A running Ray cluster; otherwise one is made here.")] = None,
    profile: Annotated[
        bool, typer.Option(help="Afterwards, profile decode steps of baseline, winner and best of each algorithm.")
    ] = False,
    dry_run: Annotated[bool, typer.Option(help="Check the file, count, estimate; start nothing.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")] = False,
) -> None:
    """Find the fastest lossless configuration of a model on this machine."""
    from pipeline.errors import InputError
    from pipeline.space import Overrides, load_space

    if stop_after is not None and not 0 < stop_after < math.inf:
        raise InputError(f"{stop_after} does not fit", key="--stop-after", expected="a number above 0")
    given = Overrides(
        engine=engine,
        model=model,
        draft_model=tuple(draft_model) if draft_model else None,
        tensor_parallel_size=tensor_parallel_size,
        concurrency=tuple(concurrency) if concurrency else None,
        trials=trials,
        hours=time_budget,
        seed=seed,
        sampler=sampler,  # type: ignore[arg-type]  # checked when the file is loaded
    )
    overrides = _as_begun(resume, runs, given) if resume is not None else given
    file = space or _space_of(resume, runs)
    spec = load_space(file, overrides)
    topology, release, choice, part = _resolve(spec, dry_run=dry_run)
    if dry_run:
        _print_plan(choice, part, release, topology, as_json=json_)
        return
    from pipeline.drive import Job, drive

    ended = drive(
        Job(
            study=spec.study,
            space_file=file,
            space=part,
            choice=choice,
            topology=topology,
            release=release,
            overrides=overrides,
            runs=runs,
            resume=resume,
            tracking_uri=tracking_uri,
            address=address,
            stop_after_s=stop_after,
            profile=profile,
            as_json=json_,
        )
    )
    if json_:
        from pipeline.report import render, study_report

        _print_json(choice, json.loads(render(study_report(ended.study), "json")))
    raise typer.Exit(ended.exit_code)


def _space_of(resume: str | None, runs: Path) -> Path:
    """The space file that a study keeps in its folder.

    Raises:
        InputError: no such study, or none is named.
    """
    from pipeline.errors import InputError
    from pipeline.store import Study

    if resume is None:
        raise InputError(
            "no space file", key="SPACE", expected="a file such as tune_spaces/verify.yaml, or --resume with a study"
        )
    return Study.open(resume, runs).space_file


def _as_begun(resume: str, runs: Path, given: Overrides) -> Overrides:
    """What a study was started with, and budget, sampler and seed as they are stated now.

    Raises:
        InputError: no such study, or another model, load, … than it was started with.
    """
    from pipeline.errors import InputError
    from pipeline.store import Study

    begun = {
        name: tuple(v) if isinstance(v, list) else v for name, v in Study.open(resume, runs).facts["overrides"].items()
    }
    now = {name: value for name, value in asdict(given).items() if value is not None}
    for name in ("engine", "model", "draft_model", "tensor_parallel_size", "concurrency"):
        if name in now and now[name] != begun.get(name):
            raise InputError(
                f"{now[name]!r} is not what the study was started with", key=f"--{name.replace('_', '-')}",
                expected=repr(begun[name]) if name in begun else "the file's own",
            )  # fmt: skip
    return replace(given, **{**begun, **now})


def _resolve(spec: SpaceSpec, *, dry_run: bool) -> tuple[Topology, str | None, EngineChoice, Space]:
    """Machine, release, engine and the engine's part of the space; every error before anything starts.

    A dry run may assume the machine that the file states, so that a space can be checked anywhere.
    """
    from pipeline.inputs import check_command, check_models, check_workload
    from pipeline.space import EngineChoice, choose_engine
    from pipeline.topology import probe

    topology, release = probe(), _release(spec)
    if dry_run and topology.gpu_count == 0 and (spec.engine == "sglang" or spec.file.embedded is None):
        stated = spec.file.sglang.topology if spec.file.sglang else None
        topology = stated or topology
        machine = "on the machine that the file states" if stated else "on a machine that the file does not state"
        choice = EngineChoice("sglang", f"dry run {machine}")
    else:
        choice = choose_engine(spec.engine, topology, release, spec.need_gpus)
    part = spec.for_engine(choice.engine)
    if not dry_run:
        part.check_paths()
    if choice.engine == "embedded":
        check_models(spec, part)
    elif not dry_run:
        check_command(os.environ)
    check_workload(spec, part)
    return topology, release or part.release, choice, part


def _release(spec: SpaceSpec) -> str | None:
    """SGLang's release: the installed one, or the file's word where another command stands in for the package."""
    from serve.engines.sglang import COMMAND_VARIABLE
    from serve.engines.sglang_flags import installed_release

    stated = spec.file.sglang.release if spec.file.sglang and COMMAND_VARIABLE in os.environ else None
    return installed_release() or stated


def _print_json(choice: EngineChoice, found: dict[str, Any]) -> None:
    typer.echo(json.dumps({"engine": choice.engine, "engine_reason": choice.reason, **found}, indent=2))


def _print_plan(choice: EngineChoice, part: Space, release: str | None, topology: Topology, *, as_json: bool) -> None:
    from pipeline.plan import plan_search

    plan = plan_search(part, release, topology)
    if as_json:
        _print_json(choice, plan.model_dump(mode="json"))
        return
    typer.echo(f"engine: {choice.engine} ({choice.reason})")
    for line in plan.lines():
        typer.echo(line)


if __name__ == "__main__":
    run_command(app)

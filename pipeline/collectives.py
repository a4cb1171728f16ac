"""`python -m pipeline.collectives SPACE`: time the ways in which a model's ranks could talk, without the engine.

The model's own all-reduces and all-gathers run inside CUDA graphs under each collective setting of the space.
What fails, hangs, or is slower than another setting at every size need not be launched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli import run_command
from pipeline.errors import InputError, MeasurementError, PreflightError, UserError

if TYPE_CHECKING:
    from pipeline.engine_space import Space
    from pipeline.records import Topology
    from pipeline.screening import Result, Screening

FILE = "collectives.json"  # in a study's folder
SECONDS = 55.0  # with starting and ending, under a minute
TRUSTED = 0.7  # a rank correlation with the trials below this: screening stays off

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    space: Annotated[Path, typer.Argument(help="The space file, such as tune_spaces/gpu2-pcie.yaml.")],
    out: Annotated[Path | None, typer.Option(help="Also write everything as JSON to this file.")] = None,
    study: Annotated[str | None, typer.Option(help="Compare with the trials of this study: folder or name.")] = None,
    results: Annotated[Path | None, typer.Option(help="Take the times from this file of an earlier run.")] = None,
    runs: Annotated[Path, typer.Option(help="Folder that holds the studies.")] = Path("runs"),
    model: Annotated[str | None, typer.Option(help="Model folder or hub id; overrides the file.")] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(help="GPUs an engine; overrides the file.")] = None,
    seconds: Annotated[
        float, typer.Option(help="Limit on the whole run; what is left then is not measured.")
    ] = SECONDS,
    noise: Annotated[float | None, typer.Option(help="Share of a step that counts as no difference.", min=0)] = None,
    at_once: Annotated[int | None, typer.Option(help="Settings prepared together.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")] = False,
) -> None:
    """Time the collective settings of a space and say which of them leave it, and why."""
    from pipeline.screening import NOISE, Screening
    from pipeline.space import Overrides, load_space
    from pipeline.topology import probe

    if results is not None:
        found = Screening.model_validate_json(_text(results))
    else:
        spec = load_space(space, Overrides(model=model, tensor_parallel_size=tensor_parallel_size))
        found = benchmark(
            spec.for_engine("sglang"), _release(), probe(), seconds=seconds, noise=NOISE if noise is None else noise,
            at_once=at_once, say=lambda line: typer.echo(line, err=True),
        )  # fmt: skip
    _write(found, out)
    if study is not None:
        found = _compared(found, study, runs)
        _write(found, out)
    typer.echo(found.model_dump_json(indent=2) if as_json else "\n".join(lines(found)))
    if all(result.outcome != "ok" for result in found.results):
        raise MeasurementError("no setting could be measured; the causes are above")


def benchmark(
    space: Space,
    release: str | None,
    topology: Topology,
    *,
    seconds: float = SECONDS,
    noise: float,
    at_once: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    **run: Any,
) -> Screening:
    """Time a space's settings on this machine and screen them; `run` goes to `time_settings`.

    Raises:
        PreflightError: fewer GPUs than one engine needs.
        InputError: nothing to time, or the model's sizes cannot be read.
    """
    from pipeline import screening
    from pipeline.collectives_run import AT_ONCE, Deadlines, time_settings
    from serve.engines.sglang import collective_environment

    ranks = space.tensor_parallel_size
    settings, left_out = screening.settings(space, release, topology)
    _check(space, topology, len(settings))
    shape = screening.shape_of(_model_config(space.model), f"{space.model}/config.json")
    messages = screening.messages(shape, ranks, screening.token_counts(space))
    deadlines = run.pop("deadlines", Deadlines(total=seconds))
    timed = time_settings(
        settings, shape, messages, ranks, lambda setting: collective_environment(setting.config, os.environ, release),
        deadlines=deadlines, at_once=at_once or AT_ONCE, say=say, **run,
    )  # fmt: skip
    floor = max(noise, timed.drift or 0.0)
    return screening.Screening(
        model=space.model,
        ranks=ranks,
        shape=shape,
        messages=messages,
        noise=floor,
        drift=timed.drift,
        results=timed.results,
        dropped=screening.screen(timed.results, floor),
        left_out=left_out,
        seconds=timed.seconds,
        stages_s=timed.stages_s,
        versions=timed.versions,
        topology=topology,
    )


def study_screen(
    folder: Path, space: Space, release: str | None, topology: Topology, say: Callable[[str], None]
) -> Screening | None:
    """The screen of a study that asks for one, run once and kept in its folder; None where there is nothing to say."""
    from pipeline.screening import NOISE, Screening

    if not space.search.screen_collectives or space.engine != "sglang":
        return None
    file = folder / FILE
    if file.is_file():
        return Screening.model_validate_json(file.read_text())
    try:
        found = benchmark(space, release, topology, noise=NOISE)
    except UserError as error:
        say(f"no collective screen: {error}")
        return None
    file.write_text(found.model_dump_json(indent=2) + "\n")
    for line in lines(found):
        say(line)
    return found


def _check(space: Space, topology: Topology, settings: int) -> None:
    ranks = space.tensor_parallel_size
    if ranks < 2:
        raise InputError("one GPU sends no messages", key="sglang.tensor_parallel_size", expected="2 or more")
    if topology.gpu_count < ranks:
        raise PreflightError(f"the collective benchmark needs {ranks} GPUs, this machine has {topology.gpu_count}")
    if not settings:
        raise InputError(
            "no setting of this space leaves the messages to NCCL", key="sglang.space.collectives",
            expected="`custom_all_reduce: false` among its choices",
        )  # fmt: skip


def _model_config(model: str) -> dict[str, Any]:
    """A model's config.json, from its folder or, for a hub id, from the hub or its cache."""
    path = Path(model).expanduser() / "config.json"
    if not path.is_file():
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(model, "config.json"))
        except (OSError, ValueError) as error:
            raise InputError(
                f"no config.json of {model} ({type(error).__name__})", expected="a model folder, or a hub id in reach"
            ) from error
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _release() -> str | None:
    from serve.engines.sglang_flags import installed_release

    return installed_release()


def _write(found: Screening, out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(found.model_dump_json(indent=2) + "\n")


def _text(path: Path) -> str:
    if not path.is_file():
        raise InputError("no such file", source=str(path), expected="what --out of an earlier run wrote")
    return path.read_text()


def _compared(found: Screening, study: str, runs: Path) -> Screening:
    from pipeline.screening import spearman
    from pipeline.store import Study

    rho, pairs = spearman(found.results, Study.open(study, runs).records())
    return found.model_copy(update={"spearman": rho, "pairs": pairs})


def lines(found: Screening) -> list[str]:
    """The run in plain text: a table, fastest first, with what leaves the space and why; then what was not timed."""
    tried = [result for result in found.results if result.contains is None]
    tried.sort(key=lambda result: sum(times.step_ms for times in result.times) or float("inf"))
    leaves = {dropped.name: dropped.reason for dropped in found.dropped}
    width = max(len(result.name) for result in tried)
    out = [
        f"{found.model}: {found.shape.all_reduces} all-reduces and one all-gather a step, {found.ranks} ranks; "
        f"{len(found.results)} settings in {found.seconds:.0f} s{_stages(found)}",
        f"milliseconds a step, by its tokens; differences below {found.noise:.1%} count as none",
        f"{'':{width}}  " + " ".join(f"{message.tokens:>8}" for message in found.messages),
    ]
    out += [f"{result.name:{width}}  {_row(result, leaves.get(result.name))}" for result in tried]
    if along := len(found.results) - len(tried):
        out.append(f"{along} more settings contain one that failed or hung, and leave with it")
    out += [f"not timed: {name}: {reason}" for name, reason in found.left_out.items()]
    if late := [result.name for result in tried if result.outcome == "not measured"]:
        out.append(f"not reached, so still in the space: {'; '.join(late)}")
    return out + _verdict(found)


def _stages(found: Screening) -> str:
    parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in found.stages_s.items())
    return f" ({parts})" if parts else ""


def _row(result: Result, reason: str | None) -> str:
    figures = " ".join(f"{times.step_ms:8.3f}" for times in result.times)
    shown = figures or ("" if reason else f"{result.outcome}: {result.cause}")
    return shown + (f"  leaves: {reason}" if reason else "")


def _verdict(found: Screening) -> list[str]:
    if found.pairs is None:
        return []
    if found.spearman is None:
        return [f"the trials cannot tell whether this ranking holds: {found.pairs} comparable measurements"]
    advice = "screening may be used" if found.spearman >= TRUSTED else "leave `screen_collectives` off"
    return [f"Spearman with the trials: {found.spearman:.2f} over {found.pairs} measurements; {advice}"]


if __name__ == "__main__":
    run_command(app)

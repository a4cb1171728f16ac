"""`python -m pipeline.simulate STUDY [LENGTH]...`: what a better drafter would be worth, on the engine itself.

SGLang can make the accept length up: drafts, verify pass and collectives run and cost what they cost, and then so
many tokens are accepted (`SGLANG_SIMULATE_ACC_LEN`; read in 0.5.17 and 0.5.23, where every algorithm knows it and
clamps it to the draft's depth + 1). That tells whether the what-if table is right. The text is garbage. So such a
launch is no trial: it is not in the ledger, its answers are not kept, and `serve.engines.sglang` lets no
configuration set the variable.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.anatomy import Anatomy, Simulated, tok_per_s, what_if
from pipeline.cli import run_command
from pipeline.errors import InputError
from pipeline.store import RUNS, Study

if TYPE_CHECKING:
    from pipeline.records import LevelResult, TrialRecord
    from pipeline.ruler import MeasurePlan

app = typer.Typer(add_completion=False)


def variables(record: TrialRecord, length: float) -> dict[str, str]:
    """What makes SGLang accept `length` tokens a verify step on average, the bonus token included.

    Along a chain of drafts it accepts the drafts themselves; elsewhere it can only write one token over and over,
    which a mixture of experts would send to the same experts each time.
    """
    stated = getattr(record.config.speculation, "eagle_topk", None)
    chain = (stated or record.resolved.get("speculative_eagle_topk")) == 1 and record.config.speculation.algorithm in (
        "EAGLE", "EAGLE3", "NEXTN", "STANDALONE",
    )  # fmt: skip
    return {
        "SGLANG_SIMULATE_ACC_LEN": f"{length:g}",
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token" if chain else "fixed",
    }


def subject(study: Study, level: str | None) -> tuple[TrialRecord, Anatomy]:
    """The configuration of the what-if table, as first launched, and its anatomy at `level`, else at the table's.

    Raises:
        InputError: the study measured no speculation with SGLang, or not at that level.
    """
    from pipeline.report import study_report

    report = study_report(study)
    if report.subject is None:
        raise InputError(f"{study.name} measured no speculative configuration beside its baseline")
    wanted = level or report.subject.level
    found = {a.level: a for a in report.anatomies if a.name == report.subject.name}
    if wanted not in found:
        known = ", ".join(sorted(name for name in found if name))
        raise InputError(f"{report.subject.name} was not measured at {wanted}", key="--level", expected=known)
    config_id = next(row.config_id for row in report.ranking if row.name == report.subject.name)
    record = next(r for r in study.records() if r.config_id == config_id and r.measurement is not None)
    if record.config.engine != "sglang":
        raise InputError(f"{study.name} ran on the {record.config.engine} engine", expected="a study of SGLang's")
    return record, found[wanted]


def lengths(anatomy: Anatomy, asked: list[float]) -> list[float]:
    """The accept lengths to try: those asked for, else the what-if table's above the present one; each is a launch.

    Raises:
        InputError: a length that the draft cannot give.
    """
    top = anatomy.max_accept_length
    for length in asked:
        if length < 1 or (top is not None and length > top):
            raise InputError(f"no accept length of {length:g} with {anatomy.name}", expected=f"1 to {top or '…'}")
    better = [n for n in what_if(anatomy).accept_lengths if n.is_integer() and n > anatomy.accept_length]
    return asked or better or [anatomy.accept_length]


def level_plan(study: Study, level: str) -> MeasurePlan:
    """The study's own measurement, of one level alone. Garbage has no natural end, so answers have a fixed length."""
    from pipeline.candidate import study_space
    from pipeline.ruler import MeasurePlan

    whole = MeasurePlan.from_space(study_space(study), salt=study.facts["id"])
    one = next(found for found in whole.levels if found.key == level)
    assert one.concurrency is not None  # anatomies are of closed loops
    prompts = {one.workload: whole.workload.prompts[one.workload]}
    return whole.model_copy(
        update={
            "workload": whole.workload.model_copy(update={"prompts": prompts, "ignore_eos": True}),
            "load": whole.load.model_copy(
                update={"concurrency": (one.concurrency,), "request_rate": (), "trace": None}
            ),
        }
    )


def simulate(study: Study, record: TrialRecord, anatomy: Anatomy, length: float) -> Simulated:
    """Launch, measure at the anatomy's level, tear down; the result is stored in `STUDY/simulated/`.

    Raises:
        EngineError: the engine did not start, or died.
        MeasurementError: no figures that could be trusted.
    """
    from pipeline.relaunch import relaunched
    from pipeline.ruler import Ruler

    folder = study.folder / "simulated" / record.config_id
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{anatomy.level}-{length:g}"
    plan = level_plan(study, str(anatomy.level))
    with relaunched(record, folder / f"{name}.log", variables(record, length)) as (engine, base_url):
        measured = Ruler(plan).measure(base_url, watch=engine.check, greedy=False)
    found = _simulated(record, anatomy, length, measured.levels[0])
    (folder / f"{name}.json").write_text(found.model_dump_json(indent=2) + "\n")
    return found


def _simulated(record: TrialRecord, anatomy: Anatomy, asked: float, level: LevelResult) -> Simulated:
    from pipeline.reporting.facts import named

    got = level.accept_length or asked
    return Simulated(
        config_id=record.config_id,
        name=named(record.config.words()),
        level=str(anatomy.level),
        asked=asked,
        accept_length=got,
        cycle_ms=anatomy.cycle_ms,
        predicted_tok_per_s=tok_per_s(anatomy.cycle_ms, anatomy.streams, got),
        measured=level.output_tok_per_s,
    )


@app.command()
def main(
    study: Annotated[str, typer.Argument(help="A study's folder or name, or `latest`.")],
    accept_length: Annotated[
        list[float] | None,
        typer.Argument(help="Accept lengths to try; default: the what-if table's."),
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder that holds the studies.")] = RUNS,
    level: Annotated[str | None, typer.Option(help="Load level, such as open.c1; default: the report's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Launch a study's best speculation with made-up accept lengths: measured beside predicted throughput.

    The report shows the result below its what-if table.
    """
    opened = Study.open(study, runs)
    record, anatomy = subject(opened, level)
    done: list[Any] = []
    for length in lengths(anatomy, accept_length or []):
        typer.echo(f"{anatomy.name}, {anatomy.level}: accept length {length:g} …", err=True)
        found = simulate(opened, record, anatomy, length)
        done.append(found.model_dump() | {"error": found.error})
        if not as_json:
            typer.echo(_line(found))
    if as_json:
        typer.echo(json.dumps(done, indent=2))


def _line(found: Simulated) -> str:
    return (
        f"accept length {found.accept_length:.2f} (simulated): {found.measured.value:,.0f} tok/s measured, "
        f"{found.predicted_tok_per_s:,.0f} predicted ({found.error:+.1%})"
    )


if __name__ == "__main__":
    run_command(app)

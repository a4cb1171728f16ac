"""`python -m pipeline.measure URL`: the trials' ruler against any running OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from pipeline.cli import run_command
from pipeline.errors import InputError, MeasurementError, PreflightError
from pipeline.metrics import level_value
from pipeline.records import LevelResult
from pipeline.spec import LoadSpec, WorkloadSpec

if TYPE_CHECKING:
    from pipeline.ruler import Measured, MeasurePlan

API_KEY_VARIABLE = "FASTVERIFY_API_KEY"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def measure(
    url: Annotated[str, typer.Argument(help="Base URL, such as http://127.0.0.1:30000")],
    model: Annotated[str | None, typer.Option(help="Served name; the first that the server lists")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(help="Streams of a closed loop; repeatable")] = None,
    rate: Annotated[list[float] | None, typer.Option(help="Requests/s of an open loop (Poisson); repeatable")] = None,
    trace: Annotated[Path | None, typer.Option(help="Replay a JSONL file of timestamps and lengths")] = None,
    prompts: Annotated[list[str] | None, typer.Option(help="extract, open or a JSONL file; repeatable")] = None,
    output_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens")] = 128,
    natural_stop: Annotated[bool, typer.Option(help="Let answers end by themselves")] = False,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests a window; max(8, 4 x concurrency)")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Most repeats of a level")] = 5,
    ci_width: Annotated[float, typer.Option(help="Stop when ± this share of the mean is reached")] = 0.05,
    budget_s: Annotated[float, typer.Option(help="Most seconds a level")] = 120.0,
    seed: Annotated[int, typer.Option(help="Prompts, order and arrival times")] = 0,
    salt: Annotated[str, typer.Option(help="Another salt, other requests")] = "measure",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Measure throughput, TTFT, TPOT, latency and accept length of a running server.

    An API key is read from FASTVERIFY_API_KEY.
    """
    from pipeline.ruler import MeasurePlan, Ruler

    with _flags_checked():
        workload = WorkloadSpec(
            prompts={re.sub(r"[^\w .-]", "_", Path(source).stem): source for source in prompts or ["extract", "open"]},
            output_tokens=output_tokens,
            ignore_eos=not natural_stop,
            temperature=temperature,
            seed=seed,
        )
        load = LoadSpec(
            concurrency=tuple(concurrency or ([] if rate or trace else [1])),
            request_rate=tuple(rate or ()),
            trace=str(trace) if trace else None,
            requests_per_level=requests,
            min_repeats=min(2, repeats),
            max_repeats=repeats,
            ci_width=ci_width,
            level_budget_s=budget_s,
        )
    plan = MeasurePlan(workload=workload, load=load, salt=salt)
    target, api_key = base_url(url), os.environ.get(API_KEY_VARIABLE)
    _must_answer(target, api_key)
    ruler = Ruler(plan, api_key=api_key)
    measured = ruler.measure(target, model=model, greedy=False, on_phase=_tell(quiet=as_json))
    print(json.dumps(as_data(measured, plan), indent=2) if as_json else as_text(measured))


# Where a flag is not called as what it sets.
_FLAGS = {
    "request_rate": "rate",
    "requests_per_level": "requests",
    "max_repeats": "repeats",
    "level_budget_s": "budget-s",
}


@contextmanager
def _flags_checked() -> Iterator[None]:
    """A value that does not fit is the flag's mistake, in one line."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "concurrency"
        key = f"--{_FLAGS.get(name, name).replace('_', '-')}"
        if first["type"] == "value_error":
            raise InputError(str(first["ctx"]["error"]), key=key) from None
        expected = first["msg"].removeprefix("Input should be ")
        raise InputError(f"{first['input']!r} does not fit", key=key, expected=expected) from None


def base_url(url: str) -> str:
    """Accept a host and port, and a URL that already ends in /v1."""
    whole = url if "://" in url else f"http://{url}"
    if not whole.startswith(("http://", "https://")):
        raise InputError(f"not an HTTP address: {url}", key="URL", expected="http://host:port")
    return whole.rstrip("/").removesuffix("/v1")


def _must_answer(url: str, api_key: str | None) -> None:
    from pipeline.load import server_info

    try:
        asyncio.run(server_info(url, api_key=api_key))
    except MeasurementError as error:
        raise PreflightError(str(error)) from error


def _tell(*, quiet: bool) -> Any:
    """Phases go to stderr, so that stdout holds the result alone."""
    return (lambda _: None) if quiet else lambda phase: print(f"… {phase}", file=sys.stderr)


def as_data(measured: Measured, plan: MeasurePlan) -> dict[str, Any]:
    """The result for machines: plan, figures per level, notes."""
    return {
        "plan": plan.model_dump(mode="json", exclude_none=True),
        "levels": [level.model_dump(mode="json") for level in measured.levels],
        "notes": list(measured.notes),
    }


_COLUMNS = ("level", "ok", "failed", "tok/s", "±", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95", "accept", "CPU")


def as_text(measured: Measured) -> str:
    """The result for people: one line a level, times in ms."""
    rows = [_COLUMNS, *(_row(level) for level in measured.levels)]
    return "\n".join([*_aligned(rows), *(f"note: {note}" for note in measured.notes)])


def _row(level: LevelResult) -> tuple[str, ...]:
    tok_s = level.output_tok_per_s
    half = None if tok_s.high is None else tok_s.high - tok_s.value
    times = [level_value(level, name) for name in ("p50_ttft_ms", "p95_ttft_ms", "p50_tpot_ms", "p95_tpot_ms")]
    failed = level.requests_failed + level.requests_cut_off
    figures = [tok_s.value, half, *times, level.accept_length, level.client_cpu]
    return (level.level.key, str(level.requests_ok), str(failed), *map(_figure, figures))


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


if __name__ == "__main__":
    run_command(app)

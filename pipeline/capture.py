"""`python -m pipeline.capture STUDY`: profile decode steps of the baseline, the winner and the best of each algorithm.

Each is launched again, timed without the profiler, then profiled through SGLang's own endpoints, twice: with CPU
activity, which says what each kernel belongs to, and with GPU activity alone, which slows the engine less. The
profiles go to `STUDY/profiles/` and from there into the report. What has a profile is not launched again.

Steps are not asked for by stage: 0.5.17 and 0.5.23 start their profiler again at a prompt that comes after the
decode steps, and write that trace over the first (profiler_manager.py). Steps with a prompt are left out here.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from pipeline.cli import run_command
from pipeline.config import EngineConfig
from pipeline.errors import FastverifyError, MeasurementError
from pipeline.profile import StepProfile, parse
from pipeline.records import TrialRecord
from pipeline.store import RUNS, Study
from pipeline.trace import gpu_work, learn, load_trace

_STOPPED = 2.0  # seconds without growth after which a trace file is taken for whole
_TRACES = "*.trace.json.gz"
_SHORT, _LONG = 64, 448  # output tokens of the two runs whose difference holds no prefill
_PROMPT = "Explain, step by step and with an example for each step, how a bicycle stays upright. Part"

app = typer.Typer(add_completion=False)


def capture(
    base_url: str,
    out_dir: Path,
    load: Callable[[], object],
    *,
    ranks: int = 1,
    num_steps: int = 30,
    activities: tuple[str, ...] = ("CPU", "GPU"),
    settle_s: float = 0.5,
    timeout_s: float = 180.0,
) -> list[Path]:
    """Profile a running server that `load` keeps decoding; return one trace file a rank.

    Args:
        base_url: the server, started by us: it writes into `out_dir`, so it must share this file system.
        out_dir: a folder of its own; traces of an earlier attempt in it are removed.
        load: sends requests and returns when they are done; called again and again until the traces are there.
        ranks: traces to wait for, at least.
        num_steps: forward passes of the scheduler to record.
        activities: what the profiler watches; never Python's stack or shapes, which slow the engine most.
        settle_s: time given to the first prefill before the profiler starts.
        timeout_s: limit on the whole capture.

    Raises:
        MeasurementError: the server refused, or no whole trace came in time.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    for stale in out_dir.glob(_TRACES):
        stale.unlink()
    deadline = time.monotonic() + timeout_s
    request = {
        "output_dir": str(out_dir.resolve()),
        "num_steps": num_steps,
        "activities": list(activities),
        "with_stack": False,
        "record_shapes": False,
    }
    with _kept_busy(load):
        time.sleep(settle_s)
        _post(f"{base_url}/start_profile", request, timeout_s)
        return _wait_for_traces(out_dir, ranks, deadline)


@contextmanager
def _kept_busy(load: Callable[[], object]) -> Iterator[None]:
    """Run `load` over and over in a thread while the block lasts, and let the last one end."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            load()

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(run)
        try:
            yield
        finally:
            over.set()
    sending.result()


def _wait_for_traces(out_dir: Path, ranks: int, deadline: float) -> list[Path]:
    sizes: dict[Path, int] = {}
    since = time.monotonic()
    while time.monotonic() < deadline:
        seen = {path: path.stat().st_size for path in sorted(out_dir.glob(_TRACES))}
        if seen != sizes:
            sizes, since = seen, time.monotonic()
        if len(sizes) >= ranks and time.monotonic() - since > _STOPPED:
            return list(sizes)
        time.sleep(0.2)
    raise MeasurementError(f"{len(sizes)} of {ranks} traces appeared in {out_dir}; the engine's log says why")


def _post(url: str, body: dict[str, Any], timeout_s: float) -> Any:
    """The JSON that comes back; None for any other answer."""
    request = urllib.request.Request(  # noqa: S310 - http, to an engine that we started
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
            text = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise MeasurementError(f"{url}: {error}") from error
    return json.loads(text) if text.startswith(b"{") else None


def rank_of(path: Path) -> str:
    """The rank in a trace's file name, such as `TP-1`."""
    found = re.search(r"TP-\d+(?:-(?:DP|PP|EP)-\d+)*", path.name)
    return found.group() if found else path.name


def profile_engine(
    base_url: str,
    out_dir: Path,
    load: Callable[[], object],
    *,
    label: str = "",
    ranks: int = 1,
    num_steps: int = 30,
    measured_step_ms: float | None = None,
) -> list[StepProfile]:
    """Capture and parse: one `StepProfile` a rank, also stored as `profile.json` in `out_dir`.

    Raises:
        MeasurementError: no whole trace with CPU activity came. Without the one of GPU activity it goes on.
    """
    paths = capture(base_url, out_dir, load, ranks=ranks, num_steps=num_steps)
    try:
        lighter = capture(base_url, out_dir / "gpu", load, ranks=ranks, num_steps=num_steps, activities=("GPU",))
    except MeasurementError as error:
        typer.echo(f"{label}: no trace of GPU activity alone ({error}); read from the one with CPU activity", err=True)
        lighter = []
    found = _profiles(paths, lighter, label)
    profiles = [profile.model_copy(update={"measured_step_ms": measured_step_ms}) for profile in found]
    (out_dir / "profile.json").write_text(json.dumps([p.model_dump() for p in profiles], indent=2))
    return profiles


def _profiles(paths: list[Path], lighter: list[Path], label: str) -> Iterator[StepProfile]:
    """Each rank's profile, of the trace that slowed its step less."""
    light = {rank_of(path): path for path in lighter}
    for path in paths:
        rank, events = rank_of(path), load_trace(path)
        profile = parse(events, rank=rank, label=label)
        other = _light(light[rank], events, rank, label) if rank in light else None
        if other is not None and other.step_ms < profile.step_ms:
            profile = other.model_copy(update={"spans_step_ms": profile.step_ms})
        yield profile


def _light(path: Path, labelled: list[dict[str, Any]], rank: str, label: str) -> StepProfile | None:
    """The profile of a trace of GPU activity alone; None where nothing in it looks like a step of the labelled one."""
    try:
        return parse(load_trace(path), rank=rank, label=label, shapes=learn(gpu_work(labelled)))
    except MeasurementError as error:
        typer.echo(f"{label} {rank}: the trace of GPU activity alone is of no use ({error})", err=True)
        return None


def generate(base_url: str, tokens: int, streams: int, limit_s: float = 300.0) -> tuple[float, float]:
    """Decode `tokens` tokens on each of `streams` requests at once; return the median (seconds, decode steps)."""

    def one(number: int) -> tuple[float, float]:
        body = {
            "text": f"{_PROMPT} {number}:",
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True},
        }
        began = time.monotonic()
        meta = _post(f"{base_url}/generate", body, limit_s)["meta_info"]
        return time.monotonic() - began, float(meta.get("spec_verify_ct") or meta["completion_tokens"] - 1)

    with ThreadPoolExecutor(streams) as pool:
        done = list(pool.map(one, range(streams)))
    return median(seconds for seconds, _ in done), median(steps for _, steps in done)


def decode_step_ms(base_url: str, streams: int = 1, repeats: int = 3) -> float:
    """Milliseconds a decode step, without a profiler: a long run less a short one, so that prefill cancels."""
    generate(base_url, _SHORT, streams)  # warm: kernels, and the prompt in the cache
    found = []
    for _ in range(repeats):
        short, long = generate(base_url, _SHORT, streams), generate(base_url, _LONG, streams)
        found.append(1e3 * (long[0] - short[0]) / (long[1] - short[1]))
    return median(found)


def targets(study: Study) -> list[TrialRecord]:
    """A launch of the baseline, of the winner, and of the best of each algorithm."""
    from pipeline.report import study_report
    from pipeline.reporting.figures import leaders

    records = study.records()
    first = {record.config_id: record for record in reversed(records) if record.status == "ok"}
    return [first[row.config_id] for row in leaders(study_report(study).ranking) if row.config_id in first]


def profile_trial(record: TrialRecord, folder: Path, *, streams: int, steps: int) -> list[StepProfile]:
    """Launch a trial's configuration again, time its decode step, profile it, tear it down.

    Raises:
        EngineError: it did not start.
        MeasurementError: no whole trace came.
    """
    from pipeline.relaunch import relaunched

    folder.mkdir(parents=True, exist_ok=True)
    with relaunched(record, folder / "engine.log") as (_, base_url):
        return profile_running(base_url, record.config, folder, streams=streams, steps=steps)


def profile_running(
    base_url: str, config: EngineConfig, folder: Path, *, streams: int = 1, steps: int = 16
) -> list[StepProfile]:
    """Time the decode step of an engine that runs, then profile it.

    Raises:
        MeasurementError: no whole trace came.
    """
    from pipeline.reporting.facts import named

    return profile_engine(
        base_url,
        folder,
        lambda: generate(base_url, _LONG, streams),
        label=named(config.words()),
        ranks=config.tensor_parallel_size,
        num_steps=steps,
        measured_step_ms=decode_step_ms(base_url, streams),
    )


def profile_study(study: Study, *, streams: int = 1, steps: int = 30, stop_after_s: float | None = None) -> int:
    """Profile a study's baseline, winner and best of each algorithm; return how many could not be profiled.

    Raises:
        TimeoutError: `stop_after_s` is over; the same call goes on where this one stopped.
    """
    began, failed = time.monotonic(), 0
    for record in targets(study):
        folder = study.folder / "profiles" / record.config_id
        if (folder / "profile.json").exists():
            continue
        if stop_after_s is not None and time.monotonic() - began > stop_after_s:
            raise TimeoutError("time is up; the same command goes on")
        try:
            found = profile_trial(record, folder, streams=streams, steps=steps)
        except FastverifyError as error:
            failed += 1
            typer.echo(f"{record.config.words()}: {error}", err=True)
        else:
            typer.echo("\n".join(_line(profile) for profile in found))
    return failed


@app.command()
def main(
    study: Annotated[str, typer.Argument(help="A study's folder or name, or `latest`.")],
    runs: Annotated[Path, typer.Option(help="Folder that holds the studies.")] = RUNS,
    streams: Annotated[int, typer.Option(help="Requests decoding at once.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Decode steps to record.", min=4)] = 30,
    stop_after: Annotated[float | None, typer.Option(help="Start no further launch after this many seconds.")] = None,
) -> None:
    """Profile the decode steps of a study's baseline, winner and best of each algorithm."""
    try:
        failed = profile_study(Study.open(study, runs), streams=streams, steps=steps, stop_after_s=stop_after)
    except TimeoutError as error:
        typer.echo(str(error))
        raise typer.Exit(3) from None
    if failed:
        raise typer.Exit(1)


def _line(p: StepProfile) -> str:
    parts = ", ".join(f"{name} {ms:.2f}" for name, ms in p.parts_ms.items())
    measured = f"{p.measured_step_ms:.2f} ms, " if p.measured_step_ms is not None else ""
    counts = f"{p.all_reduces:g} all-reduces, {p.all_gathers:g} all-gathers"
    return f"{p.label} {p.rank}: step {measured}{p.step_ms:.2f} under the profiler: {parts}; {counts}"


if __name__ == "__main__":
    run_command(app)

"""How true the load generator's stamps are, and what a chunk costs it, against sglang.bench_serving's client.

    python -m benchmarks.load_generator [--rounds 5] [--out benchmarks/results/load_generator.json]

Truth is the fake server's own monotonic stamp of each write. Starts are staggered. Cost is the client
process's CPU time ÷ chunks, both clients over the same prompts and the same paced server, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.foreign import bench_serving
from pipeline import metrics
from pipeline.errors import MeasurementError
from pipeline.load import Sending, run_level
from pipeline.metrics import Window
from pipeline.records import LoadLevel
from pipeline.ruler import refuse_saturated
from pipeline.spec import WorkloadSpec
from pipeline.workload import PlannedRequest, load_prompts, plan
from tests.fakes.running import fake_server

TOKENS = 64
WAVES = 3  # requests a stream, where cost is measured
ONE_STREAM = 20  # requests in turn: one alone would be one sample
# Streams -> time between a stream's chunks: a server for 2 cores to keep up with.
STEP_MS = {1: 10, 64: 50, 256: 150}
LIMITS = {"median_error_ms": 1.0, "cpu_ratio": 0.8}


def planned(count: int, *, spread_s: float | None = None, salt: str = "load") -> tuple[PlannedRequest, ...]:
    """So many requests, with starts over `spread_s` (Poisson) or as streams become free."""
    rate = count / spread_s if spread_s else None
    level = LoadLevel(workload="open", request_rate=rate) if rate else LoadLevel(workload="open", concurrency=1)
    return plan(level, WorkloadSpec(output_tokens=TOKENS), load_prompts("open"), 0, salt, count=count)


def accuracy(streams: int) -> dict[str, Any]:
    """Errors of TTFT and TPOT against the server's stamps, or why the measurement is refused."""
    with tempfile.TemporaryDirectory() as folder:
        stamps = Path(folder) / "stamps.jsonl"
        knobs = {"ttft_ms": 200, "step_ms": STEP_MS[streams], "tokens_per_step": 2, "stamps": str(stamps)}
        with fake_server(["--max-running-requests", str(streams)], **knobs) as url:
            asyncio.run(run_level(Sending(url, "fake-model"), planned(1, salt="warm up"), concurrency=1))
            if streams == 1:
                work = run_level(Sending(url, "fake-model"), planned(ONE_STREAM), concurrency=1)
            else:
                spread_s = STEP_MS[streams] * TOKENS / 2 / 1e3 * 0.7  # all run at once for a while
                work = run_level(Sending(url, "fake-model"), planned(streams, spread_s=spread_s))
            window = asyncio.run(work)
        truth = [json.loads(line) for line in stamps.read_text().splitlines()[1:]]  # without the warm-up
    errors = _errors(window, truth)
    return {
        "streams": streams,
        "chunks": sum(len(trace.chunk_times) for trace in window.ok),
        "client_cpu": window.client_cpu,
        "loop_lag_ms": window.loop_lag_ms,
        "refused": _refused(window),
        **{name: {"median": statistics.median(found), "p99": _p99(found)} for name, found in errors.items()},
    }


def _errors(window: Window, truth: list[dict[str, Any]]) -> dict[str, list[float]]:
    true = sorted(truth, key=lambda row: row["received"])
    traces = sorted(window.traces, key=lambda trace: trace.started)
    if len(window.ok) != len(true):
        raise MeasurementError(f"{len(window.ok)} answers, {len(true)} stamped")
    ttft, tpot = [], []
    for trace, row in zip(traces, true, strict=True):
        first, last = row["writes"][0][0], row["writes"][-1][0]
        ttft.append(abs((metrics.ttft_ms(trace) or math.nan) - 1e3 * (first - trace.started)))
        tpot.append(abs((metrics.tpot_ms(trace) or math.nan) - 1e3 * (last - first) / (TOKENS - 1)))
    return {"ttft_error_ms": ttft, "tpot_error_ms": tpot}


def _p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def _refused(window: Window) -> str | None:
    try:
        refuse_saturated("open", window)
    except MeasurementError as error:
        return str(error)
    return None


def cost(streams: int, rounds: int) -> dict[str, Any]:
    """CPU microseconds a chunk, both clients in turns; the least of the rounds, the one least disturbed, counts."""
    python, pairs = bench_serving(), []
    with fake_server(["--max-running-requests", str(streams)], ttft_ms=200, step_ms=STEP_MS[streams]) as url:
        for number in range(rounds):
            requests = planned(WAVES * streams, salt=str(number))
            pairs.append((_our_cost(url, requests, streams), _their_cost(python, url, requests, streams)))
    ours, theirs = zip(*pairs, strict=True)
    return {
        "streams": streams,
        "ours_us": min(ours),
        "bench_serving_us": min(theirs),
        "ratio": min(ours) / min(theirs),
        "rounds_us": pairs,
    }


def _our_cost(url: str, requests: tuple[PlannedRequest, ...], streams: int) -> float:
    cpu = time.process_time()
    window = asyncio.run(run_level(Sending(url, "fake-model"), requests, concurrency=streams))
    spent = time.process_time() - cpu
    if len(window.ok) != len(requests):
        raise MeasurementError(next(trace.error or "cut off" for trace in window.traces if trace.status != "ok"))
    return 1e6 * spent / sum(len(trace.chunk_times) for trace in window.ok)


def _their_cost(python: Path, url: str, requests: tuple[PlannedRequest, ...], streams: int) -> float:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([request.messages[-1]["content"] for request in requests], file)
        file.flush()
        script = Path(__file__).with_name("bench_serving_client.py")
        done = subprocess.run(
            [str(python), str(script), url, file.name, str(TOKENS), str(streams)],
            capture_output=True,
            text=True,
            timeout=120,
        )
    if done.returncode:
        raise MeasurementError(done.stderr[-500:])
    found = json.loads(done.stdout.splitlines()[-1])
    return 1e6 * found["cpu_s"] / found["chunks"]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "load_generator.json")
    options = parser.parse_args()
    accuracies = [accuracy(streams) for streams in STEP_MS]
    costs = [cost(streams, options.rounds) for streams in (64, 256)]
    results = {
        "machine": {"python": platform.python_version(), "cpus": os.cpu_count()},
        "limits": LIMITS,
        "accuracy": accuracies,
        "cost": costs,
        "held": {
            "accuracy": all(
                row["refused"] or max(row["ttft_error_ms"]["median"], row["tpot_error_ms"]["median"]) <= 1.0
                for row in accuracies
            ),
            "cost": all(row["ratio"] <= LIMITS["cpu_ratio"] for row in costs),
        },
    }
    options.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()

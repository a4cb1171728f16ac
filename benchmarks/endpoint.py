"""The endpoint against the engine itself: throughput, time to first token, and what the client spends.

    python benchmarks/endpoint.py --streams 1 --streams 16 --out benchmarks/results/endpoint.json

The champion's replica runs the fake engine, paced at 10 ms a token and flat out. Both ways are measured
in turns on the same engine process, with the project's own load generator, and compared within rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.cli import run_command  # noqa: E402
from pipeline.config import EngineConfig  # noqa: E402
from pipeline.load import Sending, run_level  # noqa: E402
from pipeline.metrics import Window  # noqa: E402
from pipeline.spec import Limits  # noqa: E402
from pipeline.workload import PlannedRequest  # noqa: E402

app = typer.Typer(add_completion=False)
PACES_MS = {"paced": 10.0, "flat out": 0.0}
FAKE = f"{sys.executable} {ROOT / 'tests' / 'fakes' / 'sglang_server.py'}"


@app.command()
def main(
    streams: Annotated[list[int], typer.Option(help="Concurrent streams; may be repeated.")] = [1, 16],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="Paired rounds.")] = 5,
    tokens: Annotated[int, typer.Option(help="Tokens an answer, paced; ten times as many flat out.")] = 100,
    requests: Annotated[int, typer.Option(help="Requests a stream and window.")] = 4,
    haproxy: Annotated[bool, typer.Option(help="HAProxy in front, as served; or Serve's own proxy.")] = True,
    port: Annotated[int, typer.Option(help="The endpoint's port.")] = 18000,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes as well.")] = None,
) -> None:
    """Measure endpoint ÷ engine at each number of streams."""
    from serve.__main__ import environment

    os.environ |= {"RAY_AUTH_MODE": "disabled", "FASTVERIFY_SGLANG_COMMAND": FAKE}
    environment(port, haproxy=haproxy)
    rows = _measure(port, streams, rounds, tokens, requests)
    result = {"benchmark": "endpoint", "haproxy": haproxy, "cpus": os.cpu_count(), "rows": rows}
    text = json.dumps(result, indent=2)
    typer.echo(text)
    if out is not None:
        out.write_text(text + "\n")


def _measure(port: int, streams: list[int], rounds: int, tokens: int, requests: int) -> list[dict[str, Any]]:
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    ray.init(include_dashboard=False, log_to_driver=False, num_gpus=1)
    rows = []
    try:
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        for pace, step_ms in PACES_MS.items():
            ways = {"engine": _champion(step_ms), "endpoint": f"http://127.0.0.1:{port}"}
            rows += [_row(pace, n, ways, rounds, tokens if step_ms else 10 * tokens, requests) for n in streams]
    finally:
        serve.shutdown()
        ray.shutdown()
    return rows


def _champion(step_ms: float) -> str:
    """Put a fake engine of this pace in service; return its own address."""
    from ray import serve

    from serve.service import APP_NAME, ChampionSpec, ProxySettings, Service
    from serve.switching import put_in_service

    knobs = json.dumps({"children": False, "start_ms": 0, "ttft_ms": step_ms, "step_ms": step_ms})
    config = EngineConfig(engine="sglang", model="fake", max_running_requests=512, env=(("FAKE_SGLANG_KNOBS", knobs),))
    spec = ChampionSpec(
        config=config,
        limits=Limits(start_s=60, stop_s=5, proof_s=10),
        proxy=ProxySettings(echo_request_id=False, max_concurrent=512),
        folder=tempfile.mkdtemp(),
        drain_s=2,
    )
    put_in_service(Service(spec=spec))
    status = serve.get_app_handle(APP_NAME).status.remote().result(timeout_s=60)
    return str(status["launch"].base_url)


def _row(pace: str, streams: int, ways: dict[str, str], rounds: int, tokens: int, requests: int) -> dict[str, Any]:
    seen: dict[str, list[Window]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in sorted(ways, reverse=bool(number % 2)):
            seen[name].append(_window(ways[name], streams, tokens, requests))
    pairs = zip(seen["engine"], seen["endpoint"], strict=True)
    ratios = [_tok_per_s(after) / _tok_per_s(before) for before, after in pairs]
    figures = {name: _figures(windows) for name, windows in seen.items()}
    return {
        "pace": pace,
        "streams": streams,
        "tok_per_s_ratio": statistics.median(ratios),
        "ratios": ratios,
        "p50_ttft_added_ms": figures["endpoint"]["p50_ttft_ms"] - figures["engine"]["p50_ttft_ms"],
        **figures,
    }


def _figures(windows: list[Window]) -> dict[str, float]:
    ttft = [1e3 * (t.chunk_times[0] - t.started) for window in windows for t in window.ok]
    return {
        "output_tok_per_s": statistics.median(map(_tok_per_s, windows)),
        "p50_ttft_ms": statistics.median(ttft),
        "client_cpu": statistics.median(w.client_cpu for w in windows if w.client_cpu is not None),
        "failed": sum(len(w.traces) - len(w.ok) for w in windows),
    }


def _tok_per_s(window: Window) -> float:
    return sum(trace.output_tokens or 0 for trace in window.ok) / window.seconds


def _window(url: str, streams: int, tokens: int, requests: int) -> Window:
    planned = [
        PlannedRequest(n, str(n), "open", ({"role": "user", "content": f"count {n}"},), tokens)
        for n in range(streams * requests)
    ]
    return asyncio.run(run_level(Sending(base_url=url, model="fake"), planned, concurrency=streams))


if __name__ == "__main__":
    run_command(app)

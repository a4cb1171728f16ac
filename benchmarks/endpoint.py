"""The endpoint against the engine itself: throughput, time to first token, and whose CPU it costs.

    python benchmarks/endpoint.py --out benchmarks/results/endpoint.json      # 5 minutes on 2 quiet cores

The champion's replica runs the fake engine, from 10 ms a token to flat out. All ways to it are measured in
turns on the same engine process, with the project's own load generator, and compared within rounds:

    engine    straight to the engine
    endpoint  as served: HAProxy (or what `--front` names), the replica, the engine
    replica   Ray's direct ingress: the replica's own port, nothing in front
    eager     the endpoint, but its replica interrupts whoever runs at every chunk (the usual scheduling)

On few cores client, engine and endpoint compete. So each way reports CPU µs a token by process and the share
of the machine that was idle: none idle means that the cores ran out, not that a hop is slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
from serve import procfs  # noqa: E402

app = typer.Typer(add_completion=False)
FAKE = f"{sys.executable} {ROOT / 'tests' / 'fakes' / 'sglang_server.py'}"
LONGEST_ANSWER = 4000  # tokens; the fake's context holds twice as many
FLAT_OUT_TOK_PER_S = 32_000  # about what the fake gives on two cores: only sizes the windows
# What stands in front of the replica, as Ray's variables, and the paces that it is worth measuring at.
FRONTS: dict[str, dict[str, str]] = {
    "haproxy": {},
    "serve": {},
    "serve over gRPC": {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "1"},
}
PACES_MS = {"haproxy": (10.0, 1.0, 0.2, 0.0), "serve": (10.0, 0.0), "serve over gRPC": (10.0, 0.0)}
NOT_MEASURED = {
    "gRPC to the client": "Serve's gRPC ingress takes protobuf services (`grpc_servicer_functions`); OpenAI's API is "
    "JSON and server-sent events over HTTP/1.1, and none of its clients speaks gRPC.",
}


@app.command()
def main(
    front: Annotated[list[str], typer.Option(help=f"One of: {', '.join(FRONTS)}.")] = list(FRONTS),  # noqa: B006
    streams: Annotated[list[int], typer.Option(help="Concurrent streams; may be repeated.")] = [1, 16],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="Paired rounds.")] = 4,
    seconds: Annotated[float, typer.Option(help="About how long a window is.")] = 0.8,
    port: Annotated[int, typer.Option(help="The endpoint's port.")] = 18000,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes as well.")] = None,
) -> None:
    """Measure every way to the engine, at each pace and number of streams; with --out, print it as a table."""
    began, rows = time.monotonic(), []
    for name in front:
        # Ray reads its variables once a process.
        rows += (_measure if len(front) == 1 else _apart)(name, port, streams, rounds, seconds)
    versions = {"cpus": os.cpu_count(), "load_average": os.getloadavg()[0], "seconds": time.monotonic() - began}
    text = json.dumps({"benchmark": "endpoint", **versions, "rows": rows, "not_measured": NOT_MEASURED}, indent=2)
    if out is not None:
        out.write_text(text + "\n")
    typer.echo(text if out is None else _table(rows))


def _apart(front: str, port: int, streams: list[int], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """The rows of one front, measured by a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        options = {"front": front, "port": port, "rounds": rounds, "seconds": seconds, "out": out}
        words = [f"--{name}={value}" for name, value in options.items()] + [f"--streams={n}" for n in streams]
        subprocess.run([sys.executable, __file__, *words], check=True, stdout=subprocess.DEVNULL, timeout=900)
        rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def _measure(front: str, port: int, streams: list[int], rounds: int, seconds: float) -> list[dict[str, Any]]:
    from serve.__main__ import environment

    os.environ |= {"RAY_AUTH_MODE": "disabled", "FASTVERIFY_SGLANG_COMMAND": FAKE}
    environment(port, haproxy=front == "haproxy")
    os.environ |= FRONTS[front]
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_gpus=1)
    rows = []
    try:
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        for step_ms in PACES_MS[front]:
            bench = Bench(_champion(step_ms), port)
            rows += [{"front": front, **bench.row(step_ms, n, rounds, seconds)} for n in streams]
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


class Bench:
    """The ways to one engine, and the processes on them."""

    def __init__(self, engine_url: str, port: int) -> None:
        everything, mine = procfs.table(), procfs.descendants(os.getpid())
        self.replica = next(p.pid for p in mine if procfs.cmdline(p.pid).startswith("ray::ServeReplica"))
        self.pids = {
            "engine": procfs.listeners(int(engine_url.rpartition(":")[2]), everything),
            "replica": {self.replica},
            "front": procfs.listeners(port, everything),
        }
        endpoint = f"http://127.0.0.1:{port}"
        self.ways = {"engine": engine_url, "endpoint": endpoint, "eager": endpoint}
        own = [p for p in procfs.listening_ports([self.replica]) if 30_000 <= p <= 31_000]
        if own:  # only HAProxy's mode gives a replica a port
            self.ways["replica"] = f"http://127.0.0.1:{own[0]}"

    def row(self, step_ms: float, streams: int, rounds: int, seconds: float) -> dict[str, Any]:
        """All ways at one pace and number of streams, order turned every round."""
        seen: dict[str, list[dict[str, float]]] = {name: [] for name in self.ways}
        for number in range(rounds):
            for name in sorted(self.ways, reverse=bool(number % 2)):
                with self._eager() if name == "eager" else contextlib.nullcontext():
                    seen[name].append(self._window(self.ways[name], _plan(step_ms, streams, seconds), streams))
        ways = {name: _medians(windows) for name, windows in seen.items()}
        for name, windows in seen.items():
            pairs = zip(windows, seen["engine"], strict=True)
            ways[name]["ratios"] = [after["tok_per_s"] / before["tok_per_s"] for after, before in pairs]
            ways[name]["ratio"] = statistics.median(ways[name]["ratios"])
            ways[name]["ttft_added_ms"] = ways[name]["p50_ttft_ms"] - ways["engine"]["p50_ttft_ms"]
        return {"ms_a_token": step_ms, "streams": streams, "tok_per_s_ratio": ways["endpoint"]["ratio"], **ways}

    @contextlib.contextmanager
    def _eager(self) -> Iterator[None]:
        """The replica's threads under the usual scheduling; see `serve.champion._take_turns`."""
        threads = [int(entry.name) for entry in (procfs.PROC / str(self.replica) / "task").iterdir()]
        patient = [thread for thread in threads if os.sched_getscheduler(thread) == os.SCHED_BATCH]
        try:
            for thread in patient:
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
            yield
        finally:
            for thread in patient:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))

    def _window(self, url: str, planned: list[PlannedRequest], streams: int) -> dict[str, float]:
        cpu, machine = self._cpu_s(), _machine_s()
        window = asyncio.run(run_level(Sending(base_url=url, model="fake"), planned, concurrency=streams))
        busy, whole = (after - before for after, before in zip(_machine_s(), machine, strict=True))
        tokens = sum(trace.output_tokens or 0 for trace in window.ok)
        used = {name: after - cpu[name] for name, after in self._cpu_s().items()}
        used["client"] = (window.client_cpu or 0.0) * window.seconds
        return {
            "tok_per_s": tokens / window.seconds,
            "p50_ttft_ms": statistics.median(1e3 * (t.chunk_times[0] - t.started) for t in window.ok),
            "tokens_a_read": tokens / sum(len(set(t.chunk_times)) for t in window.ok),
            **{f"{name}_us_a_token": 1e6 * seconds / tokens for name, seconds in used.items()},
            "idle_share": 1 - busy / whole,
            "strangers_share": max(0.0, busy - sum(used.values())) / whole,
            "failed": _failed(window),
        }

    def _cpu_s(self) -> dict[str, float]:
        def spent(pids: set[int]) -> float:
            return sum(process.cpu_s for process in map(procfs.read, pids) if process)

        return {name: spent(pids) for name, pids in self.pids.items()}


def _table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, one line a way."""
    cpu = "CPU µs a token: engine / replica / front / client"
    head = f"front | ms a token | streams | way | ÷ engine | tok/s a stream | TTFT ms | tokens a read | {cpu} | idle"
    lines = [f"| {head} | strangers |", "|---" * 11 + "|"]
    for row in rows:
        for name in (way for way in ("engine", "endpoint", "eager", "replica") if way in row):
            way = row[name]
            cpu = " / ".join(f"{way[f'{who}_us_a_token']:.0f}" for who in ("engine", "replica", "front", "client"))
            lines.append(
                f"| {row['front']} | {row['ms_a_token']:g} | {row['streams']} | {name} | {way['ratio']:.3f} "
                f"| {way['tok_per_s'] / row['streams']:.0f} | {way['p50_ttft_ms']:.1f} | {way['tokens_a_read']:.1f} "
                f"| {cpu} | {way['idle_share']:.0%} | {way['strangers_share']:.0%} |"
            )
    return "\n".join(lines)


def _plan(step_ms: float, streams: int, seconds: float) -> list[PlannedRequest]:
    """Closed-loop requests for a window of about so many seconds."""
    tokens = seconds * (1e3 / step_ms if step_ms else FLAT_OUT_TOK_PER_S / streams)
    requests = math.ceil(tokens / LONGEST_ANSWER)
    return [
        PlannedRequest(n, str(n), "open", ({"role": "user", "content": f"count {n}"},), math.ceil(tokens / requests))
        for n in range(streams * requests)
    ]


def _medians(windows: list[dict[str, float]]) -> dict[str, Any]:
    return {name: statistics.median(window[name] for window in windows) for name in windows[0]}


def _failed(window: Window) -> int:
    return len(window.traces) - len(window.ok)


def _machine_s() -> tuple[float, float]:
    """CPU seconds since boot of all processes together: busy, and busy or idle."""
    ticks = [int(word) for word in (procfs.PROC / "stat").read_text().splitlines()[0].split()[1:9]]
    whole = sum(ticks) / os.sysconf("SC_CLK_TCK")
    return whole - (ticks[3] + ticks[4]) / os.sysconf("SC_CLK_TCK"), whole


if __name__ == "__main__":
    run_command(app)

"""A champion is exchanged under load from 32 streams: broken streams, and the time without service.

    python benchmarks/redeploy.py --out benchmarks/results/redeploy.json

Three exchanges on the fake engine: on a full node, behind a bridge on spare GPUs, and to a
configuration that does not start. A stream is broken when it ends without `[DONE]` and without an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.cli import run_command  # noqa: E402
from pipeline.config import EngineConfig  # noqa: E402
from pipeline.spec import Limits  # noqa: E402
from tests.fakes.steady_load import Load  # noqa: E402

app = typer.Typer(add_completion=False)
FAKE = f"{sys.executable} {ROOT / 'tests' / 'fakes' / 'sglang_server.py'}"


@app.command()
def main(
    streams: Annotated[int, typer.Option(help="Concurrent streams.")] = 32,
    start_ms: Annotated[int, typer.Option(help="How long the new engine takes to start.")] = 3000,
    port: Annotated[int, typer.Option(help="The endpoint's port.")] = 18001,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes as well.")] = None,
) -> None:
    """Exchange the champion three times under load and count what breaks."""
    from serve.__main__ import environment

    os.environ |= {"RAY_AUTH_MODE": "disabled", "FASTVERIFY_SGLANG_COMMAND": FAKE}
    environment(port)
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_gpus=2)
    try:
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        rows = _exchanges(f"http://127.0.0.1:{port}", streams, start_ms)
    finally:
        serve.shutdown()
        ray.shutdown()
    text = json.dumps(
        {"benchmark": "redeploy", "streams": streams, "engine_start_ms": start_ms, "rows": rows}, indent=2
    )
    typer.echo(text)
    if out is not None:
        out.write_text(text + "\n")


def _exchanges(url: str, streams: int, start_ms: int) -> list[dict[str, Any]]:
    from serve.switching import put_in_service, switch

    folder = tempfile.mkdtemp()
    put_in_service(_service(folder, step_ms=10))
    works = {
        "full node": lambda: put_in_service(_service(folder, step_ms=10, start_ms=start_ms)),
        "behind a bridge": lambda: switch(
            _service(folder, step_ms=9, start_ms=start_ms), spare_gpus=True, folder=f"{folder}/bridge"
        ),
        "new engine fails": lambda: put_in_service(_service(folder, fail="oom_capture")),
    }
    rows = []
    for name, work in works.items():
        load = Load(url, streams)
        done = asyncio.run(load.during(work))
        seen = done.model_dump(exclude={"asked", "failure"})
        rows.append({"exchange": name, "answered": load.whole, "told": load.told, "broken": len(load.broken)} | seen)
    return rows


def _service(folder: str, **knobs: Any) -> Any:
    from serve.service import ChampionSpec, ProxySettings, Service

    told = json.dumps({"children": False, "start_ms": 0, "step_ms": 10, "ttft_ms": 5, **knobs})
    config = EngineConfig(engine="sglang", model="fake", env=(("FAKE_SGLANG_KNOBS", told),))
    limits = Limits(start_s=60, stall_s=20, generate_s=10, stop_s=5, proof_s=10)
    proxy = ProxySettings(echo_request_id=False)
    spec = ChampionSpec(config=config, limits=limits, proxy=proxy, folder=folder, drain_s=10, expected_start_s=5)
    return Service(spec=spec)


if __name__ == "__main__":
    run_command(app)

"""`python -m serve`: start a local cluster and serve the champion until interrupted."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli import run_command

if TYPE_CHECKING:
    from serve.service import Service

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    file: Annotated[Path, typer.Option(help="What to serve, as promotion wrote it.")] = Path("runs/champion.json"),
    port: Annotated[int | None, typer.Option(help="Port; default: the file's.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to bind; default: the file's, loopback.")] = None,
    haproxy: Annotated[bool, typer.Option(help="HAProxy in front of the replicas, instead of Serve's proxy.")] = True,
) -> None:
    """Serve the champion behind /v1 until Ctrl-C. API keys: FASTVERIFY_API_KEYS_FILE, see `python -m serve.keys`."""
    service = _service(file, port, host)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    environment(service.shape.port, haproxy=haproxy)
    _serve(service, stop)


def _service(file: Path, port: int | None, host: str | None) -> Service:
    """What is to be served, and where; complains before Ray is imported, which takes seconds."""
    from pipeline.errors import PreflightError
    from serve.procfs import listening_inodes
    from serve.service import Service

    service = Service.read(file)
    shape = service.shape.model_copy(update={"port": port or service.shape.port, "host": host or service.shape.host})
    if listening_inodes(shape.port):
        raise PreflightError(f"port {shape.port} is taken; --port takes another")
    return service.model_copy(update={"shape": shape})


def environment(port: int, *, haproxy: bool = True) -> None:
    """Set what Ray reads when it is imported. Ray's own ports are open to the network: a token guards them."""
    from serve.environment import serve_environment

    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    root = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    os.environ.update(serve_environment(port, haproxy=haproxy))


def _serve(service: Service, stop: threading.Event) -> None:
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    from pipeline.topology import probe
    from serve.environment import SLOT
    from serve.switching import put_in_service

    shape = service.shape
    # The slot lets `pipeline.promote --address auto` measure on this cluster.
    resources: dict[str, float] = {SLOT: 1}
    ray.init(
        address="local", include_dashboard=False, log_to_driver=False, configure_logging=False, resources=resources,
        num_gpus=probe().gpu_count,
    )  # fmt: skip
    try:
        serve.start(http_options=HTTPOptions(host=shape.host, port=shape.port))
        typer.echo(f"starting {service.spec.config.words()} ({service.spec.config.model}) …")
        put_in_service(service)
        typer.echo(f"serving http://{shape.host}:{shape.port}/v1 (Ctrl-C ends it)")
        stop.wait()
        typer.echo("draining …")
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    run_command(app)

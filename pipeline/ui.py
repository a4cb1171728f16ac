"""`python -m pipeline.ui`: MLflow's pages of all studies here, on this machine only."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli import run_command
from pipeline.store import RUNS

CONFIG = Path(__file__).parent.parent / "mlflow" / "server.env"

app = typer.Typer(add_completion=False)


@app.command()
def ui(
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.", min=1, max=65535)] = 5000,
    runs: Annotated[Path, typer.Option(help="Folder that holds the studies and mlflow.db.")] = RUNS,
) -> None:
    """Start the MLflow server on the studies in RUNS; Ctrl-C ends it."""
    command, added = server(runs, port)
    typer.echo(f"MLflow: http://127.0.0.1:{port}  (Ctrl-C ends it)")
    for study, link in links(runs, f"http://127.0.0.1:{port}"):
        typer.echo(f"  {study}: {link}")
    os.execve(command[0], command, {**os.environ, **added})  # noqa: S606 - replaces this process: one fewer to end


def server(runs: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Command and added environment of the server.

    Raises:
        InputError: no study was logged in `runs`, or this is no checkout.
    """
    from pipeline.errors import InputError

    database = runs / "mlflow.db"
    if not database.is_file():
        raise InputError(f"no {database}", key="--runs", expected="the folder of a study that was run (make tune)")
    if not CONFIG.is_file():
        raise InputError(f"no {CONFIG}", expected="a checkout: an installed package has no server configuration")
    command = [sys.executable, "-m", "mlflow", "--env-file", str(CONFIG), "server"]
    return command, {
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{database.resolve()}",
        "MLFLOW_ARTIFACTS_DESTINATION": (runs / "mlartifacts").resolve().as_uri(),
        "MLFLOW_PORT": str(port),
    }


def links(runs: Path, base_url: str) -> list[tuple[str, str]]:
    """Each logged study's link to its table: (study, URL), newest first."""
    import json

    from pipeline.mlflow_view import view_url

    files = sorted(runs.glob("*/study.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    facts = {file.parent.name: json.loads(file.read_text()) for file in files}
    return [
        (name, view_url(base_url, str(found["mlflow_experiment_id"]), name))
        for name, found in facts.items()
        if "mlflow_experiment_id" in found
    ]


if __name__ == "__main__":
    run_command(app)

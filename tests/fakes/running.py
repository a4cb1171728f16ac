"""Servers as children, each a `with` block for tests and benchmarks: a fake SGLang, and the endpoint itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serve.process import free_port

__all__ = ["fake_server", "free_port", "serving", "with_fake"]

SERVER = Path(__file__).with_name("sglang_server.py")


def with_fake(module: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ours with the fake in SGLang's place, and these variables besides."""
    stand_in = {"FASTVERIFY_SGLANG_COMMAND": f"{sys.executable} {SERVER}"}
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=SERVER.parents[2], env=os.environ | stand_in | variables, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


ROOT = SERVER.parent.parent.parent


@contextmanager
def fake_server(flags: Sequence[str] = (), **knobs: Any) -> Iterator[str]:
    """Yield the base URL of a fake server with these knobs; it is gone afterwards."""
    port = free_port()
    argv = [sys.executable, str(SERVER), "--model-path", "fake-model", "--port", str(port), *flags]
    env = os.environ | {"FAKE_SGLANG_KNOBS": json.dumps({"children": False, "start_ms": 0, **knobs})}
    with _child(argv, env, port, start_s=20, stop_s=5) as url:
        yield url


@contextmanager
def serving(champion: Path, environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """`python -m serve` as a person would start and end it; yields the endpoint's URL."""
    port = free_port()
    argv = [sys.executable, "-m", "serve", "--file", str(champion), "--port", str(port)]
    env = {name: value for name, value in environ.items() if not name.startswith(("RAY_", "MLFLOW_"))}
    with _child(argv, env, port, start_s=180, stop_s=60) as url:
        yield url


@contextmanager
def _child(argv: Sequence[str], env: Mapping[str, str], port: int, *, start_s: float, stop_s: float) -> Iterator[str]:
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(process, url, start_s)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(stop_s)
        finally:
            process.kill()


def _wait(process: subprocess.Popen[bytes], url: str, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError(f"the server did not come up in {limit_s:.0f} s")

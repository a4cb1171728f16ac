"""Starts a fake SGLang server as a child and stops it again: a `with` block for tests and benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serve.process import free_port

__all__ = ["fake_server", "free_port"]

SERVER = Path(__file__).with_name("sglang_server.py")


@contextmanager
def fake_server(flags: Sequence[str] = (), **knobs: Any) -> Iterator[str]:
    """Yield the base URL of a fake server with these knobs; it is gone afterwards."""
    port = free_port()
    argv = [sys.executable, str(SERVER), "--model-path", "fake-model", "--port", str(port), *flags]
    env = os.environ | {"FAKE_SGLANG_KNOBS": json.dumps({"children": False, "start_ms": 0, **knobs})}
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the fake server ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError("the fake server did not come up in 20 s")

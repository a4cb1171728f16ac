"""Load tools that others trust, each in its own environment under the cache folder, made on first use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.models import cache_root

FOLDER = cache_root() / "foreign"
# sglang's own requirements bring CUDA; the load tool needs these alone.
BENCH_SERVING = (
    ("--no-deps", "sglang==0.5.9"),
    ("aiohttp", "numpy", "requests", "tqdm", "transformers", "pillow", "pybase64", "datasets", "ipython"),
)
# Brings torch along: 6 GB with CUDA's packages unless the package index is set up for its CPU build.
GUIDELLM = (("guidellm==0.8.1",),)


def bench_serving() -> Path:
    """The Python of the environment that holds `sglang.bench_serving`."""
    return _environment("sglang-bench", BENCH_SERVING)


def guidellm() -> Path:
    """The Python of the environment that holds `guidellm`."""
    return _environment("guidellm", GUIDELLM)


def _environment(name: str, installs: Sequence[Sequence[str]]) -> Path:
    folder = FOLDER / name
    python, done = folder / "bin" / "python", folder / "complete"
    if not done.exists():
        print(f"making {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=300)
        for packages in installs:
            subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True, timeout=1800)
        done.touch()
    return python


def release(python: Path, package: str) -> str:
    """The version of a package in an environment."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([str(python), "-c", code], check=True, timeout=60, capture_output=True, text=True)
    return done.stdout.strip()

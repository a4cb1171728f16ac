"""What every record of a study carries: versions and the commit that made it."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("fastverify", "ray", "optuna", "mlflow", "torch", "transformers", "sglang", "flashinfer-python")


def versions() -> dict[str, str]:
    """Installed releases of what a result depends on; absent packages are absent."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The checkout's commit, with `-dirty` when files differ; None outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None

"""What the engine says it became: resolved settings against those asked, degraded features, its release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.config import EngineConfig
from serve.engines.logs import degraded, log_accept_length
from serve.engines.sglang import asked_not_got


def read_back(config: EngineConfig, resolved: dict[str, Any], log_path: str) -> dict[str, Any]:
    """Fields of a trial's record: `asked_not_got`, `degraded`, `log_accept_length`, `engine_version`."""
    log = Path(log_path)
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return {
        "asked_not_got": asked_not_got(config, resolved),
        "degraded": degraded(lines),
        "log_accept_length": log_accept_length(lines),
        "engine_version": resolved.get("version"),
    }

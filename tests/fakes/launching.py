"""Launches of the fake SGLang server through the real plan and the real process class."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pipeline.config import EngineConfig
from pipeline.records import Launch
from pipeline.spec import Limits
from serve.engines import sglang
from serve.process import free_port

SERVER = Path(__file__).with_name("sglang_server.py")
COMMAND = f"{sys.executable} {SERVER}"
FIXTURES = Path(__file__).parent.parent / "fixtures" / "sglang-0.5.17"
# Short enough for tests, long enough for a busy machine with two cores.
LIMITS = Limits(start_s=20, stall_s=3, generate_s=3, silence_s=1, stop_s=3, proof_s=10)


def fake_launch(
    knobs: dict[str, Any], log_path: Path, config: EngineConfig | None = None, *, port: int | None = None
) -> Launch:
    """The launch of a fake server with these knobs; `config` defaults to a plain one on two ranks."""
    config = config or EngineConfig(engine="sglang", model="fake/model", tensor_parallel_size=2)
    config = config.model_copy(update={"env": (*config.env, ("FAKE_SGLANG_KNOBS", json.dumps(knobs)))})
    inherited = dict(os.environ) | {sglang.COMMAND_VARIABLE: COMMAND}
    launch = sglang.plan(config, port=port or free_port(), inherited=inherited)
    return launch.model_copy(update={"log_path": str(log_path)})

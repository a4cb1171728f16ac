"""One module an engine: configuration to command, and what its server says."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.config import EngineConfig
from pipeline.models import resolve
from pipeline.records import Launch


def plan(
    config: EngineConfig,
    *,
    port: int,
    gpu_ids: tuple[int, ...] = (),
    inherited: Mapping[str, str],
    log_path: str = "",
) -> Launch:
    """The command and environment that launch `config`; nothing is started."""
    from serve.engines import embedded, sglang

    if config.engine == "embedded":
        launch = embedded.plan(config, port=port, gpu_ids=gpu_ids, inherited=inherited, folder_of=resolve)
    else:
        launch = sglang.plan(config, port=port, gpu_ids=gpu_ids, inherited=inherited)
    return launch.model_copy(update={"log_path": log_path})

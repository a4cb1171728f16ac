"""Launch a trial's configuration again, outside any study: to profile it, or to try a what-if."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.records import TrialRecord

if TYPE_CHECKING:
    from serve.process import EngineProcess


@contextmanager
def relaunched(
    record: TrialRecord, log: Path, variables: Mapping[str, str] | None = None
) -> Iterator[tuple[EngineProcess, str]]:
    """Run the engine of `record` on its GPUs while the block lasts; yields it, ready, and its base URL.

    Args:
        record: whose configuration.
        log: the engine's log; one of an earlier launch is replaced.
        variables: added to the engine's environment, past what a configuration may say.

    Raises:
        EngineError: it did not start, or left something behind.
    """
    from pipeline.spec import Limits
    from serve.engines import plan
    from serve.process import EngineProcess, free_port

    log.unlink(missing_ok=True)
    gpus = record.launch.gpu_ids if record.launch else ()
    launch = plan(record.config, port=free_port(), gpu_ids=gpus, inherited=dict(os.environ), log_path=str(log))
    launch = launch.model_copy(update={"env": {**launch.env, **(variables or {})}})
    with EngineProcess(launch, Limits(), engine=record.config.engine) as engine:
        engine.wait_ready()
        yield engine, launch.base_url

"""Puts a champion into service, changes it, and waits until the change is over. Needs a running Serve."""

from __future__ import annotations

import time
from typing import Any

from ray import serve

from pipeline.config import EngineConfig
from pipeline.errors import PromotionError
from serve.app import application
from serve.deployment import Deployed, EngineOptions
from serve.service import APP_NAME, Service, Switch

POLL_S = 0.2


def running() -> bool:
    """Whether a champion is in service on this cluster."""
    status = serve.status().applications.get(APP_NAME)
    return status is not None and status.status == "RUNNING"


def put_in_service(service: Service) -> Switch | None:
    """Deploy a champion, or hand a running one its new configuration, and wait for the outcome.

    Returns:
        How the change went, also when it went back by itself; None when nothing had to be changed.

    Raises:
        PromotionError: no engine serves now.
    """
    before = running()
    try:
        replica = serve.run(application(service), name=APP_NAME, route_prefix="/")
    except RuntimeError as error:
        raise PromotionError(f"the champion did not start: {error}") from error
    limits = service.spec.limits
    deadline = time.monotonic() + 2 * (service.spec.drain_s + limits.stop_s + limits.proof_s + limits.start_s)
    while time.monotonic() < deadline:
        status: dict[str, Any] = replica.status.remote().result(timeout_s=60)
        if not status["switching"]:
            switch: Switch | None = status["switch"]
            return switch if before else None
        time.sleep(POLL_S)
    raise PromotionError("the change of champion is not over within its limits; see `serve status`")


def switch(service: Service, *, spare_gpus: bool, folder: str) -> Switch | None:
    """Change the champion: without a gap where GPUs are free for a bridge, else with one that callers are told.

    With a bridge the new configuration is launched and proven on the spare GPUs first; requests go
    there while the champion's own engine is exchanged.

    Raises:
        EngineError: the bridge did not start; the champion has not been touched.
        PromotionError: no engine serves now.
    """
    if not spare_gpus or not running():
        return put_in_service(service)
    config, limits = service.spec.config, service.spec.limits
    with Deployed(config, EngineOptions(folder, limits), app_name=f"{APP_NAME}-bridge") as bridge:
        bridged = service.spec.model_copy(update={"bridge": bridge.base_url})
        return put_in_service(service.model_copy(update={"spec": bridged}))


def gpus_free(config: EngineConfig) -> bool:
    """Whether the cluster has the GPUs for one more engine of this configuration. A CPU engine needs none."""
    import ray

    needed = config.tensor_parallel_size if config.engine == "sglang" else 0
    return bool(ray.available_resources().get("GPU", 0.0) >= needed)

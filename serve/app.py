"""The champion as a Ray Serve application, and as the YAML that `serve deploy` takes.

`serve run serve.app:champion` serves `runs/champion.json`, which promotion writes;
`serve run serve.app:champion file=PATH` serves another one. Replicas, autoscaling and limits are in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray import serve

from serve.champion import Champion
from serve.service import APP_NAME, CHAMPION_FILE, Service, deployment_options

# Serve replaces replicas whose version differs and hands a new `user_config` to those whose version does not.
_CODE_VERSION = "champion-1"


def champion(args: dict[str, str]) -> serve.Application:
    """Serve's application builder. `file` names a champion file; `from: user_config` is for a YAML that has it all."""
    if args.get("from") == "user_config":
        bound: serve.Application = _deployment().bind()
        return bound
    return application(Service.read(Path(args.get("file", CHAMPION_FILE))))


def application(service: Service) -> serve.Application:
    """The application that serves `service`."""
    options = deployment_options(service)
    bound: serve.Application = _deployment().options(**options, version=_CODE_VERSION, _internal=True).bind()
    return bound


def _deployment() -> Any:
    return serve.deployment(serve.ingress()(Champion), name=APP_NAME)

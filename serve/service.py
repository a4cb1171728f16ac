"""What it takes to serve a champion, as data: configuration, limits, replicas. No Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from pipeline.config import EngineConfig, Frozen
from pipeline.errors import InputError
from pipeline.spec import Limits
from serve.portable import portable

APP_NAME = "champion"
CHAMPION_FILE = Path("runs/champion.json")


class ProxySettings(Frozen):
    """Limits of the endpoint.

    `timeout_s` bounds a whole request; the engine is told to stop when it passes. The server in
    front may write `x-request-id` itself: `echo_request_id` is off there. Prompts are kept only where
    `sample_file` asks for it: one chat in `sample_every`, until the file has `sample_limit`.
    """

    max_body_bytes: PositiveInt = 8 * 2**20
    max_concurrent: PositiveInt = 256
    timeout_s: PositiveFloat = 600.0
    connect_s: PositiveFloat = 5.0
    echo_request_id: bool = True
    sample_file: str | None = None
    sample_every: PositiveInt = 10
    sample_limit: PositiveInt = 1000


class ChampionSpec(Frozen):
    """What a champion's replica is told.

    `bridge` is the address of an engine that answers while this replica changes its own; None means
    that there is none, and requests get 503 for about `expected_start_s` seconds.
    """

    config: EngineConfig
    limits: Limits = Limits()
    proxy: ProxySettings = ProxySettings(echo_request_id=False)
    folder: str = "runs/champion"
    bridge: str | None = None
    drain_s: NonNegativeFloat = 30.0
    expected_start_s: PositiveFloat = 120.0


class Switch(Frozen):
    """How a change of configuration went."""

    outcome: Literal["switched", "rolled back"]
    asked: str  # config_id
    seconds: float
    seconds_without_service: float
    drained: bool  # False: what was still inside was cut off, with an error body
    failure: str | None = None


class Shape(Frozen):
    """How many replicas, each with an engine and GPUs of its own; and where the endpoint listens."""

    replicas: PositiveInt = 1
    autoscaling: dict[str, Any] | None = None  # Serve's `autoscaling_config`, instead of `replicas`
    host: str = "127.0.0.1"
    port: int = 8000


class Service(Frozen):
    """Everything needed to serve a champion: what promotion writes and `champion` reads."""

    spec: ChampionSpec
    shape: Shape = Shape()

    @classmethod
    def read(cls, path: Path) -> Service:
        """Load a champion file.

        Raises:
            InputError: it does not exist, or is something else.
        """
        if not path.is_file():
            raise InputError(
                "there is no champion yet", source=str(path), expected="a file written by `python -m pipeline.promote`"
            )
        return cls.parse(path.read_text(), str(path))

    @classmethod
    def parse(cls, text: str, source: str) -> Service:
        """A champion from its JSON.

        Raises:
            InputError: it is something else; says where.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(
                f"not a champion: {first['msg']}", source=source, key=".".join(map(str, first["loc"])) or None,
                expected="what `python -m pipeline.promote` writes; move this away and promote again",
            ) from error  # fmt: skip

    def write(self, path: Path) -> None:
        """Store it, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_text(self.model_dump_json(indent=2) + "\n")
        partial.replace(path)


def portable_service(service: Service) -> Service:
    """The service without anything of this machine in it: folders by name, logs under `runs`, loopback."""
    spec = service.spec.model_copy(
        update={
            "config": portable(service.spec.config),
            "folder": ChampionSpec.model_fields["folder"].default,
            "bridge": None,
        }
    )
    return Service(spec=spec, shape=service.shape.model_copy(update={"host": Shape().host}))


def deployment_options(service: Service) -> dict[str, Any]:
    """Options of the Serve deployment, as data: they go into `.options(...)` and into the YAML alike."""
    spec, shape = service.spec, service.shape
    scale = {"autoscaling_config": shape.autoscaling} if shape.autoscaling else {"num_replicas": shape.replicas}
    gpus = spec.config.tensor_parallel_size if spec.config.engine == "sglang" else 0
    return {
        **scale,
        # The pass-through counts and refuses by itself, in OpenAI's shape; Serve must not do it first.
        "max_ongoing_requests": 4 * spec.proxy.max_concurrent,
        "max_queued_requests": -1,
        "health_check_period_s": 5.0,
        "health_check_timeout_s": spec.limits.generate_s + 30.0,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": spec.drain_s + spec.limits.stop_s + spec.limits.proof_s,
        "ray_actor_options": {"num_cpus": 0.0, "num_gpus": float(gpus)},
        "user_config": spec.model_dump(mode="json", exclude_none=True),
    }


def deploy_yaml(service: Service) -> str:
    """The champion for `serve deploy` on any cluster that has this package: no path or host of this machine.

    Raises:
        InputError: the configuration names a path of this machine that nothing can replace.
    """
    service = portable_service(service)
    shape = service.shape
    document = {
        "proxy_location": "EveryNode",
        "http_options": {"host": shape.host, "port": shape.port},
        "applications": [
            {
                "name": APP_NAME,
                "route_prefix": "/",
                "import_path": "serve.app:champion",
                "args": {"from": "user_config"},
                "deployments": [{"name": APP_NAME, **deployment_options(service)}],
            }
        ],
    }
    return yaml.safe_dump(document, sort_keys=False)

"""The champion's application as data: the YAML, portability, Serve's environment, the reshaped errors."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config import DraftModelSpeculation, EngineConfig
from pipeline.errors import InputError
from serve import environment
from serve.environment import serve_environment
from serve.middleware import OpenAIErrors
from serve.portable import localized, portable
from serve.service import ChampionSpec, ProxySettings, Service, Shape, deploy_yaml, deployment_options

CONFIG = EngineConfig(
    engine="sglang",
    model="/data/models/big",
    tensor_parallel_size=8,
    speculation=DraftModelSpeculation(algorithm="EAGLE3", draft_model="/data/heads/head"),
)


def service(config: EngineConfig = CONFIG, **shape: Any) -> Service:
    spec = ChampionSpec(config=config, folder="/home/tuner/runs/champion", bridge="http://10.0.0.7:1")
    return Service(spec=spec, shape=Shape(**shape))


def test_the_yaml_names_no_path_or_host_of_the_machine_that_tuned() -> None:
    text = deploy_yaml(service(host="10.0.0.7"))
    assert not any(word in text for word in ("/data", "/home", "10.0.0.7"))
    document = yaml.safe_load(text)
    assert document["http_options"] == {"host": "127.0.0.1", "port": 8000}
    (app,) = document["applications"]
    (deployment,) = app["deployments"]
    told = ChampionSpec.model_validate(deployment["user_config"])
    assert (told.config.model, told.config.speculation.draft_model) == ("big", "head")  # type: ignore[union-attr]
    assert deployment["ray_actor_options"]["num_gpus"] == 8


def test_names_are_found_again_under_the_models_folder_of_another_machine(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    found = localized(portable(CONFIG), {"FASTVERIFY_MODELS": str(tmp_path)})
    assert found.model == str(tmp_path / "big")
    assert found.speculation.draft_model == "head"  # type: ignore[union-attr]  # not there: may be a hub id
    assert localized(portable(CONFIG), {}) == portable(CONFIG)


@pytest.mark.parametrize("extra", [("--log-file", "/var/x"), ("--log-file=/var/x",)])
def test_a_path_that_nothing_can_replace_is_refused(extra: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="path of this machine"):
        portable(CONFIG.model_copy(update={"extra_args": extra}))


def test_replicas_or_autoscaling_each_with_gpus_of_its_own() -> None:
    assert deployment_options(service(replicas=3))["num_replicas"] == 3
    scaled = deployment_options(service(autoscaling={"min_replicas": 1, "max_replicas": 4}))
    assert scaled["autoscaling_config"]["max_replicas"] == 4
    assert "num_replicas" not in scaled
    cpu = deployment_options(service(EngineConfig(engine="embedded", model="smollm2-135m")))
    assert cpu["ray_actor_options"]["num_gpus"] == 0


def test_serve_never_refuses_before_the_endpoint_does() -> None:
    found = service()
    spec = found.spec.model_copy(update={"proxy": ProxySettings(max_concurrent=100)})
    options = deployment_options(found.model_copy(update={"spec": spec}))
    assert options["max_ongoing_requests"] > 100
    assert options["max_queued_requests"] == -1


def test_a_service_is_written_whole_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "champion.json"
    service().write(path)
    assert Service.read(path) == service()
    assert [p.name for p in path.parent.iterdir()] == ["champion.json"]
    with pytest.raises(InputError, match="no champion yet"):
        Service.read(tmp_path / "none.json")


def test_haproxys_sockets_fit_their_length_limit() -> None:
    found = serve_environment(8000)
    assert found["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert len(str(Path(found["RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"]).parent)) + 57 + len("/metrics.sock") <= 97
    assert serve_environment(8000, haproxy=False)["RAY_SERVE_ENABLE_HA_PROXY"] == "0"


async def ask(answer: list[dict[str, Any]], path: str = "/v1/x") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What a client gets through the middleware, and the scope that the app saw."""
    sent: list[dict[str, Any]] = []
    seen: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope)
        for message in answer:
            await send(message)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"x-request-timeout-seconds", b"0.1"), (b"accept", b"*/*")]
    await OpenAIErrors(app)({"type": "http", "path": path, "headers": headers}, None, send)  # type: ignore[arg-type]
    return sent, seen


HEADERS = [(b"content-type", b"text/plain"), (b"x-request-id", b"r")]
PLAIN = [
    {"type": "http.response.start", "status": 503, "headers": HEADERS},
    {"type": "http.response.body", "body": b"Request dropped ", "more_body": True},
    {"type": "http.response.body", "body": b"due to backpressure"},
]  # fmt: skip


async def test_serves_plain_errors_become_openais_and_keep_the_request_id() -> None:
    (start, body), seen = await ask(PLAIN)
    assert json.loads(body["body"])["error"]["message"] == "Request dropped due to backpressure"
    headers = dict(start["headers"])
    assert (start["status"], headers[b"retry-after"], headers[b"x-request-id"]) == (503, b"1", b"r")
    assert int(headers[b"content-length"]) == len(body["body"])
    assert seen["headers"] == [(b"accept", b"*/*")]


async def test_everything_else_passes_untouched() -> None:
    fine = [{"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}, PLAIN[1]]
    assert (await ask(fine))[0] == fine
    assert (await ask(PLAIN, "/-/healthz"))[0] == PLAIN


def test_the_ports_of_another_service_on_this_machine_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as Ray opens its fallback: it could be shared
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        monkeypatch.setattr(environment, "FALLBACK_PORT", taken)
        assert int(serve_environment(8000)["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"]) != taken


@pytest.mark.parametrize(("text", "said"), [("{", "Invalid JSON"), ('{"spec": {"config": {"engine": "x"}}}', "engine")])
def test_what_is_no_champion_is_named(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "champion.json"
    file.write_text(text)
    with pytest.raises(InputError, match=f"champion.json: .*{said}"):
        Service.read(file)

"""The endpoint on a real cluster with the fake engine: real clients, switches under load, and the way back."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.config import EngineConfig
from pipeline.spec import Limits
from serve import procfs
from serve.service import ChampionSpec, ProxySettings, Service, Switch
from tests.fakes.steady_load import Load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LIMITS = Limits(start_s=60, stall_s=20, generate_s=10, stop_s=5, proof_s=10)
MESSAGES: Any = [{"role": "user", "content": "Name three colours."}]


def config(**knobs: Any) -> EngineConfig:
    """A fake engine that is told apart by its knobs."""
    told = {"children": False, "step_ms": 10, "ttft_ms": 5, **knobs}
    return EngineConfig(engine="sglang", model="fake-model", env=(("FAKE_SGLANG_KNOBS", json.dumps(told)),))


def service(folder: Path, **knobs: Any) -> Service:

    proxy = ProxySettings(echo_request_id=False, max_concurrent=64, max_body_bytes=100_000)
    spec = ChampionSpec(
        config=config(**knobs), limits=LIMITS, proxy=proxy, folder=str(folder), drain_s=5, expected_start_s=5
    )
    return Service(spec=spec)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("champion")


@pytest.fixture(scope="module")
def endpoint(ray_cluster: str, folder: Path) -> Iterator[str]:
    from ray import serve

    from serve.service import APP_NAME
    from serve.switching import put_in_service

    assert put_in_service(service(folder)) is None
    yield ray_cluster
    serve.delete(APP_NAME)


@pytest.fixture
def sdk(endpoint: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{endpoint}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_the_openai_sdk_chats_streams_and_reads_logprobs(sdk: openai.OpenAI) -> None:
    model = sdk.models.list().data[0].id
    whole = sdk.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    entries = whole.choices[0].logprobs
    assert entries is not None and entries.content is not None
    assert len(entries.content) == 8
    stream = sdk.chat.completions.create(model=model, messages=MESSAGES, max_tokens=8, temperature=0, stream=True)
    parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(parts) == whole.choices[0].message.content
    assert len(parts) > 4
    assert sdk.completions.create(model=model, prompt="One, two,", max_tokens=4).choices[0].text


def test_the_openai_sdk_sees_its_own_error_classes(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="context length"):
        sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "word " * 9000}])
    with pytest.raises(openai.APIStatusError) as refused:
        sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 200_000}])
    assert refused.value.status_code == 413
    assert refused.value.code == "request_too_large"


def test_tools_pass_through(sdk: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    answer = sdk.chat.completions.create(model="m", messages=MESSAGES, tools=tools, max_tokens=8)
    assert answer.choices[0].finish_reason in ("length", "tool_calls", "stop")


def test_curl_sees_tokens_as_they_come(endpoint: str) -> None:
    body = json.dumps({"model": "m", "messages": MESSAGES, "max_tokens": 50, "stream": True})
    argv = ["curl", "-sN", "-H", "content-type: application/json", "-d", body, f"{endpoint}/v1/chat/completions"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as curl:
        assert curl.stdout is not None
        first = curl.stdout.readline()
        began = time.monotonic()
        rest = curl.stdout.read()
    assert first.startswith(b"data: {")
    assert rest.endswith(b"data: [DONE]\n\n")
    assert time.monotonic() - began > 0.25  # 50 tokens at 10 ms: it was not held back to the end


def test_langchain_streams(endpoint: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(base_url=f"{endpoint}/v1", api_key="none", model="m", max_tokens=8, temperature=0)
    pieces = [piece.content for piece in chat.stream("Name three colours.")]
    assert "".join(pieces) == chat.invoke("Name three colours.").content != ""


def test_serves_own_refusals_have_openais_shape_and_its_timeout_header_is_ours(endpoint: str) -> None:
    request = urllib.request.Request(f"{endpoint}/v1/nothing")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    assert json.loads(refused.value.read())["error"]["code"] == "unknown_url"
    body = json.dumps({"model": "m", "messages": MESSAGES, "max_tokens": 40, "stream": True}).encode()
    headers = {"x-request-timeout-seconds": "0.1", "content-type": "application/json"}
    request = urllib.request.Request(f"{endpoint}/v1/chat/completions", data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_a_client_that_leaves_frees_the_engine_within_two_seconds(endpoint: str) -> None:
    async def leave() -> None:
        async with aiohttp.ClientSession() as client:
            body = {"model": "m", "messages": MESSAGES, "max_tokens": 2000, "stream": True}
            async with client.post(f"{endpoint}/v1/chat/completions", json=body) as answer:
                await answer.content.readany()
                assert running_requests(endpoint) == 1

    asyncio.run(leave())
    ends = time.monotonic() + 2
    while (left := running_requests(endpoint)) and time.monotonic() < ends:
        time.sleep(0.05)
    assert left == 0


def running_requests(endpoint: str) -> float:
    with urllib.request.urlopen(f"{endpoint}/metrics", timeout=10) as page:
        found = re.search(r"^sglang:num_running_reqs\{?.*? ([\d.]+)$", page.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_the_replica_waits_its_turn_for_a_core_and_its_engine_does_not(endpoint: str) -> None:
    """The engine is forked by the replica: were it to inherit the policy, it would be slow to serve everyone."""
    from ray import serve

    from serve.service import APP_NAME

    launch = serve.get_app_handle(APP_NAME).status.remote().result(timeout_s=60)["launch"]
    (engine,) = procfs.listeners(int(launch.base_url.rpartition(":")[2]), procfs.table())
    mine = procfs.descendants(os.getpid())
    replica = next(p.pid for p in mine if procfs.cmdline(p.pid).startswith("ray::ServeReplica"))
    threads = [int(entry.name) for entry in Path(f"/proc/{replica}/task").iterdir()]
    assert os.SCHED_BATCH in {os.sched_getscheduler(thread) for thread in threads}
    assert os.sched_getscheduler(engine) == os.SCHED_OTHER
    assert os.getpriority(os.PRIO_PROCESS, engine) == os.getpriority(os.PRIO_PROCESS, os.getpid())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(["model", "messages", "prompt", "max_tokens", "stream", "stop", "n", "tools", "logprobs"])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE"]),
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/embeddings", "/v1/%00", "/"]),
    body=st.binary(max_size=40) | st.dictionaries(FIELDS, JSON, max_size=4).map(lambda d: json.dumps(d).encode()),
)
def test_no_request_gets_a_500(endpoint: str, method: str, path: str, body: bytes) -> None:
    request = urllib.request.Request(endpoint + path, data=body, method=method)
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200
    except urllib.error.HTTPError as refused:
        assert 400 <= refused.code < 500, refused.read()
        assert refused.code == 404 or json.loads(refused.read())


def test_a_switch_on_a_full_node_under_32_streams_breaks_none_without_a_word(endpoint: str, folder: Path) -> None:
    from serve.switching import put_in_service

    load = Load(endpoint, 32)
    switch = asyncio.run(load.during(lambda: put_in_service(service(folder, start_ms=1500))))
    assert switch.outcome == "switched"
    assert switch.drained
    assert load.broken == []
    assert load.whole > 32
    assert load.retry_after and all(int(seconds) >= 1 for seconds in load.retry_after)
    assert 1.5 < switch.seconds_without_service < 15


def test_with_spare_gpus_a_switch_has_no_gap(endpoint: str, folder: Path) -> None:
    from serve.switching import gpus_free
    from serve.switching import switch as change

    wanted = service(folder, start_ms=1000)
    assert gpus_free(wanted.spec.config)
    load = Load(endpoint, 8)
    bridge = str(folder / "bridge")
    switch = asyncio.run(load.during(lambda: change(wanted, spare_gpus=True, folder=bridge)))
    assert (switch.outcome, switch.seconds_without_service) == ("switched", 0.0)
    assert (load.broken, load.told) == ([], 0)
    assert load.whole > 8


def test_a_champion_that_does_not_start_is_followed_by_the_old_one(endpoint: str, folder: Path) -> None:
    from serve.switching import put_in_service

    good = service(folder, ttft_ms=6)
    assert changed(good).outcome == "switched"
    load = Load(endpoint, 4)
    switch: Any = asyncio.run(load.during(lambda: put_in_service(service(folder, fail="oom_capture"))))
    assert switch.outcome == "rolled back"
    assert "oom" in switch.failure
    assert load.broken == []
    with urllib.request.urlopen(f"{endpoint}/health", timeout=10) as answer:
        assert answer.status == 200
    assert changed(good).asked == switch.asked  # nothing to change: the good one runs


def changed(wanted: Service) -> Switch:
    from serve.switching import put_in_service

    switch = put_in_service(wanted)
    assert switch is not None
    return switch

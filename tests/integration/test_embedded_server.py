"""The embedded server as a process: its endpoints, its exits, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from pipeline.config import EngineConfig, NgramSpeculation
from serve.embedded.text import REPLACEMENT
from serve.engines.embedded import plan
from tests.fakes.tiny_model import CONTEXT, build

READY = "The server is fired up and ready to roll!"
START_S, WAIT_S = 60.0, 20.0
CHAT = "/v1/chat/completions"
LONG = {"prompt": "a b a b a b", "max_tokens": CONTEXT - 50, "ignore_eos": True, "temperature": 0}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Running:
    """A server process and its log."""

    def __init__(self, argv: tuple[str, ...], env: dict[str, str], log: Path, url: str) -> None:
        self.url, self._log = url, log
        with log.open("wb") as out:
            self.process = subprocess.Popen(argv, env={**os.environ, **env}, stdout=out, stderr=out, cwd=log.parent)

    def log(self) -> str:
        return self._log.read_text()

    def wait_for(self, line: str) -> None:
        deadline = time.monotonic() + START_S
        while line not in self.log():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def exit_code(self) -> int:
        return self.process.wait(timeout=START_S)


@contextlib.contextmanager
def started(folder: Path, model: str, *flags: str, port: int | None = None, ready: bool = True) -> Iterator[Running]:
    """A server on the plan's own command, in a folder that is not the project's."""
    config = EngineConfig(
        engine="embedded",
        model=model,
        max_running_requests=2,
        speculation=NgramSpeculation(num_draft_tokens=4),
        extra_args=("--threads", "1", "--decode-log-interval", "5", *flags),
    )
    launch = plan(config, port=port or free_port(), inherited=os.environ)
    server = Running(launch.argv, launch.env, folder / f"{time.monotonic_ns()}.log", launch.base_url)
    try:
        if ready:
            server.wait_for(READY)
        yield server
    finally:
        server.process.kill()
        server.process.wait(timeout=WAIT_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("model"), spread=0.05))


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with started(tmp_path_factory.mktemp("logs"), model, "--served-model-name", "tiny") as running:
        yield running


@pytest.fixture
async def client(server: Running) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=WAIT_S)
    async with aiohttp.ClientSession(server.url, timeout=timeout) as session:
        yield session


async def metric(client: aiohttp.ClientSession, name: str) -> float:
    page = await (await client.get("/metrics")).text()
    found = re.search(rf"^sglang:{name}{{.*}} (.+)$", page, re.MULTILINE)
    assert found is not None, page
    return float(found[1])


async def until(client: aiohttp.ClientSession, name: str, value: float) -> None:
    async with asyncio.timeout(WAIT_S):
        while await metric(client, name) != value:
            await asyncio.sleep(0.02)


async def events(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    lines = [line.decode().strip() async for line in response.content]
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data.pop() == "[DONE]"
    return [json.loads(event) for event in data]


async def test_it_says_what_it_is_and_what_it_resolved(client: aiohttp.ClientSession, server: Running) -> None:
    assert (await client.get("/health")).status == 200
    listed = await (await client.get("/v1/models")).json()
    assert [entry["id"] for entry in listed["data"]] == ["tiny"]
    info = await (await client.get("/server_info")).json()
    assert info["speculative_algorithm"] == "NGRAM"
    assert (info["speculative_num_draft_tokens"], info["speculative_ngram_max_trie_depth"]) == (4, 2)
    assert (info["dtype"], info["context_length"]) == ("float32", CONTEXT)
    assert str(server.url.rsplit(":", 1)[1]) in info["launch_command"]


async def test_openai_s_own_client_gets_chats_streams_logprobs_and_errors(server: Running) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as api:
        asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
        asked |= {"max_tokens": 12, "extra_body": {"ignore_eos": True, "return_spec_tokens_details": True}}
        whole = await api.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        stream = await api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert REPLACEMENT not in "".join(c.choices[0].delta.content or "" for c in chunks[:-4] if c.choices)
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
        assert whole.choices[0].logprobs is not None and len(whole.choices[0].logprobs.content or []) == 12
        details = whole.model_extra["sglext"]["spec_tokens_details"] if whole.model_extra else {}
        assert details["spec_accept_length"] == 12 / details["spec_verify_ct"]
        with pytest.raises(openai.BadRequestError, match="n=2"):
            await api.chat.completions.create(model="tiny", messages=asked["messages"], n=2)
        with pytest.raises(openai.BadRequestError, match="context length"):
            await api.completions.create(model="tiny", prompt="x", max_tokens=CONTEXT)
        with pytest.raises(openai.NotFoundError):
            await api.embeddings.create(model="tiny", input="x")


async def test_generate_s_counts_agree_with_the_metrics_and_the_log(
    client: aiohttp.ClientSession, server: Running
) -> None:
    names = ("generation_tokens_total", "spec_verify_calls_total", "prompt_tokens_total", "num_requests_total")
    before = [await metric(client, name) for name in names]
    body = {"text": "a b a b a b", "sampling_params": {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}}
    meta = (await (await client.post("/generate", json=body)).json())["meta_info"]
    after = [await metric(client, name) for name in names]
    grown = [b - a for a, b in zip(before, after, strict=True)]
    assert grown == [meta["completion_tokens"], meta["spec_verify_ct"], meta["prompt_tokens"], 1]
    assert meta["completion_tokens"] == meta["spec_verify_ct"] + meta["spec_num_correct_drafts"] == 40
    assert meta["spec_accept_length"] > 1.5  # the tiny model loops
    assert re.search(r"^\[[-\d]+ [:\d]+\] Decode batch, #running-req: 1, .*accept len: ", server.log(), re.MULTILINE)


async def test_a_streamed_generate_ends_as_the_whole_one_does(client: aiohttp.ClientSession) -> None:
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 9, "temperature": 0, "ignore_eos": True}}
    whole = await (await client.post("/generate", json=body)).json()
    streamed = await events(await client.post("/generate", json=body | {"stream": True}))
    assert (streamed[-1]["text"], streamed[-1]["output_ids"]) == (whole["text"], whole["output_ids"])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_stops_the_work(client: aiohttp.ClientSession, stream: bool) -> None:
    aborted = await metric(client, "num_aborted_requests_total")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.3):
            response = await client.post("/v1/completions", json=LONG | {"stream": stream})
            await response.read()
    await until(client, "num_aborted_requests_total", aborted + 1)
    assert await metric(client, "num_running_reqs") == 0


async def test_a_full_queue_is_503_with_retry_after_and_a_flush_waits_its_turn(client: aiohttp.ClientSession) -> None:
    running = [asyncio.create_task(client.post("/v1/completions", json=LONG)) for _ in range(3)]
    await until(client, "num_queue_reqs", 2)
    refused = await client.post("/v1/completions", json=LONG)
    assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
    assert (await refused.json())["error"]["code"] == "overloaded"
    assert (await client.post("/flush_cache")).status == 400
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await until(client, "num_running_reqs", 0)
    assert (await client.post("/flush_cache")).status == 200
    assert "avg_spec_accept_length" not in (await (await client.get("/server_info")).json())["internal_states"][0]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"prompt": 5}', b'{"prompt": "x", "stream": "maybe"}'])
async def test_a_body_that_is_no_request_is_400_in_openai_s_shape(client: aiohttp.ClientSession, body: bytes) -> None:
    answer = await client.post("/v1/completions", data=body)
    assert answer.status == 400
    assert (await answer.json())["error"]["type"] == "invalid_request_error"


async def test_sigterm_answers_what_is_running_then_exits_with_zero(model: str, tmp_path: Path) -> None:
    with started(tmp_path, model) as server:
        async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(total=WAIT_S)) as client:
            answer = asyncio.create_task(client.post("/v1/completions", json=LONG | {"max_tokens": 400}))
            await until(client, "num_running_reqs", 1)
            server.process.send_signal(signal.SIGTERM)
            body = await (await answer).json()
        assert body["usage"]["completion_tokens"] == 400
        assert await asyncio.to_thread(server.exit_code) == 0
        assert "Draining requests" in server.log()


def test_what_cannot_start_exits_as_sglang_does_and_says_why(model: str, server: Running, tmp_path: Path) -> None:
    taken = int(server.url.rsplit(":", 1)[1])
    cases = {
        "bad flag": (started(tmp_path, model, "--no-such-flag", ready=False), 2, "error: unrecognized arguments"),
        "bad model": (started(tmp_path, str(tmp_path / "none"), ready=False), 1, "OSError: "),
        "bad context": (started(tmp_path, model, "--context-length", "999999", ready=False), 1, "ValueError: "),
        "taken port": (
            started(tmp_path, model, port=taken, ready=False),
            3,
            "[Errno 98] error while attempting to bind",
        ),
    }
    for name, (start, code, said) in cases.items():
        with start as failing:
            assert failing.exit_code() == code, name
            assert said in failing.log(), name

"""The pass-through: bytes untouched, errors in OpenAI's shape, limits, and streams that end when the client goes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.keys import KeyRing
from serve.openai import Refusal, check_route
from serve.proxy import PassThrough
from serve.service import ProxySettings
from tests.fakes.upstream import Upstream, served

CHAT = "/v1/chat/completions"
SSE = {"content-type": "text/event-stream; charset=utf-8"}


@contextlib.asynccontextmanager
async def endpoint(
    upstream: Upstream, keys: KeyRing | None = None, **limits: Any
) -> AsyncIterator[tuple[aiohttp.ClientSession, PassThrough]]:
    proxy = PassThrough(ProxySettings(**limits), keys)
    async with upstream.listening(), served(proxy) as address, aiohttp.ClientSession(address) as client:
        proxy.send_to(upstream.base_url)
        yield client, proxy


async def error_of(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    body = await answer.json()
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


def delta(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}, ensure_ascii=False).encode() + b"\n\n"


async def test_a_stream_passes_byte_for_byte_even_when_utf8_and_tool_deltas_are_torn() -> None:
    tool = b'data: {"choices":[{"delta":{"tool_calls":[{"function":{"name":"","arguments":"{\\"a"}}]}}]}\n\n'
    whole = delta("é漢🙂") + b": keep-alive\n\n" + tool + b"data: [DONE]\n\n"
    upstream = Upstream()
    upstream.headers, upstream.pause_s = SSE, 0.002
    upstream.chunks = [whole[i : i + 3] for i in range(0, len(whole), 3)]
    async with endpoint(upstream) as (client, _), client.post(CHAT, data=b"{}") as answer:
        assert await answer.read() == whole
        assert answer.headers["content-type"] == SSE["content-type"]


async def test_request_bytes_query_and_request_id_reach_the_engine_but_no_credentials() -> None:
    upstream, body = Upstream(), '{"messages": "é\u2028"}'.encode()
    headers = {"x-request-id": "abc-1", "authorization": "Bearer secret", "x-custom": "1", "cookie": "a=b"}
    async with endpoint(upstream) as (client, _):
        async with client.post(f"{CHAT}?a=1%20b", data=body, headers=headers) as answer:
            assert answer.headers.getall("x-request-id") == ["abc-1"]
        async with client.get("/v1/models/org/model%20x", headers={"x-request-id": "bad id"}) as answer:
            assert answer.headers["x-request-id"] != "bad id"
    (method, path, names, sent), (_, model_path, _, _) = upstream.seen
    seen = {name.lower(): value for name, value in names.items()}
    assert (method, path, sent) == ("POST", f"{CHAT}?a=1%20b", body)
    assert seen["x-request-id"] == "abc-1"
    assert seen["x-custom"] == "1"
    assert not {"authorization", "cookie"} & set(seen)
    assert model_path == "/v1/models/org/model%20x"


async def test_the_engines_own_error_body_is_untouched_and_a_plain_one_is_reshaped() -> None:
    upstream = Upstream()
    upstream.status, upstream.chunks = 400, [b'{"object":"error","message":"context","code":400}']
    async with endpoint(upstream) as (client, _):
        async with client.post(CHAT, data=b"{}") as answer:
            assert (answer.status, await answer.read()) == (400, upstream.chunks[0])
        upstream.status, upstream.chunks, upstream.headers = 503, [b"busy"], {"content-type": "text/plain"}
        async with client.post(CHAT, data=b"{}") as answer:
            assert answer.status == 503
            assert (await error_of(answer))["message"] == "busy"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/flush_cache", 404, "unknown_url"),
        ("POST", "/generate", 404, "unknown_url"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_only_the_public_paths_reach_the_engine(method: str, path: str, status: int, code: str) -> None:
    upstream = Upstream()
    async with endpoint(upstream) as (client, _), client.request(method, path) as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (status, code)
    assert not upstream.seen


async def test_a_body_over_the_limit_is_refused_whether_its_length_is_stated_or_not() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 50

    upstream = Upstream()
    async with endpoint(upstream, max_body_bytes=100) as (client, _):
        for data in (b"x" * 101, pieces()):
            async with client.post(CHAT, data=data) as answer:
                assert (answer.status, (await error_of(answer))["code"]) == (413, "request_too_large")
        async with client.post(CHAT, data=b"x" * 100) as answer:
            assert answer.status == 200
    assert len(upstream.seen) == 1


async def test_more_requests_than_allowed_get_429_with_retry_after() -> None:
    upstream = Upstream()
    upstream.first_s = 0.3
    async with endpoint(upstream, max_concurrent=2) as (client, proxy):
        answers = await asyncio.gather(*(client.post(CHAT, data=b"{}") for _ in range(5)))
        assert sorted(a.status for a in answers) == [200, 200, 429, 429, 429]
        refused = next(a for a in answers if a.status == 429)
        assert refused.headers["retry-after"] == "1"
        assert (await error_of(refused))["code"] == "overloaded"
        assert 'answers_total{answer="429"} 3' in proxy.own_metrics()
        async with client.post(CHAT, data=b"{}") as again:
            assert again.status == 200


@pytest.mark.parametrize("begun", [False, True])
async def test_when_the_client_leaves_the_engine_is_told_within_two_seconds(begun: bool) -> None:
    upstream = Upstream()
    upstream.headers, upstream.chunks = SSE, [delta("x")] * 10_000
    upstream.first_s, upstream.pause_s = (0.0, 0.01) if begun else (100.0, 0.0)
    async with endpoint(upstream) as (client, proxy):
        request = asyncio.create_task(client.post(CHAT, data=b"{}").__aenter__())
        await _until(lambda: upstream.running == 1)
        if begun:
            await (await request).content.readany()
        request.cancel()
        await client.close()
        await _until(lambda: upstream.running == 0, within_s=2)
        await _until(lambda: proxy.answers["aborted"] == 1)
        assert proxy.target is not None
        assert proxy.target.in_flight == 0


async def _until(true: Any, within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.01)


async def test_a_timeout_is_504_before_the_answer_and_an_error_event_within_a_stream() -> None:
    upstream = Upstream()
    upstream.headers, upstream.chunks, upstream.pause_s = SSE, [delta("a"), delta("b")], 5.0
    async with endpoint(upstream, timeout_s=0.3) as (client, proxy):
        async with client.post(CHAT, data=b"{}") as answer:
            body = await answer.read()
        assert body.startswith(delta("a"))
        last = json.loads(body.removeprefix(delta("a")).removeprefix(b"data: "))
        assert last["error"]["code"] == "timeout"
        assert proxy.answers["broken"] == 1
        upstream.first_s = 5.0
        async with client.post(CHAT, data=b"{}") as answer:
            assert (answer.status, (await error_of(answer))["code"]) == (504, "timeout")


async def test_an_engine_that_dies_in_a_stream_ends_it_with_an_error_that_the_sdk_raises() -> None:
    upstream = Upstream()
    upstream.headers, upstream.chunks, upstream.die_after = SSE, [delta("a"), delta("b")], 1
    upstream.pause_s = 0.05
    async with endpoint(upstream) as (client, _):
        sdk = openai.AsyncOpenAI(base_url=f"{client._base_url}/v1", api_key="none", max_retries=0)
        stream = await sdk.chat.completions.create(model="m", messages=[], stream=True)
        with pytest.raises(openai.APIError, match="broke off"):
            _ = [chunk async for chunk in stream]
        await sdk.close()


async def test_an_unfinished_json_answer_is_cut_and_not_passed_off_as_whole() -> None:
    upstream = Upstream()
    upstream.headers = {"content-type": "application/json", "content-length": "100"}
    upstream.chunks, upstream.die_after, upstream.pause_s = [b'{"a":', b"1}"], 1, 0.05
    async with endpoint(upstream) as (client, _), client.post(CHAT, data=b"{}") as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()


async def test_no_engine_is_503_with_the_seconds_left_and_a_dead_one_is_503_too() -> None:
    upstream = Upstream()
    async with endpoint(upstream) as (client, proxy):
        proxy.pause("the champion is being replaced", expected_s=42)
        async with client.post(CHAT, data=b"{}") as answer:
            assert (answer.status, answer.headers["retry-after"]) == (503, "42")
            assert "being replaced" in (await error_of(answer))["message"]
        async with client.get("/health") as answer:
            assert answer.status == 503
        async with client.get("/metrics") as answer:
            assert "fastverify_endpoint_available 0" in await answer.text()
        proxy.send_to("http://127.0.0.1:9")
        async with client.post(CHAT, data=b"{}") as answer:
            assert (answer.status, answer.headers["retry-after"]) == (503, "5")


async def test_a_switch_leaves_running_streams_alone_and_drained_waits_for_them() -> None:
    old, new = Upstream(), Upstream()
    old.headers, old.chunks, old.pause_s = SSE, [delta(str(n)) for n in range(20)], 0.02
    new.chunks = [b'{"new": true}']
    async with new.listening(), endpoint(old) as (client, proxy):
        running = asyncio.create_task(client.post(CHAT, data=b"{}").__aenter__())
        await _until(lambda: old.running == 1)
        before = proxy.target
        assert before is not None
        proxy.send_to(new.base_url)
        async with client.post(CHAT, data=b"{}") as answer:
            assert await answer.json() == {"new": True}
        assert not await proxy.drained(before, within_s=0.05)
        assert await proxy.drained(before, within_s=5)
        assert await (await running).read() == b"".join(old.chunks)


async def test_keys_guard_everything_but_health_and_any_of_several_is_accepted() -> None:
    ring = KeyRing(hashlib.sha256(key).hexdigest() for key in (b"one", b"two"))
    upstream = Upstream()
    async with endpoint(upstream, ring) as (client, _):
        for sent in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}):
            async with client.get("/v1/models", headers=sent) as answer:
                assert (answer.status, (await error_of(answer))["code"]) == (401, "invalid_api_key")
        async with client.get("/metrics") as answer:
            assert answer.status == 401
        async with client.get("/health") as answer:
            assert answer.status == 200
        async with client.get("/v1/models", headers={"authorization": "Bearer two"}) as answer:
            assert answer.status == 200


async def test_health_follows_the_engine_and_metrics_join_both() -> None:
    upstream = Upstream()
    upstream.chunks, upstream.headers = [b"sglang:gen 1"], {"content-type": "text/plain"}
    async with endpoint(upstream) as (client, _):
        async with client.get("/metrics") as answer:
            assert (await answer.text()).startswith("sglang:gen 1\n# TYPE fastverify_endpoint_answers_total")
        upstream.status = 503
        async with client.get("/health") as answer:
            assert (answer.status, (await error_of(answer))["code"]) == (503, "engine_unhealthy")


METHODS = st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])


@settings(max_examples=150)
@given(
    method=METHODS,
    path=st.one_of(st.sampled_from([CHAT, "/v1/models", "/v1/models/a", "/health", "/metrics"]), st.text(max_size=30)),
    query=st.binary(max_size=20),
    headers=st.lists(st.tuples(st.binary(min_size=1, max_size=10), st.binary(max_size=20)), max_size=4),
    pieces=st.lists(st.binary(max_size=50), max_size=4),
)
def test_no_request_makes_the_endpoint_itself_fail(
    method: str, path: str, query: bytes, headers: list[tuple[bytes, bytes]], pieces: list[bytes]
) -> None:
    """Straight into ASGI, with what no HTTP client would send; the engine is unreachable, so at most 503."""

    async def ask() -> list[dict[str, Any]]:
        proxy = PassThrough(ProxySettings(max_body_bytes=100))
        proxy.send_to("http://127.0.0.1:9")
        inbox = [{"type": "http.request", "body": p, "more_body": True} for p in pieces] + [{"type": "http.request"}]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return inbox.pop(0) if inbox else await asyncio.Event().wait() or {}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "query_string": query, "headers": headers}
        await asyncio.wait_for(proxy(scope, receive, send), 5)
        await proxy.close()
        return sent

    sent = asyncio.run(ask())
    if (method, path) == ("GET", "/metrics"):
        assert sent[0]["status"] == 200  # the endpoint's own figures need no engine
    else:
        assert sent[0]["status"] in (400, 404, 405, 413, 503)
        assert json.loads(sent[1]["body"])["error"]["message"]
    assert not sent[1]["more_body"]


def test_a_refusal_says_what_kind_of_error_it_is() -> None:
    assert json.loads(Refusal(429, "overloaded", "x").body())["error"]["type"] == "rate_limit_error"
    assert json.loads(Refusal(404, "a", "x").body())["error"]["type"] == "invalid_request_error"
    assert json.loads(Refusal(502, "a", "x").body())["error"]["type"] == "server_error"
    assert check_route("/v1/models/a/b", "GET") == "/v1/models"

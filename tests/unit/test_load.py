"""The load generator against real sockets: loops, deadlines, failures, and the truth of its stamps."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from pipeline import load, metrics
from pipeline.errors import EngineError, MeasurementError
from pipeline.load import Sending, flush, read_counters, run_level, served_model, server_info
from pipeline.records import FailureClass, LoadLevel
from pipeline.spec import WorkloadSpec
from pipeline.workload import PlannedRequest, load_prompts, plan
from tests.fakes.running import fake_server

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def planned(count: int, *, rate: float | None = None, tokens: int = 8) -> tuple[PlannedRequest, ...]:
    level = LoadLevel(workload="open", request_rate=rate) if rate else LoadLevel(workload="open", concurrency=1)
    return plan(level, WorkloadSpec(output_tokens=tokens), load_prompts("open"), 0, "test", count=count)


@pytest.fixture(scope="module")
def quick() -> Iterator[str]:
    flags = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"]
    with fake_server(flags, ttft_ms=20, step_ms=5, tokens_per_step=2) as url:
        yield url


@asynccontextmanager
async def server(chat: Handler, **routes: Handler):
    """A server in this process with a chat handler and other POST paths."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    for path, handler in routes.items():
        app.router.add_post(f"/{path}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield Sending(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", "m")
    finally:
        await runner.cleanup()


def streaming(*events: bytes, then_s: float = 0.0, end: bool = True) -> Handler:
    async def chat(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
        await asyncio.sleep(then_s)
        if not end:
            request.transport.close()
        return response

    return chat


CHUNK = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'


async def test_a_closed_loop_keeps_its_streams_and_answers_everything(quick: str) -> None:
    window = await run_level(Sending(quick, "fake-model"), planned(12), concurrency=4)
    assert [t.status for t in window.traces] == ["ok"] * 12
    assert [t.index for t in window.traces] == list(range(12))
    events = sorted([(t.started, 1) for t in window.traces] + [(t.finished, -1) for t in window.traces])
    running, most = 0, 0
    for _, step in events:
        running += step
        most = max(most, running)
    assert most == 4
    assert all(t.output_tokens == 8 and t.prompt_tokens > 0 and t.spec.verify_steps > 0 for t in window.traces)
    assert 0 < window.client_cpu < 1


async def test_the_servers_own_counters_agree_with_the_requests(quick: str) -> None:
    window = await run_level(Sending(quick, "fake-model"), planned(6), concurrency=2)
    assert window.counters.generation_tokens == sum(t.output_tokens for t in window.traces)
    assert window.counters.verify_steps == sum(t.spec.verify_steps for t in window.traces)


async def test_an_open_loop_sends_on_time_whatever_is_running(quick: str) -> None:
    requests = planned(20, rate=100.0, tokens=64)  # each takes about 180 ms, so many overlap
    window = await run_level(Sending(quick, "fake-model"), requests)
    late = [t.started - t.scheduled for t in window.traces]
    assert min(late) >= -0.001
    assert statistics.median(late) < 0.02
    assert window.seconds < 20 * 0.18 / 2


async def test_requests_still_running_when_the_budget_ends_are_cut_off_not_failed(quick: str) -> None:
    sending = Sending(quick, "fake-model", budget_s=0.3)
    window = await run_level(sending, planned(50, tokens=64), concurrency=2)
    states = {t.status for t in window.traces}
    assert states == {"ok", "cut_off"}
    assert len(window.traces) < 50
    cut = [t for t in window.traces if t.status == "cut_off"]
    assert all(t.output_tokens is None and t.chunk_times for t in cut)


async def test_refusals_and_lost_connections_are_failures_with_a_reason() -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    async with server(refuse) as sending:
        (trace,) = (await run_level(sending, planned(1), concurrency=1)).traces
        assert trace.status == "failed"
        assert "HTTP 400" in trace.error and "too long" in trace.error
    async with server(streaming(CHUNK, end=False)) as sending:
        (trace,) = (await run_level(sending, planned(1), concurrency=1)).traces
        assert (trace.status, len(trace.chunk_times)) == ("failed", 1)
        assert trace.error


async def test_a_request_past_its_deadline_fails() -> None:
    async with server(streaming(CHUNK, then_s=5)) as sending:
        late = Sending(sending.base_url, "m", request_s=0.2)
        (trace,) = (await run_level(late, planned(1), concurrency=1)).traces
    assert (trace.status, trace.error) == ("failed", "no end after 0.2 s")


async def test_silence_on_all_running_streams_ends_the_window() -> None:
    async with server(streaming(CHUNK, then_s=30)) as sending:
        mute = Sending(sending.base_url, "m", silence_s=0.3)
        with pytest.raises(EngineError, match="no chunk") as caught:
            await asyncio.wait_for(run_level(mute, planned(2), concurrency=2), 5)
    assert caught.value.failure.failure_class == FailureClass.MUTE


async def test_events_cut_anywhere_are_put_together() -> None:
    whole = CHUNK + CHUNK + USAGE

    async def chat(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(whole), 7):
            await response.write(whole[start : start + 7])
            await asyncio.sleep(0.001)
        return response

    async with server(chat) as sending:
        (trace,) = (await run_level(sending, planned(1), concurrency=1)).traces
    assert (trace.text, len(trace.chunk_times), trace.output_tokens) == ("aa", 2, 1)


async def test_answers_are_retokenised_after_the_window() -> None:
    async with server(streaming(CHUNK, CHUNK, USAGE)) as sending:
        counted = Sending(sending.base_url, "m", count_tokens=len)
        (trace,) = (await run_level(counted, planned(1), concurrency=1)).traces
    assert trace.retokenized_tokens == 2


async def test_only_sglang_is_sent_what_openai_does_not_know() -> None:
    seen: list[dict[str, object]] = []

    async def chat(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        return await streaming(CHUNK, USAGE)(request)

    async with server(chat) as sending:
        await run_level(sending, planned(1), concurrency=1)
        await run_level(Sending(sending.base_url, "m", extras=False), planned(1), concurrency=1)
    assert {"ignore_eos", "return_spec_tokens_details"} <= set(seen[0])
    assert set(seen[1]) == {"model", "messages", "max_tokens", "temperature", "stream", "stream_options"}


async def test_a_flush_is_retried_until_it_is_confirmed() -> None:
    answers = [400, 400, 200]

    async def flush_cache(_: web.Request) -> web.Response:
        return web.Response(status=answers.pop(0), text="requests are running")

    async with server(streaming(CHUNK), flush_cache=flush_cache) as sending:
        assert await flush(sending.base_url) is True
        assert answers == []


async def test_a_flush_that_stays_refused_is_an_error_and_none_at_all_is_said() -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=400, text="requests are running")

    async with server(streaming(CHUNK), flush_cache=refuse) as sending:
        with pytest.raises(MeasurementError, match="not flushed within"):
            await flush(sending.base_url, timeout_s=0.3)
    async with server(streaming(CHUNK)) as sending:
        assert await flush(sending.base_url) is False


async def test_the_servers_other_endpoints(quick: str) -> None:
    info = await server_info(quick)
    assert info is not None and info["version"]
    assert await served_model(quick)
    async with server(streaming(CHUNK)) as sending:
        assert await server_info(sending.base_url) is None
        assert await read_counters(sending.base_url) == metrics.Counters()
        assert await served_model(sending.base_url) is None


async def test_nothing_listening_is_said_in_one_line() -> None:
    with pytest.raises(MeasurementError, match=r"^nothing listens at 127\.0\.0\.1:9$"):
        await server_info("http://127.0.0.1:9")
    with pytest.raises(MeasurementError, match="nothing listens"):
        await load.post_chat(Sending("http://127.0.0.1:9", "m"), {})


@pytest.mark.parametrize("streams", [1, 64])
async def test_stamps_are_true(streams: int, tmp_path: Path) -> None:
    """Against the server's own stamp of every write; the strict limit is the benchmark's, on quiet cores."""
    stamps = tmp_path / "stamps.jsonl"
    with fake_server(ttft_ms=100, step_ms=40, tokens_per_step=2, jitter_ms=30, stamps=str(stamps)) as url:
        requests = planned(streams, rate=100.0, tokens=24)
        window = await run_level(Sending(url, "fake-model"), requests)
    truth = sorted((json.loads(line) for line in stamps.read_text().splitlines()), key=lambda row: row["received"])
    traces = sorted(window.ok, key=lambda t: t.started)
    assert len(traces) == len(truth) == streams
    errors = []
    for trace, true in zip(traces, truth, strict=True):
        first, last = true["writes"][0][0], true["writes"][-1][0]
        assert len(true["writes"]) == len(trace.chunk_times)
        errors.append(abs(metrics.ttft_ms(trace) - 1e3 * (first - trace.started)))
        errors.append(abs(metrics.tpot_ms(trace) - 1e3 * (last - first) / 23))
    assert statistics.median(errors) < 5

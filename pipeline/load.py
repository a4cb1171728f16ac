"""Sends a planned workload to an OpenAI-compatible server and stamps what comes back.

The only user of aiohttp's client. One thread, one connection a stream. The clock is read before the
send and at each read that brought content; everything else (JSON, text, token counts) waits until
the window is over, so that the client does not slow down what it measures.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import aiohttp

from pipeline.errors import EngineError, MeasurementError
from pipeline.metrics import Counters, Window
from pipeline.records import Failure, FailureClass
from pipeline.stream import CountTokens, Stream, scrape_metrics, trace_of
from pipeline.workload import PlannedRequest

_TICK_S = 0.05
_SHORT = aiohttp.ClientTimeout(total=10)


@dataclass(frozen=True)
class Sending:
    """How requests are sent.

    `extras` adds what SGLang knows beyond OpenAI's API (`ignore_eos`, counters per request).
    `budget_s` is when no new request starts and running ones are cut off; `silence_s` how long running
    streams may all be silent before the engine counts as mute.
    """

    base_url: str
    model: str
    extras: bool = True
    request_s: float = 600.0
    silence_s: float = 120.0
    budget_s: float = math.inf
    api_key: str | None = None
    count_tokens: CountTokens | None = None


@dataclass
class _Pulse:
    """When anything last happened, and how many streams run."""

    last: float
    running: int = 0


async def run_level(sending: Sending, planned: Sequence[PlannedRequest], *, concurrency: int | None = None) -> Window:
    """Send one window and wait for its end.

    Args:
        sending: where and how.
        planned: the requests, in order; those with `at_s` are sent then, whatever is still running.
        concurrency: closed loop: so many streams, each sending its next request when one ends.

    Raises:
        EngineError: streams run and none has said anything for `silence_s` (class `mute`).
    """
    before = await read_counters(sending.base_url, api_key=sending.api_key)
    pulse = _Pulse(time.monotonic())
    lags: list[float] = []
    async with _session(sending.api_key) as session:
        ticker = asyncio.create_task(_tick(lags))
        cpu, began = time.thread_time(), time.monotonic()
        try:
            streams = await _until_silent(_send_all(session, sending, planned, concurrency, pulse), pulse, sending)
        finally:
            ticker.cancel()
        cpu_share = (time.thread_time() - cpu) / (time.monotonic() - began)
    after = await read_counters(sending.base_url, api_key=sending.api_key)
    return Window(
        traces=tuple(trace_of(stream, sending.count_tokens) for stream in streams),
        client_cpu=cpu_share,
        loop_lag_ms=1e3 * statistics.median(lags) if lags else None,
        counters=_gained(before, after),
    )


async def _send_all(
    session: aiohttp.ClientSession,
    sending: Sending,
    planned: Sequence[PlannedRequest],
    concurrency: int | None,
    pulse: _Pulse,
) -> list[Stream]:
    start = time.monotonic()
    end = start + sending.budget_s
    streams: list[Stream] = []

    async def send(request: PlannedRequest) -> None:
        if request.at_s is not None:
            await asyncio.sleep(min(start + request.at_s, end) - time.monotonic())
        if time.monotonic() < end:
            scheduled = None if request.at_s is None else start + request.at_s
            stream = Stream(request, started=time.monotonic(), scheduled=scheduled)
            streams.append(stream)
            await _send_one(session, sending, stream, pulse, end)

    async def worker(queue: Iterable[PlannedRequest]) -> None:
        for request in queue:
            await send(request)

    if concurrency is None:
        await asyncio.gather(*(send(request) for request in planned))
    else:
        queue = iter(planned)  # shared: each worker takes the next request
        await asyncio.gather(*(worker(queue) for _ in range(min(concurrency, len(planned)))))
    return sorted(streams, key=lambda stream: stream.planned.index)


async def _send_one(
    session: aiohttp.ClientSession, sending: Sending, stream: Stream, pulse: _Pulse, end: float
) -> None:
    """Send one request and read its stream; whatever happens ends up in the stream's status."""
    body = json.dumps(_payload(sending, stream.planned)).encode()
    deadline = min(time.monotonic() + sending.request_s, end)
    pulse.running += 1
    stream.started = pulse.last = time.monotonic()
    try:
        async with asyncio.timeout(deadline - stream.started):
            async with session.post(f"{sending.base_url}/v1/chat/completions", data=body) as response:
                if response.status != 200:
                    raise MeasurementError(f"HTTP {response.status}: {(await response.text())[:200].strip()}")
                await _read(response, stream, pulse)
    except TimeoutError:
        at_end = time.monotonic() >= end
        stream.status = "cut_off" if at_end else "failed"
        stream.error = None if at_end else f"no end after {sending.request_s:g} s"
    except (aiohttp.ClientError, MeasurementError, ConnectionError) as error:
        stream.status, stream.error = "failed", str(error) or type(error).__name__
    finally:
        stream.finished = time.monotonic()
        pulse.running -= 1


async def _read(response: aiohttp.ClientResponse, stream: Stream, pulse: _Pulse) -> None:
    """Take the body as it is read from the socket, until its end."""
    content = response.content

    def drain(now: float) -> None:
        if content.exception() is None and (data := content.read_nowait()):
            pulse.last = now
            stream.take(data, now)

    drain(time.monotonic())
    if (error := content.exception()) is not None:
        raise error
    transport = response.connection.transport if response.connection else None
    if transport is None:  # the whole answer came with its head
        return
    inner = cast(asyncio.Protocol, transport.get_protocol())
    tap = _Tap(inner, drain)
    transport.set_protocol(tap)
    try:
        await content.wait_eof()
    finally:
        if transport.get_protocol() is tap:
            transport.set_protocol(inner)


class _Tap(asyncio.Protocol):
    """Stands between the socket and aiohttp's parser, and looks at the body after every read.

    Reading through a task would cost a wake-up a chunk, and stamp when the task runs instead of when
    the bytes came.
    """

    def __init__(self, inner: asyncio.Protocol, drain: Callable[[float], None]) -> None:
        self.inner, self.drain = inner, drain
        self.connection_lost = inner.connection_lost  # type: ignore[method-assign]
        self.eof_received = inner.eof_received  # type: ignore[method-assign]
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign]

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self.inner.data_received(data)
        self.drain(now)


def _payload(sending: Sending, request: PlannedRequest) -> dict[str, Any]:
    payload: dict[str, Any] = {
        "model": sending.model,
        "messages": request.messages,
        "max_tokens": request.output_tokens,
        "temperature": request.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.temperature > 0:
        payload["seed"] = request.seed + request.index
    if sending.extras:
        # 0.5.23 answers both details in a last `sglext` chunk; 0.5.17 knows only the first.
        payload |= {
            "ignore_eos": request.ignore_eos,
            "return_cached_tokens_details": True,
            "return_spec_tokens_details": True,
        }
    return payload


async def _until_silent(sends: Any, pulse: _Pulse, sending: Sending) -> list[Stream]:
    """Wait for the sends; a silence of all running streams ends them."""
    task: asyncio.Task[list[Stream]] = asyncio.ensure_future(sends)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=min(1.0, sending.silence_s / 2))
            quiet = time.monotonic() - pulse.last
            if not task.done() and pulse.running and quiet > sending.silence_s:
                cause = f"{pulse.running} running streams, and no chunk for {quiet:.0f} s"
                raise EngineError(Failure(failure_class=FailureClass.MUTE, cause=cause, phase="measure"))
        return task.result()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


async def _tick(lags: list[float]) -> None:
    """Note how late a short timer fires: the delay that a stamp may suffer."""
    while True:
        due = time.monotonic() + _TICK_S
        await asyncio.sleep(_TICK_S)
        lags.append(time.monotonic() - due)


# The server's other endpoints.


@asynccontextmanager
async def _session(api_key: str | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    # A server may close an idle connection while it is being taken: keep none for long.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1.0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=timeout, read_bufsize=2**20
    ) as session:
        yield session


async def get_json(url: str, *, api_key: str | None = None) -> Any | None:
    """GET a JSON answer; None where the path does not exist or the answer is no JSON.

    Raises:
        MeasurementError: nothing listens, or it does not answer in 10 s.
    """
    status, text = await _get(url, api_key)
    try:
        return json.loads(text) if status == 200 else None
    except ValueError:
        return None


async def _get(url: str, api_key: str | None) -> tuple[int, str]:
    try:
        async with _session(api_key) as session, session.get(url, timeout=_SHORT) as response:
            return response.status, await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _unanswered(url, error) from error


def _unanswered(url: str, error: Exception) -> MeasurementError:
    if isinstance(error, aiohttp.ClientConnectorError):
        return MeasurementError(f"nothing listens at {error.host}:{error.port}")
    return MeasurementError(f"no answer from {url}: {error or type(error).__name__}")


async def server_info(base_url: str, *, api_key: str | None = None) -> dict[str, Any] | None:
    """SGLang's resolved settings, by their new or old path; None for another server."""
    for path in ("/server_info", "/get_server_info"):
        info = await get_json(base_url + path, api_key=api_key)
        if isinstance(info, dict):
            return info
    return None


async def served_model(base_url: str, *, api_key: str | None = None) -> str | None:
    """The first model that the server lists."""
    listed = await get_json(f"{base_url}/v1/models", api_key=api_key)
    names = [entry.get("id") for entry in (listed or {}).get("data", ())]
    return names[0] if names else None


async def post_chat(sending: Sending, payload: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """POST one chat request without streaming; return the status and the JSON body.

    Raises:
        MeasurementError: no answer within `sending.request_s`, or one that is no JSON object.
    """
    url, timeout = f"{sending.base_url}/v1/chat/completions", aiohttp.ClientTimeout(total=sending.request_s)
    try:
        async with _session(sending.api_key) as session, session.post(url, json=payload, timeout=timeout) as response:
            reply = await response.json(content_type=None)
            status = response.status
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise _unanswered(url, error) from error
    return status, reply if isinstance(reply, dict) else {"answer": reply}


async def flush(base_url: str, *, timeout_s: float = 30.0, api_key: str | None = None) -> bool:
    """Empty the prefix cache and see it confirmed; False where the server has no such endpoint.

    SGLang refuses (400) while requests run, so a refusal is tried again.

    Raises:
        MeasurementError: still refused after `timeout_s`.
    """
    end, url = time.monotonic() + timeout_s, f"{base_url}/flush_cache"
    while True:
        try:
            async with _session(api_key) as session, session.post(url, timeout=_SHORT) as response:
                status, text = response.status, (await response.text()).strip()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _unanswered(url, error) from error
        if status in (404, 405, 501):
            return False
        if status == 200:
            return True
        if time.monotonic() >= end:
            raise MeasurementError(f"the cache was not flushed within {timeout_s:g} s: HTTP {status} {text[:120]}")
        await asyncio.sleep(0.25)


async def read_counters(base_url: str, *, api_key: str | None = None) -> Counters:
    """The server's counters now; all None where it has no `/metrics`."""
    status, text = await _get(f"{base_url}/metrics", api_key)
    sums = scrape_metrics(text) if status == 200 else {}

    def counter(name: str) -> int | None:
        value = sums.get(f"sglang:{name}")
        return None if value is None else round(value)

    return Counters(
        counter("generation_tokens_total"), counter("spec_verify_calls_total"), counter("cached_tokens_total")
    )


def _gained(before: Counters, after: Counters) -> Counters:
    """What was gained; a counter appears with its first event, so one that was missing started at 0."""

    def gain(name: str) -> int | None:
        now = getattr(after, name)
        return None if now is None else now - (getattr(before, name) or 0)

    return replace(after, **{name: gain(name) for name in ("generation_tokens", "verify_steps", "cached_tokens")})

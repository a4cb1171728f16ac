"""An ASGI pass-through to one engine: bytes go through untouched, and every refusal is an OpenAI error.

Raw ASGI and aiohttp because this sits in the path of every token: a framework costs a tenth of the
throughput on a small machine. Nothing of a prompt or an answer is kept or logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from yarl import URL

from serve.keys import KeyRing
from serve.openai import Refusal, check_route, forwarded, header, request_id
from serve.relay import ClientGone, Message, Receive, Reply, Send, copy, engine_url, read_body, until_gone
from serve.sample import Sample
from serve.service import ProxySettings


@dataclass(eq=False)
class Target:
    """The engine that requests go to, and how many are inside."""

    base_url: str
    in_flight: int = 0


@dataclass(frozen=True)
class Outage:
    """No engine at the moment. `until` is when one is expected, on the monotonic clock."""

    reason: str
    until: float

    def refusal(self) -> Refusal:
        """503 with the seconds that are left."""
        left = max(1.0, self.until - time.monotonic())
        return Refusal(503, "unavailable", f"{self.reason}; retry in {left:.0f} s", retry_after_s=left)


class PassThrough:
    """The ASGI application.

    Args:
        settings: the limits.
        keys: accepted API keys; an empty ring accepts everyone.
    """

    def __init__(self, settings: ProxySettings | None = None, keys: KeyRing | None = None) -> None:
        self.settings = settings or ProxySettings()
        self._keys = keys or KeyRing()
        self._route: Target | Outage = Outage("the engine is starting", time.monotonic())
        self._session: aiohttp.ClientSession | None = None
        self._in_flight = 0
        self._sample = _sample(self.settings)
        self.answers: Counter[str] = Counter()

    def configure(self, settings: ProxySettings) -> None:
        """Take new limits for requests from now on."""
        self.settings, self._sample = settings, _sample(settings)

    # -- steering ------------------------------------------------------------------------------

    def send_to(self, base_url: str) -> None:
        """Requests from now on go to `base_url`; those inside stay where they are."""
        self._route = Target(base_url.rstrip("/"))

    def pause(self, reason: str, expected_s: float) -> None:
        """Answer 503 with `Retry-After` until `send_to`; requests inside are not touched."""
        self._route = Outage(reason, time.monotonic() + expected_s)

    @property
    def target(self) -> Target | None:
        """The engine in use, None during an outage."""
        return self._route if isinstance(self._route, Target) else None

    async def drained(self, target: Target, within_s: float) -> bool:
        """Wait until nothing is inside `target`; False when the time is over first."""
        ends = time.monotonic() + within_s
        while target.in_flight and time.monotonic() < ends:
            await asyncio.sleep(0.02)
        return not target.in_flight

    # -- ASGI ----------------------------------------------------------------------------------

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request, or the server's life span."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def close(self) -> None:
        """Close the connections to the engine."""
        if self._session is not None:
            await self._session.close()

    async def _http(self, scope: Message, receive: Receive, send: Send) -> None:
        identity = request_id(scope["headers"])
        reply = Reply(send, identity if self.settings.echo_request_id else None)
        try:
            await self._answer(scope, receive, reply, identity)
        except Refusal as refusal:
            await reply.refuse(refusal)
        except ClientGone:
            self.answers["aborted"] += 1
            return
        except asyncio.CancelledError:
            self.answers["aborted"] += 1
            raise
        if reply.status:
            self.answers[str(reply.status)] += 1
        if reply.broken:
            self.answers["broken"] += 1

    async def _answer(self, scope: Message, receive: Receive, reply: Reply, identity: str) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        route = check_route(path, scope["method"])
        if route == "/health":
            return await self._health(reply)
        if not self._keys.accepts(header(scope["headers"], b"authorization")):
            challenge = ((b"www-authenticate", b"Bearer"),)
            raise Refusal(401, "invalid_api_key", "Incorrect or missing API key.", headers=challenge)
        if route == "/metrics":
            return await self._metrics(reply)
        with self._slot() as target:
            body = await read_body(scope["headers"], receive, self.settings.max_body_bytes)
            if self._sample is not None:
                self._sample.offer(route, body)
            url = engine_url(target.base_url, path, scope.get("query_string", b""))
            headers = forwarded(scope["headers"], identity)
            await until_gone(receive, self._relay(scope["method"], url, headers, body, reply))
        return None

    async def _relay(self, method: str, url: URL, headers: list[tuple[str, str]], body: bytes, reply: Reply) -> None:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=self.settings.connect_s)
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                request = self._client().request(method, url, headers=headers, data=body or None, timeout=limits)
                async with request as answer:
                    await copy(answer, reply)
        except TimeoutError as error:
            text = f"The request was stopped after {self.settings.timeout_s:g} s."
            raise Refusal(504, "timeout", text) from error
        except aiohttp.ClientConnectionError as error:
            raise Refusal(503, "engine_unreachable", "The engine does not answer; retry shortly.", 5) from error
        except aiohttp.ClientError as error:
            raise Refusal(502, "engine_failed", "The engine broke off its answer.") from error

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Engines drop idle connections after 5 s: reuse must end well before, or a POST meets a closed one.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self._session

    # -- the endpoint's own pages --------------------------------------------------------------

    async def _health(self, reply: Reply) -> None:
        if isinstance(self._route, Outage):
            raise self._route.refusal()
        status = await self._fetch("/health")
        if status is None:
            raise Refusal(503, "engine_unhealthy", "The engine does not answer its health check.", 5)
        await reply.whole(200, b"application/json", b'{"status": "ok"}')

    async def _metrics(self, reply: Reply) -> None:
        engine = await self._fetch("/metrics") or b""
        if engine and not engine.endswith(b"\n"):
            engine += b"\n"
        await reply.whole(200, b"text/plain; version=0.0.4; charset=utf-8", engine + self.own_metrics().encode())

    async def _fetch(self, path: str) -> bytes | None:
        """The engine's page, None when it has none or does not answer in time."""
        if self.target is None:
            return None
        limits = aiohttp.ClientTimeout(total=25)  # SGLang's health check takes up to 20 s
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._client().get(self.target.base_url + path, timeout=limits) as answer:
                return await answer.read() if answer.status == 200 else None
        return None

    def own_metrics(self) -> str:
        """The endpoint's counters in Prometheus' text format."""
        lines = ["# TYPE fastverify_endpoint_answers_total counter"]
        lines += [f'fastverify_endpoint_answers_total{{answer="{k}"}} {n}' for k, n in sorted(self.answers.items())]
        lines += ["# TYPE fastverify_endpoint_in_flight gauge", f"fastverify_endpoint_in_flight {self._in_flight}"]
        available = 0 if self.target is None else 1
        lines += ["# TYPE fastverify_endpoint_available gauge", f"fastverify_endpoint_available {available}"]
        return "\n".join(lines) + "\n"

    @contextlib.contextmanager
    def _slot(self) -> Iterator[Target]:
        if isinstance(self._route, Outage):
            raise self._route.refusal()
        if self._in_flight >= self.settings.max_concurrent:
            message = f"{self._in_flight} requests are being answered already; retry shortly."
            raise Refusal(429, "overloaded", message, retry_after_s=1)
        target = self._route
        self._in_flight += 1
        target.in_flight += 1
        try:
            yield target
        finally:
            self._in_flight -= 1
            target.in_flight -= 1


def _sample(settings: ProxySettings) -> Sample | None:
    if settings.sample_file is None:
        return None
    return Sample(Path(settings.sample_file), every=settings.sample_every, limit=settings.sample_limit)

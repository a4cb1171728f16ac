"""The moving parts of the pass-through: reading a request, copying an answer, noticing that the client left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from serve.openai import Headers, Refusal, header, returned

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_ERROR_TEXT_LIMIT = 2000


class ClientGone(Exception):  # noqa: N818 (an event, not a fault)
    """The client closed its connection; there is nobody to answer."""


class Reply:
    """The client's side of one answer. Knows whether it has begun, so that a refusal fits in.

    Args:
        send: ASGI's send.
        identity: written as `x-request-id`; None when the server in front does it.
    """

    def __init__(self, send: Send, identity: str | None) -> None:
        self._send = send
        self._identity = identity
        self.status: int | None = None
        self.broken = False
        self._events = False
        self._tail = b""

    async def start(self, status: int, headers: Headers) -> None:
        """Send the status and the headers."""
        self.status = status
        self._events = (header(headers, b"content-type") or "").startswith("text/event-stream")
        own = [(b"x-request-id", self._identity.encode())] if self._identity else []
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *own]})

    async def send(self, chunk: bytes, more: bool = True) -> None:
        """Send a piece of the body."""
        self._tail = (self._tail + chunk)[-2:] if len(chunk) < 2 else chunk[-2:]
        await self._send({"type": "http.response.body", "body": chunk, "more_body": more})

    async def whole(self, status: int, content_type: bytes, body: bytes) -> None:
        """Send a short answer at once."""
        await self.start(status, [(b"content-type", content_type), (b"content-length", str(len(body)).encode())])
        await self.send(body, more=False)

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with an error: a body, an event in a begun stream, or else a cut connection."""
        if self.status is None:
            await self.start(refusal.status, refusal.all_headers())
            await self.send(refusal.body(), more=False)
            return
        self.broken = True
        if self._events:
            torn = b"" if self._tail in (b"", b"\n\n") else b"\n\n"
            await self.send(torn + refusal.event(), more=False)
        # Anything else has a length or a JSON body that nothing can be added to. Returning without
        # an end makes the server cut the connection, which clients report as an incomplete read.


async def read_body(headers: Headers, receive: Receive, limit: int) -> bytes:
    """The request's body, at most `limit` bytes.

    Raises:
        Refusal: 413, as early as the length is known.
        ClientGone: the client broke off.
    """
    stated = header(headers, b"content-length")
    if stated and stated.isdigit() and int(stated) > limit:
        raise _too_large(limit)
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
        if size > limit:
            raise _too_large(limit)
    return b"".join(parts)


def _too_large(limit: int) -> Refusal:
    return Refusal(413, "request_too_large", f"The body is larger than {limit} bytes.")


def engine_url(base_url: str, path: str, query: bytes) -> URL:
    """Where a request goes. Re-quoted, so that nothing odd reaches the engine's request line."""
    url = base_url + quote(path, safe="/:@")
    return URL(f"{url}?{quote(query, safe='=&%+,:;/?@!$*~')}" if query else url, encoded=True)


async def copy(answer: aiohttp.ClientResponse, reply: Reply) -> None:
    """Hand an engine's answer on as it arrives, whatever it holds.

    Raises:
        Refusal: the engine's error was no JSON (a server's own page); its text is in the message.
    """
    if answer.status >= 400 and "json" not in answer.content_type:
        raise await _engine_error(answer)
    await reply.start(answer.status, returned(list(answer.raw_headers)))
    async for chunk in answer.content.iter_any():
        await reply.send(chunk)
    await reply.send(b"", more=False)


async def _engine_error(answer: aiohttp.ClientResponse) -> Refusal:
    text = (await answer.content.read(_ERROR_TEXT_LIMIT)).decode(errors="replace").strip()
    seconds = answer.headers.get("retry-after", "")
    retry = float(seconds) if seconds.isdigit() else None
    return Refusal(answer.status, "engine_error", text or answer.reason or "The engine refused.", retry)


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it as soon as the client disconnects, which closes the engine's stream too.

    Raises:
        ClientGone: it did.
    """
    relay, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({relay, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not relay.done():
            raise ClientGone
        await relay
    finally:
        for task in (relay, gone):
            task.cancel()
        if not relay.done():
            with contextlib.suppress(asyncio.CancelledError, Refusal):
                await relay


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

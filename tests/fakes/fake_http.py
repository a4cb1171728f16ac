"""A small HTTP/1.1 server for the fake engines: keep-alive, JSON bodies, chunked streams, nothing else.

Hand-written because pacing is the point: a framework's cost per chunk would be the noise that the
load generator is measured against.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error", 503: "Service Unavailable"}


@dataclass
class Request:
    """One parsed request. `received` is the monotonic time at which its last byte was here."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    received: float
    peer: str = ""

    def json(self) -> dict[str, Any]:
        value = json.loads(self.body or b"{}")
        return value if isinstance(value, dict) else {}


@dataclass
class Connection:
    """The way back to one client."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    streaming: bool = field(default=False)

    @property
    def gone(self) -> bool:
        return self.reader.at_eof() or self.writer.transport.is_closing()

    def answer(self, status: int, body: bytes | str | dict[str, Any], content_type: str = "") -> None:
        if isinstance(body, dict):
            body, content_type = json.dumps(body), content_type or "application/json"
        data = body.encode() if isinstance(body, str) else body
        head = (
            f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}\r\n"
            f"Content-Type: {content_type or 'text/plain; charset=utf-8'}\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self.writer.write(head.encode() + data)

    def open_stream(self) -> None:
        """Nothing leaves before the first event: a header without content is not a first token."""
        self.streaming = True
        self._head = (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        )

    def event(self, payload: dict[str, Any] | str) -> float:
        """Write one server-sent event in one chunk; return the monotonic time just before the write."""
        text = payload if isinstance(payload, str) else json.dumps(payload, separators=(",", ":"))
        data = b"data: " + text.encode() + b"\n\n"
        frame = self._head + b"%x\r\n%b\r\n" % (len(data), data)
        self._head = b""
        now = time.monotonic()
        self.writer.write(frame)
        return now

    def close_stream(self) -> None:
        self.writer.write(self._head + b"0\r\n\r\n")


Handler = Callable[[Request, Connection], Awaitable[int]]
Log = Callable[[str], None]


async def _read_request(reader: asyncio.StreamReader, peer: str) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    url = urlsplit(target)
    return Request(method, url.path, dict(parse_qsl(url.query)), headers, body, time.monotonic(), peer)


async def serve_connection(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler, log: Log
) -> None:
    """Answer requests of one connection until the client goes."""
    host, port = writer.get_extra_info("peername")[:2]
    try:
        while request := await _read_request(reader, f"{host}:{port}"):
            status = await handler(request, Connection(reader, writer))
            log(f'INFO:     {request.peer} - "{request.method} {request.path} HTTP/1.1" {status} OK')
            await writer.drain()
            if request.headers.get("connection", "").lower() == "close":
                break
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()

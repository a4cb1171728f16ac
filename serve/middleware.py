"""Serve's own refusals (back pressure, a failed replica, a time-out) in OpenAI's shape, like the endpoint's."""

from __future__ import annotations

from typing import Any

from serve.openai import Refusal, header
from serve.relay import Message, Receive, Send

# A client could make Serve cut a stream without a word: the endpoint has its own limit, with an error event.
_SERVE_TIMEOUT = b"x-request-timeout-seconds"


class OpenAIErrors:
    """ASGI middleware around Serve's HTTP server: plain-text errors under `/v1/` become JSON."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request; other traffic passes."""
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        kept = [(name, value) for name, value in scope["headers"] if name != _SERVE_TIMEOUT]
        await self._app({**scope, "headers": kept}, receive, _Reshaped(send))


class _Reshaped:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None  # a plain error's head, held back until its text is there
        self._text = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _plain_error(message):
            self._start = message
        elif self._start is None:
            await self._send(message)
        elif message["type"] == "http.response.body":
            self._text += message.get("body", b"")
            if not message.get("more_body", False):
                await self._finish(self._start)

    async def _finish(self, start: Message) -> None:
        retry = header(start["headers"], b"retry-after")
        seconds = float(retry) if retry and retry.isdigit() else (1.0 if start["status"] == 503 else None)
        text = self._text.decode(errors="replace")[:500]
        refusal = Refusal(start["status"], "serve_error", text, seconds, _identity(start))
        await self._send({**start, "headers": refusal.all_headers()})
        await self._send({"type": "http.response.body", "body": refusal.body(), "more_body": False})


def _plain_error(start: Message) -> bool:
    return start["status"] >= 400 and (header(start["headers"], b"content-type") or "").startswith("text/plain")


def _identity(start: Message) -> tuple[tuple[bytes, bytes], ...]:
    identity = header(start["headers"], b"x-request-id")
    return ((b"x-request-id", identity.encode("latin-1")),) if identity else ()


def middlewares() -> list[Any]:
    """What RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names."""
    from starlette.middleware import Middleware

    return [Middleware(OpenAIErrors)]

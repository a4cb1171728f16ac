"""A tiny OpenAI-like engine on the test's own loop, and the pass-through in front of it, both on real ports."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence

import uvicorn
from aiohttp import web

from serve.proxy import PassThrough


class Upstream:
    """Answers what a test puts into it, and remembers what it was asked."""

    def __init__(self) -> None:
        self.chunks: Sequence[bytes] = [b"{}"]
        self.headers = {"content-type": "application/json"}
        self.status = 200
        self.pause_s = 0.0  # between chunks
        self.first_s = 0.0
        self.die_after: int | None = None  # chunks, then the connection breaks
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.running = 0
        self.base_url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Any path."""
        self.seen.append((request.method, request.raw_path, dict(request.headers), await request.read()))
        self.running += 1
        try:
            return await self._stream(request)
        finally:
            self.running -= 1

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(self.first_s)
        response = web.StreamResponse(status=self.status, headers=self.headers)
        await response.prepare(request)
        for number, chunk in enumerate(self.chunks):
            if number == self.die_after:
                assert request.transport is not None
                request.transport.abort()
                break
            await response.write(chunk)
            await asyncio.sleep(self.pause_s)
        return response

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Upstream]:
        """Serve on a free port of the loopback."""
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.base_url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        try:
            yield self
        finally:
            await runner.cleanup()


@contextlib.asynccontextmanager
async def served(proxy: PassThrough) -> AsyncIterator[str]:
    """The pass-through behind uvicorn; yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(proxy, log_level="error", lifespan="on", access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 10)
        listener.close()

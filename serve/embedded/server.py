"""`python -m serve.embedded.server --model …`: the embedded engine behind SGLang's HTTP interface.

Exit codes are SGLang's: 2 for a wrong flag, 1 for a model that cannot be loaded, 3 for a taken port,
0 after SIGTERM, once what runs and waits has been answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web

from pipeline.errors import FastverifyError, InputError
from serve.embedded.flags import parse
from serve.embedded.records import Ask, Outcome, Step
from serve.embedded.replies import Chat, Completion, Dialect, Json, Native, error_body
from serve.embedded.requests import Limits, RequestError
from serve.embedded.telemetry import Telemetry
from serve.embedded.worker import Event, Job, QueueFullError, Worker

if TYPE_CHECKING:
    from serve.embedded.engine import Engine

log = logging.getLogger(__name__)

DRAIN_S = 25.0  # under the 30 s that a launcher gives between TERM and KILL
WARMUP_S = 120.0
MAX_BODY = 8 * 1024 * 1024
ENDPOINTS: dict[str, type[Chat | Completion | Native]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completion,
    "/generate": Native,
}


class Server:
    """The HTTP side: routes requests to the worker and its events back."""

    def __init__(self, engine: Engine, args: argparse.Namespace, launch_command: str) -> None:
        self._engine, self._args, self._launch_command = engine, args, launch_command
        self._limits = Limits(engine.context_length, engine.vocab_size)
        self._telemetry = Telemetry(
            model_name=args.served_model_name,
            speculative=args.speculative_algorithm is not None,
            context_length=engine.context_length,
            log_interval=args.decode_log_interval,
        )
        self._worker = Worker(engine, self._telemetry, max_queued=args.max_queued_requests)
        self._draining = False

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_errors])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/get_server_info", self._server_info)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_route("*", "/flush_cache", self._flush_cache)
        for path in ENDPOINTS:
            app.router.add_post(path, self._answer)
        return app

    async def warm_up(self) -> None:
        """Generate two tokens, so that the first request pays for nothing but itself."""
        ask = Ask(prompt_ids=(0,) * 8, max_tokens=2, temperature=0.0, ignore_eos=True)
        async with asyncio.timeout(WARMUP_S):
            with self._running(ask) as events:
                async for event in events:
                    if isinstance(event, Exception):
                        raise event

    async def drain(self) -> bool:
        """Refuse new requests and wait for the others; False when `DRAIN_S` was not enough."""
        self._draining = True
        return await asyncio.to_thread(self._worker.drain, DRAIN_S)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._draining else 200)

    async def _models(self, _: web.Request) -> web.Response:
        model = {
            "id": self._args.served_model_name,
            "object": "model",
            "created": 0,
            "owned_by": "fastverify",
            "max_model_len": self._limits.context_length,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _server_info(self, _: web.Request) -> web.Response:
        resolved = vars(self._args) | {
            "context_length": self._limits.context_length,
            "dtype": self._engine.dtype,
            "tp_size": 1,
            "max_running_requests": 1,
            "launch_command": self._launch_command,
            "version": self._engine.version,
            "internal_states": [self._telemetry.internal_state()],
            "status": "ready",
        }
        return web.json_response(resolved)

    async def _metrics(self, _: web.Request) -> web.Response:
        text = self._telemetry.prometheus(running=self._worker.running, queued=self._worker.queued)
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _flush_cache(self, _: web.Request) -> web.Response:
        if self._worker.running:
            return web.Response(status=400, text="Flush cache failed: requests are running or waiting.\n")
        self._telemetry.flush()
        return web.Response(text="Cache flushed.\n")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a generating request, streamed or whole, in its endpoint's dialect."""
        if self._draining:
            return _unavailable("the server is shutting down")
        kind = ENDPOINTS[request.path]
        dialect = kind(await _json(request), self._engine.tokenizer, self._limits, self._args.served_model_name)
        try:
            with self._running(dialect.ask) as events:
                return await (_stream(request, dialect, events) if dialect.stream else _whole(dialect, events))
        except QueueFullError as error:
            return _unavailable(f"The request queue is full: {error}")

    @contextmanager
    def _running(self, ask: Ask) -> Iterator[AsyncIterator[Event]]:
        """Submit a request; leaving the block early, as when the client goes away, cancels it."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def send(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        job = Job(ask, send)
        self._worker.submit(job)
        try:
            yield _until_end(events)
        finally:
            job.cancelled.set()


async def _until_end(events: asyncio.Queue[Event]) -> AsyncIterator[Event]:
    event: Event = await events.get()
    while isinstance(event, Step):
        yield event
        event = await events.get()
    yield event


async def _whole(dialect: Dialect, events: AsyncIterator[Event]) -> web.Response:
    steps: list[Step] = []
    async for event in events:
        if isinstance(event, Exception):
            return _internal_error(event)
        if isinstance(event, Outcome):
            return web.json_response(dialect.whole(steps, event))
        steps.append(event)
    raise RuntimeError("the worker ended a request without an outcome")


async def _stream(request: web.Request, dialect: Dialect, events: AsyncIterator[Event]) -> web.StreamResponse:
    first = await anext(events)  # an error before the first token still gets its own status
    if isinstance(first, Exception):
        return _internal_error(first)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    await _write(response, _lines(dialect, first))
    async for event in events:
        await _write(response, _lines(dialect, event))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _lines(dialect: Dialect, event: Event) -> list[Json]:
    if isinstance(event, Step):
        return dialect.chunk(event)
    return dialect.last(event) if isinstance(event, Outcome) else [_error_of(event)]


async def _write(response: web.StreamResponse, bodies: list[Json]) -> None:
    for body in bodies:
        await response.write(f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode())


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Give every error OpenAI's shape."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except RequestError as error:
        return web.json_response(error_body(str(error), 400, error.param), status=400)
    except web.HTTPException as error:
        return web.json_response(error_body(error.reason, error.status), status=error.status)


async def _json(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except ValueError as error:  # not JSON, or not UTF-8
        raise RequestError(f"the body is not JSON: {error}") from error


def _unavailable(message: str) -> web.Response:
    return web.json_response(error_body(message, 503, code="overloaded"), status=503, headers={"Retry-After": "1"})


def _error_of(error: Exception) -> Json:
    return error_body(f"the engine failed: {type(error).__name__}: {error}", 500, code="engine_error")


def _internal_error(error: Exception) -> web.Response:
    return web.json_response(_error_of(error), status=500)


def _bind(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded; it listens only once the model is there."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def _load(args: argparse.Namespace) -> Engine:
    from pipeline.models import resolve
    from serve.embedded.engine import Engine

    draft = args.speculative_draft_model_path
    try:
        folders = resolve(args.model_path), resolve(draft) if draft else None
    except InputError as error:
        raise OSError(str(error)) from error  # SGLang's word for it, which launchers look for
    return Engine(folders[0], args, folders[1])


async def _serve(server: Server, listener: socket.socket) -> int:
    stop = asyncio.Event()
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=5.0)
    await runner.setup()
    try:
        await server.warm_up()
        await web.SockSite(runner, listener).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        log.info("The server is fired up and ready to roll!")
        await stop.wait()
        log.info("SIGTERM received. Draining requests and shutting down...")
        if not await server.drain():
            log.warning("Requests were still running after %.0f s; they are cut off", DRAIN_S)
    finally:
        await runner.cleanup()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until SIGTERM; returns the exit code."""
    args = parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S", level=logging.INFO)
    try:
        listener = _bind(args.host, args.port)
    except OSError as error:
        log.error("[Errno %s] error while attempting to bind on address (%s, %s)", error.errno, args.host, args.port)
        return 3
    command = shlex.join([sys.executable, "-m", "serve.embedded.server", *(sys.argv[1:] if argv is None else argv)])
    log.info("Loading %s: %s", args.model_path, command)
    try:
        engine = _load(args)
    except (OSError, ValueError, FastverifyError) as error:
        log.error("%s: %s", type(error).__name__, error)
        return 1
    return asyncio.run(_serve(Server(engine, args, command), listener))


if __name__ == "__main__":
    sys.exit(main())

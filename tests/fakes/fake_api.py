"""SGLang's HTTP interface over the fake engine: native and OpenAI endpoints."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine, Job
from fake_http import Connection, Request
from fake_text import WORDS, Token
from fake_trace import FakeTrace

Route = Callable[[Request, Connection], Any]


class Api:
    """Answers requests; `server_info` and the deaths belong to the server that owns it."""

    def __init__(self, engine: FakeEngine, server_info: dict[str, Any], on_request: Callable[[], None]) -> None:
        self.engine, self.server_info, self.on_request = engine, server_info, on_request
        self.model = str(server_info["served_model_name"])
        self.generates = 0
        self.flush_refusals = engine.knobs.flush_fails
        self.ready = False
        self.routes: dict[str, Route] = {
            "/health": self._health,
            "/health_generate": self._health,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/v1/models": self._models,
            "/metrics": self._metrics,
            "/flush_cache": self._flush,
            "/abort_request": self._abort,
            "/start_profile": self._start_profile,
            "/generate": self._generate,
            "/v1/completions": self._completions,
            "/v1/chat/completions": self._chat,
        }

    async def handle(self, request: Request, out: Connection) -> int:
        """Route one request; returns the status that was sent."""
        route = self.routes.get(request.path)
        if route is None:
            out.answer(404, {"detail": "Not Found"})
            return 404
        try:
            result = route(request, out)
            return await result if asyncio.iscoroutine(result) else result
        except (ValueError, KeyError, TypeError) as error:
            # As SGLang's validation says it: several lines, the last ones about the server's own files.
            out.answer(400, _error(f'1 validation error:\n  {error!r}\n\n  File "/server.py", line 1, in chat'))
            return 400

    def _health(self, request: Request, out: Connection) -> int:
        out.answer(200 if self.ready else 503, "")
        return 200 if self.ready else 503

    def _server_info(self, request: Request, out: Connection) -> int:
        counters, state = self.engine.counters, {"effective_max_running_requests_per_dp": self.engine.limit}
        if counters.spec_steps:
            state["avg_spec_accept_length"] = counters.spec_tokens / counters.spec_steps
        out.answer(200, self.server_info | {"internal_states": [state]})
        return 200

    def _model_info(self, request: Request, out: Connection) -> int:
        out.answer(200, {"model_path": self.server_info["model_path"], "is_generation": True})
        return 200

    def _models(self, request: Request, out: Connection) -> int:
        card = {"id": self.model, "object": "model", "created": 1, "owned_by": "sglang", "max_model_len": 8192}
        out.answer(200, {"object": "list", "data": [card]})
        return 200

    def _flush(self, request: Request, out: Connection) -> int:
        if self.flush_refusals > 0 or not self.engine.flush():
            self.flush_refusals -= 1
            out.answer(400, "Flush cache failed.\n")
            return 400
        out.answer(200, "Cache flushed.\nPlease check backend logs for more details.\n")
        return 200

    def _start_profile(self, request: Request, out: Connection) -> int:
        """A trace of every rank, at once; without CPU activity it has no spans, and the GPU idles for less."""
        body = request.json()
        spans = "CPU" in body["activities"]
        for rank in range(int(self.server_info.get("tp_size", 1))):
            trace = FakeTrace()
            step = trace.speculative_step if self.engine.algorithm else trace.plain_step
            for _ in range(body["num_steps"]):
                step(gap=100.0 if spans else 30.0)
            trace.write(Path(body["output_dir"]) / f"1764-TP-{rank}.trace.json.gz", spans=spans)
        out.answer(200, "Start profiling.\n")
        return 200

    def _abort(self, request: Request, out: Connection) -> int:
        body = request.json()
        for rid, job in self.engine.running.items():
            if body.get("abort_all") or rid.startswith(str(body.get("rid", "\0"))):
                job.aborted = True
        out.answer(200, "")
        return 200

    def _metrics(self, request: Request, out: Connection) -> int:
        counters, engine = self.engine.counters, self.engine
        rows: dict[str, float] = {
            "prompt_tokens_total": counters.prompt_tokens,
            "generation_tokens_total": counters.generation_tokens,
            "cached_tokens_total": counters.cached_tokens,
            "num_requests_total": counters.requests,
            "num_running_reqs": len(engine.running),
            "num_queue_reqs": engine.queued,
        }
        if engine.algorithm:
            rows["spec_verify_calls_total"] = counters.verify_calls
        label = f'{{engine_type="unified",model_name="{self.model}"}}'
        out.answer(200, "".join(f"sglang:{name}{label} {float(value)}\n" for name, value in rows.items()))
        return 200

    # ---- generation

    def _job(self, request: Request, prompt: str, body: dict[str, Any]) -> Job:
        stop = body.get("stop") or ()
        limit = body.get("max_new_tokens") or body.get("max_completion_tokens") or body.get("max_tokens") or 128
        return Job(
            rid=str(body.get("rid") or request.headers.get("x-request-id") or uuid.uuid4().hex),
            prompt=prompt,
            max_tokens=int(limit),
            ignore_eos=bool(body.get("ignore_eos", False)),
            received=request.received,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        )

    async def _serve(self, job: Job, out: Connection, writer: Writer | None) -> int | None:
        """Run `job`; None when it was answered in full here (refused, or the client left)."""
        knobs = self.engine.knobs
        self.generates += 1
        self.on_request()
        await self._stay_mute()
        context = int(self.server_info.get("context_length") or 0)
        if context and job.prompt_tokens + job.max_tokens > context:
            message = (
                f"The input ({job.prompt_tokens} tokens) and max_tokens are longer than the context length ({context})"
            )
            out.answer(400, _error(message))
            return 400
        if knobs.error_rate and random.random() < knobs.error_rate:
            out.answer(500, _error("injected", 500))
            return 500
        self.engine.admit(job)
        if writer:
            out.open_stream()
        await self.engine.run(job, lambda j, a, b: (not out.gone) and (writer is None or writer(j, a, b)))
        return None

    async def _stay_mute(self) -> None:
        limit = self.engine.knobs.mute_after_requests
        if limit is not None and self.generates > limit:
            await asyncio.sleep(3600)

    async def _generate(self, request: Request, out: Connection) -> int:
        body = request.json()
        ids = body.get("input_ids")
        prompt = body["text"] if ids is None else " ".join(map(str, ids))
        job = self._job(request, prompt, body.get("sampling_params", {}) | {"rid": body.get("rid")})
        top = int(body.get("top_logprobs_num") or 0) if body.get("return_logprob") else None
        writer = _writer(out, lambda j, a, b: self._native(j, b, top)) if body.get("stream") else None
        if status := await self._serve(job, out, writer):
            return status
        if writer:
            out.event("[DONE]")
            out.close_stream()
        else:
            out.answer(200, self._native(job, job.sent, top))
        return 200

    def _native(self, job: Job, upto: int, top: int | None) -> dict[str, Any]:
        done = upto >= len(job.tokens) or job.aborted
        meta: dict[str, Any] = {
            "id": job.rid,
            "finish_reason": {"type": job.finish_reason} if done else None,
            "prompt_tokens": job.prompt_tokens,
            "completion_tokens": self._usage(upto),
            "cached_tokens": job.cached_tokens,
            "e2e_latency": time.monotonic() - job.received,
        }
        meta |= self.engine.spec_fields(job)
        if top is not None:
            meta["output_token_logprobs"] = [[t.logprob, t.id, t.text] for t in job.tokens[:upto]]
            meta["output_top_logprobs"] = [_top(t, top) for t in job.tokens[:upto]]
        text = "".join(t.text for t in job.tokens[:upto])
        return {"text": text, "output_ids": [t.id for t in job.tokens[:upto]], "meta_info": meta}

    def _usage(self, tokens: int) -> int:
        return round(tokens * self.engine.knobs.usage_tokens_factor)

    def _usage_block(self, job: Job, choices: int = 1) -> dict[str, Any]:
        completion = self._usage(job.sent) * choices
        return {
            "prompt_tokens": job.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": job.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": job.cached_tokens},
        }

    async def _completions(self, request: Request, out: Connection) -> int:
        body = request.json()
        prompt = body["prompt"]
        return await self._openai(request, out, body, prompt if isinstance(prompt, str) else str(prompt), chat=False)

    async def _chat(self, request: Request, out: Connection) -> int:
        body = request.json()
        prompt = "\n".join(f"{m['role']}: {_content(m.get('content'))}" for m in body["messages"])
        return await self._openai(request, out, body, prompt, chat=True)

    async def _openai(self, request: Request, out: Connection, body: dict[str, Any], prompt: str, *, chat: bool) -> int:
        job = self._job(request, prompt, body)
        shape = OpenAi(job, body, self.model, chat)
        writer = _writer(out, shape.delta) if body.get("stream") else None
        if status := await self._serve(job, out, writer):
            return status
        if writer is None:
            out.answer(200, shape.whole(self._usage_block(job, shape.n)))
            return 200
        out.event(shape.last())
        if body.get("return_spec_tokens_details") and (spec := self.engine.spec_fields(job)):
            out.event(shape.envelope([], sglext={"spec_tokens_details": spec}))
        if (body.get("stream_options") or {}).get("include_usage"):
            out.event(shape.envelope([], usage=self._usage_block(job, shape.n)))
        out.event("[DONE]")
        out.close_stream()
        return 200


Writer = Callable[[Job, int, int], bool]


def _writer(out: Connection, payload: Callable[[Job, int, int], dict[str, Any]]) -> Writer:
    """A deliver function that writes one event a chunk and stamps it."""

    def write(job: Job, first: int, last: int) -> bool:
        job.writes.append((out.event(payload(job, first, last)), last - first))
        return True

    return write


class OpenAi:
    """The shapes of a completion and a chat completion."""

    def __init__(self, job: Job, body: dict[str, Any], model: str, chat: bool) -> None:
        self.job, self.model, self.chat = job, model, chat
        self.n = int(body.get("n") or 1)
        wanted = body.get("logprobs")
        self.top = int(body.get("top_logprobs") or 0) if chat else int(wanted or 0)
        self.logprobs = wanted is not None and wanted is not False
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{job.rid}"
        self.opened = False

    def envelope(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": 1, "model": self.model, "choices": choices, **more}

    def delta(self, job: Job, first: int, last: int) -> dict[str, Any]:
        tokens = job.tokens[first:last]
        text = "".join(t.text for t in tokens)
        choice: dict[str, Any] = {"index": 0, "finish_reason": None, "logprobs": self._logprobs(tokens)}
        if self.chat:
            choice["delta"] = {"content": text} if self.opened else {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        self.opened = True
        return self.envelope([choice])

    def last(self) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.job.finish_reason, "logprobs": None}
        choice |= {"delta": {}} if self.chat else {"text": ""}
        return self.envelope([choice])

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        text = "".join(t.text for t in self.job.tokens[: self.job.sent])
        said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        logprobs = self._logprobs(self.job.tokens[: self.job.sent])
        rest = {"finish_reason": self.job.finish_reason, "logprobs": logprobs}
        reply = self.envelope([{"index": i, **said, **rest} for i in range(self.n)], usage=usage)
        return reply | ({"object": "chat.completion"} if self.chat else {})

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        if not self.chat:
            return {
                "tokens": [t.text for t in tokens],
                "token_logprobs": [t.logprob for t in tokens],
                "top_logprobs": [{text: lp for lp, _, text in _top(t, self.top)} for t in tokens],
                "text_offset": [],
            }
        return {"content": [_entry(t.text, t.logprob) | {"top_logprobs": self._alternatives(t)} for t in tokens]}

    def _alternatives(self, token: Token) -> list[dict[str, Any]]:
        return [_entry(str(text), float(lp)) for lp, _, text in _top(token, self.top)]


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _top(token: Token, n: int) -> list[tuple[float, int, str]]:
    second = (token.logprob - token.margin, token.runner_up, f" {WORDS[token.runner_up]}")
    return [(token.logprob, token.id, token.text), second][:n]


def _content(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content)
    return str(content or "")


def _error(message: str, code: int = 400) -> dict[str, Any]:
    kind = "BadRequestError" if code == 400 else "InternalServerError"
    return {"object": "error", "message": message, "type": kind, "param": None, "code": code}

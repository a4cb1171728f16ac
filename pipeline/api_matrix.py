"""What a server answers to each part of OpenAI's API, as facts that two servers can be compared by.

What the baseline of an engine answers, a winner must answer alike: speculation that loses tool calls or
breaks a grammar is not lossless. What the engine lacks must be a clear 4xx in both.
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from pipeline.config import Frozen

TIMEOUT_S = 300.0
_TEXT_KEPT = 400

Facts = dict[str, bool | int | str | None]
Payload = dict[str, Any]


class Observed(Frozen):
    """One probe's outcome. `lacks` is a clear refusal; `problem` is anything that must not happen."""

    probe: str
    status: int
    facts: Facts = Field(default_factory=dict)
    text: str | None = None
    lacks: str | None = None
    problem: str | None = None


class Difference(Frozen):
    """One probe that the winner does not answer like the baseline."""

    probe: str
    baseline: str
    winner: str


class MatrixResult(Frozen):
    """Both servers over all probes."""

    passed: bool
    probes: tuple[str, ...]
    lacking: tuple[str, ...] = ()  # clearly refused by both
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True)
class Reply:
    """One HTTP answer."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body as JSON; ValueError when it is none."""
        return json.loads(self.body)


Read = Callable[[Reply, Payload], tuple[Facts, str | None]]


@dataclass(frozen=True)
class Probe:
    """One request and how its answer is read. `read` may raise ValueError, KeyError, IndexError or TypeError."""

    name: str
    path: str
    payload: Payload
    read: Read


def compare(baseline: tuple[Observed, ...], winner: tuple[Observed, ...], *, exact: bool) -> MatrixResult:
    """Hold the winner's answers against the baseline's.

    Args:
        exact: texts must be equal too (an fp32 engine); otherwise rounding may change words.
    """
    differences, lacking = [], []
    for ours, theirs in zip(baseline, winner, strict=True):
        if ours.lacks and theirs.lacks:
            lacking.append(f"{ours.probe}: {theirs.lacks}")
        elif theirs.problem or _key(ours, exact=exact) != _key(theirs, exact=exact):
            differences.append(Difference(probe=ours.probe, baseline=_words(ours), winner=_words(theirs)))
    names = tuple(o.probe for o in baseline)
    return MatrixResult(
        passed=not differences, probes=names, lacking=tuple(lacking), differences=tuple(differences)
    )  # fmt: skip


def _key(seen: Observed, *, exact: bool) -> tuple[Any, ...]:
    return seen.status, seen.facts, seen.text if exact else None


def _words(seen: Observed) -> str:
    return seen.problem or seen.lacks or f"HTTP {seen.status} {json.dumps(seen.facts)} {seen.text!r}"


# -- asking ------------------------------------------------------------------------------------


def run_matrix(base_url: str, *, api_key: str | None = None, long_words: int = 600) -> tuple[Observed, ...]:
    """Ask every probe of the server at `base_url`, one after the other."""
    model = _ask(base_url, "/v1/models", None, api_key).json()["data"][0]["id"]
    return tuple(_observe(base_url, probe, api_key) for probe in probes(model, long_words))


def _observe(base_url: str, probe: Probe, api_key: str | None) -> Observed:
    try:
        reply = _ask(base_url, probe.path, probe.payload, api_key)
    except OSError as error:
        return Observed(probe=probe.name, status=0, problem=f"no answer: {error}")
    if reply.status >= 400:
        return _refused(probe, reply)
    try:
        facts, text = probe.read(reply, probe.payload)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return Observed(probe=probe.name, status=reply.status, problem=f"unreadable: {type(error).__name__} {error}")
    return Observed(probe=probe.name, status=reply.status, facts=facts, text=text and text[:_TEXT_KEPT])


def _refused(probe: Probe, reply: Reply) -> Observed:
    """Clear: a 4xx with a message, in OpenAI's shape or SGLang's flat one."""
    try:
        body = reply.json()
        message = (body.get("error") or body).get("message")
    except (ValueError, AttributeError):
        message = None
    if reply.status < 500 and message:
        return Observed(probe=probe.name, status=reply.status, lacks=_line(str(message)))
    said = message or reply.body[:80].decode(errors="replace")
    return Observed(probe=probe.name, status=reply.status, problem=f"HTTP {reply.status}: {said}")


def _line(message: str) -> str:
    """A message as one line; SGLang's validation errors go on with the server's own file and line."""
    return " ".join(message.partition("\n\n")[0].split())[:_TEXT_KEPT]


def _ask(base_url: str, path: str, payload: Payload | None, api_key: str | None) -> Reply:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    data = None if payload is None else json.dumps(payload, ensure_ascii=False).encode()
    request = urllib.request.Request(base_url.rstrip("/") + path, data=data, headers=headers)  # noqa: S310 (http)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            return Reply(answer.status, answer.read())
    except urllib.error.HTTPError as error:
        return Reply(error.code, error.read())


# -- the probes --------------------------------------------------------------------------------

_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def probes(model: str, long_words: int) -> tuple[Probe, ...]:
    """Every probe, greedy and short."""
    chat, text = "/v1/chat/completions", "/v1/completions"

    def asked(content: str, **more: Any) -> Payload:
        messages = [{"role": "user", "content": content}]
        return {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0, **more}

    plain, count = "Name three colours.", {"model": model, "prompt": "One, two,", "max_tokens": 12, "temperature": 0}
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA, "strict": True}}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    tools = {"tools": [_WEATHER], "tool_choice": "auto"}
    story = " ".join(f"item {n}" for n in range(long_words // 2))
    return (
        Probe("chat", chat, asked(plain), _read_chat),
        Probe("completions", text, count, _read_text),
        Probe("stream", chat, asked(plain, **usage), _read_stream),
        Probe("stop strings", chat, asked(plain, stop=["e"]), _read_stop),
        Probe("n > 1", chat, asked(plain, n=2), _read_chat),
        Probe("logprobs", chat, asked(plain, logprobs=True, top_logprobs=2), _read_logprobs),
        Probe("tools", chat, asked("What is the weather in Paris?", **tools), _read_tools),
        Probe("tools, stream", chat, asked("What is the weather in Paris?", **tools, **usage), _read_stream),
        Probe("JSON schema", chat, asked("A person, as JSON.", response_format=schema), _read_schema),
        Probe("long context", chat, asked(f"{story}\nWhich item came last?"), _read_chat),
        Probe("context overflow", chat, asked("word " * 300_000), _read_chat),
        Probe("unicode", chat, asked("Repeat: naïve 漢字 🙂 \u202eשלום"), _read_chat),
        Probe("bad request", chat, {"model": model, "messages": "no list"}, _read_chat),
    )  # fmt: skip


def _read_chat(reply: Reply, _: Payload) -> tuple[Facts, str | None]:
    body = reply.json()
    first = body["choices"][0]
    facts: Facts = {
        "choices": len(body["choices"]),
        "role": first["message"]["role"],
        "finish": first["finish_reason"],
        "usage adds up": _adds_up(body["usage"]),
    }
    return facts, first["message"].get("content")


def _read_text(reply: Reply, _: Payload) -> tuple[Facts, str | None]:
    body = reply.json()
    first = body["choices"][0]
    return {"finish": first["finish_reason"], "usage adds up": _adds_up(body["usage"])}, first["text"]


def _adds_up(usage: Mapping[str, int]) -> bool:
    return usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"] and usage["prompt_tokens"] > 0


def _read_stop(reply: Reply, asked: Payload) -> tuple[Facts, str | None]:
    facts, text = _read_chat(reply, asked)
    return facts | {"stop string left out": not any(stop in (text or "") for stop in asked["stop"])}, text


def _read_logprobs(reply: Reply, asked: Payload) -> tuple[Facts, str | None]:
    facts, text = _read_chat(reply, asked)
    entries = reply.json()["choices"][0]["logprobs"]["content"]
    sound = all(math.isfinite(e["logprob"]) and e["logprob"] <= 0 and len(e["top_logprobs"]) == 2 for e in entries)
    return facts | {"a log-probability a token": bool(entries), "sound": sound}, text


def _read_tools(reply: Reply, asked: Payload) -> tuple[Facts, str | None]:
    facts, text = _read_chat(reply, asked)
    calls = reply.json()["choices"][0]["message"].get("tool_calls") or []
    names = ",".join(call["function"]["name"] for call in calls)
    for call in calls:
        json.loads(call["function"]["arguments"])
    return facts | {"calls": len(calls), "functions": names}, text


def _read_schema(reply: Reply, asked: Payload) -> tuple[Facts, str | None]:
    facts, text = _read_chat(reply, asked)
    try:
        value = json.loads(text or "")
        fits = set(value) == {"name", "age"} and isinstance(value["age"], int)
    except (ValueError, TypeError, KeyError):
        fits = False
    return facts | {"fits the schema": fits}, text


def _read_stream(reply: Reply, _: Payload) -> tuple[Facts, str | None]:
    events = list(_events(reply.body))
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    deltas = [choice for chunk in chunks for choice in chunk["choices"]]
    calls = [call for d in deltas for call in d["delta"].get("tool_calls") or []]
    facts: Facts = {
        "ends with [DONE]": events[-1] == "[DONE]",
        "finish": next((d["finish_reason"] for d in reversed(deltas) if d["finish_reason"]), None),
        "usage at the end": any(chunk.get("usage") for chunk in chunks),
        "functions": ",".join(c["function"]["name"] for c in calls if c["function"].get("name")),
    }
    return facts, "".join(d["delta"].get("content") or "" for d in deltas)


def _events(body: bytes) -> Iterator[str]:
    for event in body.decode().split("\n\n"):
        lines = [line.removeprefix("data:").strip() for line in event.splitlines() if line.startswith("data:")]
        if lines:
            yield "\n".join(lines)

"""The API matrix: a sound server passes, each way of answering differently is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.api_matrix import Observed, Reply, compare, probes, run_matrix
from tests.fakes.running import fake_server


def read(name: str, body: Any) -> dict[str, Any]:
    probe = next(p for p in probes("m", 10) if p.name == name)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return probe.read(Reply(200, raw), probe.payload)[0]


def chat(content: str | None = "text", **message: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": "stop"}
    return {"choices": [choice], "usage": usage}


def test_two_launches_of_one_server_are_alike_and_what_it_lacks_is_listed() -> None:
    with fake_server(step_ms=0.0, ttft_ms=0.0) as url:
        first, second = run_matrix(url, long_words=50), run_matrix(url, long_words=50)
    assert all(seen.problem is None for seen in first)
    result = compare(first, second, exact=True)
    assert result.passed
    assert [line.split(":")[0] for line in result.lacking] == ["context overflow", "bad request"]
    bad = result.lacking[1]
    assert bad.startswith("bad request: 1 validation error: ") and "\n" not in bad and "File" not in bad
    assert {"chat", "stream", "stop strings", "n > 1", "logprobs", "tools", "JSON schema"} <= set(result.probes)


def test_other_texts_differ_only_where_equality_is_exact() -> None:
    with fake_server(step_ms=0.0, ttft_ms=0.0) as url:
        ours = run_matrix(url, long_words=50)
    with fake_server(step_ms=0.0, ttft_ms=0.0, text_salt="x") as url:
        theirs = run_matrix(url, long_words=50)
    assert not compare(ours, theirs, exact=True).passed
    assert compare(ours, theirs, exact=False).passed


def test_a_server_that_fails_is_a_difference_even_when_both_fail() -> None:
    broken = Observed(probe="tools", status=500, problem="HTTP 500: boom")
    clear = Observed(probe="tools", status=400, lacks="no tools")
    works = Observed(probe="tools", status=200, facts={"calls": 1})
    assert compare((clear,), (clear,), exact=True).lacking == ("tools: no tools",)
    for ours, theirs in ((broken, broken), (works, broken), (works, clear), (clear, works)):
        assert not compare((ours,), (theirs,), exact=False).passed


def test_lost_tool_calls_a_kept_stop_string_and_loose_json_are_seen() -> None:
    call = {"function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    assert read("tools", chat(None, tool_calls=[call]))["functions"] == "get_weather"
    assert read("tools", chat(None))["calls"] == 0
    assert read("stop strings", chat("hello"))["stop string left out"] is False
    assert read("JSON schema", chat('{"name": "A", "age": 3}'))["fits the schema"] is True
    assert read("JSON schema", chat('{"name": "A"'))["fits the schema"] is False
    with pytest.raises(ValueError, match="Expecting"):
        read("tools", chat(None, tool_calls=[{"function": {"name": "f", "arguments": "{"}}]))


def test_a_stream_without_its_end_or_usage_is_seen() -> None:
    chunk = b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": null}]}\n\n'
    usage = b'data: {"choices": [], "usage": {"total_tokens": 1}}\n\n'
    whole = read("stream", chunk + usage + b"data: [DONE]\n\n")
    assert whole["ends with [DONE]"] and whole["usage at the end"]
    cut = read("stream", chunk)
    assert not cut["ends with [DONE]"] and not cut["usage at the end"]


def test_no_server_is_a_problem_of_every_probe_and_not_an_exception() -> None:
    from pipeline.api_matrix import _observe

    seen = _observe("http://127.0.0.1:9", probes("m", 10)[0], None)
    assert seen.problem is not None
    assert "no answer" in seen.problem

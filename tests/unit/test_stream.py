"""The bytes of a stream: what counts as content, whatever way it is cut, spaced or escaped."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.records import SpecCounters
from pipeline.stream import Stream, scrape_metrics, trace_of
from pipeline.workload import PlannedRequest

PLANNED = PlannedRequest(0, "p", "w", ({"role": "user", "content": "x"},), 8)
COMPACT = (",", ":")


def event(separators: tuple[str, str] = COMPACT, **fields: object) -> bytes:
    return b"data: " + json.dumps(fields, separators=separators).encode() + b"\n\n"


def delta(text: str | None, finish: str | None = None, separators: tuple[str, str] = COMPACT, **rest: object) -> bytes:
    choice = {"index": 0, "delta": {"role": None, "content": text, "reasoning_content": None}, "logprobs": None}
    return event(separators, id="x", choices=[choice | {"finish_reason": finish}], usage=None, **rest)


def read(*parts: bytes):
    stream = Stream(PLANNED, started=0.0)
    for at, part in enumerate(parts, start=1):
        stream.take(part, float(at))
    return trace_of(stream)


USAGE = event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": 7})
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("separators", [COMPACT, (", ", ": ")])
def test_only_chunks_with_text_are_stamped(separators: tuple[str, str]) -> None:
    """The role chunk comes first and says nothing: taking it for the first token makes TTFT too short."""
    trace = read(
        delta("", separators=separators),
        delta("Hello", separators=separators),
        delta(" you", separators=separators),
        delta(None, "length", separators=separators),
        USAGE,
        DONE,
    )
    assert trace.chunk_times == (2.0, 3.0)
    assert (trace.text, trace.output_tokens, trace.prompt_tokens) == ("Hello you", 7, 5)
    assert (trace.finish_reason, trace.status) == ("length", "ok")


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=5), st.booleans())
def test_any_text_comes_back_as_it_was(texts: list[str], ascii_only: bool) -> None:
    """Quotes, backslashes, JSON inside the text and escaped characters change neither text nor count."""
    parts = [
        b"data: " + json.dumps({"choices": [{"delta": {"content": t}}]}, ensure_ascii=ascii_only).encode() + b"\n\n"
        for t in texts
    ]
    trace = read(*parts, USAGE, DONE)
    assert (trace.text, len(trace.chunk_times)) == ("".join(texts), len(texts))


def test_json_inside_the_text_is_no_content_and_no_usage() -> None:
    trace = read(delta('{"content":"fake","usage":{"completion_tokens":99}}'), USAGE, DONE)
    assert (len(trace.chunk_times), trace.output_tokens) == (1, 7)


def test_logprobs_are_no_content() -> None:
    trace = read(event(choices=[{"delta": {}, "logprobs": {"content": [{"token": "a"}]}}]), delta("b"), USAGE)
    assert trace.chunk_times == (2.0,)


def test_several_events_in_one_read_share_its_stamp() -> None:
    trace = read(delta("a") + delta("b"), delta("c") + delta(None, "stop") + USAGE + DONE)
    assert trace.chunk_times == (1.0, 1.0, 2.0)
    assert (trace.output_tokens, trace.finish_reason) == (7, "stop")


def test_reasoning_counts_as_content() -> None:
    trace = read(event(choices=[{"delta": {"reasoning_content": "hm", "content": None}}]), USAGE)
    assert (trace.text, len(trace.chunk_times)) == ("hm", 1)


def test_a_finish_reason_and_usage_in_the_last_content_chunk_are_seen() -> None:
    trace = read(
        delta("a"),
        event(choices=[{"delta": {"content": "b"}, "finish_reason": "stop"}], usage={"completion_tokens": 2}),
    )
    assert (trace.finish_reason, trace.output_tokens) == ("stop", 2)


def test_counters_and_cached_tokens_from_sglang() -> None:
    details = {"spec_verify_ct": 3, "spec_num_correct_drafts": 4, "spec_num_proposed_drafts": 9}
    ext = {"spec_tokens_details": details, "cached_tokens_details": {"device": 2, "host": 1}}
    trace = read(delta("a"), event(choices=[], sglext=ext), USAGE, DONE)
    assert trace.spec == SpecCounters(7, 3, 4, 9)
    assert trace.cached_tokens == 3


def test_missing_counters_are_missing() -> None:
    trace = read(delta("a"), event(choices=[], sglext={"spec_tokens_details": {"spec_verify_ct": 0}}), USAGE)
    assert (trace.spec, trace.cached_tokens) == (None, None)
    assert read(delta("a")).output_tokens is None


@pytest.mark.parametrize("error", [{"message": "out of memory", "code": 500}, "out of memory"])
def test_an_error_inside_the_stream_fails_the_request(error: object) -> None:
    trace = read(delta("a"), event(error=error), DONE)
    assert (trace.status, trace.error) == ("failed", "out of memory")


def test_a_stream_without_content_is_a_failure_not_a_fast_answer() -> None:
    assert read(USAGE, DONE).status == "failed"


def test_metrics_are_summed_over_labels_and_nan_is_left_out() -> None:
    text = """# HELP sglang:generation_tokens_total x
sglang:generation_tokens_total{is_streaming="false",model_name="a b"} 5256.0
sglang:generation_tokens_total{is_streaming="true",model_name="a } b"} 4.0 1700000000
sglang:cached_tokens_total{cache_source="device"} NaN
plain_total 3
broken
"""
    assert scrape_metrics(text) == {"sglang:generation_tokens_total": 5260.0, "plain_total": 3.0}

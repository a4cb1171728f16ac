"""Drift: windows between readings, alarms that last, and better never alarms."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from pipeline.drift import (
    Alarm,
    Figures,
    Tolerance,
    Watch,
    alarms,
    figures_of,
    live_figures,
    prometheus,
    read_counters,
)
from pipeline.workload import load_prompts
from serve.sample import Sample

PROMOTED = Figures(tok_per_s_per_stream=100, ttft_ms=50, accept_length=2.0, error_rate=0.0)


def page(*, requests: int, tokens: int, itl_s: float, ttft_s: float, verify: int = 0, bad: int = 0) -> str:
    """A metrics page with these totals; a second rank and non-streamed requests are there to be summed or left out."""
    return f"""# HELP sglang:generation_tokens_total x
sglang:generation_tokens_total{{model="m",rank="0"}} {tokens - 10}
sglang:generation_tokens_total{{model="m",rank="1"}} 10.0
sglang:spec_verify_calls_total {verify}
sglang:gen_throughput NaN
sglang:inter_token_latency_seconds_sum{{m="m"}} {tokens * itl_s}
sglang:inter_token_latency_seconds_count{{m="m"}} {tokens}
sglang:time_to_first_token_seconds_sum{{is_streaming="true"}} {requests * ttft_s}
sglang:time_to_first_token_seconds_count{{is_streaming="true"}} {requests}
sglang:time_to_first_token_seconds_sum{{is_streaming="false"}} 1e6
sglang:time_to_first_token_seconds_count{{is_streaming="false"}} 5
fastverify_endpoint_answers_total{{answer="200"}} {requests - bad}
fastverify_endpoint_answers_total{{answer="503"}} {bad}
"""


def test_a_window_is_the_difference_of_two_readings() -> None:
    before = read_counters(page(requests=10, tokens=1000, itl_s=1.0, ttft_s=9.0, verify=1000))
    after = read_counters(page(requests=30, tokens=3000, itl_s=1.0, ttft_s=9.0, verify=1800, bad=2))
    live = live_figures(before, after)
    assert live is not None
    assert live.tok_per_s_per_stream == pytest.approx(1.0)
    assert live.ttft_ms == pytest.approx(9000)
    assert live.accept_length == pytest.approx(2000 / 800)
    assert live.error_rate == pytest.approx(2 / 20)


def test_a_quiet_window_and_a_restarted_engine_say_nothing() -> None:
    busy = read_counters(page(requests=100, tokens=1000, itl_s=0.01, ttft_s=0.05))
    assert live_figures(busy, busy) is None
    assert live_figures(busy, read_counters(page(requests=120, tokens=20, itl_s=0.01, ttft_s=0.05))) is None


def test_without_speculation_there_is_no_accept_length_and_no_alarm_for_it() -> None:
    live = live_figures({}, read_counters(page(requests=10, tokens=1000, itl_s=0.01, ttft_s=0.05)))
    assert live is not None
    assert live.accept_length is None
    assert alarms(live, PROMOTED, Tolerance()) == ()


@pytest.mark.parametrize(
    ("change", "figure"),
    [
        ({"tok_per_s_per_stream": 69}, "tok_per_s_per_stream"),
        ({"ttft_ms": 101}, "ttft_ms"),
        ({"accept_length": 1.5}, "accept_length"),
        ({"error_rate": 0.03}, "error_rate"),
        ({"tok_per_s_per_stream": 200, "ttft_ms": 1, "accept_length": 5}, None),
    ],
)
def test_worse_is_an_alarm_and_better_is_none(change: dict[str, float], figure: str | None) -> None:
    found = alarms(PROMOTED.model_copy(update=change), PROMOTED, Tolerance())
    assert [alarm.figure for alarm in found] == ([figure] if figure else [])


def test_only_what_lasts_is_an_alarm_and_a_missing_page_is_no_reading() -> None:
    watch = Watch(PROMOTED, patience=2)
    slow = [read_counters(page(requests=n, tokens=100 * n, itl_s=0.1, ttft_s=0.05)) for n in (10, 20, 30, 40)]
    assert watch.see(slow[0]) == ()
    assert watch.see(slow[1]) == ()
    assert watch.see({}) == ()
    assert [alarm.figure for alarm in watch.see(slow[2])] == ["tok_per_s_per_stream"]
    fast = read_counters(page(requests=140, tokens=200_000, itl_s=0.002, ttft_s=0.05))
    assert watch.see(fast) == ()


def test_gauges_name_what_is_off() -> None:
    text = prometheus(PROMOTED, [Alarm(figure="ttft_ms", promoted=1, live=2)])
    assert 'fastverify_drift_alarm{figure="ttft_ms"} 1' in text
    assert 'fastverify_drift_alarm{figure="error_rate"} 0' in text
    assert 'fastverify_drift_live{figure="accept_length"} 2' in text


def test_promoted_figures_come_from_the_promotions_report() -> None:
    level = {
        "level": {"workload": "open", "concurrency": 2}, "window_s": 1, "requests_ok": 4, "output_tokens": 40,
        "output_tok_per_s": {"value": 40}, "tpot_ms": {"n": 4, "mean": 10}, "ttft_ms": {"n": 4, "mean": 30},
        "accept_length": 1.5,
    }  # fmt: skip
    launches = [
        {"config_id": "a", "measurement": {"levels": [level]}},
        {"config_id": "b", "measurement": {"levels": [level | {"accept_length": 9}]}},
        {"config_id": "a", "measurement": None},
    ]
    found = figures_of({"launches": launches}, "a")
    assert found == Figures(tok_per_s_per_stream=100, ttft_ms=30, accept_length=1.5, error_rate=0.0)


def test_a_sample_of_chats_becomes_a_workload_that_only_its_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "sample.jsonl"
    sample = Sample(path, every=2, limit=3)
    for number in range(12):
        body = json.dumps({"messages": [{"role": "user", "content": f"é {number}"}]}).encode()
        sample.offer("/v1/chat/completions", body)
        sample.offer("/v1/completions", b'{"prompt": "never kept"}')
    sample.offer("/v1/chat/completions", b"no json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [prompt.messages[0]["content"] for prompt in load_prompts(str(path))] == ["é 1", "é 3", "é 5"]
    assert len(path.read_text().splitlines()) == 3
    assert Sample(path, every=1, limit=3).offer("/v1/chat/completions", body) is None
    assert len(path.read_text().splitlines()) == 3  # the limit holds over restarts


def test_pictures_and_broken_bodies_are_left_out(tmp_path: Path) -> None:
    sample = Sample(tmp_path / "s", every=1, limit=9)
    for body in (b"", b"{", b"[]", b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}'):
        sample.offer("/v1/chat/completions", body)
    assert not (tmp_path / "s").exists()

"""Figures from traces: definitions, missing values, spreads, objectives and limits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import metrics
from pipeline.errors import MeasurementError
from pipeline.metrics import Counters, Window
from pipeline.records import Estimate, LevelResult, LoadLevel, RequestTrace, SpecCounters
from pipeline.spec import Constraints, Goal

LEVEL = LoadLevel(workload="extract", concurrency=2)


def trace(
    index: int = 0, started: float = 0.0, chunks: int = 11, step: float = 0.1, tokens: int | None = None, **rest: object
) -> RequestTrace:
    times = tuple(started + 0.5 + i * step for i in range(chunks))
    return RequestTrace(
        index,
        f"p{index}",
        "extract",
        started,
        times,
        times[-1],
        output_tokens=tokens or chunks,
        prompt_tokens=10,
        **rest,
    )


def level(key: str = "extract", concurrency: int = 2, tok_s: float = 100.0, **rest: object) -> LevelResult:
    return LevelResult(
        level=LoadLevel(workload=key, concurrency=concurrency),
        window_s=1.0,
        requests_ok=4,
        output_tokens=100,
        output_tok_per_s=Estimate(value=tok_s),
        **rest,
    )


def test_times_of_one_request() -> None:
    one = trace(started=3.0)
    assert metrics.ttft_ms(one) == pytest.approx(500)
    assert metrics.tpot_ms(one) == pytest.approx(100)
    assert metrics.e2e_latency_ms(one) == pytest.approx(1500)
    assert metrics.chunk_gaps_ms(one) == pytest.approx([100] * 10)


def test_tpot_divides_by_tokens_never_by_chunks() -> None:
    """Four tokens a chunk: the gap between chunks is four times the time per token."""
    many = trace(chunks=11, step=0.1, tokens=41)
    assert metrics.tpot_ms(many) == pytest.approx(25)
    assert metrics.chunk_gaps_ms(many)[0] == pytest.approx(100)


@pytest.mark.parametrize("one", [trace(chunks=1), trace(chunks=1, tokens=4), RequestTrace(0, "p", "w", 0.0)])
def test_tpot_is_missing_not_zero_without_two_chunks(one: RequestTrace) -> None:
    assert metrics.tpot_ms(one) is None


def test_a_stream_without_content_has_no_ttft() -> None:
    assert metrics.ttft_ms(RequestTrace(0, "p", "w", 0.0)) is None


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=150))
def test_percentiles_are_within_the_values_and_missing_when_samples_are_few(values: list[float]) -> None:
    found = metrics.distribution(values)
    assert found is not None and found.n == len(values)
    assert (found.p50 is None) == (len(values) < 3)
    assert (found.p95 is None) == (len(values) < 20)
    assert (found.p99 is None) == (len(values) < 100)
    for value in (found.p50, found.p95, found.p99):
        assert value is None or min(values) <= value <= max(values)


def test_percentiles_are_numpys() -> None:
    found = metrics.distribution([float(i) for i in range(100)])
    assert (found.p50, found.p95, found.p99) == pytest.approx((49.5, 94.05, 98.01))
    assert metrics.distribution([None, None]) is None


def test_estimate_is_a_t_interval() -> None:
    found = metrics.estimate([10.0, 11.0, 12.0])
    assert (found.value, found.std, found.n) == (11.0, 1.0, 3)
    assert found.high - 11.0 == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert metrics.estimate([5.0]) == Estimate(value=5.0)
    assert metrics.estimate([]) is None


def test_throughput_counts_usage_tokens_from_first_send_to_last_byte() -> None:
    window = Window((trace(0), trace(1, started=0.5), trace(2, status="failed", error="HTTP 500")))
    result = metrics.level_result(LEVEL, [window])
    assert result.window_s == pytest.approx(2.0)
    assert result.output_tok_per_s.value == pytest.approx(22 / 2.0)
    assert (result.requests_ok, result.requests_failed, result.errors) == (2, 1, ("1 x HTTP 500",))


def test_repeats_give_a_spread_and_pooled_distributions() -> None:
    windows = [Window((trace(0), trace(1))), Window((trace(0, step=0.2), trace(1, step=0.2)))]
    result = metrics.level_result(LEVEL, windows)
    assert result.output_tok_per_s.n == 2
    assert result.output_tok_per_s.low < result.output_tok_per_s.value < result.output_tok_per_s.high
    assert result.tpot_ms.n == 4


def test_accept_length_is_a_ratio_of_sums() -> None:
    """A mean of ratios would let short requests speak as loud as long ones."""
    long = replace(trace(0, tokens=90), spec=SpecCounters(90, 30, 60, 90))
    short = replace(trace(1, tokens=10), spec=SpecCounters(10, 10, 0, 30))
    result = metrics.level_result(LEVEL, [Window((long, short))])
    assert result.accept_length == pytest.approx(100 / 40)
    assert result.accept_rate == pytest.approx(60 / 120)
    assert result.verify_steps == 40


def test_server_counters_stand_in_only_for_missing_request_counters() -> None:
    counted = Window((trace(0, tokens=90),), counters=Counters(generation_tokens=90, verify_steps=45, cached_tokens=7))
    result = metrics.level_result(LEVEL, [counted])
    assert (result.accept_length, result.accept_rate, result.cached_tokens) == (2.0, None, 7)
    plain = metrics.level_result(LEVEL, [Window((trace(0),), counters=Counters(90, 0, 0))])
    assert (plain.accept_length, plain.verify_steps, plain.cached_tokens) == (None, None, 0)


def test_no_answer_and_no_usage_are_errors_not_zeros() -> None:
    with pytest.raises(MeasurementError, match="no request succeeded; 1 x boom"):
        metrics.level_result(LEVEL, [Window((trace(status="failed", error="boom"),))])
    with pytest.raises(MeasurementError, match="no usage"):
        metrics.level_result(LEVEL, [Window((replace(trace(), output_tokens=None),))])


def test_throughputs_mix_by_the_harmonic_mean_of_the_traffic() -> None:
    levels = [level("extract", tok_s=100.0), level("open", tok_s=300.0)]
    assert metrics.objective(levels, Goal()).value == pytest.approx(150.0)
    weighted = metrics.objective(levels, Goal(weights={"extract": 1.0, "open.c2": 3.0}))
    assert weighted.value == pytest.approx(4 / (1 / 100 + 3 / 300))


def test_the_objective_carries_the_spread_over() -> None:
    spread = Estimate(value=100.0, n=3, std=2.0, low=95.0, high=105.0)
    same = [level("a").model_copy(update={"output_tok_per_s": spread}) for _ in range(2)]
    found = metrics.objective(same, Goal())
    assert found.value == pytest.approx(100.0)
    assert found.high - found.value == pytest.approx(5 / math.sqrt(2))
    assert found.std == pytest.approx(2 / math.sqrt(2))


def test_the_objective_can_speak_of_one_load_and_of_times() -> None:
    times = metrics.distribution([10.0, 20.0, 30.0])
    levels = [level(concurrency=1, tpot_ms=times), level(concurrency=8, tok_s=900.0)]
    assert metrics.objective(levels, Goal(concurrency=8)).value == 900.0
    assert metrics.objective(levels, Goal(metric="mean_tpot_ms", concurrency=1)).value == 20.0
    assert metrics.objective(levels, Goal(metric="mean_tpot_ms")) is None
    with pytest.raises(MeasurementError, match="no measured level"):
        metrics.objective(levels, Goal(concurrency=3))


def test_limits_are_judged_at_the_worst_level_and_unknown_is_not_held() -> None:
    few, many = metrics.distribution([100.0] * 5), metrics.distribution([100.0] * 20)
    limits = Constraints(p95_ttft_ms=80.0)
    held = metrics.violations([level(ttft_ms=many)], Constraints(p95_ttft_ms=125.0))
    assert held == {"p95_ttft_ms": pytest.approx(-0.2), "error_rate": 0.0}
    assert metrics.violations([level(ttft_ms=many)], limits)["p95_ttft_ms"] == pytest.approx(0.25)
    assert metrics.violations([level(ttft_ms=few)], limits)["p95_ttft_ms"] == 1.0
    assert metrics.violations([level(requests_failed=1)], Constraints())["error_rate"] == pytest.approx(0.2)


@pytest.mark.parametrize("metric", ["requests_per_s", "mean_ttft_ms", "p95_tpot_ms", "mean_e2e_latency_ms"])
def test_every_metric_can_be_read_from_one_repeat(metric: str) -> None:
    value = metrics.window_metric(Window(tuple(trace(i) for i in range(20))), metric)
    assert value is not None and value > 0


def test_an_accept_rate_that_the_server_did_not_count_follows_from_the_length() -> None:
    plain = level()
    counted = plain.model_copy(update={"accept_length": 2.5, "accept_rate": 0.9})
    uncounted = plain.model_copy(update={"accept_length": 2.5})
    found = metrics.with_accept_rate([plain, counted, uncounted], num_draft_tokens=4)
    assert [result.accept_rate for result in found] == [None, 0.9, 0.5]
    assert metrics.with_accept_rate([uncounted], None) == (uncounted,)


def test_repeats_of_two_workloads_pool_what_they_show_of_the_spread() -> None:
    one, other = metrics.estimate([99.3, 100.7]), metrics.estimate([49.65, 50.35])  # 1 % apart around each mean
    assert not metrics.close_enough([one], 0.05)  # half-width 8.9 %: one degree of freedom
    assert metrics.close_enough([one, other], 0.05)  # 3.0 %: two
    assert not metrics.close_enough([one, metrics.estimate([45.0, 55.0])], 0.05)
    assert not metrics.close_enough([one, metrics.estimate([50.0])], 10.0)  # one repeat says nothing
    assert not metrics.close_enough([one, None], 10.0)

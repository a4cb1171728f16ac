"""Traces and counters -> figures. Pure.

Definitions are in `docs/design.md`, section Words. A verify step delivers several tokens in one chunk,
so time per token comes from token counts, never from the number of chunks.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pipeline.errors import MeasurementError
from pipeline.records import Distribution, Estimate, LevelResult, LoadLevel, RequestTrace, SpecCounters
from pipeline.spec import Constraints, Goal, MetricName

# Fewest samples for a percentile: one of them at least must lie beyond it.
FEWEST = {50: 3, 95: 20, 99: 100}
MOST_ERRORS = 5


@dataclass(frozen=True, slots=True)
class Counters:
    """What the server's own counters gained over a window; None where it has no such counter."""

    generation_tokens: int | None = None
    verify_steps: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """One repeat of one load level: every trace, and what the client and the server say about it."""

    traces: tuple[RequestTrace, ...]
    client_cpu: float | None = None  # share of one core used by the load generator
    loop_lag_ms: float | None = None  # median lateness of the client's own timer
    counters: Counters = Counters()

    @property
    def ok(self) -> list[RequestTrace]:
        """The requests that were answered in full."""
        return [trace for trace in self.traces if trace.status == "ok"]

    @property
    def seconds(self) -> float:
        """First send to last byte."""
        if not self.traces:
            raise MeasurementError("an empty window")
        return max(_end(trace) for trace in self.traces) - min(trace.started for trace in self.traces)


def _end(trace: RequestTrace) -> float:
    if trace.finished is not None:
        return trace.finished
    return trace.chunk_times[-1] if trace.chunk_times else trace.started


def ttft_ms(trace: RequestTrace) -> float | None:
    """Before the send to the first chunk with content; None when no content came."""
    return 1e3 * (trace.chunk_times[0] - trace.started) if trace.chunk_times else None


def tpot_ms(trace: RequestTrace) -> float | None:
    """(last − first chunk) ÷ (output tokens − 1); None for fewer than two tokens or chunks.

    The first chunk may hold several tokens; they are counted as if decoded after the first one, as
    SGLang's own benchmark does, since no server says how many tokens a chunk holds.
    """
    if trace.output_tokens is None or trace.output_tokens < 2 or len(trace.chunk_times) < 2:
        return None
    return 1e3 * (trace.chunk_times[-1] - trace.chunk_times[0]) / (trace.output_tokens - 1)


def e2e_latency_ms(trace: RequestTrace) -> float | None:
    """Before the send to the last chunk with content."""
    return 1e3 * (trace.chunk_times[-1] - trace.started) if trace.chunk_times else None


def chunk_gaps_ms(trace: RequestTrace) -> list[float]:
    """Times between chunks. Not inter-token latency where a chunk holds several tokens."""
    return [1e3 * (b - a) for a, b in pairwise(trace.chunk_times)]


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """Mean and percentiles of the values there are; a percentile needs `FEWEST` samples."""
    present = sorted(value for value in values if value is not None)
    if not present:
        return None
    return Distribution(
        n=len(present),
        mean=statistics.fmean(present),
        p50=_percentile(present, 50),
        p95=_percentile(present, 95),
        p99=_percentile(present, 99),
    )


def _percentile(ordered: Sequence[float], percent: int) -> float | None:
    """Linear between closest ranks, as numpy does by default."""
    if len(ordered) < FEWEST[percent]:
        return None
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean of repeats with the 95 % t-interval; None without values."""
    if not values:
        return None
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return Estimate(value=mean)
    std = statistics.stdev(values)
    half = t_quantile(n - 1) * std / math.sqrt(n)
    return Estimate(value=mean, n=n, std=std, low=mean - half, high=mean + half)


def t_quantile(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t."""
    from scipy.special import stdtrit  # half a second, needed only once figures exist

    return float(stdtrit(degrees, 0.975))


def spec_counters(window: Window) -> SpecCounters | None:
    """Sum of the per-request counters, else of the server's own; None without speculation."""
    per_request = [trace.spec for trace in window.ok if trace.spec is not None]
    if per_request and len(per_request) == len(window.ok):
        total = sum(per_request[1:], per_request[0])
    elif window.counters.verify_steps is not None and window.counters.generation_tokens is not None:
        total = SpecCounters(window.counters.generation_tokens, window.counters.verify_steps)
    else:
        return None
    return total if total.verify_steps > 0 else None


def window_metric(window: Window, metric: MetricName) -> float | None:
    """One metric of one repeat."""
    if metric == "output_tok_per_s":
        return output_tokens(window.ok) / window.seconds
    if metric == "requests_per_s":
        return len(window.ok) / window.seconds
    statistic, _, name = metric.partition("_")
    measure = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "e2e_latency_ms": e2e_latency_ms}[name]
    found = distribution(measure(trace) for trace in window.ok)
    value: float | None = getattr(found, statistic, None)
    return value


def output_tokens(traces: Iterable[RequestTrace]) -> int:
    """The server's usage tokens."""
    return sum(trace.output_tokens or 0 for trace in traces)


def spread(windows: Sequence[Window], metric: MetricName) -> Estimate | None:
    """A metric over the repeats of a level."""
    return estimate([value for window in windows if (value := window_metric(window, metric)) is not None])


def close_enough(found: Sequence[Estimate | None], width: float) -> bool:
    """True when the 95 % interval of every mean is within ± `width` of it, as a share.

    How far repeats differ is pooled over the levels, as shares: two repeats of one level hardly tell (Student's t is
    12.7 there), those of two levels under the same load do (4.3).
    """
    known = [e for e in found if e is not None and e.std is not None and e.value > 0]
    if len(known) < len(found) or not known:
        return False
    degrees = sum(e.n - 1 for e in known)
    pooled = math.sqrt(sum((e.n - 1) * ((e.std or 0.0) / e.value) ** 2 for e in known) / degrees)
    return all(t_quantile(degrees) * pooled / math.sqrt(e.n) <= width for e in known)


def level_result(level: LoadLevel, windows: Sequence[Window]) -> LevelResult:
    """Everything measured at one level: throughputs per repeat, distributions pooled over the repeats.

    Raises:
        MeasurementError: no request succeeded, or an answered one came without `usage`.
    """
    traces = [trace for window in windows for trace in window.traces]
    ok = [trace for window in windows for trace in window.ok]
    errors = _errors(traces)
    if not ok:
        raise MeasurementError(f"{level.key}: no request succeeded; {'; '.join(errors) or 'no error text'}")
    if any(trace.output_tokens is None for trace in ok):
        raise MeasurementError(f"{level.key}: the server sent no usage, so tokens cannot be counted")
    throughput = spread(windows, "output_tok_per_s")
    assert throughput is not None  # there are windows with successful requests
    return LevelResult(
        level=level,
        window_s=sum(window.seconds for window in windows),
        requests_ok=len(ok),
        requests_failed=sum(trace.status == "failed" for trace in traces),
        requests_cut_off=sum(trace.status == "cut_off" for trace in traces),
        output_tokens=output_tokens(ok),
        output_tok_per_s=throughput,
        requests_per_s=spread(windows, "requests_per_s"),
        ttft_ms=distribution(map(ttft_ms, ok)),
        tpot_ms=distribution(map(tpot_ms, ok)),
        e2e_latency_ms=distribution(map(e2e_latency_ms, ok)),
        chunk_gap_ms=distribution(gap for trace in ok for gap in chunk_gaps_ms(trace)),
        retokenized_ratio=_retokenized_ratio(ok),
        client_cpu=max((w.client_cpu for w in windows if w.client_cpu is not None), default=None),
        errors=errors,
        **_speculation(windows),
        **_prompt_tokens(windows, ok),
    )


def with_accept_rate(levels: Iterable[LevelResult], num_draft_tokens: int | None) -> tuple[LevelResult, ...]:
    """Fill in accept rates that the server did not count: SGLang's own formula, (length − 1) ÷ (draft tokens − 1)."""
    if num_draft_tokens is None or num_draft_tokens < 2:
        return tuple(levels)
    return tuple(
        level
        if level.accept_rate is not None or level.accept_length is None
        else level.model_copy(update={"accept_rate": (level.accept_length - 1) / (num_draft_tokens - 1)})
        for level in levels
    )


def _speculation(windows: Sequence[Window]) -> dict[str, Any]:
    found = [spec_counters(window) for window in windows]
    counters = [spec for spec in found if spec is not None]
    if not counters or len(counters) < len(found):
        return {}
    total = sum(counters[1:], counters[0])
    rate = None
    if total.accepted_drafts is not None and total.proposed_drafts:
        rate = total.accepted_drafts / total.proposed_drafts
    return {
        "accept_length": total.output_tokens / total.verify_steps,
        "accept_rate": rate,
        "verify_steps": total.verify_steps,
    }


def _prompt_tokens(windows: Sequence[Window], ok: Sequence[RequestTrace]) -> dict[str, int | None]:
    """Prompt tokens, and those served from the prefix cache by the requests' word, else the counters'."""
    prompts = [trace.prompt_tokens for trace in ok if trace.prompt_tokens is not None]
    cached = [trace.cached_tokens for trace in ok if trace.cached_tokens is not None]
    by_counter = [w.counters.cached_tokens for w in windows if w.counters.cached_tokens is not None]
    return {
        "prompt_tokens": sum(prompts) if len(prompts) == len(ok) else None,
        "cached_tokens": sum(cached) if len(cached) == len(ok) else sum(by_counter) if by_counter else None,
    }


def _retokenized_ratio(ok: Sequence[RequestTrace]) -> float | None:
    checked = [trace for trace in ok if trace.retokenized_tokens is not None]
    tokens = output_tokens(checked)
    return sum(trace.retokenized_tokens or 0 for trace in checked) / tokens if tokens else None


def _errors(traces: Iterable[RequestTrace]) -> tuple[str, ...]:
    """The most frequent error texts, with their counts."""
    counts = Counter(trace.error for trace in traces if trace.error)
    return tuple(f"{count} x {text}" for text, count in counts.most_common(MOST_ERRORS))


def objective(levels: Sequence[LevelResult], goal: Goal) -> Estimate | None:
    """The goal's value over the levels it speaks of, None when one of them lacks the metric.

    Throughputs are mixed by the weighted harmonic mean (the throughput of the mixed traffic), times
    by the weighted mean. The interval is carried over from the levels' own, taken as independent.

    Raises:
        MeasurementError: no measured level matches the goal.
    """
    weighted = [(level, weight) for level in levels if (weight := _weight(level.level, goal))]
    if not weighted:
        raise MeasurementError(f"no measured level matches the objective ({goal.model_dump(exclude_defaults=True)})")
    parts = [(_level_estimate(level, goal.metric), weight) for level, weight in weighted]
    known = [(part, weight) for part, weight in parts if part is not None]
    if len(known) < len(parts):
        return None
    return _mix(known, harmonic=goal.maximize)


def _weight(level: LoadLevel, goal: Goal) -> float:
    if goal.concurrency is not None and level.concurrency != goal.concurrency:
        return 0.0
    if not goal.weights:
        return 1.0
    return goal.weights.get(level.key, goal.weights.get(level.workload, 0.0))


def _level_estimate(level: LevelResult, metric: MetricName) -> Estimate | None:
    if metric == "output_tok_per_s":
        return level.output_tok_per_s
    if metric == "requests_per_s":
        return level.requests_per_s
    value = level_value(level, metric)
    return None if value is None else Estimate(value=value)


def level_value(level: LevelResult, metric: str) -> float | None:
    """A pooled statistic of a level by its name, such as `p95_ttft_ms`."""
    statistic, _, name = metric.partition("_")
    found: float | None = getattr(getattr(level, name), statistic, None)
    return found


def _mix(parts: Sequence[tuple[Estimate, float]], *, harmonic: bool) -> Estimate:
    total = sum(weight for _, weight in parts)
    if harmonic:
        if any(part.value <= 0 for part, _ in parts):
            return Estimate(value=0.0)
        value = total / sum(weight / part.value for part, weight in parts)
        slopes = [value**2 * weight / (total * part.value**2) for part, weight in parts]
    else:
        value = sum(weight * part.value for part, weight in parts) / total
        slopes = [weight / total for _, weight in parts]
    halves = [(p.high - p.low) / 2 if p.high is not None and p.low is not None else None for p, _ in parts]
    half = _root_sum(slopes, halves)
    return Estimate(
        value=value,
        n=min(part.n for part, _ in parts),
        std=_root_sum(slopes, [part.std for part, _ in parts]),
        low=None if half is None else value - half,
        high=None if half is None else value + half,
    )


def _root_sum(slopes: Sequence[float], spreads: Sequence[float | None]) -> float | None:
    known = [spread for spread in spreads if spread is not None]
    if len(known) < len(spreads):
        return None
    return math.hypot(*(slope * spread for slope, spread in zip(slopes, known, strict=True)))


def violations(levels: Sequence[LevelResult], constraints: Constraints) -> dict[str, float]:
    """How far each stated limit is broken at the worst level: (seen − limit) ÷ limit; feasible when ≤ 0.

    A limit whose figure was not measured (too few samples) counts as broken (1.0): what was not seen
    to hold does not hold. The error rate is given in absolute terms.
    """
    found = {}
    for name, limit in constraints.model_dump(exclude={"error_rate"}, exclude_none=True).items():
        values = [level_value(level, name) for level in levels]
        found[name] = max(1.0 if value is None else value / limit - 1.0 for value in values)
    found["error_rate"] = max(error_rate(level) for level in levels) - constraints.error_rate
    return found


def error_rate(level: LevelResult) -> float:
    """Failed requests ÷ all that ended, cut-off ones left out."""
    ended = level.requests_ok + level.requests_failed
    return level.requests_failed / ended if ended else 0.0

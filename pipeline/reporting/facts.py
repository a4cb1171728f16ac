"""Records -> the parts of a report that need no judgement: points, costs, failures, timeline, anatomies."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from pipeline import anatomy
from pipeline.anatomy import Anatomy, Simulated
from pipeline.config import EngineConfig
from pipeline.errors import InputError
from pipeline.metrics import estimate
from pipeline.profile import StepProfile
from pipeline.records import Distribution, Estimate, LevelResult, TrialRecord
from pipeline.reporting.model import Cost, FailureLine, Point, Screen, Span
from pipeline.screening import Screening

_PHASES = {name: place for place, name in enumerate(("deploy", "launch", "ready", "warm", "measure", "", "teardown"))}

T = TypeVar("T")
Launches = dict[str, list[TrialRecord]]  # by configuration id


def launches(records: Iterable[TrialRecord]) -> Launches:
    """Launches with figures, by configuration, in the order of their first launch."""
    grouped: Launches = defaultdict(list)
    for record in records:
        if record.status in ("ok", "stopped") and record.measurement is not None:
            grouped[record.config_id].append(record)
    return dict(grouped)


def points(grouped: Launches, baseline: str | None) -> tuple[Point, ...]:
    """Every configuration at every load level, pooled over its launches."""
    plain = {key: _pooled(found) for key, found in _levels(grouped.get(baseline or "", ())).items()}
    made = (
        _point(found[0].config, key, levels, plain.get(key))
        for found in grouped.values()
        for key, levels in _levels(found).items()
    )
    return tuple(point for point in made if point.tok_per_s.value > 0)


def _levels(records: Sequence[TrialRecord]) -> dict[str, list[LevelResult]]:
    found: dict[str, list[LevelResult]] = defaultdict(list)
    for record in records:
        for level in record.measurement.levels if record.measurement else ():
            found[level.level.key].append(level)
    return dict(found)


def _pooled(levels: Sequence[LevelResult]) -> Estimate:
    """Across launches where there are several, since the unit is the launch; else the launch's own spread."""
    across = estimate([level.output_tok_per_s.value for level in levels])
    return across if across and across.n > 1 else levels[0].output_tok_per_s


def _point(config: EngineConfig, key: str, levels: Sequence[LevelResult], plain: Estimate | None) -> Point:
    pooled = _pooled(levels)
    verify = [level.verify_steps for level in levels if level.verify_steps is not None]
    return Point(
        config_id=config.config_id,
        name=named(config.words()),
        algorithm=config.speculation.algorithm,
        level=key,
        workload=levels[0].level.workload,
        concurrency=levels[0].level.concurrency,
        tok_per_s=pooled,
        mean_ttft_ms=_mean(levels, "ttft_ms", "mean"),
        p95_ttft_ms=_mean(levels, "ttft_ms", "p95"),
        mean_tpot_ms=_mean(levels, "tpot_ms", "mean"),
        p95_tpot_ms=_mean(levels, "tpot_ms", "p95"),
        accept_length=accept_length(levels),
        verify_steps=sum(verify) if verify else None,
        speedup=pooled.value / plain.value if plain and plain.value else None,
    )


def _mean(levels: Sequence[LevelResult], times: str, statistic: str) -> float | None:
    found: list[Distribution] = [d for level in levels if (d := getattr(level, times)) is not None]
    values = [value for d in found if (value := getattr(d, statistic)) is not None]
    return fmean(values) if values else None


def accept_length(levels: Iterable[LevelResult]) -> float | None:
    """Over several levels: tokens over verify steps, recovered from each level's own ratio."""
    tokens, steps = 0.0, 0
    for level in levels:
        if level.accept_length is not None and level.verify_steps:
            tokens, steps = tokens + level.accept_length * level.verify_steps, steps + level.verify_steps
    return tokens / steps if steps else None


def anatomies(grouped: Launches, measured: Sequence[Point], baseline: str | None) -> tuple[Anatomy, ...]:
    """One dissection a speculative configuration and closed-loop level, best speed-up first."""
    plain = {p.level: p.tok_per_s.value for p in measured if p.config_id == baseline}
    made = [
        anatomy.dissect(
            p.name,
            plain=plain[p.level],
            speculative=p.tok_per_s.value,
            accept_length=p.accept_length,
            streams=_streams(grouped[p.config_id][0].config, p.concurrency),
            max_accepted=anatomy.max_accept_length(grouped[p.config_id][0].config, grouped[p.config_id][0].resolved),
            level=p.level,
        )
        for p in measured
        if p.algorithm != "none" and p.accept_length and p.concurrency and p.level in plain
    ]
    return tuple(sorted(made, key=lambda a: -a.speedup))


def _streams(config: EngineConfig, concurrency: int) -> int:
    """Requests that really decode at once: the embedded engine takes one at a time, SGLang has a limit."""
    return 1 if config.engine == "embedded" else min(concurrency, config.max_running_requests)


def failures(records: Iterable[TrialRecord]) -> tuple[FailureLine, ...]:
    """Failed trials by class, the most frequent first, each with its first example."""
    failed = [(r, r.failure) for r in records if r.failure is not None and r.status == "failed"]
    counts = Counter(failure.failure_class for _, failure in failed)
    first = {failure.failure_class: (r, failure) for r, failure in reversed(failed)}
    return tuple(
        FailureLine(
            failure_class=name,
            count=count,
            example=named(first[name][0].config.words()),
            cause=first[name][1].cause,
            log_path=first[name][1].log_path,
        )
        for name, count in counts.most_common()
    )


def cost(records: Sequence[TrialRecord]) -> Cost:
    """Launches, hours, GPU-hours and the time by phase. GPU-hours are None where there is no GPU."""
    launched = [r for r in records if r.status not in ("reused", "pruned")]
    phases: Counter[str] = Counter()
    for record in launched:
        phases.update(record.phases_s)
    gpu = [sum(r.phases_s.values()) * r.config.tensor_parallel_size for r in launched if r.topology.gpu_count]
    statuses = Counter(r.status for r in records)
    return Cost(
        launches=len(launched),
        reused=statuses["reused"],
        pruned=statuses["pruned"],
        failed=statuses["failed"],
        hours=sum(phases.values()) / 3600,
        gpu_hours=sum(gpu) / 3600 if gpu else None,
        phases_s=in_order(phases),
    )


def in_order(phases: Mapping[str, float]) -> dict[str, float]:
    """Phases as a trial goes through them; unknown ones keep their place before the teardown."""
    return dict(sorted(phases.items(), key=lambda item: _PHASES.get(item[0], _PHASES["teardown"] - 1)))


def timeline(records: Iterable[TrialRecord]) -> tuple[Span, ...]:
    """Launched trials in time, from the first start."""
    started = [(datetime.fromisoformat(r.started_at), r) for r in records if r.started_at and r.phases_s]
    if not started:
        return ()
    origin = min(when for when, _ in started)
    return tuple(
        Span(
            trial=r.number,
            name=named(r.config.words()),
            role=r.role,
            status=r.status,
            start_s=(when - origin).total_seconds(),
            phases_s=in_order(r.phases_s),
        )
        for when, r in sorted(started, key=lambda pair: pair[0])
    )


def profiles(folder: Path) -> tuple[StepProfile, ...]:
    """Profiles taken of this study's configurations (`profiles/*/profile.json`)."""
    return tuple(p for found in _stored(folder, "profiles/*/profile.json", list[StepProfile]) for p in found)


def simulated(folder: Path) -> tuple[Simulated, ...]:
    """Launches with a made-up accept length (`simulated/*/*.json`), by configuration, level and length."""
    found = _stored(folder, "simulated/*/*.json", Simulated)
    return tuple(sorted(found, key=lambda run: (run.name, run.level, run.asked)))


def screen(folder: Path) -> Screen | None:
    """The study's screen of collective settings (`collectives.json`); None where it had none."""
    for found in _stored(folder, "collectives.json", Screening):
        whole = {result.name for result in found.results if result.contains is None}
        left = [(dropped.name, dropped.reason) for dropped in found.dropped if dropped.name in whole]
        if along := len(found.dropped) - len(left):
            left.append((f"{along} more", "contain one that failed or hung"))
        late = [result.name for result in found.results if result.outcome == "not measured"]
        summary = (
            f"{len(found.results)} settings were timed without the engine, in {found.seconds:.0f} s; "
            f"{len(found.dropped)} left the space, so no trial launched them. "
            f"Differences below {found.noise:.1%} of a step count as none."
        )
        return Screen(
            summary=summary,
            left=tuple(left),
            unreached=f"Not reached, so still in the space: {'; '.join(late)}." if late else "",
        )
    return None


def _stored(folder: Path, pattern: str, kind: type[T]) -> list[T]:
    found: list[T] = []
    for path in sorted(folder.glob(pattern)):
        try:
            found.append(TypeAdapter(kind).validate_json(path.read_bytes()))
        except ValidationError as error:
            name = path.parent.parent.name
            raise InputError(f"not a file of {name}", source=str(path), expected="what a command here wrote") from error
    return found


def front(measured: Iterable[tuple[str, float, float]]) -> set[str]:
    """Names of the Pareto front of (name, more is better, less is better)."""
    items = list(measured)
    return {
        name
        for name, gain, pain in items
        if not any(g >= gain and p <= pain and (g, p) != (gain, pain) for _, g, p in items)
    }


def named(words: str) -> str:
    """A configuration's words, with the absence of speculation said in full."""
    head, _, rest = words.partition(" ")
    return " ".join(part for part in ("no speculation" if head == "none" else head, rest) if part)


def throughput_against_latency(measured: Sequence[Point]) -> tuple[set[str], str]:
    """Configurations on the front of tok/s at the most streams against TPOT at the fewest, and that in words."""
    loads = sorted({p.concurrency for p in measured if p.concurrency is not None})
    if len(loads) < 2:
        return set(), ""
    busy, quiet = loads[-1], loads[0]
    rates, times = _by_config(measured, busy, "rate"), _by_config(measured, quiet, "tpot")
    both = [(cid, rates[cid], times[cid]) for cid in rates.keys() & times.keys()]
    return front(both), f"Pareto front: tok/s at {busy} streams against TPOT at {quiet}."


def _by_config(measured: Iterable[Point], load: int, what: str) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for point in measured:
        value = 1 / point.tok_per_s.value if what == "rate" else point.mean_tpot_ms
        if point.concurrency == load and value is not None:
            found[point.config_id].append(value)
    return {cid: 1 / fmean(values) if what == "rate" else fmean(values) for cid, values in found.items()}


def flat(config: EngineConfig) -> Mapping[str, object]:
    """A configuration's stated settings, flat, for parallel coordinates and differences."""
    spec = config.speculation.model_dump(exclude_none=True)
    collectives = config.collectives.model_dump(exclude_none=True)
    named = {f"collectives.{key}": value for key, value in collectives.items()}
    named |= {f"speculation.{key}": value for key, value in spec.items() if value is not False}
    if config.attention_backend:
        named["attention_backend"] = config.attention_backend
    return named

"""What a search would do, without doing it: how many configurations, which are pruned and why, how long.

Everything is counted by walking the space through the rules; nothing is launched and nothing imported for it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

from pydantic import Field

from pipeline import rules
from pipeline.config import EngineConfig, Frozen
from pipeline.dimensions import Dimension, Point
from pipeline.engine_space import Space
from pipeline.records import LoadLevel, Topology

_LISTED = 40_000  # up to here every point is looked at, beyond it a sample is
_SAMPLED = 10_000
# Rough figures for the estimate before the first launch; after it, the study's own are used.
_START_S = {"sglang": 90.0, "embedded": 15.0}
_TOK_PER_S_A_STREAM = {"sglang": 60.0, "embedded": 17.0}


class Pruned(Frozen):
    """Points that one rule refuses: how many, why, and one example."""

    count: int
    reason: str
    source: str
    example: str


class DryRun(Frozen):
    """The plan of a search. Counts are exact unless `sampled`: then they are shares of the whole, rounded."""

    total_points: int | None
    distinct: int
    duplicates: int
    pruned: dict[str, Pruned] = Field(default_factory=dict)
    warned: dict[str, Pruned] = Field(default_factory=dict)
    dead: tuple[str, ...] = ()  # dimensions that change nothing here
    dropped: tuple[str, ...] = ()  # dimensions that the engine lacks
    notes: tuple[str, ...] = ()
    launches: int
    seconds_per_launch: float
    hours: float
    sampled: int | None = None  # points looked at, None for all

    def lines(self) -> list[str]:
        """The plan in words, a fact a line."""
        about = "about " if self.sampled else ""
        total = "points without end" if self.total_points is None else f"{self.total_points} points"
        found = [
            f"{total}, {about}{self.distinct} distinct configurations, {about}{self.duplicates} that repeat another"
        ]
        found += [
            f"pruned by {name}: {p.count} ({p.example}: {p.reason}; {p.source})" for name, p in self.pruned.items()
        ]
        found += [f"watch {name}: {p.count} ({p.example}: {p.reason})" for name, p in self.warned.items()]
        found += [f"changes nothing here: {name}" for name in self.dead]
        found += [f"dropped: {text}" for text in self.dropped]
        found += [f"note: {text}" for text in self.notes]
        each, all_ = _duration(self.seconds_per_launch), _duration(3600 * self.hours)
        found.append(f"{self.launches} launches of about {each} each: {all_}")
        return found


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


def plan_search(
    space: Space,
    release: str | None = None,
    topology: Topology | None = None,
    *,
    seconds_per_launch: float | None = None,
) -> DryRun:
    """Walk the space through the rules.

    Args:
        space: one engine's part of a space file.
        release: SGLang's version; the file's own when None.
        topology: the machine; unknown when None.
        seconds_per_launch: from an earlier study; a rough guess when None.
    """
    total = space.size()
    exact = total is not None and total <= _LISTED
    walk = _Walk(space, release, topology)
    walk.look_at(space.grid() if exact else _sample(space))
    scale = 1.0 if exact or total is None else total / walk.looked_at
    distinct = round(len(walk.first) * scale)
    seconds = seconds_per_launch or launch_seconds(space)
    launches = _launches(space, distinct)
    return DryRun(
        total_points=total,
        distinct=distinct,
        duplicates=round(walk.duplicates * scale),
        pruned=_scaled(walk.pruned, walk.examples, scale),
        warned=_scaled(walk.warned, walk.examples, scale),
        dead=walk.dead(),
        dropped=space.dropped,
        notes=_notes(space),
        launches=launches,
        seconds_per_launch=seconds,
        hours=launches * seconds / 3600,
        sampled=None if exact else walk.looked_at,
    )


def _notes(space: Space) -> tuple[str, ...]:
    streams, allowed = max(space.load.concurrency, default=0), space.baseline().max_running_requests
    if space.engine == "embedded" or streams <= allowed:
        return ()
    return (f"{streams} streams are offered, but max_running_requests is {allowed}: the rest waits in the queue",)


def launch_seconds(space: Space) -> float:
    """A rough guess of one launch: start, warm-up and every level for its smallest number of repeats."""
    load, workload = space.load, space.workload
    levels = load.levels(tuple(workload.prompts))
    speed = _TOK_PER_S_A_STREAM[space.engine]
    measured = sum(min(load.level_budget_s, load.min_repeats * _level_seconds(space, level, speed)) for level in levels)
    return _START_S[space.engine] + measured


def _level_seconds(space: Space, level: LoadLevel, tok_per_s: float) -> float:
    streams = level.concurrency or 1
    requests = space.load.requests_per_level or max(8, 4 * streams)
    return -(-requests // streams) * space.workload.output_tokens / tok_per_s


def _launches(space: Space, distinct: int) -> int:
    """Baseline, seeds and search, ablation of a winner (one a setting at most), confirmation."""
    searched = max(0, min(space.search.budget.trials or distinct, distinct - 1))
    ablation = 3 if space.search.ablate and searched > 1 else 0
    return 1 + searched + ablation + max(1, 3 * space.search.confirm_rounds)


def _sample(space: Space) -> Iterable[Point]:
    trial = _RandomTrial(random.Random(0))  # noqa: S311  (a sample, not a secret)
    return (space.suggest(trial) for _ in range(_SAMPLED))


class _RandomTrial:
    """Answers like an Optuna trial, evenly."""

    def __init__(self, source: random.Random) -> None:
        self._source = source

    def suggest_categorical(self, name: str, choices: list[Any]) -> Any:
        return self._source.choice(choices)

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        return self._source.randrange(low, high + 1, step)

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        return (
            self._source.uniform(low, high)
            if step is None
            else low + step * self._source.randint(0, round((high - low) / step))
        )


class _Walk:
    """Counts what the rules make of the points it is shown."""

    def __init__(self, space: Space, release: str | None, topology: Topology | None) -> None:
        self._space, self._where = space, (release, topology or Topology())
        self.looked_at = self.duplicates = 0
        self.first: dict[EngineConfig, Point] = {}
        self.pruned: Counter[str] = Counter()
        self.warned: Counter[str] = Counter()
        self.examples: dict[str, rules.Violation] = {}
        deciding = {name for dimension in space.dims for name, _ in dimension.when}
        self._maybe_dead = {d.name: d for d in space.dims if d.name not in deciding and _varies(d)}
        self._neighbours: dict[str, dict[frozenset[Any], EngineConfig]] = {name: {} for name in self._maybe_dead}
        self._compared: set[str] = set()

    def look_at(self, points: Iterable[Point]) -> None:
        for point in points:
            self.looked_at += 1
            self._one(point)

    def _one(self, point: Point) -> None:
        found = self._space.examine(self._space.config(point), *self._where)
        if found.violations:
            self._note(self.pruned, found.violations[:1])
            return
        self._note(self.warned, found.warnings)
        resolved = found.canonical.config
        self.duplicates += resolved in self.first
        self.first.setdefault(resolved, point)
        self._watch(point, resolved)

    def _note(self, counts: Counter[str], found: Iterable[rules.Violation]) -> None:
        for violation in found:
            counts[violation.rule] += 1
            self.examples.setdefault(violation.rule, violation)

    def _watch(self, point: Point, resolved: EngineConfig) -> None:
        """A dimension is alive once two points that differ in it alone come out different."""
        for name in list(self._maybe_dead):
            if name not in point:
                continue
            others = frozenset(item for item in point.items() if item[0] != name)
            if others in self._neighbours[name]:
                self._compared.add(name)
            if self._neighbours[name].setdefault(others, resolved) != resolved:
                del self._maybe_dead[name]

    def dead(self) -> tuple[str, ...]:
        return tuple(name for name in self._maybe_dead if name in self._compared)


def _varies(dimension: Dimension) -> bool:
    values = dimension.values()
    return values is None or len(values) > 1


def _scaled(counts: Counter[str], examples: dict[str, rules.Violation], scale: float) -> dict[str, Pruned]:
    return {
        name: Pruned(count=round(count * scale), reason=seen.reason, source=seen.source, example=seen.seen)
        for (name, count), seen in ((item, examples[item[0]]) for item in counts.most_common())
    }

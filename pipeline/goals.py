"""What a trial is worth to a study: its value, the limits it breaks, whether it can still win. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.metrics import objective, violations
from pipeline.records import Estimate, LevelResult, TrialRecord
from pipeline.spec import Goal, ObjectiveSpec


def launched(record: TrialRecord) -> bool:
    """True when the trial cost a launch; reused and pruned trials cost nothing."""
    return record.status in ("ok", "failed", "stopped")


def value_of(record: TrialRecord, goal: Goal) -> Estimate | None:
    """The goal's value of one finished launch; None for a trial without all its figures."""
    if record.status != "ok" or record.measurement is None:
        return None
    return objective(record.measurement.levels, goal)


def worth(records: Sequence[TrialRecord], goal: Goal) -> dict[int, float]:
    """The goal's value by trial number, with the bias of each node taken out.

    A node's bias is its baseline launches (first trial or reference trial) against those of the node that
    ran the first baseline; nodes without one are left as they are.
    """
    raw = {r.number: found.value for r in records if (found := value_of(r, goal)) is not None}
    by_node: dict[str | None, list[float]] = {}
    for record in records:
        if record.role in ("baseline", "reference") and record.number in raw:
            by_node.setdefault(record.node, []).append(raw[record.number])
    means = {node: statistics.fmean(values) for node, values in by_node.items()}
    home = next(iter(means.values()), None)  # records come in the order they finished, the baseline first
    return {
        r.number: raw[r.number] * (home or 1.0) / means.get(r.node, home or 1.0) for r in records if r.number in raw
    }


def gain(value: float, against: float, goal: Goal) -> float:
    """How much better `value` is than `against`, as a share; positive is better, also for times."""
    return value / against - 1 if goal.maximize else against / value - 1


def why_not(record: TrialRecord, spec: ObjectiveSpec) -> str | None:
    """Why this launch's configuration cannot win; None when nothing speaks against it."""
    if record.status == "failed":
        return record.failure.text() if record.failure else record.reason or "failed"
    if record.status == "stopped":
        return record.reason or "stopped early"
    fatal = next((broken for broken in record.broken if broken.fatal), None)
    if fatal is not None:
        return f"{fatal.rule}: {fatal.seen}"
    if record.lossless is not None and not record.lossless.passed:
        return f"not lossless: {record.lossless.corruption or f'{record.lossless.wrong} wrong outputs'}"
    if record.measurement is None or any(value_of(record, goal) is None for goal in spec.goals):
        return "no figure for the objective"
    return _limits_broken(record.measurement.levels, spec)


def _limits_broken(levels: Sequence[LevelResult], spec: ObjectiveSpec) -> str | None:
    excess = {name: by for name, by in violations(levels, spec.constraints).items() if by > 0}
    limits = spec.constraints.model_dump()
    words = [f"{name} over its limit of {limits[name]:g} (by {by:.3g})" for name, by in excess.items()]
    return "; ".join(words) or None


@dataclass(frozen=True)
class StopRule:
    """Judges a running trial after each load level; picklable. Called with the levels so far, None means go on.

    A level still to come is credited with the best that any trial has shown there, so a trial is stopped
    only when even that would leave it below the best trial by more than the spread.

    Args:
        spec: the study's goals and limits; a Pareto study stops for broken limits only.
        best: the goal's value of the best trial so far.
        spread: the noise floor, as a share.
        ceilings: per level key, the best result that any trial has shown.
    """

    spec: ObjectiveSpec
    best: float | None = None
    spread: float = 0.0
    ceilings: Mapping[str, LevelResult] = field(default_factory=dict)

    def __call__(self, levels: tuple[LevelResult, ...]) -> str | None:
        return cannot_win(levels, self)


def cannot_win(levels: Sequence[LevelResult], rule: StopRule) -> str | None:
    """Why a trial with these levels can no longer win; None when it still can, or when all levels are in."""
    measured = {level.level.key for level in levels}
    to_come = [level for key, level in rule.ceilings.items() if key not in measured]
    if not to_come:
        return None
    excess = {name: by for name, by in violations(levels, rule.spec.constraints).items() if by > rule.spread}
    if excess:
        return "breaks " + ", ".join(excess)
    if rule.best is None or len(rule.spec.goals) > 1:
        return None
    bound = objective((*levels, *to_come), rule.spec.goals[0])
    ahead = 0.0 if bound is None else gain(bound.value, rule.best, rule.spec.goals[0])
    if ahead >= -rule.spread:
        return None
    return f"stays {-ahead:.1%} behind the best trial at best, spread {rule.spread:.1%}"


def ceilings(records: Iterable[TrialRecord], goal: Goal) -> dict[str, LevelResult]:
    """Per load level, the result that is best in the goal's metric over all trials that may win."""
    alone = Goal(metric=goal.metric)
    best: dict[str, tuple[float, LevelResult]] = {}
    for record in records:
        for level in record.measurement.levels if record.may_win and record.measurement else ():
            figure = objective((level,), alone)
            score = None if figure is None else figure.value * (1 if goal.maximize else -1)
            if score is not None and (level.level.key not in best or score > best[level.level.key][0]):
                best[level.level.key] = score, level
    return {key: level for key, (_, level) in best.items()}

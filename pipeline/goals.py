"""What a trial is worth to a study: its value, the limits it breaks, whether it can still win. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.metrics import objective, violations
from pipeline.records import Estimate, LevelResult, TrialRecord
from pipeline.spec import Goal, ObjectiveSpec


def launched(record: TrialRecord) -> bool:
    """True when the trial cost a launch; reused and pruned trials cost nothing."""
    return record.status in ("ok", "failed", "stopped")


def baseline_id(records: Iterable[TrialRecord]) -> str | None:
    """The baseline's config_id."""
    return next((record.config_id for record in records if record.role == "baseline"), None)


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


Levels = tuple[LevelResult, ...]
# Before that many trials have shown how their levels differ, none is stopped and none is completed by guess.
ENOUGH_TRIALS = 5


@dataclass(frozen=True)
class StopRule:
    """Judges a running trial after each load level; picklable. Called with the levels so far, None means go on.

    A level still to come is credited with the best that any trial has shown there, or with the most favourable
    step that any trial made from the last measured level, whichever is more: a trial is stopped only when even
    that leaves it below the best by more than the spread.

    Args:
        spec: the study's goals and limits; without a single throughput goal only broken limits stop a trial.
        best: the goal's value of the best trial so far.
        spread: the noise floor, as a share.
        finished: the levels of the trials that ran to their end.
    """

    spec: ObjectiveSpec
    best: float | None = None
    spread: float = 0.0
    finished: tuple[Levels, ...] = ()

    def __call__(self, levels: Levels) -> str | None:
        return cannot_win(levels, self)


def cannot_win(levels: Levels, rule: StopRule) -> str | None:
    """Why a trial with these levels can no longer win; None when it still can, or when all levels are in."""
    if all(len(levels) >= len(whole) for whole in rule.finished):
        return None
    excess = {name: by for name, by in violations(levels, rule.spec.constraints).items() if by > rule.spread}
    if excess:
        return "breaks " + ", ".join(excess)
    complete = completed(levels, rule.finished, bound=True) if len(rule.spec.goals) == 1 else None
    bound = objective(complete, rule.spec.goals[0]) if complete and rule.spec.goals[0].maximize else None
    if bound is None or rule.best is None:
        return None
    ahead = gain(bound.value, rule.best, rule.spec.goals[0])
    if ahead >= -rule.spread:
        return None
    return f"stays {-ahead:.1%} behind the best trial at best, spread {rule.spread:.1%}"


def completed(levels: Levels, finished: Sequence[Levels], *, bound: bool) -> Levels | None:
    """The levels of a stopped trial, and guesses of the throughputs to come from trials that ran to their end.

    Args:
        levels: measured, in order.
        finished: what other trials showed at all levels.
        bound: credit the most that any of them makes plausible, instead of what to expect.
    """
    if len(finished) < ENOUGH_TRIALS or not levels:
        return None
    last, known = levels[-1], {level.level.key for level in levels}
    tables = [{level.level.key: level.output_tok_per_s.value for level in whole} for whole in finished]
    tables = [table for table in tables if table.get(last.level.key)]
    guessed = []
    for model in (level for level in finished[0] if level.level.key not in known):
        key = model.level.key
        steps = [table[key] / table[last.level.key] for table in tables if key in table]
        if not steps:
            return None
        value = last.output_tok_per_s.value * (max(steps) if bound else statistics.median(steps))
        if bound:
            value = max(value, *(table[key] for table in tables if key in table))
        guessed.append(model.model_copy(update={"output_tok_per_s": Estimate(value=value), "requests_per_s": None}))
    return (*levels, *guessed)

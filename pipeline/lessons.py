"""What finished trials teach the search: observations for the sampler, regions to leave, time spent. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pipeline.ablation import settings_of
from pipeline.goals import completed, launched, worth
from pipeline.metrics import objective, violations
from pipeline.records import FailureClass, TrialRecord
from pipeline.spec import Goal, ObjectiveSpec

REGION_FAILURES = 3
# Failures that come from outside the configuration teach nothing about it.
_ACCIDENTS = {FailureClass.PORT, FailureClass.KILLED, FailureClass.MEASUREMENT, FailureClass.TEARDOWN}


@dataclass(frozen=True)
class Observation:
    """A finished trial. `values` is None where there are no figures; it is feasible when `violation` ≤ 0.

    `params` is empty for trials that are no point of the space; `launched` is False where the figures are another
    trial's.
    """

    params: dict[str, Any]
    settings: dict[str, Any]
    values: tuple[float, ...] | None
    violation: float = 0.0
    launched: bool = True


@dataclass(frozen=True)
class LeftRegion:
    """Settings that failed together and never worked; points that hold all of them are not launched."""

    settings: tuple[tuple[str, Any], ...]
    trials: tuple[int, ...]

    def text(self) -> str:
        """In words, for the report and for the records of the points passed over."""
        names = " with ".join(f"{name}={value}" for name, value in self.settings)
        return f"{names} failed in trials {', '.join(map(str, self.trials))} and never worked"


def observations(records: Sequence[TrialRecord], spec: ObjectiveSpec) -> list[Observation]:
    """Every launch, and every point that turned out to be the same as one."""
    by_number = {record.number: record for record in records}
    worths = [worth(records, goal) for goal in spec.goals]
    if len(spec.goals) == 1 and spec.goals[0].metric == "output_tok_per_s":
        worths[0] |= _expected(records, spec.goals[0])
    found = []
    for record in records:
        if record.status == "pruned":
            continue  # rules are asked before a launch, so the sampler need not learn them
        launch = by_number.get(record.number if record.reused_from is None else record.reused_from, record)
        values = tuple(by_trial[launch.number] for by_trial in worths if launch.number in by_trial)
        complete = values if len(values) == len(worths) else None
        violation, settings = _violation(launch, spec), settings_of(launch.config)
        found.append(Observation(record.params, settings, complete, violation, launch is record))
    return found


def _expected(records: Sequence[TrialRecord], goal: Goal) -> dict[int, float]:
    """What trials that were stopped early would probably have given."""
    finished = [r.measurement.levels for r in records if r.status == "ok" and r.measurement]
    found = {}
    for record in records:
        if record.status == "stopped" and record.measurement:
            complete = completed(record.measurement.levels, finished, bound=False)
            value = objective(complete, goal) if complete else None
            if value is not None:
                found[record.number] = value.value
    return found


def _violation(record: TrialRecord, spec: ObjectiveSpec) -> float:
    """How infeasible a trial is: 1 for a failure or figures not to be trusted, else the worst excess over a limit."""
    lossy = record.lossless is not None and not record.lossless.passed
    if record.measurement is None or lossy or any(broken.fatal for broken in record.broken):
        return 1.0
    return max(0.0, *violations(record.measurement.levels, spec.constraints).values())


def left_regions(records: Iterable[TrialRecord]) -> tuple[LeftRegion, ...]:
    """Settings that failed in at least `REGION_FAILURES` trials and worked in none.

    Settings that failed in the very same trials cannot be told apart, so only their combination is left.
    """
    failing: dict[tuple[str, Any], list[int]] = {}
    worked: set[tuple[str, Any]] = set()
    for record in filter(launched, records):
        for pair in settings_of(record.config).items():
            if _blamed(record):
                failing.setdefault(pair, []).append(record.number)
            else:
                worked.add(pair)
    together: dict[tuple[int, ...], list[tuple[str, Any]]] = {}
    for pair, numbers in failing.items():
        if pair not in worked and len(numbers) >= REGION_FAILURES:
            together.setdefault(tuple(numbers), []).append(pair)
    return tuple(LeftRegion(tuple(pairs), numbers) for numbers, pairs in together.items())


def _blamed(record: TrialRecord) -> bool:
    """True for a failure, or wrong output, that the configuration is to blame for."""
    if record.status == "failed":
        return record.failure is None or record.failure.failure_class not in _ACCIDENTS
    return record.lossless is not None and not record.lossless.passed


def busy_seconds(records: Iterable[TrialRecord]) -> float:
    """Time during which a trial ran: the union of the trials' own spans, without the breaks between sessions."""
    spans = sorted(
        (began, began + sum(record.phases_s.values()))
        for record in records
        if record.started_at and (began := datetime.fromisoformat(record.started_at).timestamp())
    )
    busy, until = 0.0, float("-inf")
    for began, ended in spans:
        busy += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return busy

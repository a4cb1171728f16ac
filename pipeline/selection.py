"""Records -> ranking, noise floor and winner, or why there is none. Pure.

The unit is the launch, never the request. The best of many trials is best partly by luck, so who wins is decided by
the claims that confirmation launches allow (`claims.py`). "No difference" is an answer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from pydantic import Field

from pipeline.ablation import differing
from pipeline.claims import ERROR_RATE, Claim, make_claims
from pipeline.config import EngineConfig, Frozen
from pipeline.goals import baseline_id, gain, launched, value_of, why_not, worth
from pipeline.metrics import estimate
from pipeline.records import Estimate, TrialRecord
from pipeline.spec import Goal, ObjectiveSpec

# Assumed one-sigma difference of two launches where nothing was repeated.
ASSUMED_NOISE = 0.01


class Row(Frozen):
    """One configuration over all its launches. `values` follow the goals; `reason` says why it cannot win."""

    config_id: str
    words: str
    settings: int  # how many differ from the baseline's
    trials: tuple[int, ...]
    values: tuple[Estimate | None, ...]
    gain: float | None = None  # share ahead of the baseline in the first goal
    reason: str | None = None
    is_baseline: bool = False


class Noise(Frozen):
    """Typical difference of two launches of one configuration, as a share, seen in three ways; None is unknown."""

    drift: float | None = None  # first against last launch of the baseline
    repeats: float | None = None  # from repeats within a launch
    relaunches: float | None = None  # from launches of the same configuration

    @property
    def floor(self) -> float | None:
        """The larger of what is known."""
        return max((v for v in (self.drift, self.repeats, self.relaunches) if v is not None), default=None)


class Selection(Frozen):
    """Who won and why. `winner` may be the baseline; None means that no trial can be trusted to win."""

    ranking: tuple[Row, ...]
    baseline: Row | None
    noise: Noise
    noise_floor: float | None
    winner: Row | None
    confirmed: bool
    reason: str
    runner_up: Row | None = None
    pareto: tuple[Row, ...] = ()
    failures: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    claims: tuple[Claim, ...] = ()


def select(records: Iterable[TrialRecord], spec: ObjectiveSpec) -> Selection:
    """Judge a study, finished or not.

    Args:
        records: the ledger, in the order of its lines.
        spec: the study's goals and limits.
    """
    ledger = list(records)
    ranking, noise = rank(ledger, spec), measure_noise(ledger, spec.goals[0])
    claims = make_claims(ledger, spec, noise.floor)
    winner, confirmed, reason = _choose(ranking, claims, noise)
    others = [row for row in ranking if row.reason is None and row != winner]
    return Selection(
        ranking=ranking,
        baseline=next((row for row in ranking if row.is_baseline), None),
        noise=noise,
        noise_floor=noise.floor,
        winner=winner,
        confirmed=confirmed,
        reason=reason,
        runner_up=others[0] if others else None,
        pareto=pareto(ranking, spec.goals),
        failures=_failures(ledger),
        claims=claims,
    )


def rank(records: Sequence[TrialRecord], spec: ObjectiveSpec) -> tuple[Row, ...]:
    """One row a launched configuration: those that may win first, best first; then the others."""
    by_config: dict[str, list[TrialRecord]] = {}
    for record in filter(launched, records):
        by_config.setdefault(record.config_id, []).append(record)
    values = [worth(records, goal) for goal in spec.goals]
    home = baseline_id(records)
    base = _mean(by_config.get(home or "", []), values[0])
    baseline = next((record.config for record in records if record.config_id == home), None)
    rows = [_row(launches, values, base, baseline, spec) for launches in by_config.values()]
    sign = -1 if spec.goals[0].maximize else 1
    return tuple(
        sorted(rows, key=lambda r: (r.reason is not None, sign * r.values[0].value if r.values[0] else math.inf))
    )


def _row(
    launches: list[TrialRecord], values: list[dict[int, float]], base: Estimate | None, baseline: EngineConfig | None,
    spec: ObjectiveSpec,
) -> Row:  # fmt: skip
    figures = tuple(_mean(launches, by_number) for by_number in values)
    first = figures[0]
    reasons = [why for record in launches if (why := why_not(record, spec))]
    return Row(
        config_id=launches[0].config_id,
        words=launches[0].config.words(),
        settings=0 if baseline is None else len(differing(launches[0].config, baseline)),
        trials=tuple(record.number for record in launches),
        values=figures,
        gain=gain(first.value, base.value, spec.goals[0]) if first and base else None,
        reason=reasons[0] if reasons else None,
        is_baseline=launches[0].config == baseline,
    )


def _mean(launches: list[TrialRecord], by_number: dict[int, float]) -> Estimate | None:
    return estimate([by_number[r.number] for r in launches if r.number in by_number])


def measure_noise(records: Sequence[TrialRecord], goal: Goal) -> Noise:
    """How far two launches of one configuration differ, from the baseline's drift, repeats and relaunches."""
    values, home = worth(records, goal), baseline_id(records)
    by_config: dict[str, list[float]] = {}
    for record in records:
        if record.number in values:
            by_config.setdefault(record.config_id, []).append(math.log(values[record.number]))
    base = by_config.get(home or "", [])
    return Noise(
        drift=abs(math.expm1(base[-1] - base[0])) if len(base) > 1 else None,
        repeats=_repeat_noise(records, goal),
        relaunches=_relaunch_noise(list(by_config.values())),
    )


def _repeat_noise(records: Sequence[TrialRecord], goal: Goal) -> float | None:
    found = [value for record in records if (value := value_of(record, goal)) is not None]
    errors = [v.std / math.sqrt(v.n) / v.value for v in found if v.std is not None and v.value > 0]
    return math.sqrt(2) * statistics.median(errors) if errors else None


def _relaunch_noise(groups: list[list[float]]) -> float | None:
    repeated = [group for group in groups if len(group) > 1]
    degrees = sum(len(group) - 1 for group in repeated)
    if not degrees:
        return None
    squares = sum((len(group) - 1) * statistics.variance(group) for group in repeated)
    return math.sqrt(2 * squares / degrees)


def _choose(ranking: Sequence[Row], claims: Sequence[Claim], noise: Noise) -> tuple[Row | None, bool, str]:
    """Winner, whether it is confirmed, and the reason."""
    able = [row for row in ranking if row.reason is None and row.values[0] is not None]
    base = next((row for row in ranking if row.is_baseline), None)
    if base is None or base.values[0] is None:
        return None, False, "the baseline has no figures, so nothing can be said to beat it"
    if not able:
        return None, False, f"no trial may win; the baseline: {base.reason}"
    if base.reason is not None:
        return able[0], _tested(able[0], claims), f"the baseline may not win ({base.reason}); this is the best that may"
    challengers = [row for row in able if not row.is_baseline]
    if not challengers:
        return base, False, "no other configuration gave figures that may win"
    if claims:
        return _by_claims(base, challengers, claims)
    return _unconfirmed(base, challengers, noise)


def _tested(row: Row, claims: Sequence[Claim]) -> bool:
    return any(claim.config_id == row.config_id for claim in claims)


def _by_claims(base: Row, challengers: list[Row], claims: Sequence[Claim]) -> tuple[Row, bool, str]:
    by_id = {row.config_id: row for row in challengers}
    standing = [claim for claim in claims if claim.config_id in by_id]
    better = [claim for claim in standing if claim.verdict == "better"]
    if better:
        top = max(better, key=lambda claim: claim.gain.value)
        level = [claim for claim in better if claim.gain.value >= (top.gain.low or 0.0)]
        best = min(level, key=lambda claim: (by_id[claim.config_id].settings, -claim.gain.value))
        return by_id[best.config_id], True, f"confirmed against the baseline: {best.text}"
    if not standing:
        return base, True, "every finalist failed, broke a limit or was not lossless when it was launched again"
    closest = max(standing, key=lambda claim: claim.gain.value)
    return base, True, f"no difference that holds: {by_id[closest.config_id].words} {closest.text}; the baseline stays"


def _unconfirmed(base: Row, challengers: list[Row], noise: Noise) -> tuple[Row, bool, str]:
    """Without confirmation the bar is what luck alone could give the best of so many trials."""
    best, quantile = challengers[0], statistics.NormalDist().inv_cdf(1 - ERROR_RATE / 2 / len(challengers))
    bar = (noise.floor or ASSUMED_NOISE) * quantile
    ahead = best.gain or 0.0
    luck = f"luck alone could make the best of {len(challengers)} look {bar:.1%} better"
    if ahead > bar:
        return best, False, f"unconfirmed: {ahead:+.1%} over the baseline in the search, where {luck}"
    return base, False, f"unconfirmed: the best is {ahead:+.1%} over the baseline, and {luck}; the baseline stays"


def pareto(ranking: Sequence[Row], goals: Sequence[Goal]) -> tuple[Row, ...]:
    """The rows that no other row beats in every goal; with one goal, the best row."""
    able = [row for row in ranking if row.reason is None]
    points = [
        [(v.value if g.maximize else -v.value) if v else -math.inf for v, g in zip(r.values, goals, strict=True)]
        for r in able
    ]

    def dominated(point: list[float]) -> bool:
        return any(all(a >= b for a, b in zip(other, point, strict=True)) and other != point for other in points)

    return tuple(row for row, point in zip(able, points, strict=True) if not dominated(point))


def _failures(records: Sequence[TrialRecord]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for record in records:
        if record.status == "failed":
            name = record.failure.failure_class.value if record.failure else "unknown"
            found[name] = (*found.get(name, ()), record.number)
    return found

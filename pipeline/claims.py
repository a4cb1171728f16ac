"""Confirmation launches -> claims that a configuration beats the baseline, or that it cannot be told. Pure.

The best of many trials is best partly by luck, so a claim rests on confirmation launches alone: they were made after
the finalists were chosen, in turns with the baseline, and are compared within rounds.

A confirmation may end before its last planned round. Every look at its figures is a chance to be wrong, so the looks
share the error rate out among them beforehand (Bonferroni): stopping early costs launches, never honesty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.config import Frozen
from pipeline.goals import baseline_id, why_not, worth
from pipeline.records import Estimate, TrialRecord
from pipeline.spec import ObjectiveSpec

# Chance, over all claims of a study, that an interval misses the true gain (half of it on the winning side).
ERROR_RATE = 0.05
# What of it all looks before the last one may spend together.
EARLY_SHARE = 0.2

# `not judged`: the finalist placed before it was not better, and testing on would raise the error rate.
Verdict = Literal["better", "worse", "no difference", "not judged"]


class Claim(Frozen):
    """One finalist against the baseline, from confirmation launches alone, paired by round."""

    config_id: str
    against: str
    rounds: int
    gain: Estimate  # share; the interval holds for all claims of the study together
    error_rate: float = ERROR_RATE  # of this look
    verdict: Verdict
    text: str


def looks(planned: int) -> range:
    """After how many rounds a confirmation of `planned` rounds may be judged: pairs of rounds, of opposite orders."""
    return range(2 + planned % 2, planned + 1, 2)


def _error_rate(rounds: int, planned: int | None) -> float:
    """The share of the error rate that a look after `rounds` rounds may spend."""
    early = len(looks(planned)) - 1 if planned is not None else 0
    if planned is None or early < 1:
        return ERROR_RATE
    return ERROR_RATE * (1 - EARLY_SHARE if rounds >= planned else EARLY_SHARE / early)


def decided(claims: Sequence[Claim], settings: Mapping[str, int]) -> bool:
    """True when more rounds are not worth their launches: it is clear who wins, or that the first is not ahead at all.

    Args:
        claims: after a look's rounds.
        settings: how many settings of each finalist differ from the baseline's: of level ones the simpler wins.
    """
    if not claims or claims[0].gain.value <= 0:
        return bool(claims)
    better = [claim for claim in claims if claim.verdict == "better"]
    if any(claim.verdict not in ("better", "worse") for claim in claims):
        return False
    top = max(better, key=lambda claim: claim.gain.value)
    simpler = [claim for claim in better if settings[claim.config_id] < settings[top.config_id]]
    return all(claim.gain.value < (top.gain.low or 0.0) for claim in simpler)


def make_claims(records: Sequence[TrialRecord], spec: ObjectiveSpec, floor: float | None) -> tuple[Claim, ...]:
    """Each finalist against the baseline, from confirmation launches.

    The model is log value = configuration + round + noise, fitted by least squares, so that launches of one
    round are compared with each other and a lost launch costs only itself. The interval is Student's t with
    the pooled residual, at `ERROR_RATE` or this look's share of it. The finalists are judged in the order in
    which the search placed them, and the second one only when the first is better: so the error rate holds for
    both together.
    """
    goal, home = spec.goals[0], baseline_id(records)
    values = worth(records, goal)
    lost = {r.config_id for r in records if r.role == "confirm" and r.config_id != home and why_not(r, spec)}
    used = [r for r in records if r.role == "confirm" and r.number in values]
    finalists = [config for config in _placed(used) if config != home and config not in lost]
    fit = _Fit.of(used, [(1 if goal.maximize else -1) * math.log(values[r.number]) for r in used])
    if fit is None or home not in fit.configs:
        return ()
    planned = max((r.of_rounds for r in used if r.of_rounds is not None), default=None)
    looked_at = _last_line_up(records)
    claims: list[Claim] = []
    for config in finalists:
        shared = [r.round or 0 for r in used if r.config_id == config]
        rate = _error_rate(sum(number in looked_at for number in shared), planned)
        middle, error = fit.difference(config, home)
        found = _gain(len(shared), middle, error * _t_quantile(1 - rate / 2, fit.degrees), error)
        judged = not claims or claims[-1].verdict == "better"
        claims.append(_claim(config, home, found, floor, judged=judged, planned=planned, rate=rate))
    return tuple(claims)


@dataclass(frozen=True)
class _Fit:
    """The model of the claims, fitted: what each configuration is worth, beside its rounds."""

    configs: list[str]
    fitted: NDArray[np.floating]
    inverse: NDArray[np.floating]
    variance: float  # of one launch, pooled
    degrees: int

    @classmethod
    def of(cls, used: Sequence[TrialRecord], logs: Sequence[float]) -> _Fit | None:
        """Fit it to launches and their logarithms; None where they leave nothing to tell noise by."""
        configs, rounds = sorted({r.config_id for r in used}), sorted({r.round or 0 for r in used})
        degrees = len(used) - len(configs) - len(rounds) + 1
        if not used or degrees < 1:
            return None
        y, design = np.asarray(logs), np.zeros((len(used), len(configs) + len(rounds)))
        for line, record in enumerate(used):
            design[line, configs.index(record.config_id)] = 1
            design[line, len(configs) + rounds.index(record.round or 0)] = 1
        inverse = np.linalg.pinv(design.T @ design)
        fitted = inverse @ design.T @ y
        return cls(configs, fitted, inverse, float(np.sum((y - design @ fitted) ** 2)) / degrees, degrees)

    def difference(self, config: str, home: str) -> tuple[float, float]:
        """How far a configuration is ahead of another, and the standard error of that; both of logarithms."""
        contrast = np.zeros(len(self.fitted))
        contrast[self.configs.index(config)], contrast[self.configs.index(home)] = 1, -1
        return float(contrast @ self.fitted), math.sqrt(self.variance * float(contrast @ self.inverse @ contrast))


def _last_line_up(records: Sequence[TrialRecord]) -> set[int]:
    """The rounds of the last line-up: within one, configurations only drop out; an extended search brings others.

    What an earlier line-up has launched counts as evidence, but its rounds are no look at the present one.
    """
    by_round: dict[int, set[str]] = {}
    for record in records:
        if record.role == "confirm":
            by_round.setdefault(record.round or 0, set()).add(record.config_id)
    found: set[int] = set()
    later: set[str] = set()
    for number in sorted(by_round, reverse=True):
        if not later <= by_round[number]:
            break
        found.add(number)
        later = by_round[number]
    return found


def _placed(confirmations: Sequence[TrialRecord]) -> list[str]:
    """The configurations in the order of the search: that of the last round, which is never turned round."""
    latest = sorted(confirmations, key=lambda record: (-(record.round or 0), record.number))
    return list(dict.fromkeys(record.config_id for record in latest))


def _gain(rounds: int, middle: float, half: float, error: float) -> Estimate:
    """A difference of logarithms, its interval and its standard error, as a share."""
    low, high = math.expm1(middle - half), math.expm1(middle + half)
    return Estimate(value=math.expm1(middle), n=rounds, std=error * math.sqrt(rounds), low=low, high=high)


def _claim(
    config: str, home: str, found: Estimate, floor: float | None, *, judged: bool, planned: int | None, rate: float
) -> Claim:
    assert found.low is not None and found.high is not None
    verdict: Verdict = "no difference"
    if not judged:
        verdict = "not judged"
    elif found.low > 0 and found.value > (floor or 0.0):
        verdict = "better"
    elif found.high < 0:
        verdict = "worse"
    over = f"{found.n} rounds" if planned is None or found.n >= planned else f"{found.n} of {planned} rounds"
    noise = "" if floor is None else f", noise floor {floor:.1%}"
    text = f"{found.value:+.1%} ({found.low:+.1%} to {found.high:+.1%}) over {over}{noise}"
    return Claim(
        config_id=config, against=home, rounds=found.n, gain=found, error_rate=rate, verdict=verdict, text=text
    )


def _t_quantile(probability: float, degrees: int) -> float:
    from scipy.special import stdtrit  # half a second, needed only once figures exist

    return float(stdtrit(degrees, probability))

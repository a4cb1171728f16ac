"""The model behind the default sampler: what it learns from few launches of a conditional space."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.surrogate import Encoder, Surrogate, acquisition, expected_improvement

PROTO = {"LL": 0.1, "LL128": 0.2, "Simple": 0.0}


def point(draft: int | None, proto: str, noise: str = "a") -> dict[str, Any]:
    found: dict[str, Any] = {"speculation": "none", "proto": proto, "noise": noise}
    return found if draft is None else found | {"speculation": "NGRAM", "draft": draft}


def truth(settings: dict[str, Any]) -> float:
    """log tok/s: settings multiply, draft tokens have a middle that is best, `noise` does nothing."""
    drafting = -0.02 * (settings["draft"] - 6) ** 2 + 0.3 if "draft" in settings else 0.0
    return drafting + PROTO[settings["proto"]]


SPACE = [point(d, p, n) for d, p, n in itertools.product((None, 2, 4, 6, 8, 10), PROTO, "abc")]


def fitted(seed: int, count: int) -> tuple[Surrogate, Encoder]:
    chosen = [SPACE[at] for at in np.random.default_rng(seed).permutation(len(SPACE))[:count]]
    encoder = Encoder(SPACE)
    return Surrogate(encoder.rows(chosen), np.array([truth(s) for s in chosen]), encoder), encoder


@pytest.mark.parametrize("seed", range(3))
def test_a_third_of_the_points_predicts_the_others(seed: int) -> None:
    model, encoder = fitted(seed, 18)
    mean, deviation = model.predict(encoder.rows(SPACE))
    assert np.corrcoef(mean, [truth(s) for s in SPACE])[0, 1] > 0.9
    assert (deviation > 0).all()


def test_a_setting_without_effect_changes_no_prediction() -> None:
    model, encoder = fitted(0, 30)
    by_noise = [model.predict(encoder.rows([point(6, "LL", noise)]))[0][0] for noise in "abc"]
    by_proto = [model.predict(encoder.rows([point(6, proto)]))[0][0] for proto in PROTO]
    assert np.ptp(by_noise) < 0.02 < 0.15 < np.ptp(by_proto)


def test_the_best_point_is_found_within_few_launches() -> None:
    known = [SPACE[at] for at in (0, 20, 40)]
    while len(known) < 16 and max(map(truth, known)) < 0.5:
        values = [truth(s) for s in known]
        score = acquisition(known, values, [True] * len(known), [], SPACE)
        known.append(next(SPACE[at] for at in np.argsort(-score) if SPACE[at] not in known))
    assert max(map(truth, known)) == pytest.approx(0.5)


def test_a_region_that_fails_loses_its_appeal() -> None:
    """LL128 would be best, but all of it fails."""
    known = [s for s in SPACE if s["noise"] == "a"][::2]
    feasible = [s["proto"] != "LL128" for s in known]
    values = [truth(s) if ok else None for s, ok in zip(known, feasible, strict=True)]
    fresh = [s for s in SPACE if s not in known]
    score = acquisition(known, values, feasible, [], fresh)
    assert fresh[int(np.argmax(score))]["proto"] != "LL128"


def test_a_point_in_flight_is_not_proposed_again() -> None:
    known = [SPACE[at] for at in (0, 7, 20, 33, 41)]
    values = [truth(s) for s in known]
    first = SPACE[int(np.argmax(acquisition(known, values, [True] * 5, [], SPACE)))]
    second = SPACE[int(np.argmax(acquisition(known, values, [True] * 5, [first], SPACE)))]
    assert first != second


def test_one_finished_trial_is_enough_to_go_on() -> None:
    score = acquisition([SPACE[0]], [0.1], [True], [], SPACE)
    assert np.isfinite(score).all()


@settings(max_examples=50)
@given(mean=st.floats(-5, 5), deviation=st.floats(1e-3, 5), best=st.floats(-5, 5))
def test_expected_improvement_is_never_negative_and_grows_with_the_mean(
    mean: float, deviation: float, best: float
) -> None:
    low, high = expected_improvement(np.array([mean, mean + 0.1]), np.array([deviation] * 2), best)
    assert -1e-9 <= low <= high + 1e-12


def test_numbers_keep_their_order_and_absent_is_unlike_any() -> None:
    encoder = Encoder(SPACE)
    rows = encoder.rows([point(2, "LL"), point(4, "LL"), point(10, "LL"), point(None, "LL")])
    apart = encoder.distances(rows, rows)[encoder.names.index("draft")]
    assert 0 < apart[0, 1] < apart[0, 2] < apart[0, 3] == 1.0

"""Who won, and every reason why nobody did."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.claims import EARLY_SHARE, ERROR_RATE, decided, looks, make_claims
from pipeline.config import Collectives, EngineConfig, NgramSpeculation
from pipeline.records import Broken, Estimate, LoadLevel, Measurement, TrialRecord
from pipeline.selection import measure_noise, select
from pipeline.spec import Constraints, Goal, ObjectiveSpec
from tests.fakes.toy_search import level, lossless, record

BASE = EngineConfig(engine="sglang", model="toy")
FAST = EngineConfig(engine="sglang", model="toy", speculation=NgramSpeculation(num_draft_tokens=8))
OTHER = EngineConfig(engine="sglang", model="toy", collectives=Collectives(nccl_algo="Ring"))
ONE = ObjectiveSpec()


def study(*values: tuple[EngineConfig, float | None], **more: Any) -> list[TrialRecord]:
    """The baseline at 100, then the given launches."""
    found = [record(0, BASE, 100.0, "baseline")]
    return found + [record(n, config, value, **more) for n, (config, value) in enumerate(values, start=1)]


def confirmed(
    gain: float, rounds: int = 3, noise: float = 0.003, other: float | None = None, seed: int = 0
) -> list[TrialRecord]:
    """A search in which FAST won by 10 %, and its confirmation in which it gains `gain`, on a drifting machine."""
    rng, found = random.Random(seed), study((FAST, 110.0), (OTHER, 105.0))
    lineup = {FAST: 1 + gain, BASE: 1.0} | ({OTHER: 1 + other} if other is not None else {})
    for number in range(1, rounds + 1):
        for config, factor in lineup.items():
            value = 100 * factor * (1 + 0.02 * number) * (1 + noise * rng.gauss(0, 1))
            found.append(record(len(found), config, value, "confirm", round=number))
    return found


def test_an_empty_ledger_has_no_winner_and_says_why() -> None:
    selection = select([], ONE)
    assert selection.winner is None and "baseline has no figures" in selection.reason


def test_a_failed_baseline_leaves_nothing_to_compare_with() -> None:
    selection = select([record(0, BASE, None, "baseline"), record(1, FAST, 150.0)], ONE)
    assert selection.winner is None and selection.ranking[0].config_id == FAST.config_id


def test_a_baseline_alone_wins() -> None:
    selection = select(study(), ONE)
    assert selection.winner is not None and selection.winner.is_baseline and not selection.confirmed


def test_without_confirmation_a_clear_gain_wins_provisionally() -> None:
    selection = select(study((FAST, 140.0), (OTHER, 101.0)), ONE)
    assert selection.winner is not None and selection.winner.config_id == FAST.config_id
    assert not selection.confirmed and selection.reason.startswith("unconfirmed")


def test_without_confirmation_the_best_of_many_must_beat_what_luck_gives_the_best_of_many() -> None:
    many = [(EngineConfig(engine="sglang", model="toy", attention_backend=f"b{n}"), 100.0 + n / 10) for n in range(25)]
    selection = select(study(*many), ONE)
    assert selection.winner is not None and selection.winner.is_baseline
    assert "luck alone could make the best of" in selection.reason


def test_a_confirmed_gain_wins_with_its_interval_and_rounds_cancel_drift() -> None:
    selection = select(confirmed(0.08), ONE)
    assert selection.winner is not None and selection.winner.config_id == FAST.config_id and selection.confirmed
    (claim,) = selection.claims
    assert claim.verdict == "better" and claim.rounds == 3
    assert claim.gain.value == pytest.approx(0.08, abs=0.01)  # not 0.10, by which it was chosen
    assert claim.gain.low is not None and claim.gain.low > 0.05


def test_a_winner_within_noise_gives_way_to_the_baseline_with_the_reason() -> None:
    selection = select(confirmed(0.001, noise=0.01), ONE)
    assert selection.winner is not None and selection.winner.is_baseline
    assert "no difference that holds" in selection.reason and selection.confirmed


def test_a_gain_below_the_noise_floor_is_no_win_however_tight_its_interval() -> None:
    selection = select(confirmed(0.02, noise=0.0005), ONE)  # the baseline itself drifted by 6 %
    assert selection.noise_floor is not None and selection.noise_floor > 0.05
    assert selection.winner is not None and selection.winner.is_baseline
    assert selection.claims[0].gain.low is not None and selection.claims[0].gain.low > 0


def test_a_slower_finalist_is_called_worse() -> None:
    (claim,) = make_claims(confirmed(-0.1), ONE, None)
    assert claim.verdict == "worse"


def test_one_round_cannot_confirm() -> None:
    assert make_claims(confirmed(0.1, rounds=1), ONE, None) == ()


def test_of_finalists_that_are_level_the_simpler_wins() -> None:
    plain = select(confirmed(0.2, other=0.2, noise=0.005, seed=1), ONE)
    assert plain.winner is not None and plain.winner.config_id == OTHER.config_id  # one setting against two
    ahead = select(confirmed(0.20, other=0.08, noise=0.0005), ONE)
    assert ahead.winner is not None and ahead.winner.config_id == FAST.config_id
    assert ahead.runner_up is not None and ahead.runner_up.config_id == OTHER.config_id


def test_a_lost_launch_costs_the_confirmation_only_itself() -> None:
    ledger = confirmed(0.08, rounds=4, other=0.02)
    lost = [r for r in ledger if not (r.role == "confirm" and r.round == 2 and r.config_id == OTHER.config_id)]
    claims = {claim.config_id: claim for claim in make_claims(lost, ONE, None)}
    assert claims[FAST.config_id].rounds == 4 and claims[OTHER.config_id].rounds == 3
    assert claims[OTHER.config_id].gain.value == pytest.approx(0.02, abs=0.01)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"lossless": lossless(False)}, "not lossless: 6 wrong outputs"),
        ({"broken": (Broken(rule="client-saturated", protects_from="x", seen="99 % of a core"),)}, "client-saturated"),
        ({"status": "stopped", "reason": "stopped early: behind"}, "stopped early: behind"),
    ],
)
def test_what_cannot_be_trusted_never_wins_and_says_why(more: dict[str, Any], words: str) -> None:
    ledger = [*study((OTHER, 100.5)), record(2, FAST, 300.0).model_copy(update=more)]
    selection = select(ledger, ONE)
    row = next(row for row in selection.ranking if row.config_id == FAST.config_id)
    assert row.reason is not None and words in row.reason
    assert selection.winner is not None and selection.winner.config_id != FAST.config_id


def test_one_lossy_launch_of_a_configuration_disqualifies_all_of_it() -> None:
    ledger = confirmed(0.3)
    ledger[-2] = ledger[-2].model_copy(update={"lossless": lossless(False)})
    assert ledger[-2].config_id == FAST.config_id
    selection = select(ledger, ONE)
    assert selection.winner is not None and selection.winner.is_baseline
    assert selection.claims == () and "luck alone could make the best of" in selection.reason


def test_a_non_fatal_broken_rule_does_not_disqualify() -> None:
    note = Broken(rule="few-samples", protects_from="x", seen="y", fatal=False)
    selection = select([*study(), record(1, FAST, 150.0, broken=(note,))], ONE)
    assert selection.winner is not None and selection.winner.config_id == FAST.config_id


def test_a_broken_limit_disqualifies_and_a_baseline_that_breaks_it_need_not_be_beaten() -> None:
    limits = ObjectiveSpec(constraints=Constraints(p95_ttft_ms=60.0))

    def at(number: int, config: EngineConfig, value: float, ttft: float, role: str = "search") -> TrialRecord:
        found = Measurement(levels=(level(value, ttft=ttft),))
        return record(number, config, value, role).model_copy(update={"measurement": found})

    slow_baseline = select([at(0, BASE, 100, 80, "baseline"), at(1, FAST, 90, 50)], limits)
    assert slow_baseline.winner is not None and slow_baseline.winner.config_id == FAST.config_id
    assert "the baseline may not win" in slow_baseline.reason
    slow_trial = select([at(0, BASE, 100, 50, "baseline"), at(1, FAST, 300, 80)], limits)
    assert slow_trial.winner is not None and slow_trial.winner.is_baseline
    row = next(row for row in slow_trial.ranking if not row.is_baseline)
    assert row.reason is not None and "p95_ttft_ms over its limit of 60" in row.reason


def test_failures_are_listed_by_class_and_reused_and_pruned_trials_are_no_launches() -> None:
    reused = record(3, FAST, 500.0).model_copy(update={"status": "reused", "reused_from": 1})
    selection = select([*study((FAST, 130.0), (OTHER, None)), reused], ONE)
    assert selection.failures == {"collective": (2,)}
    assert next(row for row in selection.ranking if row.config_id == FAST.config_id).trials == (1,)


def test_noise_is_the_larger_of_drift_repeats_and_relaunches() -> None:
    ledger = [record(0, BASE, 100.0, "baseline"), record(1, FAST, 120.0), record(2, FAST, 121.2)]
    ledger.append(record(3, BASE, 103.0, "confirm", round=1))
    noise = measure_noise(ledger, Goal())
    assert noise.drift == pytest.approx(0.03)
    assert noise.relaunches is not None and 0.005 < noise.relaunches < 0.03
    assert noise.repeats is None and noise.floor == noise.drift


def test_repeats_within_a_launch_give_a_noise_floor_on_their_own() -> None:
    wide = level(100.0).model_copy(
        update={"output_tok_per_s": Estimate(value=100.0, n=4, std=4.0, low=94.0, high=106.0)}
    )
    found = record(0, BASE, 100.0, "baseline").model_copy(update={"measurement": Measurement(levels=(wide,))})
    assert measure_noise([found], Goal()).floor == pytest.approx(0.02 * 2**0.5)


def test_times_are_better_when_lower() -> None:
    selection = select(study((FAST, 130.0)), ObjectiveSpec(goals=(Goal(metric="mean_tpot_ms"),)))
    assert selection.winner is not None and selection.winner.config_id == FAST.config_id
    assert selection.winner.gain == pytest.approx(0.3)


def test_the_pareto_front_keeps_what_nothing_beats_in_both_goals() -> None:
    goals = (Goal(concurrency=64), Goal(metric="mean_tpot_ms", concurrency=1))

    def at(number: int, config: EngineConfig, busy: float, alone: float, role: str = "search") -> TrialRecord:
        levels = (level(busy, concurrency=64), level(alone, concurrency=1))
        return record(number, config, busy, role).model_copy(update={"measurement": Measurement(levels=levels)})

    worse = EngineConfig(engine="sglang", model="toy", attention_backend="slow")
    ledger = [at(0, BASE, 900, 100, "baseline"), at(1, FAST, 500, 200), at(2, OTHER, 950, 110), at(3, worse, 400, 90)]
    front = {row.config_id for row in select(ledger, ObjectiveSpec(goals=goals)).pareto}
    assert front == {FAST.config_id, OTHER.config_id}


def test_levels_are_mixed_by_the_objective() -> None:
    levels = (level(800.0, "open", 8), level(100.0, "open", 1))
    found = record(0, BASE, 1.0, "baseline").model_copy(update={"measurement": Measurement(levels=levels)})
    one = select([found], ObjectiveSpec(goals=(Goal(weights={LoadLevel(workload="open", concurrency=1).key: 1.0}),)))
    assert one.baseline is not None and one.baseline.values[0] is not None
    assert one.baseline.values[0].value == pytest.approx(100.0)


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_a_selection_survives_the_ledger_in_any_order_of_confirmation(seed: int) -> None:
    ledger = confirmed(0.08, other=0.01, seed=seed)
    tail = ledger[3:]
    random.Random(seed).shuffle(tail)
    first, shuffled = select(ledger, ONE), select([*ledger[:3], *tail], ONE)
    assert {c.config_id: c.verdict for c in first.claims} == {c.config_id: c.verdict for c in shuffled.claims} or (
        first.noise_floor != shuffled.noise_floor  # drift is first against last, so order is part of it
    )


def test_the_second_finalist_is_judged_only_after_the_first_has_won() -> None:
    verdicts = [claim.verdict for claim in make_claims(confirmed(-0.05, other=0.3, noise=0.003), ONE, None)]
    assert verdicts == ["worse", "not judged"]


def test_a_first_finalist_that_crashed_makes_way_for_the_second() -> None:
    ledger = confirmed(0.2, other=0.1)
    ledger.append(record(len(ledger), FAST, None, "confirm", round=3))
    selection = select(ledger, ONE)
    assert selection.winner is not None and selection.winner.config_id == OTHER.config_id and selection.confirmed


def test_false_wins_are_as_rare_as_stated() -> None:
    """Identical finalists: the share of studies with any `better` claim is half the error rate."""
    wins = 0
    for seed in range(400):
        claims = make_claims(confirmed(0.0, other=0.0, noise=0.01, seed=seed), ONE, None)
        wins += any(claim.verdict == "better" for claim in claims)
    assert wins / 400 < ERROR_RATE


def sequential(*args: Any, planned: int = 4, rounds: int = 2, **more: Any) -> list[TrialRecord]:
    """A confirmation of `planned` rounds, looked at after `rounds`."""
    ledger = confirmed(*args, rounds=rounds, **more)
    return [r.model_copy(update={"of_rounds": planned}) if r.role == "confirm" else r for r in ledger]


@pytest.mark.parametrize(("planned", "after"), [(0, []), (1, []), (2, [2]), (3, [3]), (4, [2, 4]), (5, [3, 5])])
def test_a_confirmation_is_looked_at_after_pairs_of_rounds(planned: int, after: list[int]) -> None:
    assert list(looks(planned)) == after


def test_the_looks_of_a_confirmation_share_the_error_rate() -> None:
    for planned in (2, 3, 4, 5, 8):
        spent = [make_claims(sequential(0.2, rounds=n, planned=planned), ONE, None)[0] for n in looks(planned)]
        assert sum(claim.error_rate for claim in spent) == pytest.approx(ERROR_RATE)
        assert spent[-1].error_rate >= (1 - EARLY_SHARE) * ERROR_RATE
    early, fixed = (make_claims(ledger, ONE, None)[0] for ledger in (sequential(0.2), confirmed(0.2, rounds=2)))
    assert fixed.error_rate == ERROR_RATE  # a number of rounds that was fixed beforehand spends it all at once
    assert early.gain.low is not None and fixed.gain.low is not None and early.gain.low < fixed.gain.low
    assert "over 2 of 4 rounds" in early.text and "over 2 rounds" in fixed.text


def test_an_earlier_line_ups_rounds_are_no_looks_at_the_present_one() -> None:
    ledger = sequential(0.2, rounds=2)
    for number in (3, 4):
        for config, value in ((OTHER, 140.0 + number % 2), (FAST, 120.0), (BASE, 100.0)):
            more = {"round": number, "of_rounds": 4}
            ledger.append(record(len(ledger), config, value, "confirm", **more))
    early = ERROR_RATE * EARLY_SHARE
    assert [(c.config_id, c.error_rate, c.rounds) for c in make_claims(ledger, ONE, None)] == [
        (OTHER.config_id, early, 2),
        (FAST.config_id, early, 4),
    ]


@pytest.mark.parametrize(
    ("first", "second", "noise", "settings", "clear"),
    [
        (0.3, 0.1, 0.001, (2, 1), True),  # both better, and the simpler one clearly behind
        (0.3, 0.29, 0.01, (2, 1), False),  # the simpler one may be as good
        (0.3, 0.29, 0.01, (1, 2), True),  # as good, but not simpler
        (0.01, 0.0, 0.02, (1, 1), False),
        (-0.1, 0.3, 0.001, (1, 1), True),  # the first is not ahead: the second will not be judged
    ],
)
def test_a_confirmation_ends_early_only_when_the_winner_is_clear(
    first: float, second: float, noise: float, settings: tuple[int, int], clear: bool
) -> None:
    claims = make_claims(sequential(first, other=second, noise=noise, seed=4), ONE, None)
    assert decided(claims, dict(zip((FAST.config_id, OTHER.config_id), settings, strict=True))) is clear


def test_two_looks_make_no_more_false_wins_than_one() -> None:
    wins = 0
    for seed in range(400):
        ledger = sequential(0.0, other=0.0, noise=0.01, seed=seed, rounds=4)
        early = [r for r in ledger if r.role != "confirm" or (r.round or 0) <= 2]
        wins += any(c.verdict == "better" for look in (early, ledger) for c in make_claims(look, ONE, None))
    assert wins / 400 < ERROR_RATE

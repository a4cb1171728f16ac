"""Kill the driver anywhere: no finished trial is lost or repeated, and the study ends as if nothing had happened."""

from __future__ import annotations

import random

import pytest

from pipeline.records import TrialRecord
from pipeline.spec import Budget, SamplerName, SearchSpec
from tests.fakes.toy_search import Study, ToySpace

SEED_POINT = {"speculation.algorithm": "NGRAM", "speculation.NGRAM.num_draft_tokens": 16}


def study(sampler: SamplerName, concurrency: int = 1, ledger: list[TrialRecord] | None = None) -> Study:
    search = SearchSpec(sampler=sampler, budget=Budget(trials=9), startup_trials=4)
    return Study(ToySpace(stated=[SEED_POINT]), search, noise=0.003, concurrency=concurrency, ledger=ledger or [])


def killed(sampler: SamplerName, kills: list[int], concurrency: int = 1) -> tuple[list[TrialRecord], list[int]]:
    """Run to the end through kills, each after so many launches; the ledger survives as JSON. Also what finished."""
    ledger: list[TrialRecord] = []
    launched: list[int] = []
    for after in [*kills, None]:
        session = study(sampler, concurrency, [TrialRecord.model_validate_json(r.model_dump_json()) for r in ledger])
        ledger = session.run(stop_after=after)
        launched += [proposal.number for proposal in session.launches]
    assert session.end is not None
    return ledger, launched


@pytest.mark.parametrize("sampler", ["tpe", "surrogate", "random", "quasi-random", "grid"])
def test_a_study_killed_at_random_points_equals_one_that_never_was(sampler: SamplerName) -> None:
    whole = study(sampler).run()
    for seed in range(1 if sampler == "surrogate" else 3):
        kills = random.Random(seed).sample(range(1, 7), 3)
        ledger, launched = killed(sampler, kills)
        assert [r.model_dump() for r in ledger] == [r.model_dump() for r in whole]
        # Launched twice are only the trials that were in flight, one for each kill.
        assert len(launched) - len(set(launched)) == len(kills)


@pytest.mark.parametrize("at", range(1, 26, 3))
def test_a_kill_in_any_phase_loses_and_repeats_nothing(at: int) -> None:
    whole = study("random").run()
    ledger, _ = killed("random", [at])
    assert [r.model_dump() for r in ledger] == [r.model_dump() for r in whole]


@pytest.mark.parametrize("seed", range(3))
def test_with_several_in_flight_no_finished_trial_is_lost_or_repeated(seed: int) -> None:
    kills = random.Random(seed).sample(range(4, 9), 2)
    ledger, _ = killed("tpe", kills, concurrency=3)
    numbers = [r.number for r in ledger]
    assert len(numbers) == len(set(numbers)) == max(numbers) + 1
    searched = [r.config_id for r in ledger if r.role in ("seed", "search") and r.status in ("ok", "failed")]
    assert len(searched) == len(set(searched)) == 9
    rounds = [(r.round, r.config_id) for r in ledger if r.role == "confirm"]
    assert len(rounds) == len(set(rounds))


def test_a_finished_study_proposes_nothing_more() -> None:
    ledger = study("tpe").run()
    again = study("tpe", ledger=list(ledger))
    again.run()
    assert again.launches == []


def test_a_larger_budget_extends_a_finished_study_and_confirms_the_new_finalists() -> None:
    first = study("random")
    first.search = first.search.model_copy(update={"budget": Budget(trials=2)})
    first.run()
    longer = study("random", ledger=list(first.ledger))
    longer.search = longer.search.model_copy(update={"budget": Budget(trials=30)})
    longer.run()
    assert sum(p.role == "search" for p in longer.launches) > 10
    old = {r.round for r in first.ledger if r.role == "confirm"}
    new = {p.round for p in longer.launches if p.role == "confirm"}
    assert new and not new & old

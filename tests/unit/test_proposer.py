"""Order, memo, pruning, failures, ablation and concurrency of the proposer, on a toy space."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.config import Collectives, EngineConfig, NgramSpeculation
from pipeline.lessons import observations
from pipeline.proposer import Done, Proposal, Wait
from pipeline.records import FailureClass, Measurement, TrialRecord
from pipeline.selection import rank, select
from pipeline.spec import Budget, Constraints, Goal, ObjectiveSpec, SamplerName, SearchSpec
from tests.fakes.toy_search import Broken, Study, ToySpace, level, record, roles, toy_speed

NGRAM8 = {"speculation.algorithm": "NGRAM", "speculation.NGRAM.num_draft_tokens": 8}
BEST = {**NGRAM8, "collectives.nccl_algo": "allreduce:tree", "attention_backend": "fa3"}
TREE = {"speculation.algorithm": "none", "collectives.nccl_algo": "Tree", "attention_backend": None}


def search(trials: int = 8, **more: Any) -> SearchSpec:
    return SearchSpec(**{"sampler": "random", "confirm_rounds": 2, "budget": Budget(trials=trials), **more})


def test_order_is_baseline_seeds_search_ablation_confirmation_baseline() -> None:
    study = Study(ToySpace(stated=[BEST]), search(6))
    study.run()
    order = list(dict.fromkeys(roles(study.launches)))
    assert order == ["baseline", "seed", "search", "ablation", "confirm"]
    assert study.launches[0].config == study.launches[-1].config == ToySpace().baseline()
    assert [p.params for p in study.launches if p.role == "seed"] == [BEST]
    assert study.end == "the budget of 6 trials is used"


def test_a_baseline_that_its_second_try_changed_is_the_baseline() -> None:
    study = Study(search=search(4))
    proposer = study.proposer()
    first = proposer.propose()
    assert isinstance(first, Proposal)
    moved = first.config.model_copy(update={"mem_fraction_static": 0.75})
    proposer.observe(record(first.number, moved, 100.0, "baseline"))
    study.launches.append(first)
    study.ledger.extend(proposer._records)
    study.run(proposer)
    confirmed = {p.config for p in study.launches if p.role == "confirm"}
    assert {config for config in confirmed if config.words(beside=moved) == "none"} == {moved}


def test_the_budget_counts_launches_of_seeds_and_search_only() -> None:
    study = Study(ToySpace(stated=[BEST]), search(6))
    study.run()
    assert sum(role in ("seed", "search") for role in roles(study.launches)) == 6


def test_confirmation_turns_the_order_round_and_pairs_by_round() -> None:
    study = Study(ToySpace(stated=[BEST, NGRAM8]), search(4, confirm_rounds=3, ablate=False))
    study.run()
    rounds = [(p.round, p.config.words()) for p in study.launches if p.role == "confirm"]
    first, second, third = ([words for number, words in rounds if number == r] for r in (1, 2, 3))
    assert first == third == second[::-1]
    assert len(first) == 3 and third[-1] == ToySpace().baseline().words()


def test_a_confirmation_ends_once_the_matter_is_settled() -> None:
    """A clear winner and a runner-up behind it need two of four rounds; the last launch is the baseline's then too."""
    study = Study(ToySpace(stated=[BEST, NGRAM8]), search(4, confirm_rounds=4, ablate=False), noise=0.002)
    study.run()
    confirms = [p for p in study.launches if p.role == "confirm"]
    assert [p.round for p in confirms] == [1, 1, 1, 2, 2, 2] and confirms[-1].config == ToySpace().baseline()
    assert {p.of_rounds for p in confirms} == {4}
    assert select(study.ledger, ObjectiveSpec()).winner == next(r for r in rank(study.ledger, ObjectiveSpec()))


def test_a_confirmation_that_two_rounds_do_not_settle_takes_them_all() -> None:
    close = search(4, confirm_rounds=4, ablate=False)
    study = Study(ToySpace(stated=[BEST]), close, speed=lambda c: 105.0 if c.attention_backend else 100.0, noise=0.015)
    study.run()
    assert {p.round for p in study.launches if p.role == "confirm"} == {1, 2, 3, 4}


def test_a_new_finalist_is_never_paired_with_a_baseline_from_before_the_extension() -> None:
    first = Study(ToySpace(stated=[NGRAM8]), search(1, ablate=False))
    first.run()
    assert [p.round for p in first.launches if p.role == "confirm"] == [1, 1, 2, 2]
    longer = Study(ToySpace(stated=[NGRAM8, BEST]), search(2, ablate=False), ledger=list(first.ledger))
    longer.run()
    assert [p.round for p in longer.launches if p.role == "confirm"] == [3, 3, 3, 4, 4, 4]


def test_without_confirmation_rounds_the_baseline_still_runs_last() -> None:
    study = Study(search=search(4, confirm_rounds=0, ablate=False))
    study.run()
    assert roles(study.launches) == ["baseline", *["search"] * 4, "confirm"]
    assert study.launches[-1].config == ToySpace().baseline()


def test_a_failing_baseline_is_tried_twice_and_ends_the_study() -> None:
    study = Study(search=search(4), speed=lambda config: None)
    study.run()
    assert roles(study.launches) == ["baseline", "baseline"]
    assert study.end is not None and "NCCL error" in study.end


def test_points_that_are_the_same_configuration_are_measured_once() -> None:
    def canonical(config: EngineConfig) -> EngineConfig:
        return config.model_copy(update={"attention_backend": None})  # a dead dimension

    grid = search(30, sampler="grid", ablate=False, confirm_rounds=0)
    study = Study(search=grid, canonical=canonical, speed=lambda config: 100.0)
    study.run()
    measured = [r.config_id for r in study.ledger if r.role in ("baseline", "search") and r.status != "reused"]
    assert len(measured) == len(set(measured)) == 5 * 4
    reused = [r for r in study.ledger if r.status == "reused"]
    assert len(reused) == 20  # 40 of the grid's 60 points were known; the ledger has the first for each trial
    by_number = {r.number: r for r in study.ledger}
    assert all(r.reused_from is not None and by_number[r.reused_from].config_id == r.config_id for r in reused)
    assert study.end == "every point of the grid was tried"


def test_a_rule_prunes_without_a_launch_and_is_named() -> None:
    def rules(config: EngineConfig) -> tuple[Broken, ...]:
        return (Broken("bare-tree", "Tree has no all-gather"),) if config.collectives.nccl_algo == "Tree" else ()

    study = Study(ToySpace(stated=[TREE]), search(100, sampler="grid", ablate=False), rules=rules)
    study.run()
    pruned = [r for r in study.ledger if r.status == "pruned"]
    assert [(r.role, r.reason) for r in pruned] == [("seed", "bare-tree: Tree has no all-gather")]  # once, not 15 times
    assert all(p.config.collectives.nccl_algo != "Tree" for p in study.launches)


def test_every_launch_and_every_point_passed_over_is_in_the_ledger_under_its_own_number() -> None:
    study = Study(search=search(10))
    study.run()
    assert [r.number for r in study.ledger] == list(range(len(study.ledger)))


@pytest.mark.parametrize("sampler", ["tpe", "random", "quasi-random", "grid"])
def test_a_small_space_is_exhausted_and_says_so(sampler: SamplerName) -> None:
    study = Study(search=search(100, sampler=sampler, ablate=False, confirm_rounds=0))
    study.run()
    launched = {r.config_id for r in study.ledger if r.status in ("ok", "failed")}
    failed = sum(r.status == "failed" for r in study.ledger)
    assert len(launched) == 60 - 15 + failed  # all but the part of the failing region that was left
    assert study.end is not None and ("exhausted" in study.end or "grid" in study.end)


@pytest.mark.parametrize("sampler", ["tpe", "surrogate", "random", "quasi-random", "grid"])
def test_the_same_seed_gives_the_same_study(sampler: SamplerName) -> None:
    first, again, other = (Study(search=search(10, sampler=sampler, seed=seed)) for seed in (3, 3, 4))
    for study in (first, again, other):
        study.run()
    assert [p.config for p in first.launches] == [p.config for p in again.launches]
    assert [p.config for p in first.launches] != [p.config for p in other.launches]


def test_gp_proposes_too() -> None:
    study = Study(search=search(9, sampler="gp", startup_trials=6, ablate=False, confirm_rounds=0))
    study.run()
    assert sum(p.role == "search" for p in study.launches) == 9


@pytest.mark.parametrize("sampler", ["tpe", "surrogate"])
def test_samplers_that_learn_find_the_best_point(sampler: SamplerName) -> None:
    study = Study(search=search(25, sampler=sampler, ablate=False, confirm_rounds=0))
    study.run()
    speeds = [toy_speed(p.config) for p in study.launches]
    assert max(s for s in speeds if s) == pytest.approx(161.0)


def test_a_region_that_keeps_failing_is_left_and_named() -> None:
    study = Study(search=search(30, sampler="grid", ablate=False, confirm_rounds=0))
    proposer = study.proposer()
    study.run(proposer)
    failed = [p for p in study.launches if p.config.collectives.nccl_algo == "Tree"]
    assert len(failed) == 3
    (region,) = proposer.left_regions()
    assert region.settings == (("collectives.nccl_algo", "Tree"),)
    assert region.text() in next(r.reason or "" for r in study.ledger if r.status == "pruned")


def test_settings_that_only_failed_together_are_left_only_together() -> None:
    config = EngineConfig(
        engine="sglang", model="toy", collectives=Collectives(custom_all_reduce=False, nccl_algo="Tree")
    )
    ledger = [record(0, ToySpace().baseline(), 100.0, "baseline"), *(record(n, config, None) for n in (1, 2, 3))]
    (region,) = Study(ledger=ledger).proposer().left_regions()
    assert dict(region.settings) == {"collectives.custom_all_reduce": False, "collectives.nccl_algo": "Tree"}


def test_accidents_do_not_condemn_a_region() -> None:
    config = EngineConfig(engine="sglang", model="toy", collectives=Collectives(nccl_algo="Ring"))
    lost = record(1, config, None)
    assert lost.failure is not None
    port = lost.model_copy(update={"failure": lost.failure.model_copy(update={"failure_class": FailureClass.PORT})})
    ledger = [
        record(0, ToySpace().baseline(), 100.0, "baseline"),
        *(port.model_copy(update={"number": n}) for n in (1, 2, 3)),
    ]
    assert Study(ledger=ledger).proposer().left_regions() == ()


def test_ablation_keeps_what_helps_and_undoes_what_does_not() -> None:
    study = Study(ToySpace(stated=[BEST]), search(1), noise=0.002)
    proposer = study.proposer()
    study.run(proposer)
    kept = {effect.setting: effect.kept for effect in proposer.effects()}
    assert kept == {
        "speculation": True,
        "speculation.num_draft_tokens": True,
        "collectives.nccl_algo": True,
        "attention_backend": False,
    }
    confirmed = {p.config for p in study.launches if p.role == "confirm"}
    simple = EngineConfig(
        engine="sglang", model="toy", speculation=NgramSpeculation(num_draft_tokens=8),
        collectives=Collectives(nccl_algo="allreduce:tree"),
    )  # fmt: skip
    assert confirmed == {simple, ToySpace().baseline()}
    (together,) = (p for p in study.launches if p.config == simple and p.role == "ablation")
    assert together.params and ToySpace().config(together.params) == simple  # for the warm start of a later study


def test_settings_that_only_work_together_survive_ablation_through_the_simplified_launch() -> None:
    """Each of two settings is redundant alone; without both the gain is gone."""

    def speed(config: EngineConfig) -> float:
        helped = config.collectives.nccl_algo == "Ring" or config.attention_backend == "fa3"
        return (150.0 if helped else 100.0) * (1.3 if isinstance(config.speculation, NgramSpeculation) else 1.0)

    both = {**NGRAM8, "collectives.nccl_algo": "Ring", "attention_backend": "fa3"}
    study = Study(ToySpace(stated=[both]), search(1), speed=speed)
    study.run()
    together = next(p for p in study.launches if p.undone and ", " in p.undone)
    assert together.undone == "speculation.num_draft_tokens, collectives.nccl_algo, attention_backend"
    finalists = {p.config for p in study.launches if p.role == "confirm"}
    assert ToySpace().config(both) in finalists and together.config not in finalists


def test_a_winner_that_fails_when_confirmed_is_not_launched_again() -> None:
    best = ToySpace().config(BEST)
    launches = {"best": 0}

    def speed(config: EngineConfig) -> float | None:
        launches["best"] += config == best
        return None if config == best and launches["best"] > 1 else toy_speed(config)

    study = Study(ToySpace(stated=[BEST, NGRAM8]), search(4, ablate=False), speed=speed)
    study.run()
    assert launches["best"] == 2
    assert sum(p.role == "confirm" for p in study.launches) == 5  # 3 and 3, less the winner's second


def test_several_trials_in_flight_are_distinct_and_confirmation_is_one_at_a_time() -> None:
    study = Study(search=search(12, sampler="tpe"), concurrency=4)
    proposer = study.proposer()
    assert isinstance(proposer.propose(), Proposal)
    assert isinstance(proposer.propose(), Wait)  # nothing runs before the baseline is known
    study.run()
    searched = [p.config_id for p in study.launches if p.role == "search"]
    assert len(searched) == len(set(searched)) == 12
    confirms = [r.number for r in study.ledger if r.role == "confirm"]
    assert confirms == sorted(confirms)


def test_each_further_node_gets_a_reference_trial_and_its_bias_is_taken_out() -> None:
    study = Study(search=search(2))
    proposer = study.proposer(nodes=("a", "b"))
    first = proposer.propose()
    assert isinstance(first, Proposal)
    proposer.observe(record(0, first.config, 100.0, "baseline", node="a"))
    reference = proposer.propose()
    assert isinstance(reference, Proposal) and (reference.role, reference.node) == ("reference", "b")
    proposer.observe(record(1, reference.config, 80.0, "reference", node="b"))
    slow = record(2, ToySpace().config(NGRAM8), 110.0, node="b", params=NGRAM8)
    fast = record(3, ToySpace().config(BEST), 130.0, node="a", params=BEST)
    for done in (slow, fast):
        proposer.observe(done)
    leader = proposer._view().leader()
    assert leader == slow.config  # 110 on a node that runs the baseline at 80 is 137 on the other


@pytest.mark.parametrize(("budget", "words"), [(Budget(hours=1.0), "1 hours"), (Budget(gpu_hours=4.0), "4 GPU-hours")])
def test_time_budgets_keep_a_reserve_for_the_confirmation(budget: Budget, words: str) -> None:
    now = {"s": 0.0}
    study = Study(search=SearchSpec(sampler="random", budget=budget))
    proposer = study.proposer(gpus_per_trial=4)
    proposer._clock = lambda: now["s"]
    for _ in range(100):
        answer = proposer.propose()
        if isinstance(answer, Done):
            break
        assert isinstance(answer, Proposal)
        now["s"] += 120.0
        value = toy_speed(answer.config)
        proposer.observe(record(answer.number, answer.config, value, answer.role, params=answer.params, **answer.facts))
    assert isinstance(answer, Done) and words in answer.reason
    assert 2400 < now["s"] <= 3600 + 240


def test_an_interrupted_study_counts_the_hours_it_has_used_but_not_the_break() -> None:
    ledger = [
        record(0, ToySpace().baseline(), 100.0, "baseline", started_at="2026-01-01T00:00:00+00:00"),
        record(1, ToySpace().config(NGRAM8), 120.0, started_at="2026-01-01T00:01:00+00:00"),  # overlaps by a minute
        record(2, ToySpace().config(BEST), 120.0, started_at="2026-01-03T00:00:00+00:00"),
    ]
    proposer = Study(search=SearchSpec(budget=Budget(hours=1.0)), ledger=ledger).proposer()
    assert proposer._earlier_s == 180 + 120


def two_levels(number: int, busy: float, alone: float, role: str = "search", **more: Any) -> TrialRecord:
    levels = (level(busy, concurrency=8, **more), level(alone, concurrency=1))
    config = ToySpace().config({"attention_backend": f"b{number}"} if number else {})
    return record(number, config, 1.0, role).model_copy(update={"measurement": Measurement(levels=levels)})


def after_five(objective: ObjectiveSpec | None = None) -> Proposal:
    """The next proposal once five trials have shown how their levels differ; the best gives 178 tok/s."""
    ledger = [two_levels(0, 800, 100, "baseline"), *(two_levels(n, 800 - 20 * n, 99) for n in range(1, 5))]
    study = Study(search=search(9), ledger=ledger, objective=objective or ObjectiveSpec())
    proposal = study.proposer().propose()
    assert isinstance(proposal, Proposal) and proposal.stop_early is not None
    return proposal


def test_a_trial_that_cannot_win_is_stopped_and_one_that_can_is_not() -> None:
    stop = after_five().stop_early
    assert stop is not None
    reason = stop((level(200.0, concurrency=8),))
    assert reason is not None and "behind the best trial" in reason
    assert stop((level(795.0, concurrency=8),)) is None  # within the spread
    assert stop((level(200.0, concurrency=8), level(90.0, concurrency=1))) is None  # nothing left to save


def test_few_trials_stop_nobody() -> None:
    study = Study(search=search(9), ledger=[two_levels(0, 800, 100, "baseline")])
    proposal = study.proposer().propose()
    assert isinstance(proposal, Proposal) and proposal.stop_early is not None
    assert proposal.stop_early((level(100.0, concurrency=8),)) is None


def test_a_trial_slow_under_load_goes_on_where_another_made_up_for_it_with_one_stream() -> None:
    """Speculation often loses at many streams and wins at one; the ratio of another trial is credit enough."""
    ledger = [
        two_levels(0, 800, 100, "baseline"),
        *(two_levels(n, 800, 99) for n in range(1, 4)),
        two_levels(4, 200, 150),
    ]
    proposal = Study(search=search(9), ledger=ledger).proposer().propose()
    assert isinstance(proposal, Proposal) and proposal.stop_early is not None
    assert proposal.stop_early((level(250.0, concurrency=8),)) is None


def test_a_broken_limit_stops_a_trial() -> None:
    stop = after_five(ObjectiveSpec(constraints=Constraints(p95_ttft_ms=100.0))).stop_early
    assert stop is not None
    assert stop((level(900.0, ttft=150.0),)) == "breaks p95_ttft_ms"


def test_a_stopped_trial_still_teaches_the_sampler_about_its_value() -> None:
    ledger = [two_levels(0, 800, 100, "baseline"), *(two_levels(n, 800, 100) for n in range(1, 5))]
    stopped = two_levels(5, 400, 50).model_copy(
        update={
            "status": "stopped",
            "reason": "stopped early: behind",
            "measurement": Measurement(levels=(level(400.0),)),
        }
    )
    found = observations([*ledger, stopped], ObjectiveSpec())[-1]
    assert found.violation == 0 and found.values == pytest.approx((2 / (1 / 400 + 1 / 50),))


def test_warm_start_points_are_tried_after_the_files_own() -> None:
    study = Study(ToySpace(stated=[NGRAM8]), search(3))
    study.run(study.proposer(extra_seeds=[BEST, NGRAM8]))
    assert [p.params for p in study.launches if p.role == "seed"] == [NGRAM8, BEST]


@pytest.mark.parametrize("sampler", ["tpe", "surrogate"])
def test_two_goals_are_searched_together(sampler: SamplerName) -> None:
    goals = (Goal(), Goal(metric="mean_tpot_ms"))
    study = Study(search=search(12, sampler=sampler, ablate=False), objective=ObjectiveSpec(goals=goals))
    study.run()
    assert sum(p.role == "search" for p in study.launches) == 12


def test_launches_left_counts_down_to_nothing() -> None:
    study = Study(search=search(5, confirm_rounds=1))
    proposer = study.proposer()
    before = proposer.launches_left()
    study.run(proposer)
    assert before is not None and before >= 5
    assert proposer.launches_left() == 0


def test_ablation_is_judged_from_the_ledger_alone() -> None:
    study = Study(ToySpace(stated=[BEST]), search(1), noise=0.002)
    study.run()
    copy = [TrialRecord.model_validate_json(r.model_dump_json()) for r in study.ledger]
    assert Study(search=search(1), ledger=copy).proposer().effects() == study.proposer().effects()

"""Offline surfaces: what was measured stays what it was, and launches end where real ones would."""

from __future__ import annotations

import pytest

from benchmarks.measured import load_records, measured_pcie, repeat_sd
from benchmarks.surfaces import RESULTS, Surface
from pipeline.config import EngineConfig
from pipeline.goals import StopRule
from pipeline.proposer import Proposal
from pipeline.spec import ObjectiveSpec


@pytest.fixture(scope="module")
def surface() -> Surface:
    return measured_pcie()


def test_an_algorithm_with_one_trial_is_as_fast_as_that_trial(surface: Surface) -> None:
    records = load_records(RESULTS / "gpu2" / "gpu2-pcie.jsonl")
    (trial,) = (r for r in records if r.measurement and r.config.speculation.algorithm == "STANDALONE")
    assert trial.measurement is not None
    for seen in trial.measurement.levels:
        assert surface.speed(trial.config, seen.level) == pytest.approx(seen.output_tok_per_s.value)


def test_bare_tree_fails_and_settings_that_were_not_reached_are_filled_in(surface: Surface) -> None:
    truths = {config: surface.truth(config) for config in surface.configurations.values()}
    assert len(truths) == 3 * 72
    assert {config.collectives.nccl_algo for config, value in truths.items() if value is None} == {"Tree"}
    assert sum(value is not None for value in truths.values()) == 3 * 54


def test_the_noise_is_that_of_the_repeats() -> None:
    assert 0.05 < repeat_sd(load_records(RESULTS / "gpu2" / "gpu2-pcie.jsonl")) < 0.2


def test_a_launch_stops_between_loads_as_the_ruler_does(surface: Surface) -> None:
    config: EngineConfig = surface.canonical(surface.space.baseline())
    whole = surface.measure(Proposal(0, "search", config), seed=0)
    assert whole.measurement is not None and len(whole.measurement.levels) == 4
    hopeless = StopRule(ObjectiveSpec(), best=1e9, finished=(whole.measurement.levels,) * 5)
    stopped = surface.measure(Proposal(1, "search", config, stop_early=hopeless), seed=0)
    assert stopped.status == "stopped" and stopped.measurement is not None
    assert [level.level.concurrency for level in stopped.measurement.levels] == [8, 8]
    assert stopped.phases_s["measure"] < whole.phases_s["measure"]

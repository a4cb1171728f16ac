"""Samplers over a conditional space, and the trials that stand in for Optuna's."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from pipeline.config import EngineConfig
from pipeline.lessons import Observation
from pipeline.records import Topology
from pipeline.sampling import PointTrial, RandomTrial, Sampler, _at, point_of
from pipeline.space import load_space
from pipeline.spec import SamplerName
from tests.fakes.toy_search import ToySpace

NGRAM = {"speculation.algorithm": "NGRAM", "speculation.NGRAM.num_draft_tokens": 4, "collectives.nccl_algo": "Ring"}


def take(sampler: Sampler, count: int) -> list[dict[str, Any]]:
    return list(itertools.islice(sampler.sequence(), count))


@pytest.mark.parametrize("name", ["random", "quasi-random", "grid"])
def test_a_sequence_is_the_same_each_time_and_differs_by_seed(name: SamplerName) -> None:
    assert take(Sampler(ToySpace(), name, 1), 20) == take(Sampler(ToySpace(), name, 1), 20)
    assert take(Sampler(ToySpace(), name, 1), 20) != take(Sampler(ToySpace(), name, 2), 20)


def test_quasi_random_points_spread_evenly_over_every_branch() -> None:
    points = take(Sampler(ToySpace(), "quasi-random", 0), 64)
    drafting = [p for p in points if p["speculation.algorithm"] == "NGRAM"]
    assert len(drafting) == 32
    counts = [sum(p["speculation.NGRAM.num_draft_tokens"] == d for p in drafting) for d in (2, 4, 8, 16)]
    assert counts == [8, 8, 8, 8]


def test_the_grid_is_walked_once_in_an_order_of_its_own() -> None:
    points = list(Sampler(ToySpace(), "grid", 0).sequence())
    grid = list(ToySpace().grid())
    assert points != grid and sorted(map(str, points)) == sorted(map(str, grid))


def test_a_point_answers_for_itself_and_leaves_out_what_it_does_not_state() -> None:
    trial = PointTrial(NGRAM)
    assert ToySpace().suggest(trial)["attention_backend"] is None
    assert trial.params == NGRAM and set(trial.distributions) == set(NGRAM)


def test_a_mutant_keeps_most_of_its_parent_and_stays_in_the_space() -> None:
    rng, grid = np.random.default_rng(0), list(ToySpace().grid())
    parent = {**NGRAM, "attention_backend": "fa3"}
    mutants = [ToySpace().suggest(RandomTrial(rng, parent, 0.25)) for _ in range(200)]
    assert all(mutant in grid for mutant in mutants)
    assert 20 < sum(mutant == parent for mutant in mutants) < 120


@pytest.mark.parametrize("name", ["tpe", "surrogate"])
def test_points_of_an_edited_space_are_passed_over_not_fatal(name: SamplerName) -> None:
    stale = {**NGRAM, "speculation.NGRAM.num_draft_tokens": 5, "attention_backend": "gone"}
    seen = [
        Observation(p, {"x": n}, (100.0 + n,)) for n, p in enumerate([stale, *itertools.islice(ToySpace().grid(), 5)])
    ]
    sampler = Sampler(ToySpace(), name, 0, startup=3, describe=lambda point: dict(point))
    assert next(sampler.points(seen, [NGRAM], 6)) in list(ToySpace().grid())


DISTRIBUTIONS = st.sampled_from([
    CategoricalDistribution(("a", None, True)), IntDistribution(1, 6), IntDistribution(2, 16, step=2),
    IntDistribution(1, 64, log=True), FloatDistribution(0.5, 2.0), FloatDistribution(0.5, 2.0, step=0.5),
    FloatDistribution(1e-3, 1.0, log=True),
])  # fmt: skip


@given(distribution=DISTRIBUTIONS, at=st.floats(0, 1, exclude_max=True))
def test_every_share_of_a_range_is_a_value_of_it(distribution: Any, at: float) -> None:
    value = _at(distribution, at)
    assert distribution._contains(distribution.to_internal_repr(value))


SPACES = Path(__file__).parents[2] / "tune_spaces"


@pytest.mark.parametrize("name", ["verify", "kimi-k2.5-pcie"])
def test_a_configuration_leads_back_to_a_point_of_its_space(name: str) -> None:
    """Also where the engine makes of a choice what is none: FlashInfer's `auto` becomes a backend."""
    space = load_space(SPACES / f"{name}.yaml").for_engine("sglang")
    topology = Topology(gpu_count=8, gpu_model="NVIDIA H200", sm=90, peer_access=True, link="nvlink")

    def canonical(config: EngineConfig) -> EngineConfig:
        return space.canonical(config, "0.5.23", topology).config

    rng = np.random.default_rng(0)
    for _ in range(40):
        config = canonical(space.config(space.suggest(RandomTrial(rng))))
        point = point_of(space, config, canonical)
        assert canonical(space.config(point)) == config and space.contains(point) is None


def test_a_configuration_outside_the_space_has_no_point() -> None:
    outside = ToySpace().baseline().model_copy(update={"attention_backend": "other"})
    assert point_of(ToySpace(), outside, lambda config: config) == {}

"""Optuna's samplers over a conditional space, one point at a time. With `proposer.py`, the only optuna user.

Every draw builds its study anew from what is known (finished points, points in flight) and seeds its sampler
with the draw's own key: a resumed run then draws what the killed one would have drawn, with no second store
that has to agree with the ledger.
"""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from pipeline.ablation import settings_of
from pipeline.config import EngineConfig
from pipeline.lessons import Observation
from pipeline.spec import SamplerName
from pipeline.surrogate import acquisition

Point = dict[str, Any]
_SOBOL_DIMENSIONS = 64
_MOST_TRIES = 64
POOL = 160  # candidates that the surrogate judges: so many at random, and as many close to the best
PARENTS = 4
CHANGE = 0.25  # chance that a value of a parent changes


class Space(Protocol):
    """What a sampler and the proposer need of a space (`pipeline.space.Space`)."""

    def suggest(self, trial: Any, /) -> Point: ...

    def config(self, params: Point, /) -> EngineConfig: ...

    def baseline(self) -> EngineConfig: ...

    def seeds(self) -> Sequence[Point]: ...

    def grid(self) -> Iterator[Point]: ...


class PointTrial:
    """Stands in for an Optuna trial: answers with a given point, and notes the distributions asked for.

    A dimension that the point does not state answers with its first value, so that the walk goes on, and is not
    noted: a seed may leave to the engine what the space has no word for.
    """

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.given = params
        self.params: Point = {}
        self.distributions: dict[str, BaseDistribution] = {}

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        return self._answer(name, CategoricalDistribution(tuple(choices)), choices[0])

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> Any:
        return self._answer(name, IntDistribution(low, high, log=log, step=step), low)

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False) -> Any:
        return self._answer(name, FloatDistribution(low, high, log=log, step=step), low)

    def _answer(self, name: str, distribution: BaseDistribution, default: Any) -> Any:
        if name not in self.given:
            return default
        self.params[name], self.distributions[name] = self.given[name], distribution
        return self.given[name]


class SettingsTrial(PointTrial):
    """Answers with a configuration's settings, None for what it leaves open; `open` has what fits no choice."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.open: dict[str, Sequence[Any]] = {}

    def _answer(self, name: str, distribution: BaseDistribution, default: Any) -> Any:
        value = self.given.get(name)
        choices = distribution.choices if isinstance(distribution, CategoricalDistribution) else (value,)
        if value in choices and (value is not None or len(choices) > 1):
            return value
        self.open[name] = choices
        return default


def point_of(space: Space, config: EngineConfig, canonical: Callable[[EngineConfig], EngineConfig]) -> Point:
    """The point of the space that the engine would make `config` of; empty where the space has none.

    A value that the engine rewrites (`auto`) is found by trying the choices of its dimension.
    """
    settings = settings_of(config)
    trial = SettingsTrial(settings | {"speculation.algorithm": settings["speculation"]})
    point = space.suggest(trial)
    tries = itertools.islice(itertools.product(*trial.open.values()), _MOST_TRIES)
    points = (point | dict(zip(trial.open, values, strict=True)) for values in tries)
    return next((found for found in points if canonical(space.config(found)) == config), {})


class SobolSampler(BaseSampler):
    """The n-th point of a scrambled Sobol sequence; the k-th dimension asked for takes its k-th coordinate.

    Optuna's own QMC sampler draws only the dimensions of the first trial from the sequence, which in a
    conditional space is one branch.
    """

    def __init__(self, seed: int, index: int) -> None:
        self._point = _sobol(seed, index)
        self._asked = 0

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        at = float(self._point[self._asked % _SOBOL_DIMENSIONS])
        self._asked += 1
        return _at(param_distribution, at)


@cache
def _sobol_block(seed: int, size: int) -> np.ndarray[Any, Any]:
    from scipy.stats import qmc

    block: np.ndarray[Any, Any] = qmc.Sobol(_SOBOL_DIMENSIONS, rng=seed).random(size)
    return block


def _sobol(seed: int, index: int) -> np.ndarray[Any, Any]:
    point: np.ndarray[Any, Any] = _sobol_block(seed, 1 << max(6, index.bit_length()))[index]
    return point


def _at(distribution: BaseDistribution, at: float) -> Any:
    """The distribution's value at a share of its range."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[int(at * len(distribution.choices))]
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    whole = isinstance(distribution, IntDistribution)
    low, high, step = distribution.low, distribution.high, distribution.step
    if distribution.log:
        value = float(np.exp(np.log(low) + at * (np.log(high + whole) - np.log(low))))
        return min(int(value), int(high)) if whole else value
    if step is None:
        return low + at * (high - low)
    value = low + step * int(at * (round((high - low) / step) + 1))
    return int(value) if whole else value


class RandomTrial(PointTrial):
    """Answers at random, or with a given point of which each value changes with some probability."""

    def __init__(self, rng: np.random.Generator, params: Mapping[str, Any] | None = None, change: float = 0.0) -> None:
        super().__init__(params or {})
        self._rng, self._change = rng, change

    def _answer(self, name: str, distribution: BaseDistribution, default: Any) -> Any:
        if name in self.given and self._rng.random() >= self._change:
            return self.given[name]
        return _at(distribution, float(self._rng.random()))


@dataclass(frozen=True)
class Sampler:
    """Draws points of a space.

    Random, quasi-random and grid do not depend on what was seen: a resumed run walks them again, and its caller
    passes over what it knows. The others draw from what was seen, seeded by the draw's number.

    Args:
        space: the space.
        name: which sampler.
        seed: of all draws.
        startup: random points before a model takes over.
        maximize: one direction per goal.
        describe: the settings that the engine would make of a point; the surrogate sees those.
    """

    space: Space
    name: SamplerName
    seed: int
    startup: int = 0
    maximize: tuple[bool, ...] = (True,)
    describe: Callable[[Point], Mapping[str, Any]] | None = None

    @property
    def is_sequence(self) -> bool:
        """True where draws do not depend on what was seen."""
        return self.name in ("random", "quasi-random", "grid")

    def sequence(self) -> Iterator[Point]:
        """All draws of a sampler that does not learn; ends only for the grid."""
        if self.name == "grid":
            grid = list(self.space.grid())
            yield from (grid[at] for at in np.random.default_rng(self.seed).permutation(len(grid)))
            return
        sampler: BaseSampler = optuna.samplers.RandomSampler(seed=_seed(self.seed))
        for index in itertools.count():
            if self.name == "quasi-random":
                sampler = SobolSampler(self.seed, index)
            with _quiet():
                yield self.space.suggest(optuna.create_study(sampler=sampler).ask())

    def points(self, seen: Sequence[Observation], in_flight: Sequence[Point], number: int) -> Iterator[Point]:
        """Draws of a sampler that learns, best first; the caller takes the first that it can use.

        Args:
            seen: finished trials.
            in_flight: points being measured.
            number: names this draw, so that it differs from others and can be repeated.
        """
        if self.name == "surrogate":
            yield from self._by_surrogate(seen, in_flight, np.random.default_rng([self.seed, number]))
            return
        directions = [StudyDirection.MAXIMIZE if up else StudyDirection.MINIMIZE for up in self.maximize]
        with _quiet():
            study = optuna.create_study(directions=directions, sampler=self._model(_seed(self.seed, number)))
            study.add_trials(self._history(seen, in_flight))
        while True:
            with _quiet():
                point = self.space.suggest(study.ask())  # stays in flight, which drives the next draw elsewhere
            yield point

    def _model(self, seed: int) -> BaseSampler:
        if self.name == "gp":
            return optuna.samplers.GPSampler(seed=seed, n_startup_trials=self.startup, warn_independent_sampling=False)
        return optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=self.startup, multivariate=True, group=True, constant_liar=True
        )

    def _by_surrogate(
        self, seen: Sequence[Observation], in_flight: Sequence[Point], rng: np.random.Generator
    ) -> Iterator[Point]:
        assert self.describe is not None
        launched = [o for o in seen if o.launched]
        if sum(o.values is not None for o in launched) < max(2, self.startup):
            while True:
                yield self.space.suggest(RandomTrial(rng))
        values = _scalar(launched, self.maximize, rng)
        ranked = sorted((o for o in zip(values, launched, strict=True) if o[0] is not None), key=lambda o: -(o[0] or 0))
        parents = [o.params for _, o in ranked if o.params and o.violation <= 0][:PARENTS]
        pool = [self.space.suggest(RandomTrial(rng)) for _ in range(POOL)]
        pool += [self.space.suggest(RandomTrial(rng, p, CHANGE)) for p in parents for _ in range(POOL // PARENTS)]
        score = acquisition(
            [o.settings for o in launched],
            values,
            [o.violation <= 0 for o in launched],
            [self.describe(point) for point in in_flight],
            [self.describe(point) for point in pool],
        )
        yield from (pool[at] for at in np.argsort(-score, kind="stable"))

    def _history(self, seen: Sequence[Observation], in_flight: Sequence[Point]) -> list[FrozenTrial]:
        known = [o.values for o in seen if o.values is not None and o.params]
        if not known:
            return []
        # An infeasible point is told apart by its constraint. Optuna wants a value too: the median says nothing,
        # where zero would bend the model of every point nearby.
        middle = [statistics.median(column) for column in zip(*known, strict=True)]
        finished = [self._trial(o.params, list(o.values or middle), o.violation) for o in seen if o.params]
        running = [self._trial(point, None, 0.0) for point in in_flight]
        return [trial for trial in finished + running if trial is not None]

    def _trial(self, params: Point, values: list[float] | None, violation: float) -> FrozenTrial | None:
        point = PointTrial(params)
        state = TrialState.RUNNING if values is None else TrialState.COMPLETE
        constraints = None if values is None else {"violation": violation}
        try:
            self.space.suggest(point)
            return create_trial(
                state=state,
                values=values,
                params=point.params,
                distributions=point.distributions,
                constraints=constraints,
            )
        except ValueError:
            return None  # a value that the space no longer has, after an edit or from an earlier study


def _scalar(seen: Sequence[Observation], maximize: Sequence[bool], rng: np.random.Generator) -> list[float | None]:
    """One figure per trial, larger is better: the log of the value, or of a random mix of the goals (ParEGO)."""
    weights = rng.dirichlet(np.ones(len(maximize))) if len(maximize) > 1 else np.ones(1)
    signed = [weight if up else -weight for weight, up in zip(weights, maximize, strict=True)]
    return [
        None if o.values is None else float(sum(w * np.log(v) for w, v in zip(signed, o.values, strict=True)))
        for o in seen
    ]


def _seed(*entropy: int) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """Optuna's experimental warnings and its log line per study, off."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield

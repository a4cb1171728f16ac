"""A Gaussian process over settings: predicts the goal of a configuration nobody has launched. Pure.

Settings mostly multiply, and a few only matter together. So the log of the value is modelled as a sum over
settings plus an interaction that fades with the number of settings that differ; which settings matter is learned
by marginal likelihood. A conditional setting that is absent is one more value of it, so branches share what they
have in common, where a space cut into branches would learn each one anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Settings = Mapping[str, Any]
Array = NDArray[np.float64]

_RELEVANCES = (0.05, 0.3, 1.0, 3.0)
_MIXES = (0.2, 0.5, 0.8)
_NOISES = (0.003, 0.02, 0.1)
_SWEEPS = 2
_JITTER = 1e-8


class Encoder:
    """Settings as rows of numbers: the rank of a number among those seen, the index of a word, -1 for absent."""

    def __init__(self, known: Sequence[Settings]) -> None:
        seen: dict[str, list[Any]] = {}
        for settings in known:
            for name, value in settings.items():
                seen.setdefault(name, []).append(value)
        varying = (name for name, values in seen.items() if len(values) < len(known) or len(set(values)) > 1)
        self.names = sorted(varying)
        self._values = [_ordered(set(seen[name])) for name in self.names]
        self._numeric = [all(_is_number(v) for v in values) for values in self._values]

    def rows(self, settings: Sequence[Settings]) -> Array:
        """One row each."""
        tables = [{value: float(at) for at, value in enumerate(values)} for values in self._values]
        found = [[t[s[n]] if n in s else -1.0 for n, t in zip(self.names, tables, strict=True)] for s in settings]
        return np.array(found, dtype=float).reshape(len(settings), len(self.names))

    def distances(self, a: Array, b: Array) -> Array:
        """Per setting, 0 (same) to 1 (unlike); neighbours in a range of numbers are half alike. Shape (d, n, m)."""
        apart = np.abs(a.T[:, :, None] - b.T[:, None, :])
        both = (a.T[:, :, None] >= 0) & (b.T[:, None, :] >= 0)
        numeric = np.array(self._numeric, dtype=bool)[:, None, None]
        return np.where(numeric & both, 1 - 0.5**apart, (apart > 0).astype(float))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ordered(values: set[Any]) -> list[Any]:
    numbers = sorted(v for v in values if _is_number(v))
    return numbers + sorted((v for v in values if not _is_number(v)), key=repr)


@dataclass(frozen=True)
class Kernel:
    """Relevance of each setting, share of the interaction, noise variance (of standardised values)."""

    relevance: Array
    mix: float
    noise: float

    def __call__(self, distances: Array) -> Array:
        weights = self.relevance / self.relevance.sum() if self.relevance.sum() else self.relevance
        additive = np.tensordot(weights, 1 - distances, axes=1)
        together = np.exp(-np.tensordot(self.relevance, distances, axes=1))
        return np.asarray((1 - self.mix) * additive + self.mix * together)


class Surrogate:
    """A fitted model.

    Args:
        rows: encoded settings, shape (n, d).
        values: what was seen, larger is better, shape (n,).
        encoder: made the rows.
        kernel: given, or fitted by marginal likelihood.
    """

    def __init__(self, rows: Array, values: Array, encoder: Encoder, kernel: Kernel | None = None) -> None:
        self._rows, self._encoder = rows, encoder
        self._mean, self._scale = float(values.mean()), float(values.std()) or 1.0
        self._values = (values - self._mean) / self._scale
        self._distances = encoder.distances(rows, rows)
        self.kernel = kernel or self._fit()
        self._factor = self._cholesky(self.kernel)
        self._weights = _solve(self._factor, self._values)

    def predict(self, rows: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the noise-free value at each row."""
        cross = self.kernel(self._encoder.distances(rows, self._rows))
        inner = np.linalg.solve(self._factor, cross.T)
        variance = np.maximum(1.0 - (inner**2).sum(axis=0), 1e-9)
        return self._mean + self._scale * (cross @ self._weights), self._scale * np.sqrt(variance)

    def _cholesky(self, kernel: Kernel) -> Array:
        gram = kernel(self._distances)
        return np.asarray(np.linalg.cholesky(gram + (kernel.noise + _JITTER) * np.eye(len(gram))), dtype=float)

    def _likelihood(self, kernel: Kernel) -> float:
        factor = self._cholesky(kernel)
        half = np.linalg.solve(factor, self._values)
        # A weak prior against many relevant settings: few launches cannot tell them from chance.
        prior = 0.15 * float(np.log(kernel.relevance / _RELEVANCES[0]).sum())
        return -0.5 * float(half @ half) - float(np.log(np.diag(factor)).sum()) - prior

    def _fit(self) -> Kernel:
        """Coordinate ascent over small grids: deterministic, and enough for tens of points."""
        best = Kernel(np.full(len(self._encoder.names), 0.3), 0.5, 0.02)
        top = self._likelihood(best)
        for _ in range(_SWEEPS):
            for at in range(-2, len(best.relevance)):
                for kernel in _variants(best, at):
                    found = self._likelihood(kernel)
                    if found > top:
                        best, top = kernel, found
        return best


def _variants(kernel: Kernel, at: int) -> list[Kernel]:
    """The kernel with one hyperparameter changed: noise (-2), mix (-1), or the relevance of a setting."""
    if at == -2:
        return [Kernel(kernel.relevance, kernel.mix, noise) for noise in _NOISES]
    if at == -1:
        return [Kernel(kernel.relevance, mix, kernel.noise) for mix in _MIXES]
    changed = [np.where(np.arange(len(kernel.relevance)) == at, value, kernel.relevance) for value in _RELEVANCES]
    return [Kernel(relevance, kernel.mix, kernel.noise) for relevance in changed]


def _solve(factor: Array, values: Array) -> Array:
    return np.asarray(np.linalg.solve(factor.T, np.linalg.solve(factor, values)))


def expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """How much better than `best` each point is on average, counting only what is better."""
    z = (mean - best) / deviation
    erf = np.array([math.erf(v) for v in z / math.sqrt(2)])
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return np.asarray((mean - best) * 0.5 * (1 + erf) + deviation * density)


def acquisition(
    known: Sequence[Settings],
    values: Sequence[float | None],
    feasible: Sequence[bool],
    in_flight: Sequence[Settings],
    candidates: Sequence[Settings],
) -> Array:
    """How promising each candidate is: expected improvement × chance of being feasible.

    Args:
        known: settings of finished trials.
        values: what they gave, larger is better; None for no figures.
        feasible: whether they may win.
        in_flight: settings being measured; taken as if they gave what the model expects.
        candidates: settings to judge.
    """
    encoder = Encoder([*known, *in_flight, *candidates])
    worked = [at for at, value in enumerate(values) if value is not None]
    rows, pool = encoder.rows(known), encoder.rows(candidates)
    seen = np.array([values[at] for at in worked], dtype=float)
    model = Surrogate(rows[worked], seen, encoder)
    fitted = rows[worked]
    if in_flight:
        flying = encoder.rows(in_flight)
        fitted, seen = np.vstack([fitted, flying]), np.concatenate([seen, model.predict(flying)[0]])
        model = Surrogate(fitted, seen, encoder, model.kernel)
    # The incumbent is judged by the model too: the best figure seen is best partly by luck.
    able = [at for at in worked if feasible[at]] or worked
    best = float(model.predict(rows[able])[0].max())
    score = expected_improvement(*model.predict(pool), best)
    if all(feasible):
        return score
    chance = Surrogate(rows, np.array(feasible, dtype=float), encoder).predict(pool)[0]
    return np.asarray(score * np.clip(chance, 0.01, 1.0))

"""Fills the points between measured configurations: log tok/s as a sum of effects of settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pipeline.ablation import settings_of
from pipeline.config import EngineConfig
from pipeline.records import Failure, FailureClass


class LaunchFailsError(Exception):
    """The surface has no figure here: the launch fails with this class."""

    def __init__(self, failure_class: FailureClass, cause: str) -> None:
        self.failure = Failure(failure_class=failure_class, cause=cause)
        super().__init__(cause)


class LogLinear:
    """log tok/s as a sum of effects of settings, fitted to measured configurations by ridge regression.

    A measured point answers with its own figure; a setting seen only in failures fails.
    """

    def __init__(self, measured: Iterable[tuple[EngineConfig, float | None]]) -> None:
        points = [(settings_of(config), value) for config, value in measured]
        worked = [(settings, value) for settings, value in points if value is not None]
        good = {pair for settings, _ in worked for pair in settings.items()}
        self._bad = {pair for settings, value in points if value is None for pair in settings.items()} - good
        self._exact = {_frozen(settings): value for settings, value in worked}
        self._names = sorted({pair for settings, _ in worked for pair in settings.items()}, key=repr)
        rows = np.array([[float(pair in s.items()) for pair in self._names] for s, _ in worked])
        logs = np.log([value for _, value in worked])
        self._middle = float(logs.mean())
        gram = rows.T @ rows + 0.05 * np.eye(len(self._names))
        self._effects = np.linalg.solve(gram, rows.T @ (logs - self._middle))

    def __call__(self, config: EngineConfig) -> float:
        settings = settings_of(config)
        if self._bad & settings.items():
            raise LaunchFailsError(FailureClass.COLLECTIVE, "a setting that failed when it was measured")
        exact = self._exact.get(_frozen(settings))
        if exact is not None:
            return exact
        return float(
            np.exp(
                self._middle + sum(e for e, p in zip(self._effects, self._names, strict=True) if p in settings.items())
            )
        )


def _frozen(settings: Mapping[str, Any]) -> frozenset[tuple[str, Any]]:
    return frozenset(settings.items())

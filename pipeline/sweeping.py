"""Takes down the engines that a study, or one of its trials, has left on any node."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray

from serve.deployment import delete_app, stale_apps
from serve.process import reap

if TYPE_CHECKING:
    from pipeline.search import Bench

OWNER_S = 30.0  # a worker whose driver was killed notices and ends within seconds
SWEEP_S = 300.0


def sweep(bench: Bench, nodes: Sequence[str], number: int | None = None) -> list[str]:
    """Take down the engines of a study, or of one trial, on every node; return what is left, in words.

    Where Ray has died the engines' owners have, too: on this node what they left is looked for without it.
    """
    try:
        return sweep_by_ray(bench, nodes, number)
    except ray.exceptions.RayError as error:
        folder = bench.trials if number is None else bench.trial_dir(number)
        elsewhere = [f"engines on other nodes could not be looked for: {type(error).__name__}"] * (len(nodes) > 1)
        return _reap(str(folder)) + elsewhere


def sweep_by_ray(bench: Bench, nodes: Sequence[str], number: int | None = None) -> list[str]:
    """The same, by Ray alone; RayError where it has died."""
    prefix, folder = (bench.apps, bench.trials) if number is None else (bench.app(number), bench.trial_dir(number))
    clean = ray.remote(num_cpus=0)(_reap)
    left = [f"Ray Serve still has {name}" for name in stale_apps(prefix) if not delete_app(name)]
    alive = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    asked = [clean.options(resources={f"node:{node}": 0.001}).remote(str(folder)) for node in nodes if node in alive]
    return left + [problem for found in ray.get(asked, timeout=SWEEP_S) for problem in found]


def _reap(folder: str) -> list[str]:
    """On a node: end engines without an owner; an owner that is just going gets the time to."""
    deadline = time.monotonic() + OWNER_S
    while (left := reap(folder)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left

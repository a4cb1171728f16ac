"""A Ray cluster for the length of a study: a local one that goes with the driver, or one that is there."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import PreflightError
from pipeline.facts import versions
from pipeline.records import Topology
from pipeline.topology import preflight, probe
from serve.environment import SLOT

KNOCK_S = 10.0
LOOK_S = 120.0  # a node's first worker imports everything
# What two machines must share for their figures to stand in one ranking.
KIND = ("gpu_count", "gpu_model", "peer_access", "link", "sglang", "torch", "fastverify")
_QUIET = {
    # Ray reads these when it is imported or started.
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 would have a trial's engine give way to everything else on its machine
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # ours ends the trials and takes the engines down
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}


@contextmanager
def cluster(address: str | None, gpus: int) -> Iterator[tuple[str, ...]]:
    """Yield the addresses of the nodes that may run trials.

    Args:
        address: a running cluster whose nodes were started with the resource `engine_slot`; None makes
            a local one, without a dashboard, on loopback, that ends with this process.
        gpus: GPUs of this machine, for a local cluster.

    Raises:
        PreflightError: the cluster cannot be reached, or none of its nodes has a slot.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if address is not None:
        _knock(address)
    import ray

    try:
        ray.init(**_options(address, gpus))
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise PreflightError(f"no Ray cluster{f' at {address}' if address else ''}: {error}") from error
    try:
        nodes = tuple(n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"] and n["Resources"].get(SLOT))
        if not nodes:
            raise PreflightError(f"no node of {address} has a slot; start each with --resources='{{\"{SLOT}\": 1}}'")
        from serve.deployment import start_serve

        start_serve()
        yield nodes
    finally:
        ray.shutdown()  # a local cluster ends with it, Serve included


def check_nodes(nodes: Sequence[str], here: Topology, gpus: int, runs: Path) -> list[str]:
    """Look at every node of a cluster as `preflight` looks at this one; return what is worth knowing, in words.

    Args:
        nodes: addresses of the nodes that may run trials.
        here: the driver's machine, which the rules of the study go by.
        gpus: GPUs that one trial holds.
        runs: where studies are kept; the trials of a node write under the same path.

    Raises:
        PreflightError: a node is of another kind than `here`, not ready, or gives no answer; all of them are named.
    """
    import ray

    look = ray.remote(num_cpus=0)(_look)
    asked = [look.options(resources={f"node:{node}": 0.001}).remote(gpus, str(runs.resolve())) for node in nodes]
    deadline, ours = time.monotonic() + LOOK_S, _kind(here)
    problems, warnings = [], []
    for node, answer in zip(nodes, asked, strict=True):
        theirs, found = _answer(answer, deadline, ours)
        unlike = [f"{n} {theirs.get(n)} there, {ours.get(n)} here" for n in KIND if theirs.get(n) != ours.get(n)]
        if unlike:
            problems.append(f"{node} is another kind of machine: {', '.join(unlike)}")
        elif isinstance(found, str):
            problems.append(f"{node}: {found}")
        else:
            warnings += [f"{node}: {warning}" for warning in found]
    if problems:
        raise PreflightError("; ".join(problems))
    return warnings


def _answer(asked: Any, deadline: float, ours: dict[str, Any]) -> tuple[dict[str, Any], list[str] | str]:
    """What `_look` says; of a node that is too slow, gone or without this package only what went wrong."""
    import ray

    try:
        found: tuple[dict[str, Any], list[str] | str] = ray.get(asked, timeout=max(0.0, deadline - time.monotonic()))
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return ours, f"it could not be looked at: {lines[-1]}"
    return found


def _look(gpus: int, runs: str) -> tuple[dict[str, Any], list[str] | str]:
    """On a node: its kind, and the preflight's warnings or what it refuses, in words."""
    try:
        return _kind(probe()), preflight(gpus, runs)
    except PreflightError as error:
        return _kind(probe()), str(error)


def _kind(topology: Topology) -> dict[str, Any]:
    return {name: value for name, value in (topology.model_dump() | versions()).items() if name in KIND}


def _knock(address: str) -> None:
    """Ray itself would wait for many minutes where nobody listens."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdecimal()):
        return  # `auto`, or a word that Ray refuses
    try:
        socket.create_connection((host, int(port)), timeout=KNOCK_S).close()
    except (OSError, OverflowError) as error:
        raise PreflightError(f"no Ray cluster at {address}: {error}") from error


def _options(address: str | None, gpus: int) -> dict[str, Any]:
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    if address is not None:
        return {"address": address, **common}
    # The repository goes to the workers' path as it is here: nothing is copied, nothing must be installed.
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {
        **common,
        "address": "local",  # whatever RAY_ADDRESS says, and whatever cluster `ray start` has left here
        "num_cpus": max(2, os.cpu_count() or 1),
        "num_gpus": gpus,
        "resources": {SLOT: 1},
        "include_dashboard": False,
        "runtime_env": {"env_vars": {"PYTHONPATH": path}},
    }

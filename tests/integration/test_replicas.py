"""Several replicas and autoscaling by configuration: each replica has an engine and GPUs of its own."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serve import procfs
from serve.service import APP_NAME, Service, Shape
from tests.fakes.steady_load import Load
from tests.integration.test_endpoint import service as champion

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
SCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 2,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 1,
    "upscale_delay_s": 1,
    "downscale_delay_s": 1,
}


@pytest.fixture
def folder(ray_cluster: str, tmp_path: Path) -> Iterator[Path]:
    """Where the engines' leases lie; whatever a test started is gone afterwards."""
    from ray import serve

    yield tmp_path
    engines = leases(tmp_path)
    serve.delete(APP_NAME)
    assert engines
    assert leases(tmp_path) == []
    assert not [engine for engine in engines if procfs.alive(engine)]


def service(folder: Path, shape: Shape, **knobs: Any) -> Service:
    return champion(folder, **knobs).model_copy(update={"shape": shape})


def leases(folder: Path) -> list[tuple[int, int]]:
    """The engines that run: pid and start time of each."""
    return [tuple(json.loads(path.read_text())["engine"]) for path in sorted(folder.rglob("*.lease.json"))]


def ports(folder: Path) -> set[int]:
    return {json.loads(path.read_text())["port"] for path in folder.rglob("*.lease.json")}


def gpus(folder: Path) -> list[int]:
    return sorted(gpu for path in folder.rglob("*.lease.json") for gpu in json.loads(path.read_text())["gpu_ids"])


def answered(port: int) -> float:
    """Requests that the engine on this port has taken."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        found = re.search(r"^sglang:num_requests_total\S* ([\d.]+)$", page.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def until(true: Callable[[], bool], limit_s: float = 60) -> None:
    ends = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.2)


def test_two_replicas_have_an_engine_and_gpus_each_and_share_the_load(ray_cluster: str, folder: Path) -> None:
    from serve.switching import put_in_service

    put_in_service(service(folder, Shape(replicas=2)))
    assert len(leases(folder)) == len(ports(folder)) == 2
    assert len(set(gpus(folder))) == 2
    load = Load(ray_cluster, 8)
    asyncio.run(load.during(lambda: until(lambda: all(answered(port) > 10 for port in ports(folder)))))
    assert (load.broken, load.told) == ([], 0)


def test_autoscaling_starts_a_second_engine_under_load_and_stops_it_after(ray_cluster: str, folder: Path) -> None:
    from serve.switching import put_in_service

    put_in_service(service(folder, Shape(autoscaling=SCALING)))
    (first,) = leases(folder)
    load = Load(ray_cluster, 8)
    asyncio.run(load.during(lambda: until(lambda: len(leases(folder)) == 2)))
    assert procfs.alive(first)
    until(lambda: len(leases(folder)) == 1)
    assert (load.broken, load.told) == ([], 0)


def test_replicas_are_exchanged_in_turn_so_that_one_always_answers(ray_cluster: str, folder: Path) -> None:
    from serve.switching import put_in_service

    shape = Shape(autoscaling=SCALING | {"min_replicas": 2})
    put_in_service(service(folder, shape))
    before = leases(folder)
    load = Load(ray_cluster, 4)
    switch = asyncio.run(load.during(lambda: put_in_service(service(folder, shape, start_ms=500))))
    assert switch.outcome == "switched"
    assert (load.broken, load.told) == ([], 0)
    assert len(leases(folder)) == 2
    assert not set(before) & set(leases(folder))

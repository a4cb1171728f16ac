"""An engine under Ray Serve, and what may die under it: the engine is always proven gone, and the cause is told."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve

from pipeline.config import EngineConfig
from pipeline.errors import EngineError, TeardownError
from pipeline.records import FailureClass, Topology
from pipeline.ruler import MeasurePlan
from pipeline.search import Bench
from pipeline.spec import LoadSpec, ObjectiveSpec
from pipeline.sweeping import sweep
from serve import deployment, procfs
from serve.deployment import TAKEN_AWAY, Deployed, EngineOptions, delete_app, stale_apps
from serve.engines.logs import second_try
from tests.fakes.launching import LIMITS

pytestmark = pytest.mark.slow
CONFIG = EngineConfig(engine="sglang", model="m", tensor_parallel_size=2)
LASTING = LIMITS.model_copy(update={"start_s": 60.0, "stall_s": 60.0, "generate_s": 30.0})


@pytest.fixture
def engine(ray_cluster: str, tmp_path: Path) -> Iterator[Deployed]:
    name = f"one-{tmp_path.name}"
    yield Deployed(CONFIG, EngineOptions(str(tmp_path), LASTING), app_name=name)
    assert stale_apps(name) == []
    assert not list(tmp_path.rglob("*.lease.json"))
    assert not processes(tmp_path)


def processes(folder: Path) -> list[str]:
    """Living processes whose log lies in the folder."""
    logs = {str(path) for path in folder.rglob("engine.log")}
    found = []
    for pid in procfs.table():
        try:
            target = str(Path(f"/proc/{pid}/fd/1").readlink())
        except OSError:
            continue
        if target in logs:
            found.append(procfs.cmdline(pid))
    return found


def owner(folder: Path) -> int:
    """The pid of the replica that owns the engine."""
    (lease,) = folder.rglob("*.lease.json")
    return int(json.loads(lease.read_text())["owner"][0])


def test_an_engine_lives_as_long_as_its_block(engine: Deployed, tmp_path: Path) -> None:
    with engine:
        assert engine.resolved["tp_size"] == 2
        assert engine.launch is not None and len(engine.launch.gpu_ids) == 2
        assert processes(tmp_path)
        engine.check()
    assert engine.teardown is not None and engine.teardown.proven
    assert set(engine.phases_s) == {"deploy", "ready", "teardown"}


def test_the_replica_dies(engine: Deployed, tmp_path: Path) -> None:
    with pytest.raises(EngineError) as caught, engine:
        os.kill(owner(tmp_path), signal.SIGKILL)
        engine.check()  # Serve has put another in its place, whose engine is none of this trial's
    assert caught.value.failure.failure_class is FailureClass.KILLED
    assert second_try(CONFIG, caught.value.failure) is not None
    assert engine.teardown is not None and engine.teardown.proven


def test_the_application_is_taken_away(engine: Deployed) -> None:
    with pytest.raises(EngineError) as caught, engine:
        assert delete_app(engine.app_name)
        engine.check()
    assert caught.value.failure.phase == TAKEN_AWAY
    assert engine.teardown is not None and engine.teardown.proven


def test_serves_controller_dies(engine: Deployed) -> None:
    with engine:
        ray.kill(controller(), no_restart=False)
        engine.check()
    assert engine.teardown is not None and engine.teardown.proven


def controller() -> Any:
    from ray.serve.context import _get_global_client

    return _get_global_client()._controller


def test_what_serve_keeps_is_a_teardown_error(engine: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(deployment, "delete_app", lambda _: False)
        with pytest.raises(TeardownError, match=f"Ray Serve still has {engine.app_name}"), engine:
            pass
    assert delete_app(engine.app_name)


def test_a_sweep_takes_down_one_trial_or_all(ray_cluster: str, tmp_path: Path) -> None:
    plan = MeasurePlan(load=LoadSpec(concurrency=(1,)), salt=tmp_path.name[-4:])
    bench = Bench("swept", str(tmp_path), plan, ObjectiveSpec(), LASTING, Topology())
    here = [ray.util.get_node_ip_address()]
    one = CONFIG.model_copy(update={"tensor_parallel_size": 1})
    for number in (1, 2):
        Deployed(one, EngineOptions(str(bench.trial_dir(number)), LASTING), app_name=bench.app(number)).__enter__()
    assert len(stale_apps(bench.apps)) == 2
    assert sweep(bench, here, 1) == []
    assert stale_apps(bench.apps) == [bench.app(2)]
    assert not processes(bench.trial_dir(1)) and processes(bench.trial_dir(2))
    assert sweep(bench, here) == []
    assert stale_apps(bench.apps) == []
    assert not processes(tmp_path)
    assert serve.status().proxies is not None  # Serve itself stays

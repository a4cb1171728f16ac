"""Which cluster a study runs on, and what is said of one that cannot be used; Ray itself is not started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from pipeline.cluster import _kind, check_nodes, cluster
from pipeline.errors import PreflightError
from pipeline.records import Topology

ADDRESS = "auto"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Ray is asked for, in order."""
    seen: list[Any] = []
    monkeypatch.setattr(ray, "init", lambda **options: seen.append(options))
    monkeypatch.setattr(ray, "shutdown", lambda: seen.append("shutdown"))
    monkeypatch.setattr("serve.deployment.start_serve", lambda: seen.append("serve"))
    return seen


def _nodes(monkeypatch: pytest.MonkeyPatch, *nodes: tuple[str, bool, dict[str, float]]) -> None:
    found = [{"NodeManagerAddress": name, "Alive": alive, "Resources": has} for name, alive, has in nodes]
    monkeypatch.setattr(ray, "nodes", lambda: found)


def test_a_cluster_without_slots_says_how_to_start_its_nodes(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    _nodes(monkeypatch, ("10.0.0.1", True, {"CPU": 8.0}), ("10.0.0.2", False, {"engine_slot": 1.0}))
    with (
        pytest.raises(PreflightError, match=r"no node of auto has a slot; .*--resources='\{\"engine_slot\": 1\}'"),
        cluster(ADDRESS, 0),
    ):
        raise AssertionError("nothing may run there")
    assert calls[1:] == ["shutdown"], "Serve is not started, the connection is closed"


def test_trials_run_on_living_nodes_with_a_slot(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    _nodes(
        monkeypatch,
        ("10.0.0.1", True, {"engine_slot": 1.0}),
        ("10.0.0.2", False, {"engine_slot": 1.0}),
        ("10.0.0.3", True, {"GPU": 8.0}),
    )
    with cluster(ADDRESS, 0) as nodes:
        assert nodes == ("10.0.0.1",)
    assert calls[0]["address"] == ADDRESS
    assert "num_gpus" not in calls[0], "a running cluster has what it has"
    assert calls[1:] == ["serve", "shutdown"]


def test_without_an_address_no_cluster_that_happens_to_run_is_joined(
    monkeypatch: pytest.MonkeyPatch, calls: list[Any]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    _nodes(monkeypatch, ("127.0.0.1", True, {"engine_slot": 1.0}))
    with cluster(None, 2):
        pass
    assert (calls[0]["address"], calls[0]["num_gpus"]) == ("local", 2)


def test_a_cluster_that_cannot_be_had_is_the_callers_to_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(PreflightError, match="no Ray cluster at auto: nobody there"), cluster(ADDRESS, 0):
        pass


def test_nodes_that_give_no_answer_are_named_beside_those_that_refuse(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = Topology(gpu_count=8)
    answers = {
        "10.0.0.1": (_kind(here), ["little disk"]),
        "10.0.0.2": ray.exceptions.GetTimeoutError("not in time"),
        "10.0.0.3": ray.exceptions.RaySystemError("trace\nModuleNotFoundError: No module named 'pipeline'"),
        "10.0.0.4": (_kind(here), "a GPU is busy"),
        "10.0.0.5": (_kind(here.model_copy(update={"gpu_count": 4})), []),
    }

    class Look:
        def options(self, resources: dict[str, float]) -> Any:
            (name,) = resources

            def remote(_: object, gpus: int, runs: str) -> str:
                assert Path(runs).is_absolute(), "a worker runs in a place of its own"
                return name.partition(":")[2]

            return type("Asked", (), {"remote": remote})()

    def get(node: str, timeout: float) -> Any:
        answer = answers[node]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "remote", lambda **_: lambda _: Look())
    monkeypatch.setattr(ray, "get", get)
    assert check_nodes(["10.0.0.1"], here, 8, Path("runs")) == ["10.0.0.1: little disk"]
    with pytest.raises(PreflightError) as refused:
        check_nodes(list(answers), here, 8, tmp_path)
    assert str(refused.value).split("; ") == [
        "10.0.0.2: it could not be looked at: not in time",
        "10.0.0.3: it could not be looked at: ModuleNotFoundError: No module named 'pipeline'",
        "10.0.0.4: a GPU is busy",
        "10.0.0.5 is another kind of machine: gpu_count 4 there, 8 here",
    ]

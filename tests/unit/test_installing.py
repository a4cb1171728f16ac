"""Which service a registered champion becomes on this machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.config import EngineConfig
from pipeline.installing import registered_service
from pipeline.registry import Version
from serve.portable import portable
from serve.service import ChampionSpec, Service

VERSION = Version(name="fastverify-a", version=1)


def service(model: str, drain_s: float) -> Service:
    return Service(spec=ChampionSpec(config=EngineConfig(engine="sglang", model=model), drain_s=drain_s))


def registry(held: Service) -> Any:
    """A registry that holds one service, without this machine's paths."""
    config = portable(held.spec.config)
    text = held.model_copy(update={"spec": held.spec.model_copy(update={"config": config})}).model_dump_json()
    return SimpleNamespace(service=lambda version: text)


def test_a_kept_file_has_the_machines_own_paths(tmp_path: Path) -> None:
    mine = service("/models/a", 5.0)
    mine.write(tmp_path / "champion-1.json")
    assert registered_service(registry(mine), VERSION, tmp_path / "champion.json") == mine


def test_a_kept_file_of_another_models_version_is_not_served_in_its_place(tmp_path: Path) -> None:
    service("/models/b", 5.0).write(tmp_path / "champion-1.json")
    found = registered_service(registry(service("/models/a", 7.0)), VERSION, tmp_path / "champion.json")
    assert (found.spec.config.model, found.spec.drain_s) == ("a", 7.0)

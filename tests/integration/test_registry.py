"""Champions in the registry: files come back as they went in, aliases move, nothing is a pickle."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import EngineConfig
from pipeline.errors import InputError, PromotionError
from pipeline.promote import Job, _stands
from pipeline.registry import CHAMPION, PREVIOUS, Registry, Version, answering, registered_name, run_tags
from pipeline.tracking import default_uri
from serve.service import ChampionSpec, Service


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Registry(default_uri(tmp_path), registered_name("org/model:1"))


def registered(registry: Registry, text: str) -> Version:
    params = {"model": "org/model", "speculation.algorithm": "NGRAM", "a:b": "x" * 9000}
    return registry.register({"service.json": text}, params=params, tags={"study": "s"}, run_id=None)


def test_a_version_returns_its_files_and_aliases_follow_promotions(registry: Registry, tmp_path: Path) -> None:
    assert registry.by_alias(CHAMPION) is None
    first = registered(registry, '{"n": 1}')
    assert registry.by_alias(CHAMPION) is None  # registering alone promotes nothing
    registry.promote(first)
    assert registry.by_alias(PREVIOUS) is None
    second = registered(registry, '{"n": 2}')
    registry.promote(second)
    champion, previous = registry.by_alias(CHAMPION), registry.by_alias(PREVIOUS)
    assert champion is not None and previous is not None
    assert (champion.version, previous.version) == (second.version, first.version)
    assert champion.tags["study"] == "s"
    assert (registry.service(champion), registry.service(previous)) == ('{"n": 2}', '{"n": 1}')
    registry.promote(second)  # again: the previous one stays what it was
    assert registry.by_alias(PREVIOUS) == previous
    names = {path.suffix for path in registry.files(champion, tmp_path / "files").rglob("*") if path.is_file()}
    assert not names & {".pkl", ".pickle"}
    registry.tag(champion, "drift", "slow")
    assert (again := registry.by_alias(CHAMPION)) is not None
    assert again.tags["drift"] == "slow"


def test_an_unknown_run_is_an_input_error(registry: Registry) -> None:
    with pytest.raises(InputError, match="has no run nothing"):
        run_tags(registry.uri, "nothing")


def test_what_is_champion_already_stays_and_a_lost_file_comes_back(registry: Registry, tmp_path: Path) -> None:
    service = Service(spec=ChampionSpec(config=EngineConfig(engine="sglang", model="org/model")))
    registry.promote(registered(registry, service.model_dump_json()))
    job = Job("s", tmp_path, registry.uri, None, force=False, rounds=2, soak_minutes=None)
    said: list[str] = []
    decision = _stands(job, registry, said.append)
    assert (decision.promote, decision.stands) == (None, True)
    assert Service.read(job.file).spec.config == service.spec.config
    job.file.write_text("mine")
    _stands(job, registry, said.append)
    assert job.file.read_text() == "mine"


def test_a_registry_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    nobody = "http://127.0.0.1:9"
    with pytest.raises(PromotionError, match=f"the registry at {nobody} does not answer"), answering(nobody):
        Registry(nobody, "m").by_alias(CHAMPION)

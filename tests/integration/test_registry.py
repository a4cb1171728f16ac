"""Champions in the registry: files come back as they went in, aliases move, nothing is a pickle."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import InputError
from pipeline.registry import CHAMPION, PREVIOUS, Registry, Version, registered_name, run_tags
from pipeline.tracking import default_uri


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
    with pytest.raises(InputError, match="no study and no MLflow run"):
        run_tags(registry.uri, "nothing")

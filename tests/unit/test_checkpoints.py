"""What a local model folder tells before a launch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoints import architecture, check_draft_model, is_path


def _folder(path: Path, config: dict[str, Any], vocabulary: dict[str, int] | None = None) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if vocabulary is not None:
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return str(path)


def test_a_standalone_draft_shares_the_vocabulary_token_by_token(tmp_path: Path) -> None:
    words = {"a": 0, "b": 1}
    target = _folder(tmp_path / "t", {"vocab_size": 2}, words)
    same = _folder(tmp_path / "same", {"vocab_size": 2}, words)
    larger = _folder(tmp_path / "larger", {"vocab_size": 3}, {**words, "c": 2})
    swapped = _folder(tmp_path / "swapped", {"vocab_size": 2}, {"a": 1, "b": 0})
    assert check_draft_model(target, same, "STANDALONE") is None
    assert "vocab_size of the target is 2, of the draft 3" in str(check_draft_model(target, larger, "STANDALONE"))
    assert "'a' is 0 in the target, 1 in the draft" in str(check_draft_model(target, swapped, "STANDALONE"))


@pytest.mark.parametrize(("config", "fits"), [({"hidden_size": 64}, True), ({"hidden_size": 32}, False)])
def test_an_eagle_head_is_made_for_one_hidden_size(tmp_path: Path, config: dict[str, Any], fits: bool) -> None:
    target = _folder(tmp_path / "t", {"text_config": {"hidden_size": 64}})
    head = _folder(tmp_path / "h", {**config, "draft_vocab_size": 8, "vocab_size": 9})
    assert (check_draft_model(target, head, "EAGLE3") is None) is fits


def test_a_head_may_be_narrower_than_its_target(tmp_path: Path) -> None:
    target = _folder(tmp_path / "t", {"hidden_size": 64})
    head = _folder(tmp_path / "h", {"hidden_size": 32, "target_hidden_size": 64})
    assert check_draft_model(target, head, "EAGLE3") is None


def test_what_cannot_be_read_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    assert architecture(str(tmp_path / "broken")) is None
    assert check_draft_model("org/target", str(tmp_path / "broken"), "STANDALONE") is None


def test_architecture_and_paths(tmp_path: Path) -> None:
    assert architecture(_folder(tmp_path / "t", {"architectures": ["LlamaForCausalLM"]})) == "LlamaForCausalLM"
    assert architecture("org/model") is None
    assert [is_path(text) for text in ("/a", "./a", "~/a", "org/a", "a")] == [True, True, True, False, False]

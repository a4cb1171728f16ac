"""Weights: names, folders and hub ids; checked, made once, and never half there."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline import models
from pipeline.errors import InputError
from pipeline.models import Known, ModelError, cache_root, check_sha256, known, resolve


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTVERIFY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path / "cache"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A model called `toy`; the list says how often it was made."""
    calls: list[Path] = []

    def make(scratch: Path, folder: Path) -> None:
        calls.append(scratch)
        time.sleep(0.3)
        (folder / "config.json").write_text("{}")

    monkeypatch.setitem(models.MODELS, "toy", Known("toy-1", make))
    return calls


def local(folder: Path) -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


def test_a_known_model_is_made_once_and_then_found(cache: Path, made: list[Path]) -> None:
    assert resolve("toy") == resolve("toy") == cache / "toy-1"
    assert len(made) == 1
    assert not made[0].exists()


def test_two_at_once_make_it_once(made: list[Path]) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve("toy"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert len(found) == 3
    assert len(made) == 1


def test_waiting_for_another_process_has_a_limit(made: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "LOCK_S", 0.3)
    cache_root().mkdir()
    with models._locked(cache_root() / "toy-1.lock"), pytest.raises(ModelError, match="another process"):
        resolve("toy")
    assert made == []


def test_a_failure_leaves_nothing_that_looks_finished(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise ModelError("disk full")

    monkeypatch.setitem(models.MODELS, "toy", Known("toy-1", fail))
    with pytest.raises(ModelError, match="disk full"):
        resolve("toy")
    assert [path.name for path in cache.iterdir()] == ["toy-1.lock"]


def test_a_local_folder_passes_through(tmp_path: Path) -> None:
    folder = local(tmp_path / "mine")
    assert known(folder)
    assert resolve(folder) == Path(folder)


@pytest.mark.parametrize(("name", "close"), [("smollm2-135", "smollm2-135m"), ("smollm-student", "smollm2-student")])
def test_an_unknown_name_is_an_error_with_the_nearest(name: str, close: str) -> None:
    assert not known(name)
    with pytest.raises(InputError, match="org/name") as refused:
        resolve(name)
    assert refused.value.nearest == close


def test_a_folder_without_a_model_is_not_one(tmp_path: Path) -> None:
    assert not known(str(tmp_path))
    with pytest.raises(InputError):
        resolve(str(tmp_path))


def test_a_hub_id_that_cannot_be_had_offline_says_what_would_do() -> None:
    assert known("org/name")
    with pytest.raises(InputError, match="smollm2-135m"):
        resolve("org/name")


def test_another_file_than_the_one_meant_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "wheel.whl"
    file.write_bytes(b"abc")
    check_sha256(file, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    with pytest.raises(ModelError, match="expected 0000"):
        check_sha256(file, "0" * 64)


def test_a_download_that_fails_or_hangs_is_a_clear_error() -> None:
    with pytest.raises(ModelError, match=r"could not be had: .* exited with 3"):
        models._child(["-c", "raise SystemExit(3)"], 30, "it could not be had")
    with pytest.raises(ModelError, match="could not be had within 0 s"):
        models._child(["-c", "import time; time.sleep(30)"], 0.3, "it could not be had")


def test_the_command_lists_fetches_and_prints(cache: Path, made: list[Path]) -> None:
    run = CliRunner().invoke
    before = json.loads(run(models.app, ["--json"]).stdout)
    assert before == {"smollm2-135m": None, "smollm2-student": None, "toy": None}
    assert run(models.app, ["toy"]).stdout.strip() == str(cache / "toy-1")
    assert json.loads(run(models.app, ["toy", "--json"]).stdout) == {"toy": str(cache / "toy-1")}
    assert "not fetched yet" in run(models.app, []).stdout


def test_the_command_ends_a_wrong_name_with_two_and_no_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.models", "smollm2"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "smollm2-135m" in done.stderr


def test_the_shipped_draft_fits_the_target_s_embedding(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    from serve.embedded.convert import make_student

    target, student = Path(local(tmp_path / "target")), tmp_path / "student"
    student.mkdir()
    config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 576, "intermediate_size": 1536}
    config |= {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    (target / "config.json").write_text(json.dumps(config))
    save_file({"model.embed_tokens.weight": torch.randn(64, 576)}, target / "model.safetensors")
    (target / "tokenizer.json").write_text("{}")

    make_student(target, student)
    model, report = LlamaForCausalLM.from_pretrained(student, output_loading_info=True)
    assert not any(report.values())
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 64)
    assert (student / "tokenizer.json").exists()

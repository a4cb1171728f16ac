"""The main command before anything starts: which engine, overrides and models; a plan without a machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pipeline import tune
from pipeline.errors import InputError
from pipeline.records import Topology
from pipeline.space import Overrides, load_space
from pipeline.store import Study

SPACE = """\
study: s
sglang: {model: org/m, tensor_parallel_size: 8, release: 0.5.23, space: {speculation: {none: , NGRAM: }}}
embedded:
  model: smollm2-135m
  draft_models: {STANDALONE: smollm2-student}
  space: {speculation: {none: , STANDALONE: }}
load: {concurrency: [1]}
"""
H200 = {"gpu_count": 2, "gpu_model": "NVIDIA H200", "sm": 90}


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, None, {})


def machine(monkeypatch: pytest.MonkeyPatch, release: str | None, topology: dict[str, object]) -> None:
    monkeypatch.setenv("FASTVERIFY_TOPOLOGY", json.dumps(topology))
    monkeypatch.setattr(tune, "_release", lambda _: release)


@pytest.fixture
def space(tmp_path: Path) -> Path:
    (tmp_path / "s.yaml").write_text(SPACE)
    return tmp_path / "s.yaml"


def test_auto_takes_the_embedded_engine_only_where_there_is_no_gpu(space: Path) -> None:
    _, _, choice, part = tune._resolve(load_space(space), dry_run=False)
    assert (choice.engine, choice.reason, part.model) == ("embedded", "no GPU on this machine", "smollm2-135m")


def test_gpus_and_the_package_are_taken(space: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "0.5.23", H200)
    spec = load_space(space, Overrides(tensor_parallel_size=2))
    topology, release, choice, _ = tune._resolve(spec, dry_run=False)
    assert (topology, release, choice.reason) == (Topology(**H200), "0.5.23", "2 x NVIDIA H200, SGLang 0.5.23")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "release", "topology", "words"),
    [
        (Overrides(), "0.5.23", H200, "needs 8 GPUs, this machine has 2.*--tensor-parallel-size 2"),
        (Overrides(), None, H200, "the SGLang package is not installed"),
        (Overrides(engine="sglang"), "0.5.23", {}, "no GPU on this machine"),
        (Overrides(model="smollm2-135"), None, {}, "^--model: embedded.model: no model.*did you mean 'smollm2-135m'"),
        (Overrides(draft_model="studnt"), None, {}, "^--draft-model: embedded.draft_models.STANDALONE: no model"),
    ],
)
def test_nothing_is_taken_instead_of_what_was_asked_for(
    space: Path, monkeypatch: pytest.MonkeyPatch, given: Overrides, release: str | None,
    topology: dict[str, object], words: str,
) -> None:  # fmt: skip
    machine(monkeypatch, release, topology)
    with pytest.raises(InputError, match=words):
        tune._resolve(load_space(space, given), dry_run=False)


def test_a_dry_run_may_assume_the_machine_of_the_file(space: Path) -> None:
    text = SPACE.replace("release: 0.5.23,", "release: 0.5.23, topology: {gpu_count: 8, gpu_model: RTX, sm: 120},")
    space.write_text(text)
    topology, release, choice, _ = tune._resolve(load_space(space, Overrides(engine="sglang")), dry_run=True)
    assert (topology.gpu_count, release) == (8, "0.5.23")
    assert choice.reason == "dry run on the machine that the file states"
    space.write_text(SPACE)
    _, _, choice, _ = tune._resolve(load_space(space, Overrides(engine="sglang")), dry_run=True)
    assert choice.reason == "dry run on a machine that the file does not state"


def test_a_release_is_stated_only_for_a_stand_in(space: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.delenv("FASTVERIFY_SGLANG_COMMAND", raising=False)
    monkeypatch.setattr("serve.engines.sglang_flags.installed_release", lambda: None)
    assert tune._release(load_space(space)) is None
    monkeypatch.setenv("FASTVERIFY_SGLANG_COMMAND", "fake")
    assert tune._release(load_space(space)) == "0.5.23"


# ---- the command


def invoke(*argv: str) -> str:
    app = typer.Typer()
    app.command()(tune.tune)
    result = CliRunner().invoke(app, list(argv))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_a_plan_begins_with_the_engine_and_its_reason(space: Path) -> None:
    lines = invoke(str(space), "--dry-run").splitlines()
    assert lines[0] == "engine: embedded (no GPU on this machine)"
    assert "2 distinct configurations" in lines[1]


def test_a_plan_as_json_is_json_and_says_the_engine_too(space: Path) -> None:
    plan = json.loads(invoke(str(space), "--dry-run", "--json"))
    assert (plan["engine"], plan["engine_reason"]) == ("embedded", "no GPU on this machine")


def test_a_driver_needs_time(space: Path) -> None:
    with pytest.raises(InputError, match="--stop-after"):
        invoke(str(space), "--stop-after", "0")


def test_a_study_that_goes_on_has_its_own_space_file(space: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    study = Study.create("s", space, {"overrides": {"trials": 5}}, runs)
    assert tune._space_of("s", runs) == study.space_file
    lines = invoke("--resume", "s", "--runs", str(runs), "--dry-run").splitlines()
    assert "2 distinct configurations" in lines[1]
    with pytest.raises(InputError, match="SPACE: no space file"):
        invoke("--dry-run")
    with pytest.raises(InputError, match="no study at nowhere"):
        invoke("--resume", "nowhere", "--runs", str(runs), "--dry-run")


def test_a_resumed_study_keeps_what_it_was_started_with(space: Path, tmp_path: Path) -> None:
    stated = {"model": "smollm2-135m", "concurrency": [2, 4], "trials": 5}
    Study.create("s", space, {"overrides": stated}, tmp_path / "runs")
    begun = tune._as_begun("s", tmp_path / "runs", Overrides(trials=9, concurrency=(2, 4)))
    assert begun == Overrides(model="smollm2-135m", concurrency=(2, 4), trials=9)
    with pytest.raises(InputError, match=r"^--concurrency: \(8,\).*expected \(2, 4\)"):
        tune._as_begun("s", tmp_path / "runs", Overrides(concurrency=(8,)))
    with pytest.raises(InputError, match=r"^--engine: 'sglang'.*expected the file's own"):
        tune._as_begun("s", tmp_path / "runs", Overrides(engine="sglang"))

"""Promotion on a real cluster with the fake engine: a faster winner, a corrupt one, the registry and the way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import promoting
from pipeline.candidate import Candidate, find_candidate, find_incumbent, study_space
from pipeline.config import EngineConfig
from pipeline.errors import PromotionError
from pipeline.installing import go_back, install, previous_service, register, service_of
from pipeline.mlflow_trial import STUDY_TAG
from pipeline.records import Topology, TrialRecord
from pipeline.registry import CHAMPION, PREVIOUS, Registry, registered_name
from pipeline.store import Study
from pipeline.tracking import TRIAL_TAG, default_uri
from serve.service import Service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

SPACE = """
study: pretend
engine: sglang
sglang:
  model: fake-model
  tensor_parallel_size: 1
  release: 0.5.23
  fixed: {max_running_requests: 8}
  space:
    attention_backend: [triton, flashinfer]
workload: {prompts: {open: open}, output_tokens: 24, greedy_prompts: 3, greedy_tokens: 8}
load: {concurrency: [2], requests_per_level: 4, warmup_requests: 2, min_repeats: 2, max_repeats: 2}
limits: {start_s: 30, stall_s: 20, generate_s: 10, stop_s: 5, proof_s: 10}
search: {budget: {trials: 2}}
"""


def config(**knobs: Any) -> EngineConfig:
    told = json.dumps({"children": False, "start_ms": 0, "ttft_ms": 2, **knobs})
    return EngineConfig(engine="sglang", model="fake-model", max_running_requests=8, env=(("FAKE_SGLANG_KNOBS", told),))


BASELINE, FAST, CORRUPT = config(step_ms=8), config(step_ms=4), config(step_ms=3, text_salt="other")


def study(runs: Path, *configs: EngineConfig) -> Study:
    """A finished study with a baseline and other trials, as its ledger would have it."""
    space = runs / "space.yaml"
    runs.mkdir(exist_ok=True)
    space.write_text(SPACE)
    made = Study.create("pretend", space, {"id": "abc", "engine": "sglang", "overrides": {}, "versions": {}}, runs)
    for number, tried in enumerate((BASELINE, *configs), start=1):
        role = "baseline" if number == 1 else "search"
        made.append(
            TrialRecord(study=made.name, number=number, role=role, status="ok", config=tried, config_id=tried.config_id)
        )
    return made


def bench_for(made: Study, trial: int) -> promoting.Bench:
    space = study_space(made)
    config = made.records()[trial - 1].config
    candidate = Candidate(made, space, space.objective, config, f"trial {trial}")
    return promoting.Bench(candidate, promoting.fresh_folder(candidate), Topology(), {}, lambda _: None)


def promote(runs: Path, made: Study, trial: int, registry: Registry, *, force: bool = False) -> Any:
    """What the command does, on the session's cluster, without a service that runs."""
    bench = bench_for(made, trial)
    incumbent = find_incumbent(registry, runs / "champion.json")
    evidence = promoting.gather(bench, incumbent, rounds=2, soak_minutes=0.05)
    decision = promoting.judge_promotion(bench, evidence, force=force)
    if decision.promote is not None:
        chosen = {c.config_id: c for c in (bench.candidate.config, bench.candidate.baseline)}[decision.promote]
        service = service_of(chosen, bench.candidate, evidence.launches, runs / "champion.json")
        install(service, runs / "champion.json", live=False, say=lambda _: None)
        register(registry, service, bench.candidate, evidence, decision, runs / "champion.json")
    return decision


@pytest.mark.usefixtures("ray_cluster")
def test_a_corrupt_winner_leaves_the_baseline_then_a_true_one_replaces_it_and_rollback_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    monkeypatch.setattr(promoting, "gpu_state", lambda: {"0": {"sm_clock_mhz": 1980}})
    made = study(runs, CORRUPT, FAST)
    registry = Registry(default_uri(runs), registered_name("fake-model"))

    first = promote(runs, made, 2, registry)
    assert first.promote == BASELINE.config_id
    assert "lossless" in first.reason
    assert "there is no champion yet, so the baseline is promoted" in first.reason
    api = next(gate for gate in first.gates if gate.name == "API matrix")
    assert not api.passed or "alike" in api.seen

    second = promote(runs, made, 3, registry, force=True)
    assert second.promote == FAST.config_id
    assert second.claim.gain.value > 0.5
    assert next(gate for gate in second.gates if gate.name == "soak").passed
    kept = json.loads((made.folder / "promotions" / "002" / "evidence.json").read_text())
    assert all(launch["gpu_state"] == {"0": {"sm_clock_mhz": 1980}} for launch in kept["launches"])
    champion, previous = registry.by_alias(CHAMPION), registry.by_alias(PREVIOUS)
    assert champion is not None and previous is not None
    assert (champion.tags["config_id"], previous.tags["config_id"]) == (FAST.config_id, BASELINE.config_id)

    files = {path.name: path.read_text() for path in registry.files(champion, tmp_path / "got").iterdir()}
    assert {"service.json", "champion.yaml", "promotion.json", "space.yaml"} <= set(files)
    assert not any(str(tmp_path) in text for text in files.values())
    check_deployable(files["champion.yaml"])

    service, version = previous_service(registry, runs / "champion.json")
    go_back(registry, service, version, runs / "champion.json", live=False, say=lambda _: None)
    assert Service.read(runs / "champion.json").spec.config == BASELINE
    swapped = registry.by_alias(CHAMPION), registry.by_alias(PREVIOUS)
    assert [v and v.tags["config_id"] for v in swapped] == [BASELINE.config_id, FAST.config_id]


@pytest.mark.usefixtures("ray_cluster")
def test_an_engine_that_dies_in_the_soak_is_refused_with_its_cause(tmp_path: Path) -> None:
    dying = config(step_ms=4, die_after_s=6)
    gate = bench_for(study(tmp_path / "runs", dying), 2).soak(dying, 5)
    assert not gate.passed
    assert "crash" in gate.seen or "killed" in gate.seen


def check_deployable(text: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
    (app,) = schema.applications
    assert (app.import_path, app.route_prefix) == ("serve.app:champion", "/")


def test_a_registry_without_a_champion_says_so(tmp_path: Path) -> None:
    registry = Registry(default_uri(tmp_path), registered_name("org/none"))
    assert find_incumbent(registry, tmp_path / "champion.json").config is None
    with pytest.raises(PromotionError, match="no previous champion"):
        previous_service(registry, tmp_path / "champion.json")


def test_a_run_id_leads_to_its_trial(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    runs = tmp_path / "runs"
    made = study(runs, FAST)
    client = MlflowClient(tracking_uri=default_uri(runs))
    tags = {STUDY_TAG: made.name, TRIAL_TAG: "2"}
    run = client.create_run(client.create_experiment("fastverify"), tags=tags)
    assert find_candidate(run.info.run_id, runs, default_uri(runs)).config == FAST

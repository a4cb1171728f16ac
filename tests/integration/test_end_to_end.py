"""The whole way with the real small model: tune, promote, serve, chat, roll back; every step its own command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from pipeline.registry import CHAMPION, PREVIOUS, Registry, registered_name
from tests.fakes.running import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parent.parent.parent
SPACE = """
study: way
engine: embedded
embedded:
  model: smollm2-135m
  space:
    speculation:
      none:
      NGRAM: {num_draft_tokens: [6]}
workload: {prompts: {extract: extract}, output_tokens: 16, greedy_prompts: 2, greedy_tokens: 8}
load: {concurrency: [1], requests_per_level: 2, warmup_requests: 1, min_repeats: 2, max_repeats: 2, ci_width: 0.5}
search: {budget: {trials: 1}, confirm_rounds: 0, ablate: false, early_stop: false, warm_start: false}
"""


def command(*argv: str, code: int = 0) -> str:
    """Run a command of the project and return what it printed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "MLFLOW_", "FASTVERIFY_"))}
    done = subprocess.run(
        [sys.executable, "-m", *argv], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_tune_promote_chat_and_roll_back(tmp_path: Path) -> None:
    runs, space = tmp_path / "runs", tmp_path / "way.yaml"
    space.write_text(SPACE)
    where = ("--runs", str(runs))
    command("pipeline.tune", str(space), *where)
    first = command("pipeline.promote", trial_run(runs, "none"), *where)
    assert "there is no champion yet, so the baseline is promoted" in first
    assert "registered: models:/fastverify-smollm2-135m/1, alias champion" in first
    registry = Registry(f"sqlite:///{runs / 'mlflow.db'}", registered_name("smollm2-135m"))
    champion = registry.by_alias(CHAMPION)
    assert champion is not None
    assert champion.tags["study"] == "way"

    with (
        serving(runs / "champion.json") as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as client,
    ):
        model = client.models.list().data[0].id
        messages = [{"role": "user", "content": "Say hello."}]
        stream = client.chat.completions.create(model=model, messages=messages, max_tokens=8, stream=True)  # type: ignore[call-overload]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    second = command("pipeline.promote", trial_run(runs, "NGRAM"), *where, "--rounds", "2", "--force")
    assert "registered: models:/fastverify-smollm2-135m/2, alias champion" in second
    swapped = command("pipeline.promote", "--rollback", *where)
    assert "champion again: models:/fastverify-smollm2-135m/1" in swapped
    now, before = registry.by_alias(CHAMPION), registry.by_alias(PREVIOUS)
    assert now is not None and before is not None
    assert (now.version, before.version) == (1, 2)


def trial_run(runs: Path, algorithm: str) -> str:
    """The MLflow run of a trial with this algorithm."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{runs / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fastverify")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id], filter_string=f"params.algorithm = '{algorithm}'")
    return str(found[0].info.run_id)

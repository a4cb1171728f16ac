"""A whole study through the command line: Ray Tune, Ray Serve, fake SGLang on two pretended GPUs, a real MLflow store.

The second test kills the driver again and again: nothing finished is lost or repeated, nothing is left behind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.proposer import Done, Proposal, Proposer
from pipeline.records import FailureClass, Topology, TrialRecord
from pipeline.space import load_space
from pipeline.store import Study

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
LONG = {"trials": 5, "rounds": 2}  # enough to be killed three times
TOPOLOGY = {"gpu_count": 2, "gpu_model": "NVIDIA H200", "sm": 90, "peer_access": True, "link": "nvlink"}
SPACE = """
study: short
engine: sglang
sglang:
  model: org/model
  tensor_parallel_size: 2
  release: 0.5.23
  rules: {allow: [bare-tree]}
  fixed: {collectives: {custom_all_reduce: false}}
  seeds: [{collectives.nccl_algo: Tree}]
  space:
    speculation:
      none:
      NGRAM: {num_draft_tokens: [4, 8]}
    collectives:
      nccl_algo: [null, "allreduce:tree", Tree]
workload: {prompts: {extract: extract}, output_tokens: 32, greedy_prompts: 2, greedy_tokens: 8}
load: {concurrency: [4], requests_per_level: 4, min_repeats: 2, max_repeats: 2}
search: {budget: {trials: TRIALS}, startup_trials: 2, sglang_defaults: false, ablate: false, confirm_rounds: ROUNDS}
"""


def environment(**knobs: Any) -> dict[str, str]:
    fake = ROOT / "tests" / "fakes" / "sglang_server.py"
    return os.environ | {
        "FASTVERIFY_SGLANG_COMMAND": f"{sys.executable} {fake}",
        "FASTVERIFY_TOPOLOGY": json.dumps(TOPOLOGY),
        "FAKE_SGLANG_KNOBS": json.dumps({"cost_model": 0.5, "ttft_ms": 5, **knobs}),
        "PYTHONPATH": str(ROOT),
    }


def command(folder: Path, *more: str, trials: int = 3, rounds: int = 1) -> list[str]:
    space = folder / "short.yaml"
    space.write_text(SPACE.replace("TRIALS", str(trials)).replace("ROUNDS", str(rounds)))
    return [sys.executable, "-m", "pipeline.tune", str(space), "--runs", str(folder / "runs"), *more]


def leftovers(folder: Path) -> list[str]:
    """Command lines of living processes that belong to studies under `folder`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            cwd = str((entry / "cwd").readlink())
        except OSError:
            continue
        if str(folder) in words or str(folder) in cwd:
            found.append(words)
    return found


def gone(folder: Path, limit_s: float = 20.0) -> bool:
    deadline = time.monotonic() + limit_s
    while leftovers(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not leftovers(folder)


def in_order(records: list[TrialRecord]) -> list[TrialRecord]:
    return [record for record in records if record.status in ("ok", "failed", "stopped")]


def test_a_study_from_space_file_to_winner(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path), env=environment(), capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    study = Study.open("short", tmp_path / "runs")
    records = study.records()
    launched = in_order(records)

    # The baseline is the first trial and the last.
    assert launched[0].role == "baseline"
    assert launched[-1].role == "confirm"
    assert launched[0].config == launched[-1].config
    assert launched[0].config.speculation.algorithm == "none"

    # Failed on purpose: Tree dies at capture, with a class, a cause in words, a log, and no score.
    failed = next(record for record in records if record.status == "failed")
    assert failed.failure is not None
    assert failed.failure.failure_class is FailureClass.COLLECTIVE
    assert "allreduce:tree" in failed.failure.cause
    assert failed.measurement is None
    assert Path(str(failed.failure.log_path)).is_file()
    assert "collective" in done.stdout

    # Every launch is proven gone, was held against the baseline, and is in MLflow.
    assert all(record.teardown is not None and record.teardown.proven for record in launched)
    assert all(record.lossless is not None and record.lossless.passed for record in launched if record.status == "ok")
    assert len(mlflow_children(tmp_path / "runs", study)) == len(records)
    assert study.facts["finished"]
    assert (study.folder / "report.html").stat().st_size > 100_000
    assert done.stdout.startswith("engine: sglang (2 x NVIDIA H200, SGLang 0.5.23)")
    assert gone(tmp_path), leftovers(tmp_path)
    assert_replayed(records, study.space_file)


def assert_replayed(records: list[TrialRecord], space_file: Path) -> None:
    """The proposer alone, shown the ledger's outcomes, proposes what Tune launched, in the same order."""
    space, topology = load_space(space_file).for_engine("sglang"), Topology(**TOPOLOGY)
    proposer = Proposer(
        space,
        space.search,
        space.objective,
        check=lambda config: space.examine(config, "0.5.23", topology).violations,
        canonical=lambda config: space.canonical(config, "0.5.23", topology).config,
    )
    for record in in_order(records):
        proposal = proposer.propose()
        assert isinstance(proposal, Proposal)
        assert (proposal.number, proposal.role, proposal.config_id) == (record.number, record.role, record.config_id)
        proposer.observe(record)
    assert isinstance(proposer.propose(), Done)


def mlflow_children(runs: Path, study: Study) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{runs / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fastverify")
    assert experiment is not None
    parent = study.facts["mlflow_run_id"]
    return list(client.search_runs([experiment.experiment_id], f"tags.`mlflow.parentRunId` = '{parent}'"))


@pytest.mark.timeout(400)
def test_killed_again_and_again_a_study_loses_and_repeats_nothing(tmp_path: Path) -> None:
    chance = random.Random(7)
    runs = tmp_path / "runs"
    finished: list[str] = []
    for kill in (signal.SIGKILL, signal.SIGINT, signal.SIGKILL):
        resume = ["--resume", "short"] if finished or (runs / "short" / "study.json").exists() else []
        driver = subprocess.Popen(
            command(tmp_path, *resume, **LONG), env=environment(), cwd=ROOT, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_for_records(runs / "short" / "records.jsonl", len(finished) + 1, driver)
        time.sleep(chance.uniform(0.0, 3.0))
        driver.send_signal(kill)
        driver.wait(timeout=90)
        assert gone(tmp_path), leftovers(tmp_path)
        now = (runs / "short" / "records.jsonl").read_text().splitlines()
        assert now[: len(finished)] == finished
        finished = [line for line in now if line.endswith("}")]

    last = subprocess.run(
        command(tmp_path, "--resume", "short", **LONG),
        env=environment(), capture_output=True, text=True, timeout=240, cwd=ROOT,
    )  # fmt: skip
    assert last.returncode == 0, last.stderr
    study = Study.open("short", runs)
    records = study.records()
    assert study.ledger.read_text().splitlines()[: len(finished)] == finished
    assert max(Counter(record.number for record in records).values()) == 1
    searched = [r.config_id for r in in_order(records) if r.role in ("seed", "search")]
    assert len(searched) == len(set(searched)) == LONG["trials"]
    assert study.facts["finished"]
    assert gone(tmp_path), leftovers(tmp_path)


def wait_for_records(ledger: Path, count: int, driver: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and driver.poll() is None:
        if ledger.exists() and ledger.read_text().count("\n") >= count:
            return
        time.sleep(0.1)
    raise AssertionError(f"the driver wrote fewer than {count} records")


def test_a_resumed_study_must_have_the_same_space_file(tmp_path: Path) -> None:
    argv = command(tmp_path)
    facts = {"id": "x", "overrides": {}, "engine": "sglang", "topology": TOPOLOGY}
    Study.create("short", Path(argv[3]), facts, tmp_path / "runs")
    Path(argv[3]).write_text(Path(argv[3]).read_text().replace("num_draft_tokens: [4, 8]", "num_draft_tokens: [4]"))
    assert "another space file" in refused([*argv, "--resume", "short"])


def refused(argv: list[str], **more: str) -> str:
    """What a command says that is refused with exit code 2."""
    done = subprocess.run(argv, env=environment() | more, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_resumed_study_must_have_the_same_machine_and_model(tmp_path: Path) -> None:
    argv = command(tmp_path)
    facts = {"id": "x", "overrides": {"model": "org/other"}, "engine": "sglang", "topology": TOPOLOGY}
    Study.create("short", Path(argv[3]), facts, tmp_path / "runs")
    resume = [*argv, "--resume", "short"]
    assert "--model: 'org/third'" in refused([*resume, "--model", "org/third"])
    other = json.dumps({**TOPOLOGY, "gpu_model": "NVIDIA B200"})
    assert "here it would be sglang on 2 x NVIDIA B200" in refused(resume, FASTVERIFY_TOPOLOGY=other)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--address", "nonsense"), "no Ray cluster at nonsense"),
        (("--address", "127.0.0.1:9"), "no Ray cluster at 127.0.0.1:9: "),
        (("--tracking-uri", "nonsense"), "is no MLflow store"),
        (("--resume", "nowhere"), "no study at nowhere"),
        (("--tensor-parallel-size", "4"), "needs 4 GPUs, this machine has 2"),
    ],
)
def test_what_cannot_start_leaves_nothing_behind(tmp_path: Path, more: tuple[str, ...], words: str) -> None:
    assert words in refused(command(tmp_path, *more))
    assert not (tmp_path / "runs").exists()


def test_runs_that_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    assert "cannot hold studies" in refused(command(tmp_path))

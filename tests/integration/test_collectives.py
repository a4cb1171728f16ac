"""The collective benchmark with the real bench and a torch that is made up: times, failures, hangs, deadlines."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.collectives import benchmark
from pipeline.collectives_run import Deadlines, Timed, time_settings
from pipeline.config import Collectives, EngineConfig
from pipeline.records import Topology
from pipeline.screening import Setting, Shape, messages, setting_key
from pipeline.space import load_space
from serve.engines.sglang import collective_environment

TORCH = Path(__file__).parents[1] / "fakes" / "torch_nccl"
SHAPE = Shape(hidden_size=64, layers=2, vocab_size=128)
QUICK = Deadlines(total=60, imported=20, prepared=8, measured=8)


def setting(**asked: Any) -> Setting:
    config = EngineConfig(engine="sglang", model="m", collectives=Collectives(custom_all_reduce=False, **asked))
    name = " ".join(f"{key}={value}" for key, value in asked.items())
    return Setting(name or "base", setting_key(config), asked, config)


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TORCH))
    monkeypatch.setenv("FAKE_FACTORS", json.dumps({"NCCL_PROTO=Simple": 2.0, "NCCL_PROTO=LL": 0.5}))


def run(*settings: Setting, deadlines: Deadlines = QUICK, **more: Any) -> Timed:
    before = set(psutil.Process().children(recursive=True))  # another test's cluster may live in this process
    found = time_settings(
        settings, SHAPE, messages(SHAPE, 2, [1, 8]), 2,
        lambda one: collective_environment(one.config, os.environ), deadlines=deadlines, **more,
    )  # fmt: skip
    mine = set(psutil.Process().children(recursive=True)) - before
    assert [p for p in mine if p.status() != psutil.STATUS_ZOMBIE] == []
    return found


def outcomes(timed: Timed) -> dict[str, str]:
    return {result.name: result.outcome for result in timed.results}


def test_each_setting_is_timed_under_its_own_variables() -> None:
    timed = run(setting(), setting(nccl_proto="Simple"), setting(nccl_proto="LL"))
    steps = {result.name: [times.step_ms for times in result.times] for result in timed.results}
    # 5 all-reduces of 0.01 ms and one all-gather
    assert steps["base"] == pytest.approx([0.06, 0.06])
    assert steps["nccl_proto=Simple"] == pytest.approx([0.12, 0.12])
    assert steps["nccl_proto=LL"] == pytest.approx([0.03, 0.03])
    assert timed.results[0].times[0].all_reduce_us == pytest.approx(10)
    assert timed.drift == pytest.approx(0, abs=1e-9)
    assert timed.versions["nccl"] == "2.27.5"
    assert set(timed.stages_s) == {"import", "communicator, warm-up and capture", "measurement", "end"}
    assert timed.seconds / 2 < sum(timed.stages_s.values()) <= timed.seconds  # all that is waited for is told


def test_tree_fails_at_the_all_gather_and_takes_what_contains_it_along() -> None:
    said: list[str] = []
    both = setting(nccl_algo="Tree", nccl_proto="LL")
    timed = run(setting(), setting(nccl_algo="Tree"), both, at_once=2, say=said.append)
    assert outcomes(timed) == {"base": "ok", "nccl_algo=Tree": "failed", both.name: "failed"}
    tree, contained = timed.results[0], timed.results[1]
    assert tree.phase == "all-gather warm-up"
    assert tree.cause is not None and "no algorithm/protocol available for function AllGather" in tree.cause
    assert any("RuntimeError" in line for line in tree.log_tail)
    assert contained.cause == "contains nccl_algo=Tree, which failed by itself"
    assert len(said) == 3


def test_a_hang_is_ended_and_costs_no_other_setting_its_figures() -> None:
    deadlines = Deadlines(total=60, imported=20, prepared=5, measured=3)
    stuck, late, crashed = (setting(nccl_nthreads=n) for n in (512, 256, 128))
    timed = run(setting(), stuck, late, crashed, setting(nccl_proto="LL"), deadlines=deadlines)
    assert outcomes(timed) == {
        "base": "ok", stuck.name: "hung", late.name: "hung", crashed.name: "failed", "nccl_proto=LL": "ok",
    }  # fmt: skip
    by_name = {result.name: result for result in timed.results}
    assert (by_name[stuck.name].phase, by_name[stuck.name].cause) == (
        "communicator, warm-up and capture", "no answer within 5 s",
    )  # fmt: skip
    assert by_name[late.name].phase == "measurement"
    assert "exit code -11: Segmentation fault (fake)" in (by_name[crashed.name].cause or "")


def test_what_is_late_in_company_is_tried_alone_before_it_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_LATE_ONCE", str(tmp_path / "was-late"))
    late, contained = setting(nccl_nthreads=64), setting(nccl_nthreads=64, nccl_proto="LL")
    deadlines = Deadlines(total=60, imported=20, prepared=4, measured=4)
    timed = run(setting(), late, contained, deadlines=deadlines, at_once=2)
    assert outcomes(timed) == {"base": "ok", late.name: "ok", contained.name: "ok"}, timed.results
    assert (tmp_path / "was-late").exists()


def test_the_total_time_holds_and_what_is_left_is_not_blamed() -> None:
    began = time.monotonic()
    deadlines = Deadlines(total=4, imported=20, prepared=20, measured=20)
    timed = run(setting(nccl_nthreads=512), setting(nccl_proto="LL"), setting(), deadlines=deadlines, at_once=1)
    assert time.monotonic() - began < 8
    assert set(outcomes(timed).values()) == {"not measured"} and len(timed.results) == 3


def test_a_bench_that_cannot_start_fails_with_its_last_words() -> None:
    (lost,) = run(setting(), command=("/bin/sh", "-c", "echo no torch here >&2; exit 3")).results
    assert lost.outcome == "not measured" and lost.phase == "import"  # nothing that the setting could help
    assert lost.cause == "ended with exit code 3: no torch here"


def test_the_whole_benchmark_screens_a_space(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128}')
    file = tmp_path / "s.yaml"
    file.write_text(
        f"study: s\nsglang:\n  model: {model}\n  tensor_parallel_size: 2\n  load: {{concurrency: [4, 1]}}\n"
        "  rules: {allow: [bare-tree]}\n"
        "  fixed: {collectives: {custom_all_reduce: false}}\n"
        "  space: {collectives: {nccl_algo: [null, Tree], nccl_proto: [null, LL, Simple]}}\n"
    )
    space = load_space(file).for_engine("sglang")
    found = benchmark(space, None, Topology(gpu_count=2), noise=0.05, deadlines=QUICK)
    assert [message.tokens for message in found.messages] == [1, 4]
    reasons = {dropped.name: dropped.reason for dropped in found.dropped}
    assert set(reasons) == {
        "nccl_algo=Tree", "nccl_proto=Simple", "nccl_algo=Tree nccl_proto=LL", "nccl_algo=Tree nccl_proto=Simple",
    }  # fmt: skip
    assert reasons["nccl_proto=Simple"].startswith("dominated by nccl_proto=LL: 4.00")
    refused = space.config({"collectives.nccl_algo": None, "collectives.nccl_proto": "Simple"})
    assert [d.name for d in found.refuses(space.canonical(refused).config)] == ["nccl_proto=Simple"]

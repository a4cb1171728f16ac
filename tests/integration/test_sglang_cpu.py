"""Real SGLang on the CPU: flags, readiness, endpoints, exit codes. Opt in with `-m sglang_cpu`.

Needs SGLang with its CPU build installed, and FASTVERIFY_CPU_MODEL, a small model's folder. SGLang's
kernel package ends in `import common_ops`, which the CPU build lacks: a one-line stand-in is put on
the child's path.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import EngineConfig
from pipeline.errors import EngineError
from pipeline.records import FailureClass
from pipeline.spec import Limits
from serve import procfs, watch
from serve.engines import logs, sglang
from serve.engines.sglang_flags import flags, installed_release
from serve.process import EngineProcess, free_port

MODEL = os.environ.get("FASTVERIFY_CPU_MODEL", "")
pytestmark = [
    pytest.mark.sglang_cpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(installed_release() is None, reason="SGLang is not installed"),
    pytest.mark.skipif(not MODEL, reason="FASTVERIFY_CPU_MODEL names no model folder"),
]
LIMITS = Limits(start_s=900, stall_s=180, generate_s=60, silence_s=30, stop_s=15, proof_s=20)


def engine(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> EngineProcess:
    stand_in = folder / "site"
    stand_in.mkdir()
    (stand_in / "common_ops.py").write_text("import torch\n")
    path = os.pathsep.join(filter(None, (str(stand_in), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    config = EngineConfig.model_validate(
        {
            "engine": "sglang",
            "model": MODEL,
            "attention_backend": "torch_native",
            "max_running_requests": 4,
            "context_length": 1024,
            # Otherwise the cache takes most of the machine's memory.
            "extra_args": ("--device", "cpu", "--max-total-tokens", "8192"),
            "env": (("SGLANG_USE_CPU_ENGINE", "1"), ("OMP_NUM_THREADS", "1")),
            **settings,
        }
    )
    launch = sglang.plan(config, port=free_port(), inherited=os.environ)
    return EngineProcess(launch, LIMITS, engine="sglang", log_path=folder / "engine.log")


def test_the_installed_parser_knows_every_flag_of_ours() -> None:
    table = flags()
    assert table.source == "installed parser"
    assert {"--max-running-requests", "--disable-custom-all-reduce", "--speculative-algorithm"} <= set(table.flags)


def test_a_real_launch_is_proven_ready_measured_and_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tmp_path, monkeypatch) as real:
        resolved = real.wait_ready()
        assert resolved["max_running_requests"] == 4
        body = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 16, "temperature": 0}}
        watch.request(real.launch.base_url, "/generate", body, 60)
        time.sleep(1)
        real.check()
        assert b"sglang:generation_tokens_total" in watch.request(real.launch.base_url, "/metrics", None, 10)
    assert real.proof is not None and real.proof.proven
    text = (tmp_path / "engine.log").read_text()
    assert any(logs.decode_line(line) for line in text.splitlines())


@pytest.mark.parametrize(
    ("victim", "cause"),
    [("scheduler", "scheduler_0 was killed by SIGKILL"), ("main", "the engine was killed by SIGKILL")],
)
def test_kill_9_of_one_process_ends_all_and_is_told_from_a_crash(
    victim: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tmp_path, monkeypatch) as real, pytest.raises(EngineError) as caught:
        real.wait_ready()
        ours = procfs.descendants(real.guard_pid)
        found = [
            p
            for p in ours
            if (p.name.startswith("sglang::sched") if victim == "scheduler" else p.ppid == real.guard_pid)
        ]
        os.kill(found[0].pid, signal.SIGKILL)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            real.check()
            time.sleep(0.1)
    assert caught.value.failure.failure_class is FailureClass.KILLED, caught.value.failure
    assert cause in caught.value.failure.cause
    assert real.proof is not None and real.proof.proven


def test_a_model_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tmp_path, monkeypatch, model="/no/such/model") as real, pytest.raises(EngineError) as caught:
        real.wait_ready()
    assert caught.value.failure.failure_class is FailureClass.CONFIG_INVALID
    assert real.proof is not None and real.proof.proven

"""The commands around a champion: wrong questions are one line and exit code 2, and cost no import of Ray."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import EngineConfig
from pipeline.installing import promotion_report
from pipeline.promotion import Decision, Evidence
from pipeline.records import Launch, TrialRecord
from serve.service import ChampionSpec, Service


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("pipeline.promote",), "either STUDY or --rollback"),
        (("pipeline.promote", "x", "--rollback"), "either STUDY or --rollback"),
        (("pipeline.promote", "--rollback"), "no champion yet"),
        (("pipeline.drift",), "no champion yet"),
        (("serve",), "no champion yet"),
    ],
)
def test_a_wrong_question_is_one_line_and_exit_code_2(argv: tuple[str, ...], said: str, tmp_path: Path) -> None:
    root = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-m", *argv], cwd=tmp_path, env={"PYTHONPATH": str(root), "PATH": "/usr/bin"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_taken_port_is_said_before_anything_starts(tmp_path: Path) -> None:
    config = EngineConfig(engine="sglang", model="m")
    Service(spec=ChampionSpec(config=config)).write(tmp_path / "champion.json")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        argv = [sys.executable, "-m", "serve", "--file", str(tmp_path / "champion.json"), "--port", port]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, f"error: port {port} is taken; --port takes another\n")


def test_help_and_checks_import_no_ray() -> None:
    code = "import sys, pipeline.promote, pipeline.drift, serve.__main__, serve.service; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_the_report_holds_no_path_or_host_of_this_machine() -> None:
    config = EngineConfig(engine="sglang", model="m")
    record = TrialRecord(
        study="s",
        number=1,
        role="confirm",
        status="failed",
        config=config,
        config_id=config.config_id,
        launch=Launch(argv=("/opt/python", "-m", "x"), log_path="/opt/log"),
        node="10.0.0.7",
    )
    evidence = Evidence(winner="a", incumbent="b", has_champion=False, launches=(record,))
    text = str(promotion_report(evidence, Decision(promote=None, reason="r")))
    assert config.words() in text
    assert "/opt" not in text
    assert "10.0.0.7" not in text

"""The command that starts MLflow's server, without starting it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pipeline.errors import InputError
from pipeline.ui import CONFIG, links, server


def test_the_server_command_uses_the_shipped_configuration(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").touch()
    command, added = server(tmp_path, 5099)
    assert command == [sys.executable, "-m", "mlflow", "--env-file", str(CONFIG), "server"]
    assert added["MLFLOW_BACKEND_STORE_URI"] == f"sqlite:///{tmp_path}/mlflow.db"
    assert added["MLFLOW_PORT"] == "5099"


def test_the_configuration_is_sane() -> None:
    lines = [tuple(line.split("=", 1)) for line in CONFIG.read_text().splitlines() if line and not line.startswith("#")]
    stated = dict(lines)
    assert stated["MLFLOW_HOST"] == "127.0.0.1"
    assert stated["MLFLOW_WORKERS"] == "1"
    assert stated["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    assert not list(CONFIG.parent.glob("*.py"))  # it would hide the package `mlflow`


def test_without_a_logged_study_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="make tune"):
        server(tmp_path, 5000)


def test_logged_studies_are_linked(tmp_path: Path) -> None:
    for name, facts in (("a", {"mlflow_experiment_id": "3"}), ("b", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "study.json").write_text(json.dumps(facts))
    assert [(study, "experiments/3/runs" in url) for study, url in links(tmp_path, "http://h")] == [("a", True)]

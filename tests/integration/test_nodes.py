"""A study on two nodes: two Ray nodes on loopback addresses, each with pretended GPUs and the fake engine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pipeline.store import Study
from tests.fakes.running import free_port
from tests.integration.test_study import ROOT, TOPOLOGY, command, environment, gone, leftovers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SECOND = "127.0.0.2"


@contextmanager
def node(*arguments: str) -> Iterator[None]:
    """A Ray node with two GPUs and a slot, for as long as the block lasts."""
    ray = Path(sys.executable).parent / "ray"
    resources = ["--num-cpus=2", "--num-gpus=2", "--resources", json.dumps({"engine_slot": 1})]
    env = environment() | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    argv = [str(ray), "start", "--block", *resources, *arguments]
    running = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        running.terminate()
        try:
            running.wait(60)
        except subprocess.TimeoutExpired:
            running.kill()


@pytest.fixture
def address() -> Iterator[str]:
    """Two nodes that know each other. Their sockets' paths must be short, so not under pytest's folder."""
    folder, port = tempfile.mkdtemp(prefix="fv-ray-"), free_port()
    head = (
        "--head",
        "--node-ip-address=127.0.0.1",
        f"--port={port}",
        "--include-dashboard=false",
        "--temp-dir",
        folder,
    )
    joins = ("--address", f"127.0.0.1:{port}", f"--node-ip-address={SECOND}")
    with ExitStack() as nodes:
        nodes.callback(shutil.rmtree, folder, ignore_errors=True)
        nodes.enter_context(node(*head, f"--ray-client-server-port={free_port()}"))
        _wait_for(f"127.0.0.1:{port}", 1)
        nodes.enter_context(node(*joins))
        _wait_for(f"127.0.0.1:{port}", 2)
        yield f"127.0.0.1:{port}"


def _wait_for(address: str, count: int) -> None:
    deadline = time.monotonic() + 90
    status = [str(Path(sys.executable).parent / "ray"), "status", "--address", address]
    while time.monotonic() < deadline:
        said = subprocess.run(status, capture_output=True, text=True, timeout=60).stdout
        if said.count(" node_") == count:
            return
        time.sleep(0.5)
    pytest.fail(f"no {count} nodes at {address}")


def tune(folder: Path, address: str, topology: dict[str, object]) -> subprocess.CompletedProcess[str]:
    argv = command(folder, "--address", address, "--tracking-uri", "none", trials=3, rounds=0)
    env = environment() | {"RAY_AUTH_MODE": "disabled", "FASTVERIFY_TOPOLOGY": json.dumps(topology)}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240, cwd=ROOT)


def test_both_nodes_run_trials_one_each_and_the_second_measures_the_baseline_too(tmp_path: Path, address: str) -> None:
    refused = tune(tmp_path, address, TOPOLOGY | {"gpu_model": "NVIDIA H100"})
    assert refused.returncode == 2
    assert "another kind of machine: gpu_model NVIDIA H200 there, NVIDIA H100 here" in refused.stderr
    assert not list((tmp_path / "runs").glob("*/records.jsonl"))

    done = tune(tmp_path, address, TOPOLOGY)
    assert done.returncode == 0, done.stderr
    launched = [r for r in Study.open("short", tmp_path / "runs").records() if r.status in ("ok", "failed")]
    assert len({record.node for record in launched}) == 2
    reference = next(record for record in launched if record.role == "reference")
    assert reference.node != launched[0].node
    assert reference.config == launched[0].config
    assert all(record.teardown is not None and record.teardown.proven for record in launched)
    assert gone(tmp_path), leftovers(tmp_path)

"""Whole lives of an engine: every way to fail, through the real plan and the real process class."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import socketserver
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Collectives, EngineConfig
from pipeline.errors import EngineError
from pipeline.records import Failure, FailureClass, Launch
from pipeline.spec import Limits
from serve import cleanup, procfs
from serve.process import EngineProcess, free_port, reap
from tests.fakes.fake_failures import FAILURES
from tests.fakes.launching import FIXTURES, LIMITS, fake_launch

ROOT = Path(__file__).parent.parent.parent


def until(condition: Callable[[], object], limit_s: float = 15.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def engine_of(knobs: dict[str, Any], folder: Path, limits: Limits = LIMITS, **more: Any) -> EngineProcess:
    return EngineProcess(fake_launch(knobs, folder / "engine.log", **more), limits, engine="sglang")


def failure_of(engine: EngineProcess, act: Callable[[EngineProcess], object] | None = None) -> Failure:
    """Start, wait, do `act` until it fails; then everything must be proven gone."""
    with pytest.raises(EngineError) as caught, engine:
        engine.wait_ready()
        if act is not None:
            act(engine)
    assert_gone(engine)
    return caught.value.failure


def assert_gone(engine: EngineProcess) -> None:
    assert engine.proof is not None and engine.proof.proven, engine.proof
    assert not alive_with_port(engine.launch)
    assert not list(engine.lease_dir.glob("*.lease.json"))


def alive_with_port(launch: Launch) -> list[str]:
    """Command lines of living processes that name this launch's port."""
    port = launch.base_url.rpartition(":")[2]
    lines = [procfs.cmdline(pid) for pid in procfs.table() if pid != os.getpid()]
    return [line for line in lines if f"--port {port}" in line]


def keep_checking(engine: EngineProcess) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        engine.check()
        time.sleep(0.05)


# ---- a good life


def test_a_healthy_engine_is_ready_watched_and_gone(tmp_path: Path) -> None:
    with engine_of({}, tmp_path) as engine:
        resolved = engine.wait_ready()
        assert resolved["tp_size"] == 2 and resolved["max_running_requests"] == 48
        assert list(tmp_path.glob("*.lease.json"))
        assert len(alive_with_port(engine.launch)) >= 4  # server, two schedulers, detokenizer
        engine.check()
    assert_gone(engine)
    assert engine.proof is not None and engine.proof.notes == ()
    assert engine.stop() is engine.proof


def test_the_engine_gets_the_environment_of_its_plan_and_no_stale_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "4")
    config = EngineConfig(engine="sglang", model="m", collectives=Collectives(nccl_proto="LL"))
    with engine_of({}, tmp_path, config=config) as engine:
        engine.wait_ready()
        pid = next(p.pid for p in procfs.descendants(engine.guard_pid))
        assert procfs.has_variable(pid, "NCCL_PROTO=LL")
        assert not procfs.has_variable(pid, "SGLANG_SIMULATE_ACC_LEN=4")
    assert engine.launch.scrubbed.count("SGLANG_SIMULATE_ACC_LEN") == 1


# ---- deaths at the start

AT_START = {
    "bad_flag": (FailureClass.CONFIG_INVALID, 2, "start"),
    "bad_model": (FailureClass.CONFIG_INVALID, 1, "start"),
    "weights_too_big": (FailureClass.OOM_RAISE, -9, "load"),
    "kv_pool_small": (FailureClass.OOM_RAISE, -9, "load"),
    "oom_capture": (FailureClass.OOM_LOWER, -9, "capture"),
    "capture": (FailureClass.CAPTURE, -9, "capture"),
    "nccl": (FailureClass.COLLECTIVE, -9, "load"),
    "tree": (FailureClass.COLLECTIVE, -9, "capture"),
    "draft_size": (FailureClass.DRAFT_MISMATCH, -9, "load"),
    "draft_vocab": (FailureClass.DRAFT_MISMATCH, -9, "load"),
    "assertion": (FailureClass.CRASH, -9, "load"),
    "fusion_sm": (FailureClass.CONFIG_INVALID, -9, "load"),
    "silent_kill": (FailureClass.KILLED, -9, "load"),
    "segfault": (FailureClass.CRASH, -11, "load"),
    "port": (FailureClass.PORT, 3, "start"),
}
RUNNING = {
    "oom_serving": (FailureClass.OOM_LOWER, -9),
    "watchdog": (FailureClass.COLLECTIVE, -6),
    "scheduler_killed": (FailureClass.KILLED, -9),
}


def test_every_injectable_failure_is_covered() -> None:
    assert set(AT_START) | set(RUNNING) == set(FAILURES)


@pytest.mark.parametrize("name", sorted(AT_START))
def test_death_at_the_start(name: str, tmp_path: Path) -> None:
    failure_class, exit_code, phase = AT_START[name]
    failure = failure_of(engine_of({"fail": name, "start_ms": 20}, tmp_path))
    assert (failure.failure_class, failure.exit_code, failure.phase) == (failure_class, exit_code, phase)
    assert failure.log_path == str(tmp_path / "engine.log")
    assert failure.command is not None and "--tp-size 2" in failure.command
    assert failure.text().endswith(str(tmp_path / "engine.log"))


def test_bare_tree_says_what_to_use_instead(tmp_path: Path) -> None:
    config = EngineConfig(engine="sglang", model="m", collectives=Collectives(nccl_algo="Tree"))
    failure = failure_of(engine_of({"fail": "tree", "start_ms": 20}, tmp_path, config=config))
    assert failure.cause.endswith("use allreduce:tree")


def test_the_exit_code_of_the_shell_means_the_same(tmp_path: Path) -> None:
    failure = failure_of(engine_of({"fail": "kv_pool_small", "exit_code": 137, "start_ms": 20}, tmp_path))
    assert (failure.failure_class, failure.exit_code) == (FailureClass.OOM_RAISE, 137)


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    launch = fake_launch({}, tmp_path / "engine.log")
    launch = launch.model_copy(update={"argv": ("/no/such/python", *launch.argv[1:])})
    failure = failure_of(EngineProcess(launch, LIMITS, engine="sglang"))
    assert failure.failure_class is FailureClass.CONFIG_INVALID
    assert "/no/such/python" in failure.cause


# ---- hangs, and silences that are none


@pytest.mark.parametrize("phase", ["load", "capture"])
def test_a_silent_start_is_ended_by_the_stall_limit(phase: str, tmp_path: Path) -> None:
    began = time.monotonic()
    failure = failure_of(engine_of({"hang_at": phase}, tmp_path, LIMITS.model_copy(update={"stall_s": 1.0})))
    assert failure.failure_class is FailureClass.HANG
    assert f"during {phase}" in failure.cause
    assert time.monotonic() - began < 10


def test_the_recorded_fusion_hang_is_ended_by_the_stall_limit(tmp_path: Path) -> None:
    knobs = {"log_fixture": str(FIXTURES / "tp2_fusion.log.gz"), "hang_at": "load", "time_compression": 180.0}
    failure = failure_of(engine_of(knobs, tmp_path, LIMITS.model_copy(update={"stall_s": 1.0})))
    assert failure.failure_class is FailureClass.HANG
    assert "all-reduce fusion" in failure.cause


@pytest.mark.parametrize("name", ["eagle3_tp1", "dummy_tp2"])
def test_recorded_healthy_starts_pass_the_same_limit(name: str, tmp_path: Path) -> None:
    # 180 s of stall limit and 77 s of silence, both at a sixtieth.
    knobs = {"log_fixture": str(FIXTURES / f"{name}.log.gz"), "time_compression": 60.0}
    with engine_of(knobs, tmp_path, LIMITS.model_copy(update={"stall_s": 3.0})) as engine:
        engine.wait_ready()
    assert_gone(engine)


def test_a_compiler_at_work_suspends_the_limit(tmp_path: Path) -> None:
    limits = LIMITS.model_copy(update={"stall_s": 1.0})
    with engine_of({"busy_at": "capture", "busy_s": 1.5}, tmp_path, limits) as engine:
        engine.wait_ready()
    assert_gone(engine)


def test_the_total_limit_holds_too(tmp_path: Path) -> None:
    limits = LIMITS.model_copy(update={"start_s": 1.0, "stall_s": 60.0})
    failure = failure_of(engine_of({"start_ms": 60000}, tmp_path, limits))
    assert failure.failure_class is FailureClass.UNREADY
    assert "not ready within 1 s" in failure.cause


def test_startup_complete_without_the_ready_line_is_not_ready(tmp_path: Path) -> None:
    failure = failure_of(engine_of({"hang_at": "ready"}, tmp_path, LIMITS.model_copy(update={"stall_s": 1.0})))
    assert (failure.failure_class, failure.phase) == (FailureClass.HANG, "warm-up")


# ---- ready in words only


def test_ready_but_mute(tmp_path: Path) -> None:
    limits = LIMITS.model_copy(update={"generate_s": 1.0})
    failure = failure_of(engine_of({"mute_after_requests": 0}, tmp_path, limits))
    assert (failure.failure_class, failure.phase) == (FailureClass.MUTE, "warm-up")


def test_ready_but_refusing(tmp_path: Path) -> None:
    limits = LIMITS.model_copy(update={"generate_s": 1.0})
    failure = failure_of(engine_of({"error_rate": 1.0}, tmp_path, limits))
    assert failure.failure_class is FailureClass.UNREADY
    assert "HTTP 500" in failure.cause


@contextlib.contextmanager
def thief(port: int) -> Iterator[None]:
    """Another server on the port, which answers everything with a perfect reply."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"version": "0.5.23", "launch_command": "another"}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            return

    # Not HTTPServer: it asks DNS for its own name.
    server = socketserver.ThreadingTCPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def test_a_taken_port_starts_nothing(tmp_path: Path) -> None:
    port = free_port()
    with thief(port):
        engine = engine_of({}, tmp_path, port=port)
        with pytest.raises(EngineError) as caught:
            engine.start()
        assert caught.value.failure.failure_class is FailureClass.PORT
        assert not alive_with_port(engine.launch)
        assert engine.stop().group_dead


def test_the_loser_of_a_port_is_not_ready_whatever_its_log_says(tmp_path: Path) -> None:
    engine = engine_of({"start_ms": 1500}, tmp_path, LIMITS.model_copy(update={"proof_s": 1.0}))
    port = int(engine.launch.base_url.rpartition(":")[2])
    engine.start()
    with thief(port):
        with pytest.raises(EngineError) as caught:
            engine.wait_ready()
        proof = engine.stop()
    assert "fired up" in (tmp_path / "engine.log").read_text()
    assert caught.value.failure.failure_class is FailureClass.PORT
    assert proof.group_dead and not proof.ports_free  # the thief has it: this port is not to be used again


# ---- deaths and silences while running


@pytest.mark.parametrize("name", sorted(RUNNING))
def test_death_while_running_ends_the_watch(name: str, tmp_path: Path) -> None:
    failure_class, exit_code = RUNNING[name]
    knobs = {"die_after_s": 0.5, "fail": f"run:{name}"}
    failure = failure_of(engine_of(knobs, tmp_path), keep_checking)
    assert (failure.failure_class, failure.exit_code, failure.phase) == (failure_class, exit_code, "measure")


def test_healthy_but_mute_while_running_ends_the_watch(tmp_path: Path) -> None:
    limits = LIMITS.model_copy(update={"silence_s": 0.5, "generate_s": 1.0})
    failure = failure_of(engine_of({"mute_after_requests": 1}, tmp_path, limits), keep_checking)
    assert failure.failure_class is FailureClass.MUTE


def test_a_stopped_process_is_hung(tmp_path: Path) -> None:
    limits = LIMITS.model_copy(update={"silence_s": 0.5, "generate_s": 0.5})

    def freeze(engine: EngineProcess) -> None:
        for process in procfs.descendants(engine.guard_pid):
            os.kill(process.pid, signal.SIGSTOP)
        keep_checking(engine)

    assert failure_of(engine_of({}, tmp_path, limits), freeze).failure_class is FailureClass.HANG


def test_an_idle_but_able_engine_passes_the_watch(tmp_path: Path) -> None:
    limits = LIMITS.model_copy(update={"silence_s": 0.2})
    with engine_of({"silent": True}, tmp_path, limits) as engine:
        engine.wait_ready()
        for _ in range(30):
            engine.check()
            time.sleep(0.05)
    assert_gone(engine)


# ---- nothing stays


LEAVES_A_SEMAPHORE = """
import os, pathlib, sys, time
child = os.fork()
if not child:
    pathlib.Path(f"/dev/shm/sem.fake-{os.getpid()}").touch()
    time.sleep(2)
    os._exit(1)
os.waitpid(child, 0)
sys.exit(1)
"""


def test_shared_memory_of_a_process_that_died_during_the_start_is_removed(tmp_path: Path) -> None:
    # Real SGLang: the semaphores of a scheduler that died while it loaded stayed for good.
    argv, url = (sys.executable, "-c", LEAVES_A_SEMAPHORE), f"http://127.0.0.1:{free_port()}"
    engine = EngineProcess(Launch(argv=argv, base_url=url), LIMITS, engine="sglang", log_path=tmp_path / "engine.log")
    assert failure_of(engine).failure_class is FailureClass.CRASH
    assert engine.proof is not None and "removed from /dev/shm: sem.fake-" in " ".join(engine.proof.notes)
    assert not list(Path("/dev/shm").glob("sem.fake-*"))


def test_stubborn_escaped_children_and_shared_memory_are_removed(tmp_path: Path) -> None:
    knobs = {"stubborn": True, "stubborn_children": True, "escaped_children": True, "shm_segments": 2}
    limits = LIMITS.model_copy(update={"stop_s": 0.5})
    others = set(Path("/dev/shm").glob("sglang_fake_*"))
    with engine_of(knobs, tmp_path, limits) as engine:
        engine.wait_ready()
        segments = set(Path("/dev/shm").glob("sglang_fake_*")) - others
        assert len(segments) == 2
    assert_gone(engine)
    assert engine.proof is not None and "removed from /dev/shm" in engine.proof.notes[0]
    assert not any(segment.exists() for segment in segments)


def test_a_start_that_is_stopped_leaves_no_children(tmp_path: Path) -> None:
    engine = engine_of({"hang_at": "capture"}, tmp_path)
    engine.start()
    assert until(lambda: len(alive_with_port(engine.launch)) >= 4)
    engine.stop()
    assert_gone(engine)


def test_stopping_ends_a_wait_in_another_thread(tmp_path: Path) -> None:
    engine = engine_of({"hang_at": "capture"}, tmp_path)
    engine.start()
    raised: list[EngineError] = []

    def wait() -> None:
        try:
            engine.wait_ready()
        except EngineError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.3)
    engine.stop()
    waiting.join(10)
    assert_gone(engine)
    assert raised and raised[0].failure.failure_class is FailureClass.KILLED


DRIVER = """
    import json, sys, time
    from pathlib import Path
    from tests.fakes.launching import LIMITS, fake_launch
    from serve.process import EngineProcess
    launch = fake_launch({knobs}, Path({folder!r}) / "engine.log")
    engine = EngineProcess(launch, LIMITS, engine="sglang")
    engine.start()
    engine.wait_ready()
    print(launch.model_dump_json(), flush=True)
    time.sleep(60)
"""


def test_kill_9_of_the_owner_leaves_nothing(tmp_path: Path) -> None:
    knobs = {"stubborn_children": True, "escaped_children": True, "shm_segments": 2}
    script = textwrap.dedent(DRIVER).replace("{knobs}", str(knobs)).replace("{folder!r}", repr(str(tmp_path)))
    others = set(Path("/dev/shm").glob("sglang_fake_*"))
    driver = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    launch = Launch.model_validate_json(driver.stdout.readline())
    assert len(alive_with_port(launch)) >= 4
    mine = set(Path("/dev/shm").glob("sglang_fake_*")) - others
    assert len(mine) == 2
    driver.kill()
    driver.wait(10)
    driver.stdout.close()
    assert until(lambda: not alive_with_port(launch)), alive_with_port(launch)
    assert reap(tmp_path, limit_s=10) == []
    assert not list(tmp_path.glob("*.lease.json"))
    assert not any(segment.exists() for segment in mine), "nobody else would know whose they were"


def test_kill_9_of_the_guard_ends_the_server_and_the_proof_finds_the_rest(tmp_path: Path) -> None:
    engine = engine_of({"stubborn_children": True, "escaped_children": True}, tmp_path)
    engine.start()
    engine.wait_ready()
    os.kill(engine.guard_pid, signal.SIGKILL)
    assert until(lambda: not procfs.listening_inodes(engine._port)), "the kernel ends the server with its guard"
    with pytest.raises(EngineError, match="its guard was killed"):
        engine.check()
    assert alive_with_port(engine.launch), "the escaped children live on"
    proof = engine.stop()
    assert_gone(engine)
    assert len([note for note in proof.notes if "survived the guard" in note]) == 3


def test_a_surviving_child_fails_the_proof_and_keeps_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = LIMITS.model_copy(update={"proof_s": 0.5})
    engine = engine_of({"stubborn_children": True, "escaped_children": True}, tmp_path, limits)
    engine.start()
    engine.wait_ready()
    os.kill(engine.guard_pid, signal.SIGKILL)
    until(lambda: not procfs.listening_inodes(engine._port))
    with monkeypatch.context() as unkillable:
        unkillable.setattr(procfs, "kill", lambda who, number=signal.SIGKILL: None)
        proof = engine.stop()
    assert not proof.group_dead and not proof.proven
    assert any("cannot be killed" in note for note in proof.notes)
    assert list(tmp_path.glob("*.lease.json")), "the lease stays for the next reaper"
    monkeypatch.setattr(cleanup.procfs, "alive", lambda who: procfs.identity(who[0]) == who and who[0] != os.getpid())
    assert reap(tmp_path, limit_s=10) == []
    assert not alive_with_port(engine.launch)

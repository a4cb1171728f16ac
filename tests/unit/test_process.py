"""Processes, progress and remains, piece by piece; whole lives are in integration/test_engine_failures.py."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from pipeline.spec import Limits
from serve import cleanup, nvml, procfs, watch
from serve.engines import logs

FIXTURES = Path(__file__).parent.parent / "fixtures" / "sglang-0.5.17"
SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


# ---- progress of a start


class Replay:
    """A recorded log on a virtual clock: what `StallClock` would have seen, second by second."""

    def __init__(self, name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.now, self.lines = path, 1000.0, []
        path.write_text("")
        monkeypatch.setattr(watch.time, "monotonic", lambda: self.now)
        with gzip.open(FIXTURES / f"{name}.log.gz", "rt") as file:
            text = file.read()
        began: datetime | None = None
        at = 0.0
        for line in text.splitlines(keepends=True):
            if found := re.match(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", line):
                stamp = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S")
                began = began or stamp
                at = (stamp - began).total_seconds()
            self.lines.append((at, line))

    def longest_silence_s(self, until_s: float) -> float:
        """The largest silence that the clock reports, looking every second until the ready line or `until_s`."""
        clock = watch.StallClock(watch.Log(self.path), guard_pid=os.getpid())
        clock.log.offset = 0
        start, worst = self.now, 0.0
        while not logs.is_ready(self.path.read_text()) and self.now - start < until_s:
            due = [line for at, line in self.lines if at <= self.now - start]
            self.lines = self.lines[len(due) :]
            with self.path.open("a") as file:
                file.writelines(due)
            worst = max(worst, clock.silent_s())
            self.now += 1.0
        return worst


@pytest.mark.parametrize("name", ["base_tp1", "dummy_tp2", "eagle3_tp1", "ngram8_tp1", "standalone_tp1", "student_tp1"])
def test_healthy_starts_stay_under_the_stall_limit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silence = Replay(name, tmp_path / "log", monkeypatch).longest_silence_s(until_s=600)
    assert silence < Limits().stall_s / 2


def test_the_healthiest_silence_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A limit below a minute would end good starts: kernels compile without a word.
    assert Replay("eagle3_tp1", tmp_path / "log", monkeypatch).longest_silence_s(until_s=600) > 50


def test_a_hung_start_exceeds_the_stall_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Replay("tp2_fusion", tmp_path / "log", monkeypatch).longest_silence_s(until_s=250) > Limits().stall_s


def stall_clock(tmp_path: Path, text: str = "") -> watch.StallClock:
    log = watch.Log(tmp_path / "log")
    (tmp_path / "log").write_text(text)
    return watch.StallClock(log, guard_pid=os.getpid(), look_every_s=0.0)


def process(name: str, cpu_s: float) -> procfs.Process:
    return procfs.Process(pid=1, start=1, ppid=1, session=1, name=name, cpu_s=cpu_s)


@pytest.mark.parametrize(
    ("name", "progress"), [("cicc", True), ("ptxas", True), ("python3", False), ("sglang::schedul", False)]
)
def test_only_compilers_at_work_suspend_the_limit(
    name: str, progress: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = stall_clock(tmp_path)
    clock.silent_s()
    for cpu_s in (1.0, 2.0, 3.0):
        monkeypatch.setattr(procfs, "descendants", lambda root, c=cpu_s: [process(name, c)])
        time.sleep(0.02)
        silent = clock.silent_s()
    assert (silent < 0.015) is progress


def test_a_compiler_that_stands_still_is_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = stall_clock(tmp_path)
    monkeypatch.setattr(procfs, "descendants", lambda root: [process("cicc", 5.0)])
    clock.silent_s()
    time.sleep(0.05)
    assert clock.silent_s() >= 0.05


@pytest.mark.parametrize(
    ("text", "read", "progress"),
    [
        ("Load weight begin.\n", 50 << 20, True),
        ("Load weight begin.\n", 1000, False),
        ("Load weight begin.\nLoad weight end.\n", 50 << 20, False),
        ("", 50 << 20, True),  # imports: minutes with hardly a line on a busy machine
        ("", 1000, False),
    ],
)
def test_imports_and_weights_are_progress_only_while_bytes_arrive(
    text: str, read: int, progress: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = stall_clock(tmp_path, text)
    total = iter(range(0, 100 * read, read))
    monkeypatch.setattr(procfs, "descendants", lambda root: [process("python3", 0.0)])
    monkeypatch.setattr(procfs, "io_bytes", lambda pid: next(total))
    for _ in range(4):
        time.sleep(0.02)
        silent = clock.silent_s()
    assert (silent < 0.015) is progress


def test_a_log_is_read_from_its_launch_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("an earlier life: The server is fired up and ready to roll!\n")
    log = watch.Log(path)
    assert (log.text(), log.size()) == ("", 0)
    with path.open("ab") as file:
        file.write(b"new \xff\n")
    assert log.text() == "new �\n"


# ---- processes


def test_a_process_is_its_pid_and_its_start() -> None:
    child = subprocess.Popen(SLEEP)
    who = procfs.identity(child.pid)
    assert who is not None and procfs.alive(who)
    stranger = (child.pid, who[1] + 1)
    procfs.kill([stranger])
    assert procfs.alive(who), "a stranger's start time must not be killed"
    assert child.pid in [p.pid for p in procfs.descendants(os.getpid())]
    procfs.kill([who])
    assert child.wait(5) == -signal.SIGKILL
    assert not procfs.alive(who)


def test_zombies_are_dead() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    deadline = time.monotonic() + 10
    while procfs.read(child.pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert procfs.read(child.pid) is None
    child.wait(5)


def test_who_listens() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert not procfs.listening_inodes(port)
        server.listen()
        assert procfs.listeners(port, [os.getpid(), 1]) == {os.getpid()}
        assert port in procfs.listening_ports([os.getpid()])
    assert not procfs.listening_inodes(port)


# ---- remains


def marked(mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(SLEEP, env={**os.environ, cleanup.MARK: mark}, start_new_session=True)


def until(condition: object, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.02)


def test_a_marked_process_is_found_wherever_it_went() -> None:
    child, stranger = marked("ours"), marked("theirs")
    try:
        belongings = cleanup.Belongings("ours", (0, 0))
        until(belongings.living)
        assert [p.pid for p in belongings.living()] == [child.pid]
        assert belongings.kill(time.monotonic() + 10) == []
        assert child.wait(5) == -signal.SIGKILL
        assert stranger.poll() is None
    finally:
        for one in (child, stranger):
            one.kill()
            one.wait(5)


def lease(folder: Path, owner: tuple[int, int], engine: subprocess.Popen[bytes], mark: str, boot: str = "") -> Path:
    who = procfs.identity(engine.pid)
    assert who is not None
    return cleanup.Lease(owner, (0, 0), who, mark, 1, (), boot or cleanup.boot_id()).write(folder)


def test_a_dead_owners_engine_is_reaped_and_its_lease_removed(tmp_path: Path) -> None:
    engine = marked("orphan")
    path = lease(tmp_path / "trials" / "003", (999999, 1), engine, "orphan")
    assert cleanup.reap(tmp_path, limit_s=10) == []
    assert engine.wait(5) == -signal.SIGKILL
    assert not path.exists()


def test_a_living_owner_keeps_its_engine(tmp_path: Path) -> None:
    engine = marked("owned")
    me = procfs.identity(os.getpid())
    assert me is not None
    path = lease(tmp_path, me, engine, "owned")
    assert "is alive" in cleanup.reap(tmp_path, limit_s=1)[0]
    assert engine.poll() is None and path.exists()
    engine.kill()
    engine.wait(5)


def test_a_reused_pid_is_not_killed(tmp_path: Path) -> None:
    stranger = marked("stranger")
    path = lease(tmp_path, (999999, 1), stranger, "long gone")
    data = json.loads(path.read_text())
    data["engine"][1] += 1  # the same pid, another start time
    path.write_text(json.dumps(data))
    assert cleanup.reap(tmp_path, limit_s=1) == []
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait(5)


def test_leases_of_another_boot_or_half_written_ones_touch_nothing(tmp_path: Path) -> None:
    stranger = marked("s")
    lease(tmp_path, (999999, 1), stranger, "s", boot="another")
    (tmp_path / "x.lease.json").write_text('{"owner": [1,')
    assert cleanup.reap(tmp_path, limit_s=1) == []
    assert stranger.poll() is None and not list(tmp_path.glob("*.lease.json"))
    stranger.kill()
    stranger.wait(5)


def test_only_dead_processes_segments_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup, "_SHM", tmp_path)
    dead, alive = subprocess.Popen([sys.executable, "-S", "-c", ""]), os.getpid()
    dead.wait(10)
    mine = procfs.identity(alive)
    assert mine is not None
    for name in (f"torch_{dead.pid}_1", f"torch_{alive}_1", "psm_stranger"):
        (tmp_path / name).write_bytes(b"x")
    belongings = cleanup.Belongings("m", (dead.pid, 1), {(dead.pid, 1), mine})
    assert belongings.remove_shared_memory() == [str(tmp_path / f"torch_{dead.pid}_1")]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["psm_stranger", f"torch_{alive}_1"])


@pytest.mark.parametrize(
    ("now", "users", "back"),
    [
        ([1060], {}, True),  # within 64 MiB
        ([2000, 1010], {}, True),  # comes back while we wait
        ([2000], {}, False),
        ([2000], {999999: 900}, False),  # a pid of the host's, from inside a container: it may be ours
        ([2000], {1: 900}, True),  # a stranger that we can see
    ],
)
def test_gpu_memory_is_back_or_explained(
    now: list[int], users: dict[int, int], back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter(now)
    last = now[-1]
    monkeypatch.setattr(nvml, "used_mib", lambda gpus: {0: next(readings, last)})
    monkeypatch.setattr(nvml, "users", lambda gpus: {0: users})
    found, words = cleanup.memory_back({0: 1000}, time.monotonic() + 0.3)
    assert found is back
    assert (words is None) is back


def test_without_gpus_there_is_no_memory_to_prove() -> None:
    assert cleanup.memory_back({}, time.monotonic()) == (None, None)

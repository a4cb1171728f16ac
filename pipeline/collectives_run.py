"""Times every setting in processes of its own, within a total time.

Starting a process costs more than a measurement, so settings go in waves: those of a wave import and prepare
together, then each is measured while all others are idle, and the next wave imports meanwhile. Whatever
fails or outlives its deadline is killed with its whole group; the others of its wave go on.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.screening import (
    GATHERS,
    Message,
    Outcome,
    Result,
    Setting,
    Shape,
    Times,
    contains,
    drift_of,
    implied,
    summary,
    untimed,
)
from serve import procfs

COMMAND = (sys.executable, "-m", "pipeline.collectives_bench")
AT_ONCE = 16
SAMPLES = 15
KILL_S = 10.0  # the driver takes a moment to give the memory of a killed process back
TAIL_LINES = 15
_ROOT = Path(__file__).resolve().parents[1]
_SHM = Path("/dev/shm")  # noqa: S108 - where NCCL keeps its buffers between ranks without peer access
_SHM_A_RANK = 128 << 20
# Multicast stays off whatever the caller's environment says, and the import of torch starts no threads.
_ALWAYS = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Deadlines:
    """Seconds that each stage may take; `total` bounds them all."""

    total: float = 55.0
    imported: float = 60.0
    prepared: float = 20.0
    measured: float = 10.0


class Timed(NamedTuple):
    """What a run found: a result a setting, the drift of the first one, what timed it, and where the seconds went."""

    results: tuple[Result, ...]
    drift: float | None
    versions: dict[str, str]
    seconds: float
    stages_s: dict[str, float]


@dataclass(eq=False)
class Child:
    """The process group of one setting."""

    setting: Setting
    process: subprocess.Popen[bytes]
    log: Path
    heard: dict[str, dict[str, Any]] = field(default_factory=dict)  # the first event of each kind

    def send(self, line: str) -> None:
        """Write one line; a child that is gone already has said why, or its end will."""
        with suppress(BrokenPipeError):
            self.process.stdin.write(line.encode() + b"\n")  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]

    def tail(self) -> tuple[str, ...]:
        """The end of what it wrote to stderr."""
        return tuple(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


def time_settings(
    settings: Sequence[Setting],
    shape: Shape,
    messages: Sequence[Message],
    ranks: int,
    environment: Callable[[Setting], Mapping[str, str]],
    *,
    deadlines: Deadlines = Deadlines(),
    at_once: int = AT_ONCE,
    command: Sequence[str] = COMMAND,
    say: Callable[[str], None] = lambda line: None,
) -> Timed:
    """Time the settings in their order, as many as the total time allows; the rest comes back as not measured.

    Args:
        settings: the first is measured again after every wave; how much it moves is the drift.
        shape: of the model, for the number of messages.
        messages: of one step, a size each.
        ranks: processes a setting, one a GPU.
        environment: of a setting's processes, whole.
        deadlines: of each stage and of all.
        at_once: settings that are prepared together; less where /dev/shm has no room for their buffers.
        command: the bench; tests give another.
        say: called with a line for every setting that is done.
    """
    with tempfile.TemporaryDirectory(prefix="collectives-", ignore_cleanup_errors=True) as folder:
        run = _Run(shape, messages, ranks, environment, deadlines, command, say, Path(folder))
        try:
            run.all(settings, max(1, min(at_once, shutil.disk_usage(_SHM).free // (_SHM_A_RANK * ranks))))
        finally:
            run.end(run.living)
    return Timed(tuple(run.results), run.drift, run.versions, time.monotonic() - run.began, dict(run.stages_s))


class _Run:
    def __init__(
        self,
        shape: Shape,
        messages: Sequence[Message],
        ranks: int,
        environment: Callable[[Setting], Mapping[str, str]],
        deadlines: Deadlines,
        command: Sequence[str],
        say: Callable[[str], None],
        folder: Path,
    ) -> None:
        self.shape, self.messages, self.ranks, self.environment = shape, messages, ranks, environment
        self.deadlines, self.command, self.say, self.folder = deadlines, command, say, folder
        self.began = time.monotonic()
        self.results: list[Result] = []
        self.drift: float | None = None
        self.versions: dict[str, str] = {}
        self.stages_s: defaultdict[str, float] = defaultdict(float)
        self.living: list[Child] = []
        self.started = 0
        self.first: Setting | None = None
        self.anchor: Child | None = None  # of the first setting: lives to the end, to be measured again
        self.again: list[Setting] | None = []  # late in company; None once these run alone
        self.events: queue.Queue[tuple[Child, dict[str, Any]]] = queue.Queue()

    def all(self, settings: Sequence[Setting], at_once: int) -> None:
        """Wave after wave; what did not get ready in time among others gets another chance alone."""
        self.first = settings[0] if settings else None
        self.waves(deque(settings), at_once)
        late, self.again = deque(self.again or ()), None
        self.waves(late, 1)

    def waves(self, left: deque[Setting], at_once: int) -> None:
        """While a wave is measured, the next one imports; nothing of it touches the GPUs yet."""
        wave = self.wave(left, at_once)
        while wave:
            ready = self.prepare(wave)
            following = self.wave(left, at_once)
            for child in ready[:1]:
                self.times(child)  # thrown away: the GPUs come out of idle clocks
            measured = [child for child in ready if child in self.living and self.measure(child)]
            self.anchor = self.anchor or next((c for c in measured if c.setting is self.first), None)
            self.watch_drift()
            self.end(child for child in wave if child is not self.anchor)
            wave = following
        for setting in left:
            self.note(untimed(setting, "not measured", cause="no time was left"))

    def wave(self, left: deque[Setting], at_once: int) -> list[Child]:
        """Start the next settings, but none that contains one that failed, or (for now) one that was late."""
        found: list[Child] = []
        while left and len(found) < at_once and self.time_left() > 0:
            setting = left.popleft()
            if known := implied(setting, self.results):
                self.note(known)
            elif self.again and any(late.changes and contains(setting, late.changes) for late in self.again):
                self.again.append(setting)
            else:
                found.append(self.start(setting))
        return found

    def start(self, setting: Setting) -> Child:
        """Start one setting's bench; it imports and then waits for a word."""
        self.started += 1
        log = self.folder / f"{self.started}.log"
        env = {**self.environment(setting), **_ALWAYS}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), env.get("PYTHONPATH"))))
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=env,
                start_new_session=True,
            )  # fmt: skip
        child = Child(setting, process, log)
        self.living.append(child)
        threading.Thread(target=_read, args=(child, self.events), daemon=True).start()
        child.send(json.dumps(self.job(setting)))
        return child

    def job(self, setting: Setting) -> dict[str, Any]:
        """What a bench is told."""
        return {
            "setting": setting.name,
            "ranks": self.ranks,
            "all_reduces": self.shape.all_reduces,
            "gathers": GATHERS,
            "samples": SAMPLES,
            "messages": [message.model_dump() for message in self.messages],
            "limit_s": int(max(self.time_left(), 0)) + 30,  # should this process be killed, they end by themselves
            "store": str(self.folder / f"{self.started}.store"),
            "turn": str(self.folder / "turn"),
            "turn_s": self.deadlines.prepared / 5,  # a warm-up takes a fraction of a second
        }

    def prepare(self, wave: list[Child]) -> list[Child]:
        """Let a wave make its communicators and graphs, once all have imported; return those that are ready."""
        imported = self.wait(wave, "imported", self.deadlines.imported)
        for child in imported:
            child.send("prepare")
        ready = self.wait(imported, "ready", self.deadlines.prepared)
        for child in ready:
            self.versions |= child.heard["ready"].get("versions", {})
        return ready

    def measure(self, child: Child) -> bool:
        """Measure one setting while all others are idle; True when there are figures."""
        times = self.times(child)
        if times is None:
            return False
        setting = child.setting
        self.note(Result(name=setting.name, key=setting.key, changes=setting.changes, outcome="ok", times=times))
        return True

    def times(self, child: Child) -> tuple[Times, ...] | None:
        """One measurement of every size; None when it failed or hung, which is noted."""
        child.heard.pop("result", None)
        child.send("measure")
        if not self.wait([child], "result", self.deadlines.measured):
            return None
        sizes = child.heard["result"]["sizes"]
        return tuple(
            summary(message, self.shape.all_reduces, size["reduce_ms"], size["gather_ms"])
            for message, size in zip(self.messages, sizes, strict=True)
        )

    def watch_drift(self) -> None:
        """Measure the first setting again; what it moved since is not the settings' doing."""
        anchor = self.anchor
        if anchor is None or anchor not in self.living or self.time_left() <= 0:
            return
        first = next(result for result in self.results if result.key == anchor.setting.key)
        again = self.times(anchor)
        if again is not None:
            self.drift = max(self.drift or 0.0, drift_of(first.times, again))

    def wait(self, children: Sequence[Child], event: str, limit_s: float) -> list[Child]:
        """Those that report `event` in time; the others are noted with what became of them, and killed."""
        began = time.monotonic()
        deadline = began + min(limit_s, self.time_left())
        over = {event, "failed", "ended"}
        while any(not over & child.heard.keys() for child in children) and self.listen(deadline):
            pass
        self.stages_s[_STAGES[event]] += time.monotonic() - began
        reached = [child for child in children if event in child.heard and "failed" not in child.heard]
        for child in children:
            if child not in reached:
                self.lose(child, event, limit_s)
        return reached

    def listen(self, deadline: float) -> bool:
        """Take in one event; False when the deadline has passed."""
        try:
            child, said = self.events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return False
        if said["event"] not in child.heard:  # of several ranks that fail, the first one knows why
            child.heard[said["event"]] = said
        return True

    def lose(self, child: Child, event: str, limit_s: float) -> None:
        """Kill a child and note what became of it, unless it has its figures already."""
        failed, ended = child.heard.get("failed"), child.heard.get("ended")
        if ended:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(1)  # its own exit code, not that of our kill
        self.end([child])
        stage, tail = _STAGES[event], child.tail()
        if failed:
            cause = f"rank {failed['rank']}: {failed['cause']}"
            lost = untimed(child.setting, "failed", phase=failed["phase"], cause=cause, log_tail=tail)
        elif self.time_left() <= 0:
            lost = untimed(child.setting, "not measured", phase=stage, cause="no time was left")
        else:
            words = f"ended with exit code {child.process.returncode}: {tail[-1] if tail else 'without a word'}"
            cause = words if ended else f"no answer within {limit_s:g} s"
            # NCCL reads nothing before the import is over: it is never the setting's fault.
            outcome: Outcome = "not measured" if event == "imported" else "failed" if ended else "hung"
            lost = untimed(child.setting, outcome, phase=stage, cause=cause, log_tail=tail)
        if lost.outcome == "hung" and event == "ready" and self.again is not None:
            self.again.append(child.setting)
        elif all(result.key != lost.key for result in self.results):
            self.note(lost)

    def note(self, result: Result) -> None:
        """Keep a result and say it."""
        self.results.append(result)
        step = f"{result.times[-1].step_ms:.2f} ms a step of {result.times[-1].tokens} tokens" if result.times else ""
        self.say(f"{result.name}: {step or f'{result.outcome}: {result.cause}'}")

    def end(self, children: Iterable[Child]) -> None:
        """Kill those of the children that still live, all at once, each with its whole group."""
        ending = [child for child in children if child in self.living]
        if ending:
            began = time.monotonic()
            _kill(ending)
            self.stages_s["end"] += time.monotonic() - began
            self.living = [child for child in self.living if child not in ending]

    def time_left(self) -> float:
        """Seconds of the total time that are left."""
        return self.deadlines.total - (time.monotonic() - self.began)


_STAGES = {"imported": "import", "ready": "communicator, warm-up and capture", "result": "measurement"}


def _kill(children: Sequence[Child]) -> None:
    """Kill process groups, wait until they are gone, and remove the shared memory that only they had."""
    sessions = {child.process.pid for child in children}
    ours = [process for process in procfs.table().values() if process.session in sessions]
    shared = {name for process in ours for name in procfs.shared_memory(process.pid)}
    procfs.kill(process.identity for process in ours)
    deadline = time.monotonic() + KILL_S
    while any(procfs.alive(process.identity) for process in ours) and time.monotonic() < deadline:
        time.sleep(0.02)
    for child in children:
        child.process.poll()
        with suppress(BrokenPipeError):  # what it never read
            child.process.stdin.close()  # type: ignore[union-attr]
    for name in shared:
        if "nccl" in Path(name).name:
            Path(name).unlink(missing_ok=True)


def _read(child: Child, events: queue.Queue[tuple[Child, dict[str, Any]]]) -> None:
    """Pass on the events of one child; NCCL writes lines of its own to the same pipe."""
    for line in child.process.stdout or ():
        if line.startswith(b'{"event"'):
            events.put((child, json.loads(line)))
    events.put((child, {"event": "ended"}))

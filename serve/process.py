"""One engine process: launch, readiness, watch, teardown with proof. No Ray.

    with EngineProcess(launch, limits, engine="sglang") as engine:
        resolved = engine.wait_ready()
        …; engine.check()
    assert engine.proof.proven

The engine is the child of a guard (`guard.py`), which outlives nobody: whatever ends this process
ends the engine.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from pathlib import Path
from typing import Any, Self

from pipeline.config import EngineName
from pipeline.errors import EngineError
from pipeline.records import Failure, FailureClass, Launch, TeardownProof
from pipeline.spec import Limits
from serve import nvml, procfs, watch
from serve.cleanup import MARK, Belongings, Lease, boot_id, memory_back, reap
from serve.engines import logs
from serve.engines.sglang import child_environment
from serve.guarded import Guarded

__all__ = ["EngineProcess", "free_port", "reap"]

POLL_S = 0.1
LOOK_S = 1.0  # how often a start is asked what it holds: a crash leaves nobody to ask
LOSER_S = 3.0  # a server that lost its port says so and ends within this time


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class EngineProcess:
    """One launch and its end.

    Args:
        launch: what to start; `log_path` must be set there or here.
        limits: every wait's deadline.
        engine: how to ask it for a token.
        log_path: where its output goes; appended to. Default: `launch.log_path`.
        lease_dir: where the lease lies while it lives, for `reap`; default: the log's folder.
    """

    def __init__(
        self,
        launch: Launch,
        limits: Limits,
        *,
        engine: EngineName,
        log_path: Path | str | None = None,
        lease_dir: Path | str | None = None,
    ) -> None:
        self.launch, self.limits, self.engine = launch, limits, engine
        self.log_path = Path(log_path or launch.log_path)
        self.lease_dir = Path(lease_dir or self.log_path.parent)
        self.resolved: dict[str, Any] = {}
        self.proof: TeardownProof | None = None
        self._port = int(launch.base_url.rpartition(":")[2])
        self._phase = "launch"
        self._guarded: Guarded | None = None
        self._belongings: Belongings | None = None
        self._lease: Path | None = None
        self._liveness: watch.Liveness | None = None

    # ---- start

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the guard and, under it, the engine.

        Raises:
            EngineError: the port is taken, or nothing could be started.
        """
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = watch.Log(self.log_path)
        if procfs.listening_inodes(self._port):
            raise self._error(Failure(failure_class=FailureClass.PORT, cause=f"port {self._port} is already taken"))
        self._memory_before = nvml.used_mib(self.launch.gpu_ids)
        self._mark = uuid.uuid4().hex
        environment = child_environment(self.launch, os.environ) | {MARK: self._mark}
        self._began = time.monotonic()
        try:
            self._guarded = Guarded(self.launch.argv, environment, self.log_path, grace_s=self.limits.stop_s)
        except TimeoutError as error:
            raise self._error(Failure(failure_class=FailureClass.UNREADY, cause=str(error))) from error
        self._sign_lease(self._guarded)
        look_every_s = min(1.0, self.limits.stall_s / 8)
        self._clock = watch.StallClock(self._log, self.guard_pid, self.launch.gpu_ids, look_every_s)

    def _sign_lease(self, guarded: Guarded) -> None:
        """Write down who owns what, for `reap`; an engine that is dead already needs no lease."""
        me, guard, engine = (procfs.identity(pid) for pid in (os.getpid(), self.guard_pid, guarded.pids["engine"]))
        self._belongings = Belongings(self._mark, engine or (guarded.pids["engine"], 0))
        self._belongings.ports.add(self._port)
        if guard and engine and me:
            lease = Lease(me, guard, engine, self._mark, self._port, self.launch.gpu_ids, boot_id())
            self._lease = lease.write(self.lease_dir)

    @property
    def guard_pid(self) -> int:
        """The engine's parent; 0 before the start."""
        return self._guarded.pids["guard"] if self._guarded else 0

    # ---- readiness

    def wait_ready(self) -> dict[str, Any]:
        """Wait until this very process answers a real generate; return its resolved settings.

        Raises:
            EngineError: it ended, stalled, took too long, lost its port, or answers no generate.
        """
        deadline, look_at = self._began + self.limits.start_s, 0.0
        while not self._says_ready():
            self._raise_if_dead()
            if self._belongings and time.monotonic() > look_at:
                self._belongings.look(self.guard_pid)
                look_at = time.monotonic() + LOOK_S
            silent_s = self._clock.silent_s()
            if silent_s > self.limits.stall_s:
                raise self._error(logs.stalled(self._log.text(), silent_s))
            if time.monotonic() > deadline:
                raise self._error(self._unready(f"not ready within {self.limits.start_s:.0f} s"))
            time.sleep(POLL_S)
        self._prove_own_port()
        self._first_token()
        self.resolved = self._read_settings()
        if self._belongings:
            self._belongings.look(self.guard_pid)
        self._phase = "measure"
        self._liveness = watch.Liveness(
            self.launch.base_url,
            self.engine,
            self._log,
            quiet_s=self.limits.silence_s,
            generate_s=self.limits.generate_s,
        )
        return self.resolved

    def _says_ready(self) -> bool:
        if self.engine == "sglang":
            return logs.is_ready(self._log.text())
        try:
            watch.request(self.launch.base_url, "/health", None, watch.HEALTH_S)
        except watch.NoAnswerError:
            return False
        return True

    def _prove_own_port(self) -> None:
        """The loser of a race for the port prints the ready line too: its warm-up was answered by the winner."""
        deadline = time.monotonic() + LOSER_S
        while not self._owns_port():
            self._raise_if_dead()
            if time.monotonic() > deadline:
                cause = f"port {self._port} is answered by a process that is not ours"
                raise self._error(Failure(failure_class=FailureClass.PORT, cause=cause, phase="launch"))
            time.sleep(POLL_S)

    def _owns_port(self) -> bool:
        """True when a process of ours listens. A container's processes are not visible: then the settings decide."""
        listeners = procfs.listeners(self._port, procfs.table())
        if listeners:
            return bool(listeners & {process.pid for process in procfs.descendants(self.guard_pid)})
        return bool(procfs.listening_inodes(self._port)) and self._command_is_ours(self._read_settings())

    def _command_is_ours(self, info: dict[str, Any]) -> bool:
        said = info.get("launch_command")
        asked = " ".join(self.launch.argv[self._first_flag() :])
        return bool(said) and str(said).endswith(asked)

    def _first_flag(self) -> int:
        argv = self.launch.argv
        return next((i for i, word in enumerate(argv) if word.startswith("--")), len(argv))

    def _first_token(self) -> None:
        """A real generate; a server that still refuses connections or answers 503 is asked again until its deadline."""
        deadline = time.monotonic() + self.limits.generate_s
        while True:
            left = deadline - time.monotonic()
            try:
                return watch.generate(self.launch.base_url, self.engine, max(left, 0.05))
            except watch.NoAnswerError as error:
                self._raise_if_dead(wait_s=0.2)
                if time.monotonic() < deadline - POLL_S:
                    time.sleep(POLL_S)
                elif error.status is not None:
                    raise self._error(
                        self._unready(f"it says that it is ready and refuses a generate: {error}")
                    ) from error
                else:
                    raise self._error(self._mute(error)) from error

    def _read_settings(self) -> dict[str, Any]:
        try:
            info = watch.server_info(self.launch.base_url, self.limits.generate_s)
        except watch.NoAnswerError as error:
            self._raise_if_dead(wait_s=0.2)
            raise self._error(self._unready(f"no settings: {error}")) from error
        return info

    # ---- watch

    def check(self) -> None:
        """Cheap; to be called every second or so during measurement.

        Raises:
            EngineError: the engine is dead, hung, or healthy but mute.
        """
        self._raise_if_dead()
        if self._liveness and (failure := self._liveness.failure()):
            self._raise_if_dead()
            raise self._error(failure)

    def _raise_if_dead(self, wait_s: float = 0.0) -> None:
        guarded = self._guarded
        if guarded is None:
            raise RuntimeError("the engine was not started")
        guarded.listen(wait_s)
        if guarded.closed or (guarded.guard_gone and guarded.exit_code is None):
            cause = "stopped by its owner" if guarded.closed else "its guard was killed, and the engine with it"
            raise self._error(Failure(failure_class=FailureClass.KILLED, cause=cause, phase=self._phase))
        if guarded.exit_code is not None:
            text = self._log.text()
            raise self._error(logs.classify(text, guarded.exit_code, self._phase, env=self.launch.env))

    def _mute(self, error: watch.NoAnswerError) -> Failure:
        return watch.mute(self.launch.base_url, str(error), self._log, "warm-up", self.limits.generate_s)

    def _unready(self, cause: str) -> Failure:
        text = self._log.text()
        tail = tuple(text.splitlines()[-logs.TAIL_LINES :])
        return Failure(failure_class=FailureClass.UNREADY, cause=cause, phase=logs.start_step(text), log_tail=tail)

    def _error(self, failure: Failure) -> EngineError:
        where = {"log_path": str(self.log_path), "command": " ".join(self.launch.argv)}
        return EngineError(failure.model_copy(update=where))

    # ---- end

    def stop(self) -> TeardownProof:
        """End the engine, prove it gone; a second call returns the same proof. Never raises for what is left."""
        if self.proof is None:
            self.proof = self._stop()
        return self.proof

    def _stop(self) -> TeardownProof:
        began = time.monotonic()
        belongings = self._belongings
        if belongings is None or self._guarded is None:
            return TeardownProof(group_dead=True, ports_free=True, seconds=0.0, notes=("nothing was started",))
        belongings.look(self.guard_pid)
        belongings.look(None)
        self._guarded.close(self.limits.stop_s + self.limits.proof_s)
        deadline = time.monotonic() + self.limits.proof_s
        # Nothing should outlive the guard's own sweep: what does is worth a note.
        notes = [f"{process.name} (pid {process.pid}) survived the guard" for process in belongings.living()]
        alive = belongings.kill(deadline)
        notes += [f"{process.name} (pid {process.pid}) cannot be killed" for process in alive]
        busy = self._await_ports(belongings, deadline)
        notes += [f"port {port} is still in use" for port in busy]
        memory, over = memory_back(self._memory_before, deadline)
        notes += [over] if over else []
        if removed := belongings.remove_shared_memory():
            notes.append(f"removed from /dev/shm: {', '.join(Path(name).name for name in removed)}")
        proof = TeardownProof(
            group_dead=not alive,
            ports_free=not busy,
            gpu_memory_back=memory,
            seconds=time.monotonic() - began,
            notes=tuple(notes),
        )
        if proof.proven and self._lease:
            self._lease.unlink(missing_ok=True)
        return proof

    @staticmethod
    def _await_ports(belongings: Belongings, deadline: float) -> list[int]:
        while (busy := belongings.busy_ports()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return busy

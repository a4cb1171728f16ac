"""The owner's end of a guard: start one, hear of the engine's end, and close it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from serve import procfs

START_LIMIT_S = 30.0
POLL_S = 0.05
_ROOT = Path(__file__).resolve().parent.parent
_BOOT = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from serve.guard import main; main()"


class Guarded:
    """A started engine under its guard. Safe to be asked from several threads.

    Args:
        argv: the engine's command.
        environment: all of its environment.
        log_path: where its output is appended.
        grace_s: TERM to KILL when this end closes.

    Raises:
        TimeoutError: the guard did not start.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log_path: Path, *, grace_s: float) -> None:
        self.exit_code: int | None = None
        self.closed = False
        self.guard_gone = False  # it ended though nobody asked it to
        self.pids: dict[str, int] = {}
        self._lock = threading.Lock()
        self._rest = ""
        # No site-packages and no variables of Python's: the guard shares the engine's environment.
        command = [sys.executable, "-I", "-S", "-c", _BOOT, str(log_path.resolve()), str(grace_s), *argv]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, env=dict(environment), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._await_pids()

    def _await_pids(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while "engine" not in self.pids:
            if self.guard_gone or time.monotonic() > deadline:
                self.close(START_LIMIT_S)
                raise TimeoutError("the engine's guard did not start")
            self.listen(POLL_S)

    def listen(self, wait_s: float = 0.0) -> None:
        """Take in what the guard has said; wait at most `wait_s` for a word."""
        with self._lock:
            pipe = self._process.stdout
            if pipe is None or pipe.closed or not select.select([pipe], [], [], wait_s)[0]:
                return
            data = os.read(pipe.fileno(), 4096)
            self.guard_gone = not data and not self.closed
            *lines, self._rest = (self._rest + data.decode()).split("\n")
        for line in lines:
            self._hear(line)

    def _hear(self, line: str) -> None:
        word, _, number = line.partition(" ")
        if word == "exit":
            self.exit_code = int(number)
        else:
            self.pids[word] = int(number)

    def close(self, limit_s: float) -> None:
        """Let the guard end the engine; return when the guard is gone or the time is over."""
        self.closed = True
        if self._process.stdin is not None:
            self._process.stdin.close()
        deadline = time.monotonic() + limit_s
        while procfs.read(self.pids.get("guard", 0)) and time.monotonic() < deadline:
            self.listen(POLL_S)
            time.sleep(POLL_S / 5)
        self.listen()
        with self._lock:
            if self._process.stdout is not None:
                self._process.stdout.close()
        self._process.wait(timeout=START_LIMIT_S)

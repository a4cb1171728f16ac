"""The engine's parent: starts it, reports its end, and leaves nothing of it behind when its owner goes.

It runs in its own session, apart from the owner's process tree, and is the reaper of all that the
engine forks: a grandchild that loses its parent, or leaves the group, comes back to it. When its
standard input closes (the owner stops it, or died, even by SIGKILL) it ends the engine: TERM, a
grace, then KILL of every descendant; where the owner died it removes their shared memory too. If the
guard itself is killed the kernel kills the engine.

Protocol on standard output: `guard PID`, `engine PID`, `exit CODE`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING

from serve import procfs

if TYPE_CHECKING:
    from serve.cleanup import Belongings

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PRCTL = ctypes.CDLL(None, use_errno=True).prctl
SWEEP_LIMIT_S = 30.0


class Guard:
    """One engine's life."""

    def __init__(self, argv: list[str], log_path: str, grace_s: float) -> None:
        self.argv, self.log_path, self.grace_s = argv, log_path, grace_s
        self.engine = 0
        self.exited = False

    def run(self) -> None:
        """Start, wait for the owner to close its end, clean up."""
        _PRCTL(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        wake, signalled = os.pipe()
        os.set_blocking(signalled, False)
        signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        say(f"guard {os.getpid()}")
        self.engine = self._start()
        say(f"engine {self.engine}")
        from serve.cleanup import Belongings  # not before: the engine would wait for it

        while 0 not in select.select([0, wake], [], [])[0]:
            if signal.SIGTERM in os.read(wake, 512):
                break
            self._reap()
        self._end(wake, Belongings(mark="", engine=(self.engine, 0)))

    def _start(self) -> int:
        me = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.set_wakeup_fd(-1)
            if os.getppid() == me:
                self._become_engine()
        finally:
            os._exit(127)

    def _become_engine(self) -> None:
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        log = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.closerange(3, 256)
        try:
            os.execvp(self.argv[0], self.argv)  # noqa: S606 - the command is data, no shell
        except OSError as error:
            os.write(2, f"cannot start {self.argv[0]}: {error.strerror}\n".encode())

    def _reap(self) -> None:
        """Collect the dead; report the engine's exit code the way Popen counts it."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.engine:
                    self.exited = True
                    say(f"exit {os.waitstatus_to_exitcode(status)}")

    def _end(self, wake: int, belongings: Belongings) -> None:
        deadline = time.monotonic() + self.grace_s
        belongings.look(os.getpid())
        self._reap()
        if not self.exited:
            # Only the engine: it drains and ends its own children, which a TERM of theirs would look like a crash.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.engine, signal.SIGTERM)
        while not self.exited and (left := deadline - time.monotonic()) > 0:
            if select.select([wake], [], [], left)[0]:
                os.read(wake, 512)
            self._reap()
        self._sweep()
        if not say(f"engine {self.engine}"):  # an owner that lives removes it, and proves so
            belongings.remove_shared_memory()

    def _sweep(self) -> None:
        """KILL every descendant until there is none."""
        deadline = time.monotonic() + SWEEP_LIMIT_S
        while (left := procfs.descendants(os.getpid())) and time.monotonic() < deadline:
            procfs.kill(process.identity for process in left)
            time.sleep(0.02)
            self._reap()
        self._reap()


def say(line: str) -> bool:
    """Tell the owner; False when it is dead."""
    with contextlib.suppress(OSError):
        os.write(1, f"{line}\n".encode())
        return True
    return False


def main() -> None:
    """`guard LOG GRACE ARGV…`: detach from the caller, so that who reaps its children leaves the guard alone."""
    log_path, grace_s, *argv = sys.argv[1:]
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        Guard(argv, log_path, float(grace_s)).run()
    os._exit(0)

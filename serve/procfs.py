"""Processes as Linux sees them, from /proc alone. Standard library only: the guard runs without site-packages.

A process is named by pid *and* start time, so that a pid that was given to a stranger is never taken
for ours. Zombies count as dead: they hold nothing but a row in the table.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SHM = "/dev/shm/"  # noqa: S108 - where the kernel keeps shared memory
_TICKS = os.sysconf("SC_CLK_TCK")
Identity = tuple[int, int]  # pid, start time in clock ticks since boot


@dataclass(frozen=True, slots=True)
class Process:
    """One living process. `cpu_s` is its own user and system time."""

    pid: int
    start: int
    ppid: int
    session: int
    name: str
    cpu_s: float

    @property
    def identity(self) -> Identity:
        return (self.pid, self.start)


def read(pid: int) -> Process | None:
    """One process; None when it is dead, a zombie, or not to be seen."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    if fields[0] in ("Z", "X"):
        return None
    cpu = (int(fields[11]) + int(fields[12])) / _TICKS
    return Process(pid, int(fields[19]), int(fields[1]), int(fields[3]), name, cpu)


def table() -> dict[int, Process]:
    """All living processes by pid."""
    pids = (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())
    return {pid: found for pid in pids if (found := read(pid)) is not None}


def identity(pid: int) -> Identity | None:
    """Pid and start time of a living process."""
    found = read(pid)
    return found.identity if found else None


def alive(who: Identity) -> bool:
    """True while exactly that process lives."""
    return identity(who[0]) == tuple(who)


def descendants(root: int, processes: dict[int, Process] | None = None) -> list[Process]:
    """Every living descendant of `root`, without it."""
    known = table() if processes is None else processes
    children: dict[int, list[Process]] = {}
    for process in known.values():
        children.setdefault(process.ppid, []).append(process)
    found: list[Process] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += [process.pid for process in below]
    return found


def kill(who: Iterable[Identity], number: int = signal.SIGKILL) -> None:
    """Signal exactly these processes; the dead and the strangers are left alone."""
    for one in who:
        if alive(one):
            try:
                os.kill(one[0], number)
            except ProcessLookupError:
                continue


def cmdline(pid: int) -> str:
    """The command line with spaces, empty when it cannot be read."""
    return _text(pid, "cmdline").replace("\0", " ")


def has_variable(pid: int, assignment: str) -> bool:
    """True when the process was started with `NAME=value` in its environment."""
    return f"\0{assignment}\0" in f"\0{_text(pid, 'environ')}\0"


def io_bytes(pid: int) -> int:
    """Bytes that the process has read so far, from disk or cache; 0 when it cannot be seen."""
    rows = dict(line.split(": ") for line in _text(pid, "io").splitlines() if ": " in line)
    return int(rows.get("rchar", 0)) + int(rows.get("read_bytes", 0))


def shared_memory(pid: int) -> set[str]:
    """Files in /dev/shm that the process has mapped or open."""
    maps = {line.split(maxsplit=5)[5] for line in _text(pid, "maps").splitlines() if f" {SHM}" in line}
    return {name.removesuffix(" (deleted)") for name in maps} | {f for f in _open_files(pid) if f.startswith(SHM)}


def listeners(port: int, pids: Iterable[int]) -> set[int]:
    """Those of these processes that have a listening socket on `port`."""
    wanted = {f"socket:[{inode}]" for inode in listening_inodes(port)}
    return {pid for pid in pids if wanted & _open_files(pid)} if wanted else set()


def listening_inodes(port: int) -> set[str]:
    """Inodes of all TCP sockets that listen on `port`, whoever owns them."""
    return {inode for name in ("tcp", "tcp6") for local, inode in _listening(name) if local == port}


def listening_ports(pids: Iterable[int]) -> set[int]:
    """TCP ports on which these processes listen."""
    owned = {name for pid in pids for name in _open_files(pid) if name.startswith("socket:")}
    return {port for name in ("tcp", "tcp6") for port, inode in _listening(name) if f"socket:[{inode}]" in owned}


def _listening(name: str) -> list[tuple[int, str]]:
    try:
        rows = (PROC / "net" / name).read_text().splitlines()[1:]
    except OSError:
        return []
    fields = (row.split() for row in rows)
    return [(int(f[1].rpartition(":")[2], 16), f[9]) for f in fields if f[3] == "0A"]


def _open_files(pid: int) -> set[str]:
    found: set[str] = set()
    try:
        for entry in os.scandir(PROC / str(pid) / "fd"):
            try:
                found.add(str(Path(entry.path).readlink()))
            except OSError:
                continue
    except OSError:
        return found
    return found


def _text(pid: int, name: str) -> str:
    try:
        return (PROC / str(pid) / name).read_text(errors="replace")
    except OSError:
        return ""

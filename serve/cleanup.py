"""What an engine leaves behind: finding it, removing it, proving it gone; and leases for those whose owner died."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from serve import nvml, procfs
from serve.procfs import Identity

log = logging.getLogger(__name__)

MARK = "FASTVERIFY_LAUNCH"  # in every engine's environment: finds what has left its session
MEMORY_SLACK_MIB = 64
LEASE_SUFFIX = ".lease.json"
POLL_S = 0.1
_SHM = Path("/dev/shm")  # noqa: S108 - where the kernel keeps shared memory


@dataclass
class Belongings:
    """All that was ever seen to be one engine's: processes, ports, shared memory."""

    mark: str
    engine: Identity
    processes: set[Identity] = field(default_factory=set)
    ports: set[int] = field(default_factory=set)
    shared_memory: set[str] = field(default_factory=set)

    def look(self, guard_pid: int | None) -> None:
        """Add what is alive now."""
        ours = self.living() if guard_pid is None else procfs.descendants(guard_pid)
        pids = [process.pid for process in ours]
        self.processes |= {process.identity for process in ours}
        self.ports |= procfs.listening_ports(pids)
        for pid in pids:
            self.shared_memory |= procfs.shared_memory(pid)

    def living(self) -> list[procfs.Process]:
        """Processes of ours that live."""
        return [process for process in procfs.table().values() if self._is_ours(process)]

    def _is_ours(self, process: procfs.Process) -> bool:
        """Seen before, or with the mark, or a renamed process of the session: renaming may wipe the environment."""
        if process.identity in self.processes:
            return True
        pid, since = self.engine
        renamed = process.name.startswith("sglang::") and process.session == pid and process.start >= since
        return renamed or (process.pid != os.getpid() and procfs.has_variable(process.pid, f"{MARK}={self.mark}"))

    def kill(self, deadline: float) -> list[procfs.Process]:
        """KILL until nothing lives or the deadline passes; return what lives still."""
        while left := self.living():
            if time.monotonic() > deadline:
                return left
            self.processes |= {process.identity for process in left}
            procfs.kill(process.identity for process in left)
            time.sleep(POLL_S / 4)
        return []

    def busy_ports(self) -> list[int]:
        """Ports of ours on which something still listens."""
        return sorted(port for port in self.ports if procfs.listening_inodes(port))

    def remove_shared_memory(self) -> list[str]:
        """Remove segments that only dead processes of ours had; return their names."""
        dead = {str(pid) for pid, start in self.processes if not procfs.alive((pid, start))}
        named = {str(path) for path in _segments() if dead & set(re.findall(r"\d+", path.name))}
        suspects = {name for name in self.shared_memory | named if Path(name).exists()}
        in_use = {name for pid in procfs.table() for name in procfs.shared_memory(pid)} if suspects else set()
        removed = sorted(suspects - in_use)
        for name in removed:
            Path(name).unlink(missing_ok=True)
        return removed


def _segments() -> list[Path]:
    mine = os.getuid()
    return [path for path in _SHM.glob("*") if path.is_file() and path.stat().st_uid == mine]


def memory_back(before: dict[int, int], deadline: float) -> tuple[bool | None, str | None]:
    """Wait until each GPU holds what it held before the launch; None where there is no GPU."""
    if not before:
        return None, None
    while over := _over(before):
        if time.monotonic() > deadline:
            return False, "; ".join(f"GPU {gpu} holds {mib} MiB more than before" for gpu, mib in over.items())
        time.sleep(POLL_S)
    return True, None


def _over(before: dict[int, int]) -> dict[int, int]:
    """MiB above the earlier reading, by GPU, where strangers that we can see do not explain it.

    In a container the driver's pids are the host's: what cannot be looked up excuses nothing.
    """
    now = nvml.used_mib(before)
    over = {gpu: now[gpu] - used for gpu, used in before.items() if now.get(gpu, used) - used > MEMORY_SLACK_MIB}
    users = nvml.users(over) if over else {}
    alive = procfs.table()
    return {gpu: mib for gpu, mib in over.items() if not users.get(gpu) or any(pid not in alive for pid in users[gpu])}


# ---- leases


@dataclass(frozen=True)
class Lease:
    """Who runs an engine, and what to look for when the owner is gone. Written at the start of a launch."""

    owner: Identity
    guard: Identity
    engine: Identity
    mark: str
    port: int
    gpu_ids: tuple[int, ...]
    boot_id: str

    def write(self, folder: Path) -> Path:
        """Store the lease; returns its file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"engine-{self.engine[0]}-{self.mark[:8]}{LEASE_SUFFIX}"
        path.write_text(json.dumps(asdict(self)))
        return path


def boot_id() -> str:
    """Changes at every boot: pids and start times of another boot mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def reap(lease_dir: Path | str, *, limit_s: float = 60.0) -> list[str]:
    """End every engine under `lease_dir` whose owner is dead; return what could not be ended, in words.

    Only processes whose start time matches the lease are touched: a pid given to a stranger is safe.
    A living owner keeps its engine.
    """
    left: list[str] = []
    for path in sorted(Path(lease_dir).rglob(f"*{LEASE_SUFFIX}")):
        problem = _reap_one(path, limit_s)
        if problem:
            left.append(problem)
        else:
            path.unlink(missing_ok=True)
    return left


def _reap_one(path: Path, limit_s: float) -> str | None:
    lease = _read(path)
    if lease is None or lease.boot_id != boot_id():
        return None
    if procfs.alive(lease.owner):
        return f"port {lease.port}: its owner, pid {lease.owner[0]}, is alive"
    deadline = time.monotonic() + limit_s
    belongings = Belongings(lease.mark, lease.engine)
    belongings.processes |= {lease.guard, lease.engine}
    belongings.ports.add(lease.port)
    # The guard ends the engine by itself when its owner dies; give it the first half of the time.
    while procfs.alive(lease.guard) and time.monotonic() < deadline - limit_s / 2:
        time.sleep(POLL_S)
    belongings.look(None)
    alive = belongings.kill(deadline)
    removed = belongings.remove_shared_memory()
    log.info("reaped the engine of %s (port %d), %d shared segments", path.parent, lease.port, len(removed))
    return f"port {lease.port}: {_names(alive)} cannot be killed" if alive else None


def _names(processes: Iterable[procfs.Process]) -> str:
    return ", ".join(f"{process.name} (pid {process.pid})" for process in processes)


def _read(path: Path) -> Lease | None:
    """A lease, or None when a crash left half a file."""
    try:
        data = json.loads(path.read_text())
        for name in ("owner", "guard", "engine"):
            data[name] = (int(data[name][0]), int(data[name][1]))
        return Lease(**data)
    except (ValueError, KeyError, TypeError, IndexError):
        return None

"""The machine as a fingerprint, whether it is ready for a trial, and how its GPUs feel. Never raises without GPUs."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from pipeline.errors import InputError, PreflightError
from pipeline.records import Topology
from serve import nvml, procfs

MIB = nvml.MIB
REHEARSAL = "FASTVERIFY_TOPOLOGY"
BUSY_MIB = 256  # more than a driver's own context: somebody works there
SHM_NEEDED_MIB = 64  # a rank: NCCL's buffers and the processes' shared memory
DISK_NEEDED_MIB, DISK_WANTED_MIB = 256, 4096
FILES_WANTED = 4096
_SHM = Path("/dev/shm")  # noqa: S108 - where the kernel keeps shared memory


def probe() -> Topology:
    """The fingerprint of this machine's visible GPUs; without GPUs only the CPU and the name.

    `FASTVERIFY_TOPOLOGY` (a Topology as JSON) is believed instead, to rehearse a study without its machine.

    Raises:
        InputError: that variable holds no Topology.
    """
    if REHEARSAL in os.environ:
        return _stated(os.environ[REHEARSAL])
    host: dict[str, Any] = {"cpu_count": os.cpu_count(), "hostname": socket.gethostname()}
    with nvml.session() as lib:
        handles = _visible(lib) if lib is not None else {}
        if lib is None or not handles:
            return Topology(**host)
        first = next(iter(handles.values()))
        capability = nvml.attempt(lib, lib.nvmlDeviceGetCudaComputeCapability, first)
        return Topology(
            gpu_count=len(handles),
            gpu_model=_text(nvml.attempt(lib, lib.nvmlDeviceGetName, first)),
            sm=capability[0] * 10 + capability[1] if capability else None,
            peer_access=_peer_access(lib, list(handles.values())),
            link=_link(lib, list(handles.values())),
            driver=_text(nvml.attempt(lib, lib.nvmlSystemGetDriverVersion)),
            **host,
        )


def _stated(text: str) -> Topology:
    try:
        return Topology.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{name}: {first['msg']}".removeprefix(": "), key=REHEARSAL, expected='JSON such as {"gpu_count": 8}'
        ) from None


def _text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def _visible(lib: Any) -> dict[int, Any]:
    """Handles by NVML index of the GPUs that CUDA_VISIBLE_DEVICES leaves, given as numbers or UUIDs."""
    count = nvml.attempt(lib, lib.nvmlDeviceGetCount) or 0
    found = {i: nvml.attempt(lib, lib.nvmlDeviceGetHandleByIndex, i) for i in range(count)}
    handles = {i: handle for i, handle in found.items() if handle is not None}
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return handles
    names = [name.strip() for name in asked.split(",") if name.strip()]
    uuids = {i: _text(nvml.attempt(lib, lib.nvmlDeviceGetUUID, h)) or "" for i, h in handles.items()}
    return {i: h for i, h in handles.items() if str(i) in names or any(n and uuids[i].startswith(n) for n in names)}


def _peer_access(lib: Any, handles: list[Any]) -> bool | None:
    """True when every pair can read each other's memory; None for one GPU, or when the driver does not say."""
    # Some releases of the bindings write these constants with a comma behind: tuples.
    read, fine = (
        value[0] if isinstance(value, tuple) else value
        for value in (lib.NVML_P2P_CAPS_INDEX_READ, lib.NVML_P2P_STATUS_OK)
    )
    pairs = [nvml.attempt(lib, lib.nvmlDeviceGetP2PStatus, a, b, read) for a, b in combinations(handles, 2)]
    if not pairs or None in pairs:
        return None
    return all(status == fine for status in pairs)


def _link(lib: Any, handles: list[Any]) -> Literal["nvlink", "pcie"] | None:
    """How the GPUs are joined: nvlink when each has an active link; None for one GPU."""
    if len(handles) < 2:
        return None
    linked = [any(_link_active(lib, handle, n) for n in range(lib.NVML_NVLINK_MAX_LINKS)) for handle in handles]
    return "nvlink" if all(linked) else "pcie"


def _link_active(lib: Any, handle: Any, number: int) -> bool:
    return bool(nvml.attempt(lib, lib.nvmlDeviceGetNvLinkState, handle, number))


# ---- before the first trial


def preflight(need_gpus: int, runs: Path | str = Path("runs"), *, ports: Sequence[int] = ()) -> list[str]:
    """Look whether the machine is ready; return what is worth knowing, in words.

    Args:
        need_gpus: GPUs that one trial holds.
        runs: where studies are kept; its disk must have room.
        ports: ports that must be free.

    Raises:
        PreflightError: too few free GPUs (who holds the others), no shared memory or disk, a taken port.
    """
    problems: list[str] = []
    warnings: list[str] = []
    for check in (
        _check_gpus(need_gpus),
        _check_room(_SHM, need_gpus * SHM_NEEDED_MIB, max(need_gpus, 1) * 2 * SHM_NEEDED_MIB),
        _check_room(Path(runs), DISK_NEEDED_MIB, DISK_WANTED_MIB),
        _check_ports(ports),
        _check_files(),
    ):
        problems += check[0]
        warnings += check[1]
    if problems:
        raise PreflightError("; ".join(problems))
    return warnings


Found = tuple[list[str], list[str]]  # problems, warnings


def _check_gpus(need: int) -> Found:
    busy = busy_gpus()
    total = probe().gpu_count
    said = [f"GPU {gpu} is in use: {'; '.join(who)}" for gpu, who in busy.items()]
    if need and total - len(busy) < need:
        return [f"{need} free GPUs are needed, {total - len(busy)} of {total} are free", *said], []
    return [], said


def busy_gpus() -> dict[int, list[str]]:
    """Visible GPUs that others use: pid, name and memory of each, as text."""
    with nvml.session() as lib:
        gpus = list(_visible(lib)) if lib is not None else []
    used, users = nvml.used_mib(gpus), nvml.users(gpus)
    found: dict[int, list[str]] = {}
    for gpu in gpus:
        who = [_user(pid, mib) for pid, mib in users.get(gpu, {}).items()]
        if who or used.get(gpu, 0) > BUSY_MIB * 4:
            found[gpu] = who or [f"{used[gpu]} MiB held by processes that cannot be seen from here"]
    return found


def _user(pid: int, mib: int | None) -> str:
    process = procfs.read(pid)
    name = f" ({process.name})" if process else ""
    return f"pid {pid}{name}, {f'{mib} MiB' if mib is not None else 'memory unknown'}"


def _check_room(path: Path, needed_mib: int, wanted_mib: int) -> Found:
    place = next((p for p in (path, *path.absolute().parents) if p.exists()), Path("/"))
    free = shutil.disk_usage(place).free // MIB
    if free < needed_mib:
        return [f"{path} has {free} MiB free, {needed_mib} MiB are needed"], []
    return [], [f"{path} has only {free} MiB free"] if free < wanted_mib else []


def _check_ports(ports: Sequence[int]) -> Found:
    return [f"port {port} is taken" for port in ports if procfs.listening_inodes(port)], []


def _check_files() -> Found:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = hard != resource.RLIM_INFINITY and hard < FILES_WANTED
    return [], [f"at most {hard} open files are allowed (ulimit -n)"] if few else []


# ---- during a trial

_THROTTLES = {
    "idle": "nvmlClocksThrottleReasonGpuIdle",
    "power cap": "nvmlClocksThrottleReasonSwPowerCap",
    "hardware slowdown": "nvmlClocksThrottleReasonHwSlowdown",
    "thermal (software)": "nvmlClocksThrottleReasonSwThermalSlowdown",
    "thermal (hardware)": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "power brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
    "application clocks": "nvmlClocksThrottleReasonApplicationsClocksSetting",
    "sync boost": "nvmlClocksThrottleReasonSyncBoost",
}


def gpu_state(gpu_ids: Sequence[int] | None = None) -> dict[str, Any]:
    """SM clock, temperature, power and throttle reasons by GPU index; `{}` without GPUs.

    Units are in the keys. A reading that this GPU does not offer is left out.
    """
    with nvml.session() as lib:
        if lib is None:
            return {}
        handles = _visible(lib)
        return {str(i): _state(lib, h) for i, h in handles.items() if gpu_ids is None or i in gpu_ids}


def _state(lib: Any, handle: Any) -> dict[str, Any]:
    power = nvml.attempt(lib, lib.nvmlDeviceGetPowerUsage, handle)
    mask = nvml.attempt(lib, lib.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    reasons = None if mask is None else [name for name, bit in _THROTTLES.items() if mask & getattr(lib, bit, 0)]
    readings = {
        "sm_clock_mhz": nvml.attempt(lib, lib.nvmlDeviceGetClockInfo, handle, lib.NVML_CLOCK_SM),
        "sm_clock_max_mhz": nvml.attempt(lib, lib.nvmlDeviceGetMaxClockInfo, handle, lib.NVML_CLOCK_SM),
        "temperature_c": nvml.attempt(lib, lib.nvmlDeviceGetTemperature, handle, lib.NVML_TEMPERATURE_GPU),
        "power_w": None if power is None else power / 1000,
        "throttle_reasons": reasons,
    }
    return {name: value for name, value in readings.items() if value is not None}

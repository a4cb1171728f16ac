"""The fingerprint and the preflight, against a stand-in for NVML (this machine need not have GPUs)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import topology
from pipeline.errors import InputError, PreflightError
from serve import nvml


class FakeNvml:
    """Two or more GPUs; what it lacks raises NVMLError, as a driver does."""

    class NVMLError(Exception):
        pass

    # A tuple, as nvidia-ml-py has it: passed on as it is, ctypes refuses it.
    NVML_P2P_CAPS_INDEX_READ, NVML_P2P_STATUS_OK, NVML_NVLINK_MAX_LINKS = (0,), 0, 2
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
    nvmlClocksThrottleReasonGpuIdle, nvmlClocksThrottleReasonSwPowerCap = 1, 4  # noqa: N815

    def __init__(self, count: int = 2, *, nvlink: bool = True, peers: bool = True) -> None:
        self.count, self.nvlink, self.peers = count, nvlink, peers
        self.users: dict[int, list[Any]] = {}
        self.used = dict.fromkeys(range(count), 10)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index >= self.count:
            raise self.NVMLError
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}aaa"

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        return b"NVIDIA H200"

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.1"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return (9, 0)

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, what: int) -> int:  # noqa: N802
        assert isinstance(what, int)
        return 0 if self.peers else 5

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
        if not self.nvlink:
            raise self.NVMLError
        return int(link == 1)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(used=self.used[handle] * nvml.MIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return self.users.get(handle, [])

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        return 123456

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:  # noqa: N802
        return 5

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        return 1500

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        return 1980

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:  # noqa: N802
        raise self.NVMLError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()

    @contextmanager
    def session() -> Iterator[Any]:
        yield fake

    monkeypatch.setattr(nvml, "session", session)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def session() -> Iterator[None]:
        yield None

    monkeypatch.setattr(nvml, "session", session)
    found = topology.probe()
    assert (found.gpu_count, found.sm, found.peer_access, found.link) == (0, None, None, None)
    assert found.cpu_count == os.cpu_count()
    assert topology.gpu_state() == {} and topology.busy_gpus() == {}


def test_two_linked_gpus(gpus: FakeNvml) -> None:
    found = topology.probe()
    assert (found.gpu_count, found.gpu_model, found.sm, found.driver) == (2, "NVIDIA H200", 90, "580.1")
    assert (found.peer_access, found.link) == (True, "nvlink")


def test_a_pcie_machine_without_peer_access(gpus: FakeNvml) -> None:
    gpus.nvlink = gpus.peers = False
    found = topology.probe()
    assert (found.peer_access, found.link) == (False, "pcie")


def test_one_gpu_has_no_peers(gpus: FakeNvml) -> None:
    gpus.count = 1
    found = topology.probe()
    assert (found.gpu_count, found.peer_access, found.link) == (1, None, None)


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("1", 1), ("GPU-0aaa", 1), ("0,1", 2), ("GPU-9", 0)])
def test_only_visible_gpus_count(visible: str, count: int, gpus: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert topology.probe().gpu_count == count


def test_gpu_state_names_units_and_leaves_out_what_is_not_offered(gpus: FakeNvml) -> None:
    assert topology.gpu_state([1]) == {
        "1": {
            "sm_clock_mhz": 1500,
            "sm_clock_max_mhz": 1980,
            "power_w": 123.456,
            "throttle_reasons": ["idle", "power cap"],
        }
    }


def test_gpus_of_others_are_named_and_too_few_free_ones_end_it(gpus: FakeNvml, tmp_path: Path) -> None:
    gpus.users = {1: [SimpleNamespace(pid=os.getpid(), usedGpuMemory=3000 * nvml.MIB)]}
    gpus.used[1] = 3000
    assert any(f"pid {os.getpid()}" in said and "3000 MiB" in said for said in topology.preflight(1, tmp_path))
    with pytest.raises(PreflightError, match=rf"2 free GPUs are needed, 1 of 2 are free; GPU 1.*pid {os.getpid()}"):
        topology.preflight(2, tmp_path)


def test_memory_held_by_the_invisible_counts_too(gpus: FakeNvml, tmp_path: Path) -> None:
    gpus.used[0] = 90000
    with pytest.raises(PreflightError, match="90000 MiB held by processes that cannot be seen"):
        topology.preflight(2, tmp_path)


def test_a_ready_machine_has_nothing_to_say_about_gpus(gpus: FakeNvml, tmp_path: Path) -> None:
    assert not [said for said in topology.preflight(2, tmp_path / "not" / "yet") if "GPU" in said]


def test_no_room_is_an_error_and_little_room_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000 * nvml.MIB))
    assert any(f"{tmp_path} has only 1000 MiB free" in said for said in topology.preflight(0, tmp_path))
    monkeypatch.setattr(topology.shutil, "disk_usage", lambda path: SimpleNamespace(free=10 * nvml.MIB))
    with pytest.raises(PreflightError, match="has 10 MiB free, 256 MiB are needed"):
        topology.preflight(0, tmp_path)


def test_a_taken_port_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(PreflightError, match=f"port {port} is taken"):
            topology.preflight(0, tmp_path, ports=[port])
    topology.preflight(0, tmp_path, ports=[port])


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ("{bad", "Invalid JSON"),
        ('{"gpus": 8}', "gpus: Extra inputs"),
        ('{"gpu_count": -8}', "gpu_count: Input should be"),
    ],
)
def test_a_stated_machine_that_is_none(monkeypatch: pytest.MonkeyPatch, stated: str, words: str) -> None:
    monkeypatch.setenv("FASTVERIFY_TOPOLOGY", stated)
    with pytest.raises(InputError, match=f'^FASTVERIFY_TOPOLOGY: {words}.*; expected JSON such as ."gpu_count": 8'):
        topology.probe()

"""The few readings of NVML that the project takes. Without a driver or GPUs every reading is empty.

Indices are NVML's: physical, in bus order, whatever CUDA_VISIBLE_DEVICES says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

MIB = 1 << 20


@contextmanager
def session() -> Iterator[Any | None]:
    """NVML for the length of a block; None where there is no driver."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def attempt(nvml: Any, reading: Callable[..., Any], *args: Any) -> Any:
    """One reading; None where this GPU or driver does not offer it."""
    try:
        return reading(*args)
    except nvml.NVMLError:
        return None


def used_mib(gpu_ids: Iterable[int]) -> dict[int, int]:
    """Used memory in MiB by GPU; a GPU that cannot be read is left out."""
    with session() as nvml:
        if nvml is None:
            return {}
        handles = {gpu: attempt(nvml, nvml.nvmlDeviceGetHandleByIndex, gpu) for gpu in gpu_ids}
        memory = {gpu: attempt(nvml, nvml.nvmlDeviceGetMemoryInfo, h) for gpu, h in handles.items() if h is not None}
        return {gpu: int(found.used) // MIB for gpu, found in memory.items() if found is not None}


def users(gpu_ids: Iterable[int]) -> dict[int, dict[int, int | None]]:
    """Compute processes by GPU: pid to used MiB, None where the driver hides it."""
    with session() as nvml:
        if nvml is None:
            return {}
        return {gpu: _users(nvml, gpu) for gpu in gpu_ids}


def _users(nvml: Any, gpu: int) -> dict[int, int | None]:
    handle = attempt(nvml, nvml.nvmlDeviceGetHandleByIndex, gpu)
    found = attempt(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) if handle is not None else None
    return {int(p.pid): p.usedGpuMemory // MIB if p.usedGpuMemory else None for p in found or ()}

"""Is the engine making progress? The log's growth, its compilers' work, and a real generate with a deadline."""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipeline.config import EngineName
from pipeline.records import Failure, FailureClass
from serve import nvml, procfs
from serve.engines import logs

HEALTH_S = 5.0
BUSY = (429, 503)  # a full queue is no silence
# Programs that compile kernels; while one of ours works, a silent log is no hang.
COMPILERS = frozenset(
    (
        *("nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "nvlink"),
        *("ninja", "cmake", "cc1", "cc1plus", "gcc", "g++", "c++", "clang", "ld", "as", "collect2"),
    )
)
_INDUCTOR = "torch._inductor.compile_worker"
_READ_STEP = 1 << 20  # bytes: less between two looks is no weight loading
_GPU_STEP = 16  # MiB


class Log:
    """The part of the log file that belongs to this launch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0

    def size(self) -> int:
        """Bytes written since the launch."""
        return (self.path.stat().st_size if self.path.exists() else 0) - self.offset

    def text(self) -> str:
        """What was written since the launch; bytes that are no UTF-8 are replaced."""
        if not self.path.exists():
            return ""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read().decode(errors="replace")


@dataclass
class StallClock:
    """How long nothing has moved: no log line, no compiler of ours at work, no imports or weights arriving.

    Processor time of the engine itself is no progress: ranks that wait for each other spin at 100 %.
    """

    log: Log
    guard_pid: int
    gpu_ids: tuple[int, ...] = ()
    look_every_s: float = 1.0
    _moved: float = field(default_factory=time.monotonic)
    _looked: float = 0.0
    _size: int = 0
    _work: tuple[object, ...] = ()
    _read: int = 0
    _gpu: int = 0

    def silent_s(self) -> float:
        """Look again, and return the seconds since something last moved."""
        size = self.log.size()
        if size != self._size or self._working():
            self._size, self._moved = size, time.monotonic()
        return time.monotonic() - self._moved

    def _working(self) -> bool:
        """Compilers, imports or weights; looked at now and then only, since it walks over all processes."""
        now = time.monotonic()
        if now - self._looked < self.look_every_s:
            return False
        self._looked = now
        compiling, loading = self._compiling(), self._loading()
        return compiling or loading

    def _compiling(self) -> bool:
        ours = procfs.descendants(self.guard_pid)
        work = tuple(sorted((p.pid, p.cpu_s) for p in ours if _is_compiler(p)))
        before, self._work = self._work, work
        return bool(work) and work != before

    def _loading(self) -> bool:
        """Imports, then weights, until every rank says "Load weight end": bytes read, or GPU memory filled.

        SGLang imports for minutes with hardly a line where disk or cores are slow; ranks that hang read nothing.
        """
        text = self.log.text()
        if 0 < text.count("Load weight begin") <= text.count("Load weight end"):
            return False
        read = sum(procfs.io_bytes(p.pid) for p in procfs.descendants(self.guard_pid))
        gpu = sum(nvml.used_mib(self.gpu_ids).values())
        moved = read - self._read >= _READ_STEP or gpu - self._gpu >= _GPU_STEP
        self._read, self._gpu = read, gpu
        return moved


def _is_compiler(process: procfs.Process) -> bool:
    return process.name in COMPILERS or (process.name.startswith("python") and _INDUCTOR in procfs.cmdline(process.pid))


# ---- over HTTP


class NoAnswerError(Exception):
    """The server did not answer as asked: refused, reset, late, or another status than 200 (then `status`)."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


def request(base_url: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> bytes:
    """GET, or POST of a JSON body; the reply's bytes.

    Raises:
        NoAnswerError: no 200 within `timeout_s` of silence.
    """
    url = urlsplit(base_url)
    connection = http.client.HTTPConnection(url.hostname or "127.0.0.1", url.port, timeout=timeout_s)
    try:
        payload = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("GET" if payload is None else "POST", path, payload, headers)
        reply = connection.getresponse()
        data = reply.read()
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswerError(f"{path}: {error or type(error).__name__}") from error
    finally:
        connection.close()
    if reply.status != 200:
        said = data[:200].decode(errors="replace")
        raise NoAnswerError(f"{path}: HTTP {reply.status} {said}".strip(), reply.status)
    return data


def generate(base_url: str, engine: EngineName, timeout_s: float) -> None:
    """One real token, greedy.

    Raises:
        NoAnswerError: none within `timeout_s`.
    """
    if engine == "sglang":
        body: dict[str, Any] = {"text": "The", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        request(base_url, "/generate", body, timeout_s)
        return
    body = {"model": "default", "prompt": "The", "max_tokens": 1, "temperature": 0}
    request(base_url, "/v1/completions", body, timeout_s)


def server_info(base_url: str, timeout_s: float) -> dict[str, Any]:
    """The resolved settings, under the new name of the endpoint or the old one.

    Raises:
        NoAnswerError: neither answers with a JSON object.
    """
    try:
        data = request(base_url, "/server_info", None, timeout_s)
    except NoAnswerError:
        data = request(base_url, "/get_server_info", None, timeout_s)
    try:
        info = json.loads(data)
    except ValueError as error:
        raise NoAnswerError(f"/server_info is no JSON: {data[:80]!r}") from error
    if not isinstance(info, dict):
        raise NoAnswerError("/server_info is no JSON object")
    return info


class Liveness:
    """Watches a ready engine without disturbing it: only after a quiet while does it send a token's worth.

    The probe runs in a thread, so that asking is never slow.
    """

    def __init__(self, base_url: str, engine: EngineName, log: Log, *, quiet_s: float, generate_s: float) -> None:
        self.base_url, self.engine, self.log = base_url, engine, log
        self.quiet_s, self.generate_s = quiet_s, generate_s
        self._size, self._moved = log.size(), time.monotonic()
        self._probe: threading.Thread | None = None
        self._failure: Failure | None = None

    def failure(self) -> Failure | None:
        """Why the engine must be given up, or None."""
        size = self.log.size()
        if size != self._size:
            self._size, self._moved = size, time.monotonic()
        probing = self._probe is not None and self._probe.is_alive()
        if not probing and self._failure is None and time.monotonic() - self._moved > self.quiet_s:
            self._moved = time.monotonic()
            self._probe = threading.Thread(target=self._generate, daemon=True)
            self._probe.start()
        return self._failure

    def _generate(self) -> None:
        try:
            generate(self.base_url, self.engine, self.generate_s)
        except NoAnswerError as error:
            if error.status in BUSY:
                return
            self._failure = mute(self.base_url, str(error), self.log, "measure", self.generate_s)


def mute(base_url: str, error: str, log: Log, phase: str, limit_s: float) -> Failure:
    """The failure of an engine whose generate failed: mute when its server still answers, else hung."""
    tail = tuple(log.text().splitlines()[-logs.TAIL_LINES :])
    try:
        request(base_url, "/server_info", None, min(HEALTH_S, limit_s))
    except NoAnswerError:
        cause = f"the engine answers nothing any more ({error})"
        return Failure(failure_class=FailureClass.HANG, cause=cause, phase=phase, log_tail=tail)
    cause = f"the server answers, but a generate got no token ({error})"
    return Failure(failure_class=FailureClass.MUTE, cause=cause, phase=phase, log_tail=tail)

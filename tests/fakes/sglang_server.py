"""A program that passes for `python -m sglang.launch_server`: its flags, HTTP, log, children and deaths.

    FAKE_SGLANG_STEP_MS=10 python tests/fakes/sglang_server.py --model-path m --port 30000

Knobs are in fake_knobs.py, failures in fake_failures.py. Standard library only. A pipeline runs it through
the same launcher as the real one: FASTVERIFY_SGLANG_COMMAND="python tests/fakes/sglang_server.py".
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gzip
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import fake_http
import fake_knobs
from fake_api import Api
from fake_engine import FakeEngine
from fake_failures import FAILURES, Death

READY = "The server is fired up and ready to roll!"
PR_SET_NAME = 15
STAMP = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
DEFAULTS: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 30000,
    "tp_size": 1,
    "max_running_requests": None,
    "mem_fraction_static": 0.85,
    "attention_backend": "flashinfer",
    "speculative_algorithm": None,
    "speculative_num_steps": None,
    "speculative_eagle_topk": None,
    "speculative_num_draft_tokens": None,
    "disable_custom_all_reduce": False,
    "context_length": 8192,
    "version": "0.5.23",
}


def parse(argv: Sequence[str]) -> dict[str, str]:
    """`--name value …` without a schema; a flag without a value is "true"."""
    flags: dict[str, str] = {}
    for index, word in enumerate(argv):
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            following = argv[index + 1] if index + 1 < len(argv) else "--"
            flags[name] = value or ("true" if following.startswith("--") else following)
    return flags


def _read(path: str) -> str:
    return gzip.decompress(Path(path).read_bytes()).decode() if path.endswith(".gz") else Path(path).read_text()


def _typed(text: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return True if text == "true" else text


class FakeServer:
    """One life: phases, then service, then an end."""

    def __init__(self, argv: Sequence[str], knobs: fake_knobs.Knobs) -> None:
        self.knobs, self.flags = knobs, parse(argv)
        self.quiet = False
        asked = {name.replace("-", "_"): _typed(value) for name, value in self.flags.items()}
        model = asked.get("model_path", "fake")
        self.info = DEFAULTS | {"served_model_name": model, "model_path": model} | asked | knobs.resolved
        self.info["launch_command"] = " ".join(sys.argv)
        self.children: list[int] = []
        self.failure = knobs.fail.rpartition(":")[2]

    # ---- log

    def say(self, line: str) -> None:
        """One log line; a leading `@` becomes SGLang's time and rank prefix."""
        if self.quiet:
            return
        if line.startswith("@"):
            rank, _, text = line[1:].partition(" ")
            line = f"[{datetime.now():%Y-%m-%d %H:%M:%S}{' ' + rank if rank else ''}] {text}"
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def replay(self, path: str) -> None:
        """Print a recorded log with its silences compressed, up to the ready line or the first sigquit."""
        previous: datetime | None = None
        for line in _read(path).splitlines():
            if READY in line or "Received sigquit" in line:
                return
            if found := STAMP.match(line):
                now = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S")
                time.sleep(max(0.0, (now - (previous or now)).total_seconds()) / self.knobs.time_compression)
                previous = now
            self.say(line)

    # ---- life

    def phase(self, name: str) -> None:
        """Pass one phase of the start, unless the knobs say that the life ends or hangs here."""
        failure = self.failure
        at = self.knobs.fail.partition(":")[0] if ":" in self.knobs.fail else failure and FAILURES[failure].phase
        if self.knobs.busy_at == name:
            self._compile()
        if self.knobs.log_fixture and name == "load":
            self.replay(self.knobs.log_fixture)
        if failure and at == name:
            self.die(FAILURES[failure])
        if self.knobs.hang_at == name:
            time.sleep(3600)
        time.sleep(self.knobs.start_ms / 4e3)

    def start(self) -> None:
        """Everything before the socket is bound."""
        self.say(f"@ server_args=ServerArgs({', '.join(f'{k}={v!r}' for k, v in self.info.items())})")
        self.phase("start")
        self._fork_children()
        self.say("@TP0 Load weight begin. avail mem=138.78 GB")
        self.phase("load")
        for line in self.knobs.warnings:
            self.say(line)
        self.say("@TP0 Capture target decode CUDA graph begin. backend=full, bs=[1, 2, 4, 8], avail mem=55.25 GB")
        if self.knobs.cost_model and os.environ.get("NCCL_ALGO") == "Tree" and self.info["tp_size"] > 1:
            self.die(FAILURES["tree"])
        self.phase("capture")

    async def serve(self) -> None:
        """Bind, say ready, answer until told to stop."""
        engine = FakeEngine(self.knobs, self.flags)
        api = Api(engine, self.info, self._count)
        self.api = api
        try:
            server = await asyncio.start_server(
                lambda r, w: fake_http.serve_connection(r, w, api.handle, self._access_log),
                str(self.info["host"]),
                int(self.info["port"]),
                limit=1 << 20,
                backlog=1024,
            )
        except OSError as error:
            self._port_taken(error)
        self.say("@ INFO:     Application startup complete.")
        await asyncio.sleep(self.knobs.start_ms / 4e3)
        if self.knobs.hang_at != "ready":
            api.ready = True
            self.say(f"@ {READY}")
        self.quiet = self.knobs.silent
        loop = asyncio.get_running_loop()
        if not self.knobs.stubborn:
            loop.add_signal_handler(signal.SIGTERM, self._drain)
        if self.knobs.die_after_s is not None:
            loop.call_later(self.knobs.die_after_s, self._die_running)
        async with server:
            await self._log_decoding(engine)

    async def _log_decoding(self, engine: FakeEngine) -> NoReturn:
        generated = 0
        while True:
            await asyncio.sleep(0.25)
            now = sum(job.sent for job in engine.running.values()) + engine.counters.generation_tokens
            if engine.running:
                spec = f"accept len: {engine.accept_length:.2f}, accept rate: 0.50, " if engine.algorithm else ""
                self.say(
                    f"@ Decode batch, #running-req: {len(engine.running)}, #token: {now}, token usage: 0.00, {spec}"
                    f"cuda graph: True, gen throughput (token/s): {(now - generated) / 0.25:.2f}, "
                    f"#queue-req: {engine.queued}"
                )
            generated = now

    def _access_log(self, line: str) -> None:
        self.say(f"@ {line}")

    def _count(self) -> None:
        limit = self.knobs.die_after_requests
        if limit is not None and self.api.generates > limit:
            self._die_running()

    # ---- ends

    def _die_running(self) -> None:
        self.die(FAILURES[self.failure or "scheduler_killed"])

    def die(self, death: Death) -> NoReturn:
        """Print the failure's lines and go, leaving the children behind as SGLang may."""
        for line in death.lines:
            self.say(line)
        code = death.exit_code if self.knobs.exit_code is None else self.knobs.exit_code
        if code < 0:
            os.kill(os.getpid(), -code)
            time.sleep(5)
        os._exit(code)

    def _port_taken(self, error: OSError) -> NoReturn:
        if error.errno != errno.EADDRINUSE:
            raise error
        # The loser prints the ready line too: its warm-up was answered by the other server.
        self.say(f"@ {READY}")
        self.say(
            f"@ ERROR:    [Errno 98] error while attempting to bind on address "
            f"('{self.info['host']}', {self.info['port']}): address already in use"
        )
        time.sleep(0.3)
        self._kill_children()
        os._exit(3)

    def _drain(self) -> None:
        self.say("@ SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
        if not (self.knobs.stubborn_children or self.knobs.escaped_children):
            self._kill_children()
        os._exit(0)

    # ---- processes

    def _fork_children(self) -> None:
        if not self.knobs.children:
            return
        names = [f"sglang::scheduler_TP{rank}" for rank in range(int(self.info["tp_size"]))] + ["sglang::detokenizer"]
        for name in names:
            self.children.append(_fork(name, self._idle))
        for number in range(self.knobs.shm_segments):
            Path(f"/dev/shm/sglang_fake_{self.children[0]}_{number}").write_bytes(b"\0" * 4096)

    def _idle(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if self.knobs.stubborn_children else signal.SIG_DFL)
        if self.knobs.escaped_children:
            os.setsid()
        time.sleep(3600)

    def _compile(self) -> None:
        """Work in silence, as a kernel compiler does."""
        pid = _fork("cicc", lambda: _burn(self.knobs.busy_s))
        os.waitpid(pid, 0)

    def _kill_children(self) -> None:
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _fork(name: str, work: Any) -> int:
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)
        work()
        os._exit(0)
    return pid


def _burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(1000))


def main() -> None:
    """Live one life."""
    knobs = fake_knobs.read()
    if knobs.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = FakeServer(sys.argv[1:], knobs)
    server.start()
    asyncio.run(server.serve())


if __name__ == "__main__":
    main()

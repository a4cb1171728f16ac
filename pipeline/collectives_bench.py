"""The ranks of one collective setting: started, told when to go on, timed inside CUDA graphs. Needs only torch.

The starter writes lines to stdin: the job as JSON, then `prepare` (use the GPUs: communicator, warm-up,
capture), then `measure` as often as it likes; the end of stdin ends the ranks. Events come back as JSON lines.
NCCL reads its variables once a process, so a setting is a process group of its own; torch is imported once
and the ranks are forked from there, before CUDA is touched.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

_WARM = 3  # replays: the first one uploads the graph
_CAUSE_LETTERS = 1500  # a line of a pipe stays whole below 4096 bytes


def say(event: str, **facts: Any) -> None:
    """Write one event, whole."""
    os.write(1, f"\n{json.dumps({'event': event, **facts})}\n".encode())  # whatever NCCL left unended there


def main() -> None:
    """Run one job to its end. Nothing here outlives the job's limit, whatever hangs."""
    job = json.loads(sys.stdin.readline())
    signal.alarm(job["limit_s"])  # the default action ends the process even inside a CUDA call
    import torch.distributed  # noqa: F401 - imported once, before the ranks are forked

    gc.freeze()  # every capture collects garbage: not that of the imports
    say("imported")
    if sys.stdin.readline().strip() != "prepare":
        return
    rank, gates = fork_ranks(job["ranks"])
    signal.alarm(job["limit_s"])  # a fork has no alarm
    code = 1
    try:
        Rank(job, rank, gates).run()
        code = 0
    except Exception as error:  # the process boundary: whatever NCCL or CUDA raise becomes an event
        traceback.print_exc()
        say("failed", rank=rank, phase=Rank.phase, cause=cause_of(str(error)) or type(error).__name__)
    finally:
        sys.stderr.flush()
        os._exit(code)  # no destructors: they may wait for ranks that are gone


def fork_ranks(ranks: int) -> tuple[int, list[int]]:
    """Fork ranks 1 and up; return the own rank and pipe ends: rank 0's to all others, or the others' one from it."""
    gates: list[int] = []
    for rank in range(1, ranks):
        read, write = os.pipe()
        if os.fork() == 0:
            for gate in (*gates, write):
                os.close(gate)
            return rank, [read]
        os.close(read)
        gates.append(write)
    return 0, gates


def cause_of(text: str) -> str:
    """The words that matter of an error: what NCCL calls the last error, else the first line."""
    first, _, last = text.partition("Last error:")
    return ((last.strip() or first.strip()).splitlines() or [""])[0][:_CAUSE_LETTERS]


def taken(lock: TextIO) -> bool:
    """Try to take a file's lock; it is given back when the file is closed, or its holder ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Rank:
    """One rank on its GPU."""

    phase = "start"

    def __init__(self, job: dict[str, Any], rank: int, gates: list[int]) -> None:
        self.job, self.rank, self.gates = job, rank, gates
        self.buffers: list[Any] = []  # a graph does not keep what it reads and writes

    def run(self) -> None:
        """Prepare, then measure whenever told."""
        self.connect()
        calls = self.calls()
        with self.turn():
            self.warm_up(calls)
        graphs = [self.captured(*call) for call in calls]
        if self.rank == 0:
            say("ready", versions=self.versions())
        while self.told():
            self.measure(graphs)

    def told(self) -> bool:
        """Wait for the word to measure; False when the job is over. Rank 0 passes it on."""
        if self.rank:
            return bool(os.read(self.gates[0], 1))
        if sys.stdin.readline().strip() != "measure":
            return False
        for gate in self.gates:
            os.write(gate, b"m")
        return True

    def connect(self) -> None:
        """Make the communicator, as the engine's ranks would under the same variables."""
        import torch
        import torch.distributed as dist

        Rank.phase = "communicator"
        self.device = torch.device("cuda", self.rank)
        torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl",
            store=dist.FileStore(self.job["store"], self.job["ranks"]),
            rank=self.rank,
            world_size=self.job["ranks"],
            timeout=timedelta(seconds=self.job["limit_s"]),
            device_id=self.device,
        )

    def calls(self) -> list[tuple[str, Callable[[], object], int]]:
        """A call for each message, smallest first, and how many of it a graph holds: one step's all-reduces, or a few
        all-gathers."""
        import torch
        import torch.distributed as dist

        def buffer(size: int) -> Any:
            self.buffers.append(torch.zeros(size // 2, dtype=torch.bfloat16, device=self.device))
            return self.buffers[-1]

        found: list[tuple[str, Callable[[], object], int]] = []
        for message in self.job["messages"]:
            reduced, part = buffer(message["all_reduce_bytes"]), buffer(message["all_gather_bytes"])
            whole = buffer(message["all_gather_bytes"] * self.job["ranks"])
            found.append(("all-reduce", partial(dist.all_reduce, reduced), self.job["all_reduces"]))
            found.append(("all-gather", partial(dist.all_gather_into_tensor, whole, part), self.job["gathers"]))
        return found

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Have the GPUs alone among the settings that prepare: ranks of several that spin at once starve each other.

        One that hangs keeps its turn for ever, so the wait for it is short, and then goes on regardless.
        """
        if self.rank:
            os.read(self.gates[0], 1)
            yield
            return
        with Path(self.job["turn"]).open("w") as lock:
            deadline = time.monotonic() + self.job["turn_s"]
            while not taken(lock) and time.monotonic() < deadline:
                time.sleep(0.005)
            for gate in self.gates:
                os.write(gate, b"w")
            yield

    def warm_up(self, calls: list[tuple[str, Callable[[], object], int]]) -> None:
        """Call each once: the first call of a kind makes its connections."""
        import torch

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for name, call, _ in calls:
                Rank.phase = f"{name} warm-up"
                call()
        Rank.phase = "warm-up"
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()

    def captured(self, name: str, call: Callable[[], object], count: int) -> Any:
        """A CUDA graph of `count` calls; nothing runs yet."""
        import torch

        Rank.phase = f"{name} capture"
        graph = torch.cuda.CUDAGraph()
        # Not "global": torch's watchdog thread asks CUDA for events meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(count):
                call()
        return graph

    def measure(self, graphs: list[Any]) -> None:
        """Time every graph; rank 0 reports the milliseconds of each replay."""
        Rank.phase = "measurement"
        times = [self.replays(graph) for graph in graphs]
        if self.rank == 0:
            sizes = zip(times[::2], times[1::2], strict=True)
            say("result", sizes=[{"reduce_ms": reduce, "gather_ms": gather} for reduce, gather in sizes])

    def replays(self, graph: Any) -> list[float]:
        """Milliseconds of each of `samples` replays, sent back to back so that no rank waits for another's start."""
        import torch

        for _ in range(_WARM):
            graph.replay()
        torch.cuda.synchronize()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(self.job["samples"] + 2)]
        for mark in marks:
            mark.record()
            graph.replay()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(marks[1:])]  # in the first one the ranks find together

    @staticmethod
    def versions() -> dict[str, str]:
        """What timed the messages."""
        import torch

        found = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda)}
        return found | {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}


if __name__ == "__main__":
    main()

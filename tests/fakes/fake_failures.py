"""How SGLang dies: phase, exit code and log of each kind, as measured on 0.5.17 and read in 0.5.23."""

from __future__ import annotations

from dataclasses import dataclass

KILLED = -9
SIGQUIT_AT_START = "Received sigquit from a child process. It usually means the child failed."
SIGQUIT_RUNNING = "SIGQUIT received. signum=None, frame=None. It usually means one child failed."


@dataclass(frozen=True)
class Death:
    """One way to die. A negative exit code is a signal; `lines` are printed first."""

    phase: str  # start | load | capture | run
    exit_code: int
    lines: tuple[str, ...]


def _scheduler(error: str, phase: str = "load") -> Death:
    """An exception in a scheduler: the parent kills itself, whatever the reason was."""
    return Death(
        phase,
        KILLED,
        (
            "@TP0 Scheduler hit an exception: Traceback (most recent call last):",
            '  File "/site-packages/sglang/srt/managers/scheduler.py", line 4931, in run_scheduler_process',
            "    scheduler = Scheduler(",
            *error.split("\n"),
            "",
            f"@ {SIGQUIT_RUNNING if phase == 'run' else SIGQUIT_AT_START}",
        ),
    )


_SOLUTIONS = (
    "\nPossible solutions:\n1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n"
    "2. set --cuda-graph-max-bs-decode to a smaller value (e.g., 16)"
)

FAILURES = {
    "bad_flag": Death("start", 2, ("sglang serve: error: unrecognized arguments: --no-such-flag",)),
    "bad_model": Death(
        "start",
        1,
        (
            "Traceback (most recent call last):",
            '  File "/site-packages/transformers/utils/hub.py", line 400, in cached_files',
            "    raise OSError(",
            "OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/no/such/model'.",
        ),
    ),
    "weights_too_big": _scheduler(
        "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.1."
    ),
    "kv_pool_small": _scheduler(
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
        "Current value: mem_fraction_static=0.2"
    ),
    "oom_serving": _scheduler("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "run"),
    "oom_capture": _scheduler(
        f"Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 1.00 GiB.{_SOLUTIONS}", "capture"
    ),
    "capture": _scheduler(
        "Exception: Capture cuda graph failed: No supported CUDA architectures found for major versions [9, 10]."
        + _SOLUTIONS,
        "capture",
    ),
    "nccl": _scheduler("RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
    "tree": _scheduler(
        "Exception: Capture cuda graph failed: NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)"
        + _SOLUTIONS,
        "capture",
    ),
    "watchdog": Death(
        "run",
        -6,
        (
            "[rank1]:[E1016 03:31:38.000000000 ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective operation "
            "timeout: WorkNCCL(SeqNum=9141, OpType=_ALLGATHER_BASE, Timeout(ms)=600000) ran for 600071 milliseconds",
            f"@ {SIGQUIT_RUNNING}",
        ),
    ),
    "draft_size": _scheduler(
        "RuntimeError: Error(s) in loading state_dict for Model: size mismatch for lm_head.weight: copying a param "
        "with shape torch.Size([32000, 4096]) from checkpoint, the shape in current model is torch.Size([128256, 4096])"
    ),
    "draft_vocab": _scheduler(
        "ValueError: STANDALONE speculative decoding requires the draft model to use the same vocabulary as the target "
        "model, but got target vocab_size=256000 and draft vocab_size=49152."
    ),
    "port": Death(
        "start",
        3,
        ("@ ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use",),
    ),
    "assertion": _scheduler("AssertionError"),
    "fusion_sm": _scheduler("ValueError: FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs."),
    "scheduler_killed": Death(
        "run",
        KILLED,
        (
            "@ Subprocess scheduler_0 (pid=1202) crashed with exit code -9. Triggering SIGQUIT for cleanup...",
            f"@ {SIGQUIT_RUNNING}",
        ),
    ),
    "silent_kill": Death("load", KILLED, ()),
    "segfault": Death("load", -11, ()),
}

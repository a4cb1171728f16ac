"""What an SGLang log says: decode lines, readiness, degraded features, and why the engine died.

Classification goes by the exit code and the last traceback before the sigquit line, never by a
keyword anywhere: exit 137 is only "a child failed", and healthy shutdowns print the sigquit line too.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.config import EngineConfig
from pipeline.records import Failure, FailureClass

READY_LINE = "The server is fired up and ready to roll!"
TAIL_LINES = 20

_STAMP = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?(?P<ranks>(?: (?:DP|PP|ATTN_CP|MOE_DP|CP|TP|EP)\d+)*)\]"
_STAMPED = re.compile(_STAMP)
_DECODE = re.compile(
    r"Decode batch(?: \[\d+\])?[.,] #running-req: (?P<running>\d+)"
    r"(?=.*?gen throughput \(token/s\): (?P<throughput>[\d.]+))"
    r"(?:.*?(?<!block )accept len: (?P<length>[\d.]+))?(?:.*?accept rate: (?P<rate>[\d.]+))?"
)
_SIGQUIT = re.compile(r"Received sigquit from a child process|SIGQUIT received\.")
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_CHILD_KILLED = re.compile(r"Subprocess (?P<name>\S+) \(pid=\d+\) crashed with exit code (?P<code>-?\d+)")


@dataclass(frozen=True, slots=True)
class DecodeLine:
    """One `Decode batch` line: rates of one rank since its previous line. Tokens/s; missing is None."""

    ranks: tuple[str, ...]
    running: int
    throughput: float
    accept_length: float | None
    accept_rate: float | None


def decode_line(line: str) -> DecodeLine | None:
    """Parse a decode line of any release since 2024, under any prefix; None for other lines."""
    found = _DECODE.search(line)
    if found is None:
        return None
    stamp = _STAMPED.search(line)
    length, rate = found["length"], found["rate"]
    return DecodeLine(
        ranks=tuple(stamp["ranks"].split()) if stamp else (),
        running=int(found["running"]),
        throughput=float(found["throughput"]),
        accept_length=float(length) if length else None,
        accept_rate=float(rate) if rate else None,
    )


def log_accept_length(lines: Iterable[str]) -> float | None:
    """Accept length over the decode lines of all ranks, weighted by running requests; None without any.

    A cross-check only: the counters of each request are the figure.
    """
    parsed = [found for line in lines if (found := decode_line(line)) and found.accept_length is not None]
    weight = sum(line.running for line in parsed)
    return sum((line.accept_length or 0.0) * line.running for line in parsed) / weight if weight else None


def is_ready(text: str) -> bool:
    """True when the ready line is there. A server that lost its port prints it too."""
    return READY_LINE in text


# tag, what the log says when a feature that was asked for (or is the default) is not really on
_DEGRADED = tuple(
    (tag, re.compile(pattern, re.IGNORECASE))
    for tag, pattern in {
        "fusion skipped": r"Skipping allreduce fusion",
        "custom all-reduce refused": r"(?:CustomAllreduce\w*|Custom \w*allreduce) is disabled",
        "custom all-reduce failed": r"Setup Custom allreduce failed",
        "PCIe-IPC all-reduce skipped": r"no pcie_ipc_comm|PCIe-IPC (?:workspace .*failed|all-?reduce skipped)",
        "torch symmetric memory off": r"SymmMemCommunicator: .*not supported",
        "multimem all-gather off": r"multimem all-gather disabled",
        "CUDA graphs off": r"cuda graph is disabled (?:because|for)",
        "speculation limits the batch": r"Max running requests is reset to",
        "adaptive speculation off": r"speculative_adaptive disabled",
    }.items()
)


def degraded(lines: Iterable[str]) -> tuple[str, ...]:
    """Tags of the features that the engine did without, in a fixed order."""
    text = "\n".join(line for line in lines if "server_args=" not in line)
    return tuple(tag for tag, pattern in _DEGRADED if pattern.search(text))


# ---- why it died


@dataclass(frozen=True, slots=True)
class _Cause:
    """A pattern in the fatal error, its class, and the cause in plain words (`{}` is the error's first line)."""

    pattern: re.Pattern[str]
    failure_class: FailureClass
    words: str


def _cause(pattern: str, failure_class: FailureClass, words: str) -> _Cause:
    return _Cause(re.compile(pattern, re.S), failure_class, words)


_TREE = "Tree has no all-gather: NCCL refused it while CUDA graphs were captured; use allreduce:tree"  # NCCL >= 2.24
_F = FailureClass
_CAUSES = (
    _cause(
        r"leave no GPU memory for the KV cache|Please try to increase --mem-fraction-static",
        _F.OOM_RAISE,
        "too little memory is left for the KV cache: raise mem_fraction_static",
    ),
    _cause(
        r"Capture cuda graph failed:.*?out of memory",
        _F.OOM_LOWER,
        "out of memory while CUDA graphs were captured: lower mem_fraction_static or cuda_graph_max_bs",
    ),
    _cause(
        r"out of memory|OutOfMemoryError",
        _F.OOM_LOWER,
        "out of GPU memory: lower mem_fraction_static or max_running_requests",
    ),
    _cause(
        r"no algorithm/protocol available", _F.COLLECTIVE, "NCCL has no such algorithm for one of the collectives: {}"
    ),
    _cause(
        r"Capture cuda graph failed: .*NCCL error", _F.COLLECTIVE, "NCCL failed while CUDA graphs were captured: {}"
    ),
    _cause(r"NCCL error|DistBackendError|unhandled cuda error", _F.COLLECTIVE, "a collective failed in NCCL: {}"),
    _cause(r"peer access is not supported", _F.COLLECTIVE, "custom all-reduce needs peer access between GPUs: {}"),
    _cause(
        r"No supported CUDA architectures found",
        _F.CAPTURE,
        "a kernel does not exist for this GPU (fusion needs SM90 or SM10x): {}",
    ),
    _cause(r"Capture cuda graph failed", _F.CAPTURE, "CUDA graphs could not be captured: {}"),
    _cause(
        r"same vocabulary as the target|token-to-id mappings|share one vocab|size mismatch for|set_embed|hot_token_id",
        _F.DRAFT_MISMATCH,
        "the draft does not fit the target: {}",
    ),
    _cause(r"selected index k out of range", _F.CONFIG_INVALID, "the draft tree is too small for its draft tokens: {}"),
    _cause(r"allreduce fusion requires", _F.CONFIG_INVALID, "FlashInfer fusion is not for this GPU: {}"),
    _cause(
        r"Repo id must be in the form|is not a local folder|does not appear to have a file|is not a file\.",
        _F.CONFIG_INVALID,
        "no such model: {}",
    ),
    _cause(r"Unknown speculative algorithm", _F.CONFIG_INVALID, "{}"),
)
# Fatal without a traceback of Python's.
_BARE = (
    _cause(
        r"Watchdog caught collective operation timeout",
        _F.COLLECTIVE,
        "a collective never finished: NCCL's watchdog ended it",
    ),
    _cause(
        r"watchdog timeout \(self\.watchdog_timeout",
        _F.HANG,
        "the scheduler made no step within SGLang's own watchdog limit",
    ),
    _cause(
        r"(?:Prefill|Decode) out of memory",
        _F.OOM_LOWER,
        "out of GPU memory while serving: lower mem_fraction_static or max_running_requests",
    ),
)
_NO_COMMAND = re.compile(r"^cannot start .+$", re.MULTILINE)
_BIND = re.compile(r"error while attempting to bind on address|EADDRINUSE")
_ARGUMENT_CODE = re.compile(r"server_args\.py|arg_groups/")


def classify(log_text: str, exit_code: int | None, phase: str, *, env: Mapping[str, str] | None = None) -> Failure:
    """Say why an SGLang that ended has ended.

    Args:
        log_text: its whole log.
        exit_code: Popen's code (negative: a signal) or the shell's (137); None when unknown.
        phase: what it was doing as its launcher knows it; refined from the log when it was starting.
        env: what the configuration added to its environment, for causes that the log does not name.
    """
    code = 128 - exit_code if exit_code is not None and exit_code > 128 else exit_code
    before = _SIGQUIT.split(log_text, maxsplit=1)[0]
    rank, block = _fatal_block(before)
    failure_class, cause = (
        _by_exit_code(code, log_text) or _by_error(block, before, env or {}) or _by_signal(code, before)
    )
    return Failure(
        failure_class=failure_class,
        cause=cause,
        phase=_phase(before, block, phase),
        exit_code=exit_code,
        rank=rank,
        log_tail=tuple(block[-TAIL_LINES:] or before.rstrip().splitlines()[-TAIL_LINES:]),
    )


def _fatal_block(text: str) -> tuple[str | None, list[str]]:
    """The traceback that counts: the first failing rank's, else the last one; lines up to the next stamp."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if "Scheduler hit an exception" in line]
    tracebacks = [i for i, line in enumerate(lines) if _TRACEBACK in line]
    if not starts and not tracebacks:
        return None, []
    start = starts[0] if starts else tracebacks[-1]
    end = next((i for i in range(start + 1, len(lines)) if _STAMPED.match(lines[i])), len(lines))
    stamp = _STAMPED.search(lines[start])
    rank = stamp["ranks"].split() if stamp else []
    return (rank[0] if rank else None), [line for line in lines[start:end] if line.strip()]


def _error(block: list[str]) -> str:
    """The exception and its text: from the first unindented line after the last traceback header."""
    heads = [i for i, line in enumerate(block) if _TRACEBACK in line]
    rest = block[heads[-1] + 1 :] if heads else []
    first = next((i for i, line in enumerate(rest) if not line.startswith((" ", "\t"))), len(rest))
    return "\n".join(rest[first:])


def _by_exit_code(code: int | None, text: str) -> tuple[FailureClass, str] | None:
    """Codes that mean one thing only."""
    if code == 2 and (found := re.search(r"error: (?P<what>.+)", text)):
        return FailureClass.CONFIG_INVALID, f"SGLang refused its arguments: {found['what']}"
    if code == 127 and (found := _NO_COMMAND.search(text)):
        return FailureClass.CONFIG_INVALID, found[0]
    if code == 3 or _BIND.search("\n".join(text.splitlines()[-TAIL_LINES:])):
        return FailureClass.PORT, "another process has the port"
    return None


def _by_error(block: list[str], before: str, env: Mapping[str, str]) -> tuple[FailureClass, str] | None:
    error = _error(block)
    if error:
        return _known(_CAUSES, error, block, env) or _unknown_error(error, block)
    tail = "\n".join(before.splitlines()[-200:])
    return _known(_BARE, tail, [], env)


def _known(
    causes: Iterable[_Cause], text: str, block: list[str], env: Mapping[str, str]
) -> tuple[FailureClass, str] | None:
    for cause in causes:
        if cause.pattern.search(text):
            words = cause.words.format(text.splitlines()[0])
            return cause.failure_class, _collective_words(words, block, env) if "NCCL failed" in words else words
    return None


def _collective_words(words: str, block: list[str], env: Mapping[str, str]) -> str:
    """Name the usual reason of a refusal at capture: an algorithm that has no all-gather."""
    algo = env.get("NCCL_ALGO", "")
    if algo.lower() == "tree":
        return _TREE
    refused = any("ncclAllGather" in line for line in block) and any("invalid usage" in line for line in block)
    return f"{words} (under a bare NCCL_ALGO=Tree: {_TREE})" if refused and not algo else words


def _unknown_error(error: str, block: list[str]) -> tuple[FailureClass, str]:
    """An error without a rule: invalid configuration when raised by the argument checks, else a crash."""
    frames = [found for line in block if (found := _FRAME.match(line))]
    where = f" at {frames[-1]['file'].rpartition('/')[2]}:{frames[-1]['line']}" if frames else ""
    refused = any(_ARGUMENT_CODE.search(frame["file"]) for frame in frames)
    first = error.splitlines()[0]
    if re.fullmatch(r"\w+", first):
        first = f"{first} without a text{where}"
    return (FailureClass.CONFIG_INVALID if refused else FailureClass.CRASH), first


def _by_signal(code: int | None, before: str) -> tuple[FailureClass, str]:
    """No error in the log: a signal from outside, or a crash below Python."""
    if child := list(_CHILD_KILLED.finditer(before)):
        return _signal_words(int(child[-1]["code"]), child[-1]["name"])
    if code is None or code >= 0:
        return FailureClass.CRASH, f"ended with exit code {code} and no error in its log"
    return _signal_words(code, "the engine")


def _signal_words(code: int, who: str) -> tuple[FailureClass, str]:
    if code >= 0:
        return FailureClass.CRASH, f"{who} ended with exit code {code}"
    name = signal.Signals(-code).name
    if -code in (signal.SIGKILL, signal.SIGTERM):
        by = "a person, or the host's OOM killer" if -code == signal.SIGKILL else "a person, or a supervisor"
        return FailureClass.KILLED, f"{who} was killed by {name} from outside ({by})"
    return FailureClass.CRASH, f"{who} crashed with {name}"


# ---- how far a start came

_STEPS = (
    ("load", re.compile(r"Load weight begin")),
    ("capture", re.compile(r"Capture \w*.*CUDA graph begin|Capture cuda graph begin")),
    ("warm-up", re.compile(r"Application startup complete")),
)


def start_step(text: str) -> str:
    """How far a start has come: start, load, capture or warm-up."""
    return next((name for name, pattern in reversed(_STEPS) if pattern.search(text)), "start")


def _phase(before: str, block: list[str], phase: str) -> str:
    if any("Capture cuda graph failed" in line for line in block):
        return "capture"
    return start_step(before) if phase == "launch" else phase


def stalled(log_text: str, silent_s: float) -> Failure:
    """The failure of a start whose log stood still for `silent_s` seconds."""
    lines = [line for line in log_text.splitlines() if line.strip()]
    step = start_step(log_text)
    cause = f"no line in the log for {silent_s:.0f} s during {step}, and neither compiler nor weight loading at work"
    if any("SymmDeviceMemory" in line for line in lines[-8:]):
        cause += "; the last thing it did was to set up symmetric memory between the ranks (all-reduce fusion)"
    return Failure(failure_class=FailureClass.HANG, cause=cause, phase=step, log_tail=tuple(lines[-TAIL_LINES:]))


# ---- what is worth a second try

RETRYABLE = frozenset({_F.OOM_LOWER, _F.OOM_RAISE, _F.PORT, _F.KILLED})
_FRACTION_STEP = {_F.OOM_LOWER: -0.1, _F.OOM_RAISE: 0.1}
_USUAL_FRACTION = 0.85  # about what SGLang chooses when nothing is stated


def second_try(config: EngineConfig, failure: Failure) -> tuple[EngineConfig, str] | None:
    """What to launch once more after `failure`, and what changed in words; None when it is not worth it."""
    if failure.failure_class not in RETRYABLE:
        return None
    step = _FRACTION_STEP.get(failure.failure_class)
    if step is None:
        return config, "the port" if failure.failure_class is _F.PORT else "nothing: it was killed from outside"
    before = config.mem_fraction_static or _USUAL_FRACTION
    after = round(before + step, 3)
    if not 0.05 <= after <= 0.95:
        return None
    stated = config.mem_fraction_static if config.mem_fraction_static is not None else "not stated"
    return config.model_copy(update={"mem_fraction_static": after}), f"mem_fraction_static {stated} -> {after}"

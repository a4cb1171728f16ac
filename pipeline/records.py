"""What was seen: raw traces, figures derived from them, and the record of a trial.

Units are suffixes (`_ms`, `_s`, `_tok_per_s`). Missing is None, never 0. Traces are slots
dataclasses because a load test makes many; everything that is written to disk is a frozen model.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, NonNegativeInt

from pipeline.config import EngineConfig, Frozen


class FailureClass(StrEnum):
    """Why a trial has no score. The values are stored in records, MLflow tags and the sampler."""

    CONFIG_INVALID = "config_invalid"
    OOM_LOWER = "oom_lower"  # out of memory: lower mem_fraction_static
    OOM_RAISE = "oom_raise"  # no room for the KV cache: raise mem_fraction_static
    CAPTURE = "capture"
    COLLECTIVE = "collective"
    HANG = "hang"
    DRAFT_MISMATCH = "draft_mismatch"
    PORT = "port"
    CRASH = "crash"
    KILLED = "killed"
    UNREADY = "unready"
    MUTE = "mute"  # healthy, but a generate gets no token
    MEASUREMENT = "measurement"
    TEARDOWN = "teardown"


class Failure(Frozen):
    """A failed launch or measurement, in words a person can act on."""

    failure_class: FailureClass
    cause: str
    phase: str = "launch"
    exit_code: int | None = None
    rank: str | None = None
    log_path: str | None = None
    log_tail: tuple[str, ...] = ()
    command: str | None = None

    def text(self) -> str:
        """The cause, then where to look next."""
        parts = [f"{self.failure_class}: {self.cause}"]
        if self.exit_code is not None:
            parts.append(f"exit code {self.exit_code}")
        if self.log_path:
            parts.append(f"log: {self.log_path}")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class SpecCounters:
    """Speculation counters over a window or a request; sums of them are meaningful, means are not."""

    output_tokens: int
    verify_steps: int
    accepted_drafts: int | None = None
    proposed_drafts: int | None = None

    def __add__(self, other: SpecCounters) -> SpecCounters:
        def total(a: int | None, b: int | None) -> int | None:
            return None if a is None or b is None else a + b

        return SpecCounters(
            self.output_tokens + other.output_tokens,
            self.verify_steps + other.verify_steps,
            total(self.accepted_drafts, other.accepted_drafts),
            total(self.proposed_drafts, other.proposed_drafts),
        )


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One request as the client saw it. All times are monotonic seconds of one clock."""

    index: int
    prompt_id: str
    workload: str
    started: float  # just before the send
    chunk_times: tuple[float, ...] = ()  # arrival of each chunk that carried content
    finished: float | None = None  # last byte
    scheduled: float | None = None  # planned send time, open loop and replay only
    status: Literal["ok", "failed", "cut_off"] = "ok"
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None  # the server's usage
    retokenized_tokens: int | None = None
    finish_reason: str | None = None
    text: str | None = None
    error: str | None = None
    spec: SpecCounters | None = None


class LoadLevel(Frozen):
    """One level of load on one workload (a named prompt set). Exactly one of the three drives it."""

    workload: str
    concurrency: int | None = None  # closed loop
    request_rate: float | None = None  # open loop, requests/s, Poisson
    trace: str | None = None  # replay of a file of timestamps and lengths

    @property
    def key(self) -> str:
        """A name fit for MLflow and file names, such as `extract.c8`."""
        if self.concurrency is not None:
            return f"{self.workload}.c{self.concurrency}"
        if self.request_rate is not None:
            return f"{self.workload}.r{self.request_rate:g}"
        return f"{self.workload}.replay"


class Distribution(Frozen):
    """Statistics of per-request values. A percentile with too few samples is None."""

    n: int
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class Estimate(Frozen):
    """A figure with its spread: mean over repeats, sample standard deviation, 95 % interval.

    `std`, `low` and `high` are None with fewer than two repeats.
    """

    value: float
    n: int = 1
    std: float | None = None
    low: float | None = None
    high: float | None = None


class LevelResult(Frozen):
    """Everything measured at one load level of one launch, over all its repeats."""

    level: LoadLevel
    window_s: float
    requests_ok: int
    requests_failed: int = 0
    requests_cut_off: int = 0
    output_tokens: int
    output_tok_per_s: Estimate
    requests_per_s: Estimate | None = None
    ttft_ms: Distribution | None = None
    tpot_ms: Distribution | None = None
    e2e_latency_ms: Distribution | None = None
    chunk_gap_ms: Distribution | None = None
    accept_length: float | None = None
    accept_rate: float | None = None
    verify_steps: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    retokenized_ratio: float | None = None
    client_cpu: float | None = None  # share of one core used by the load generator
    errors: tuple[str, ...] = ()


class Broken(Frozen):
    """A sanity rule that did not hold: its name, what it protects from, what was seen."""

    rule: str
    protects_from: str
    seen: str
    fatal: bool = True


class PromptDiff(Frozen):
    """One prompt whose greedy output differs from the baseline's."""

    prompt_id: str
    first_difference: int  # token position
    margin: float | None = None  # baseline's top-1 minus top-2 logprob there
    verdict: Literal["numerics", "wrong"] = "wrong"


class LosslessResult(Frozen):
    """Greedy outputs against the no-speculation baseline."""

    prompts: int
    identical: int
    numerics: int = 0
    wrong: int = 0
    tolerance: float | None = None  # nats; None where equality must be exact
    allowed_flips: int | None = None  # what the baseline itself shows under another batch size
    diffs: tuple[PromptDiff, ...] = ()
    corruption: str | None = None  # named pattern: "accept length pinned at the ceiling", …
    passed: bool


class Topology(Frozen):
    """The machine as a fingerprint. Unknown is None and keeps a dimension alive."""

    gpu_count: NonNegativeInt = 0
    gpu_model: str | None = None
    sm: int | None = None  # 90 for Hopper, 120 for RTX PRO 6000
    peer_access: bool | None = None
    link: Literal["nvlink", "pcie"] | None = None
    driver: str | None = None
    cpu_count: int | None = None
    hostname: str | None = None


class Launch(Frozen):
    """What was started, enough to start it again."""

    argv: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)  # what the configuration adds
    scrubbed: tuple[str, ...] = ()  # inherited variables that were removed
    kept: tuple[str, ...] = ()  # inherited site policy that the engine also gets, such as NCCL_NVLS_ENABLE=0
    notes: tuple[str, ...] = ()  # old flag names that were mapped, and the like
    log_path: str = ""
    base_url: str = ""
    gpu_ids: tuple[int, ...] = ()


class TeardownProof(Frozen):
    """What was checked after an engine was stopped."""

    group_dead: bool
    ports_free: bool
    gpu_memory_back: bool | None = None  # None where there is no GPU
    app_gone: bool = True
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def proven(self) -> bool:
        """True when nothing of the engine is left."""
        return self.group_dead and self.ports_free and self.app_gone and self.gpu_memory_back is not False


class Measurement(Frozen):
    """All load levels of one launch and the value of the study's objective."""

    levels: tuple[LevelResult, ...]
    objective: Estimate | None = None


Role = Literal["baseline", "seed", "search", "ablation", "confirm", "reference"]
Status = Literal["ok", "failed", "pruned", "reused", "stopped"]


class TrialRecord(Frozen):
    """One trial. `status` is `ok` only when there are figures; otherwise there is a reason.

    `reused` and `pruned` trials were never launched: see `reused_from` and `reason`.
    """

    study: str
    number: int
    role: Role
    status: Status
    config: EngineConfig
    config_id: str
    params: dict[str, Any] = Field(default_factory=dict)  # the sampler's own flat point
    undone: str | None = None  # ablation: the setting that went back to its default
    round: int | None = None  # confirmation: launches of one round are paired
    of_rounds: int | None = None  # the most there may be, where fewer may do; None where their number is fixed
    reason: str | None = None
    reused_from: int | None = None
    failure: Failure | None = None
    measurement: Measurement | None = None
    lossless: LosslessResult | None = None
    broken: tuple[Broken, ...] = ()
    resolved: dict[str, Any] = Field(default_factory=dict)
    asked_not_got: dict[str, tuple[Any, Any]] = Field(default_factory=dict)
    degraded: tuple[str, ...] = ()
    log_accept_length: float | None = None  # the engine's own word, from its log
    notes: tuple[str, ...] = ()
    phases_s: dict[str, float] = Field(default_factory=dict)  # launch, measure, teardown, …
    launch: Launch | None = None
    teardown: TeardownProof | None = None
    topology: Topology = Topology()
    engine_version: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    node: str | None = None
    git_commit: str | None = None
    started_at: str | None = None  # ISO 8601, UTC
    gpu_state: dict[str, Any] = Field(default_factory=dict)  # SM clocks, throttle reasons

"""What a space file says besides the space itself: workload, load, objective, limits, search.

Pure data with defaults; `space.py` reads it from YAML and adds file, line and key to every error.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from pipeline.config import Frozen
from pipeline.records import LoadLevel

MOST_STREAMS = 10_000  # one sender, one event loop
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]  # a longer wait is a slip; timers do not take every number
Streams = Annotated[int, Field(gt=0, le=MOST_STREAMS)]
Requests = Annotated[int, Field(gt=0, le=1_000_000)]
Tokens = Annotated[int, Field(gt=0, le=10_000_000)]


def _fit_for_keys(name: str) -> str:
    if not re.fullmatch(r"[\w.-][\w .-]{0,63}", name):
        raise ValueError(f"a workload cannot be named {name!r}; expected up to 64 letters, digits and ._-")
    return name


WorkloadName = Annotated[str, AfterValidator(_fit_for_keys)]  # part of MLflow's keys and of files' names


class WorkloadSpec(Frozen):
    """Prompts and how they are answered.

    `prompts` maps a workload's name to a shipped set (`extract`, `open`) or a JSONL file (plain
    prompts, OpenAI chat or ShareGPT shapes). Greedy by default; `ignore_eos` fixes the output length.
    """

    prompts: dict[WorkloadName, str] = Field(
        default_factory=lambda: {"extract": "extract", "open": "open"}, min_length=1
    )
    output_tokens: Tokens = 128
    ignore_eos: bool = True
    temperature: NonNegativeFloat = 0.0
    seed: int = 0
    greedy_prompts: Requests = 8  # of each set, for the lossless check
    greedy_tokens: Tokens = 32


class LoadSpec(Frozen):
    """The load levels, each applied to every workload, busiest first."""

    concurrency: tuple[Streams, ...] = ()
    request_rate: tuple[PositiveFloat, ...] = ()
    trace: str | None = None
    requests_per_level: Requests | None = None  # default: max(8, 4 x concurrency)
    warmup_requests: Requests | None = None  # default: concurrency of the busiest level
    min_repeats: Requests = 2
    max_repeats: Requests = 5
    ci_width: PositiveFloat = 0.05  # stop when the 95 % interval is within ± this share of every mean
    level_budget_s: Seconds = 120.0

    @model_validator(mode="after")
    def _one_level_at_least(self) -> LoadSpec:
        if not self.concurrency and not self.request_rate and self.trace is None:
            raise ValueError("state at least one of concurrency, request_rate, trace")
        return self

    @model_validator(mode="after")
    def _levels_are_distinct_and_repeats_in_order(self) -> LoadSpec:
        for name, values in (("concurrency", self.concurrency), ("request_rate", self.request_rate)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name} lists a level twice")
        if self.min_repeats > self.max_repeats:
            raise ValueError(f"min_repeats is {self.min_repeats}, more than the {self.max_repeats} of max_repeats")
        return self

    def levels(self, workloads: tuple[str, ...]) -> tuple[LoadLevel, ...]:
        """Every level of every workload, busiest first."""
        loads: list[dict[str, float | int | str]] = [{"concurrency": c} for c in sorted(self.concurrency, reverse=True)]
        loads += [{"request_rate": r} for r in sorted(self.request_rate, reverse=True)]
        loads += [{"trace": self.trace}] if self.trace is not None else []
        return tuple(LoadLevel.model_validate({"workload": w, **load}) for load in loads for w in workloads)


MetricName = Literal[
    "output_tok_per_s", "requests_per_s", "mean_ttft_ms", "p95_ttft_ms", "mean_tpot_ms", "p95_tpot_ms",
    "mean_e2e_latency_ms", "p95_e2e_latency_ms",
]  # fmt: skip


class Goal(Frozen):
    """One objective: a metric at some load levels, mixed by weight (all equal when empty).

    `weights` maps level keys (`extract.c8`) or workload names to weights. Throughputs are mixed by
    the weighted harmonic mean, which is the throughput of the mixed traffic; times by the mean.
    """

    metric: MetricName = "output_tok_per_s"
    concurrency: PositiveInt | None = None  # only levels of this concurrency
    weights: dict[str, PositiveFloat] = Field(default_factory=dict)

    @property
    def maximize(self) -> bool:
        """True for throughputs."""
        return self.metric.endswith("_per_s")


class Constraints(Frozen):
    """Service-level limits that a winner must hold at every measured level; None is no limit."""

    p95_ttft_ms: PositiveFloat | None = None
    p95_tpot_ms: PositiveFloat | None = None
    p95_e2e_latency_ms: PositiveFloat | None = None
    error_rate: float = Field(default=0.0, ge=0, le=1)


class ObjectiveSpec(Frozen):
    """One goal, or two for a Pareto front, and the constraints."""

    goals: tuple[Goal, ...] = Field(default=(Goal(),), min_length=1, max_length=2)
    constraints: Constraints = Constraints()

    @model_validator(mode="after")
    def _goals_differ(self) -> ObjectiveSpec:
        if len(self.goals) == 2 and self.goals[0] == self.goals[1]:
            raise ValueError("both goals are the same")
        return self


class Limits(Frozen):
    """Deadlines of one launch, in seconds. Every wait has one."""

    start_s: Seconds = 1800.0  # total, launch to ready
    stall_s: Seconds = 180.0  # no log progress (and no compiler or weight loading of ours at work)
    generate_s: Seconds = 120.0  # one real generate, at readiness and as liveness
    request_s: Seconds = 600.0  # one measured request
    silence_s: Seconds = 120.0  # no chunk on any stream during measurement
    stop_s: Seconds = 30.0  # TERM to KILL
    proof_s: Seconds = 60.0  # KILL to memory back and ports free


class Budget(Frozen):
    """When the search ends: whichever comes first. Launches of seeds and search count as trials."""

    trials: PositiveInt | None = None
    hours: PositiveFloat | None = None
    gpu_hours: PositiveFloat | None = None


SamplerName = Literal["tpe", "gp", "surrogate", "random", "quasi-random", "grid"]


class SearchSpec(Frozen):
    """How points are chosen and confirmed."""

    sampler: SamplerName = "surrogate"  # benchmarks/search.py says why
    seed: int = Field(default=0, ge=0, lt=2**32)
    budget: Budget = Budget(trials=20)
    startup_trials: PositiveInt = 3  # launches with figures before a model takes over from random points
    sglang_defaults: bool = True  # seed each algorithm's own default
    warm_start: bool = True  # seed the winner of an earlier study of this model and machine
    early_stop: bool = True  # a trial that cannot win stops after its busiest level
    ablate: bool = True  # undo the winner's settings one at a time
    confirm_rounds: int = Field(default=4, ge=0)  # at most; winner, runner-up, baseline in turns: benchmarks/aa.py
    screen_collectives: bool = False  # a short benchmark first (`pipeline.collectives`) drops what cannot win
    profile: bool = False  # profile each algorithm's first trial in its own launch, after its measurement

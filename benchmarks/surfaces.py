"""Surfaces to search offline: what they share, and the modelled machines (`measured.py` has those of real records).

A modelled surface is a verify-step cost model: a step takes the target's pass over the drafts, its all-reduces
and the drafting; a step yields the accept length. The figures are plausible, not measured; what they are for is
the shape: settings that multiply, matter only together, matter at one load level, do nothing, or fail.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.loglinear import LaunchFailsError
from pipeline.config import Collectives, EngineConfig
from pipeline.engine_space import Space
from pipeline.metrics import close_enough, estimate, objective
from pipeline.proposer import Proposal
from pipeline.records import (
    Estimate,
    FailureClass,
    LevelResult,
    LoadLevel,
    LosslessResult,
    Measurement,
    Topology,
    TrialRecord,
)
from pipeline.ruler import MeasurePlan
from pipeline.space import load_space
from pipeline.spec import Goal, ObjectiveSpec

ROOT = Path(__file__).resolve().parent.parent
SPACES = ROOT / "benchmarks" / "spaces"
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Link:
    """One all-reduce: fixed latency and bandwidth."""

    latency_us: float
    gb_per_s: float

    def us(self, size: float) -> float:
        return self.latency_us + size / (1e3 * self.gb_per_s)

    def scaled(self, latency: float = 1.0, bandwidth: float = 1.0) -> Link:
        return Link(self.latency_us * latency, self.gb_per_s * bandwidth)


@dataclass(frozen=True)
class Machine:
    """A machine with a model on it."""

    topology: Topology
    layers: int
    hidden: int
    pass_ms: float  # one pass over the weights, all-reduces apart
    token_us: float  # each token of the batch on top
    draft_ms: Mapping[str, float]  # one draft step, all-reduces apart
    draft_layers: Mapping[str, int]
    accept: Mapping[str, Mapping[str, float]]  # chance that the first draft token is accepted, by workload
    nccl: Link
    custom: Link | None = None
    ipc: Link | None = None
    launch_s: float = 180.0


H200 = Topology(gpu_count=8, gpu_model="NVIDIA H200", sm=90, peer_access=True, link="nvlink")
L40S = Topology(gpu_count=8, gpu_model="NVIDIA L40S", sm=89, peer_access=False, link="pcie")
RTX6000 = Topology(
    gpu_count=8, gpu_model="NVIDIA RTX PRO 6000 Blackwell Server Edition", sm=120, peer_access=True, link="pcie"
)
_DRAFTS: dict[str, Any] = {
    "draft_ms": {"EAGLE3": 0.35, "STANDALONE": 1.1},
    "draft_layers": {"EAGLE3": 1, "STANDALONE": 28},
    "accept": {
        "EAGLE3": {"extract": 0.76, "open": 0.66},
        "STANDALONE": {"extract": 0.70, "open": 0.58},
        "NGRAM": {"extract": 0.74, "open": 0.22},
    },
}
NVLINK = Machine(
    topology=H200, layers=64, hidden=5120, pass_ms=3.2, token_us=9, nccl=Link(22, 180), custom=Link(9, 220), **_DRAFTS
)
PCIE = Machine(topology=L40S, layers=64, hidden=5120, pass_ms=11, token_us=32, nccl=Link(75, 9), **_DRAFTS)
SM120 = Machine(
    topology=RTX6000, layers=61, hidden=7168, pass_ms=6.2, token_us=40, nccl=Link(62, 14), ipc=Link(38, 16),
    launch_s=420.0,
    **{**_DRAFTS, "accept": {"EAGLE3": {"extract": 0.6, "open": 0.5}, "NGRAM": _DRAFTS["accept"]["NGRAM"]}},
)  # fmt: skip

_PROTO = {None: (1.04, 0.95), "LL": (0.72, 0.35), "LL128": (0.84, 0.9), "Simple": (1.3, 1.05)}
_ALGO = {None: (1.06, 1.0), "Ring": (1.12, 1.06), "allreduce:tree": (0.74, 0.85)}
_CHANNELS = {None: (1.03, 1.0), 4: (0.93, 0.6), 8: (0.96, 0.85), 16: (1.0, 1.02)}
_BUFFER = {None: (1.0, 1.0), 1048576: (0.985, 0.96), 8388608: (1.01, 1.04)}


def link_of(machine: Machine, asked: Collectives) -> Link:
    """What one all-reduce costs under these settings."""
    if machine.custom is not None and asked.custom_all_reduce is not False:
        link = machine.custom
        if asked.flashinfer_fusion not in (None, "off"):
            link = link.scaled(0.86)
    elif machine.ipc is not None and asked.pcie_ipc:
        link = machine.ipc
    else:
        link = machine.nccl
        for table, value in (
            (_PROTO, asked.nccl_proto),
            (_ALGO, asked.nccl_algo),
            (_CHANNELS, asked.nccl_max_nchannels),
            (_BUFFER, asked.nccl_buffsize),
        ):
            link = link.scaled(*table[value])  # type: ignore[index]
        if asked.nccl_proto == "LL" and asked.nccl_max_nchannels == 16:
            link = link.scaled(1.12)  # low-latency protocol starved by many channels
        if asked.nccl_p2p_level == "SYS":
            link = link.scaled(0.9, 1.25)
    return link.scaled(0.92) if asked.symm_mem else link


def shape_of(config: EngineConfig) -> tuple[int, int, int]:
    """Depth, width and draft tokens, with SGLang's defaults."""
    spec = config.speculation
    if spec.algorithm == "NGRAM":
        tokens, breadth = spec.num_draft_tokens or 12, spec.max_bfs_breadth or 10
        return max(1, tokens // min(breadth, 3)), breadth, tokens
    if spec.algorithm in ("EAGLE3", "STANDALONE"):
        steps, topk = getattr(spec, "num_steps", None) or 3, getattr(spec, "eagle_topk", None) or 1
        return steps, topk, (getattr(spec, "num_draft_tokens", None) or steps + 1) if topk > 1 else steps + 1
    return 0, 1, 1


def accept_length(machine: Machine, config: EngineConfig, workload: str) -> float:
    """Tokens a step: each depth is reached only if the ones above were accepted."""
    depth, width, tokens = shape_of(config)
    depth = min(depth, tokens - 1)
    if depth == 0:
        return 1.0
    chance = machine.accept[config.speculation.algorithm][workload]
    # A wide tree catches a second guess, as far as the tokens to verify allow.
    wide = 1 - (1 - chance) * (1 - 0.3 * min(1.0, (tokens - 1) / (depth * width))) if width > 1 else chance
    reached, total = 1.0, 1.0
    for step in range(depth):
        reached *= wide * 0.96**step
        total += reached
    return total


def step_ms(machine: Machine, config: EngineConfig, streams: int) -> float:
    """One verify step (or plain decode step) for a batch of streams."""
    depth, width, tokens = shape_of(config)
    link, batch = link_of(machine, config.collectives), streams * tokens
    size = 2.0 * machine.hidden * batch
    compute = machine.pass_ms + batch * machine.token_us / 1e3
    if config.attention_backend == "flashinfer":
        compute *= 0.985 if width == 1 else 1.03
    collectives = (2 * machine.layers + 1) * link.us(size) / 1e3
    algorithm = config.speculation.algorithm
    if algorithm == "NGRAM":
        return compute + collectives + 0.25 + 0.02 * streams * math.sqrt(tokens)
    drafting = depth * machine.draft_ms.get(algorithm, 0.0) * (1 + 0.004 * streams * width)
    small = (2 * machine.draft_layers.get(algorithm, 0) + 1) * link.us(2.0 * machine.hidden * streams * width) / 1e3
    return compute + collectives + (drafting + depth * small if depth else 0.0)


def modelled(machine: Machine) -> Callable[[EngineConfig, LoadLevel], float]:
    """tok/s of a configuration at a load level."""

    def speed(config: EngineConfig, level: LoadLevel) -> float:
        _fail(config)
        streams = level.concurrency or 1
        return 1e3 * streams * accept_length(machine, config, level.workload) / step_ms(machine, config, streams)

    return speed


def _fail(config: EngineConfig) -> None:
    if config.collectives.nccl_algo == "Tree":
        raise LaunchFailsError(FailureClass.COLLECTIVE, "Capture cuda graph failed: NCCL error: invalid usage")
    if config.collectives.symm_mem and config.collectives.custom_all_reduce is False:
        raise LaunchFailsError(FailureClass.HANG, "no progress in the log for 180 s")
    _, width, tokens = shape_of(config)
    if config.speculation.algorithm == "EAGLE3" and width > 1 and tokens > 8:
        raise LaunchFailsError(FailureClass.OOM_LOWER, "Capture cuda graph failed: CUDA out of memory")


def corrupts(config: EngineConfig) -> bool:
    """Symmetric memory with speculation: garbage with a better score."""
    return bool(config.collectives.symm_mem) and config.speculation.algorithm != "none"


@dataclass
class Surface:
    """A space with a speed at every point.

    Args:
        name: for the tables.
        space: the real space, with the machine's rules.
        topology: the machine.
        speed: tok/s of a configuration at a level; raises `LaunchFailsError`.
        launch_sd, repeat_sd: noise, as shares: per launch (common to its levels) and per repeat of a level.
        launch_s, failed_s: what a launch and a failed launch cost, levels apart: those take their requests' time.
    """

    name: str
    space: Space
    topology: Topology
    speed: Callable[[EngineConfig, LoadLevel], float]
    launch_sd: float = 0.01
    repeat_sd: float = 0.01
    launch_s: float = 180.0
    failed_s: float = 150.0
    levels: tuple[LoadLevel, ...] = field(init=False)
    goal: Goal = field(init=False)
    objective: ObjectiveSpec = field(init=False)

    def __post_init__(self) -> None:
        self.plan = MeasurePlan.from_space(self.space)
        self.levels = self.plan.levels
        self.goal = self.space.objective.goals[0]
        self.objective = ObjectiveSpec(goals=(self.goal,))
        self._checked: dict[str, tuple[Any, ...]] = {}
        self._truth: dict[str, float | None] = {}

    def check(self, config: EngineConfig) -> tuple[Any, ...]:
        """The real rules, for this machine."""
        if config.config_id not in self._checked:
            self._checked[config.config_id] = self.space.check(config, topology=self.topology)
        return self._checked[config.config_id]

    def canonical(self, config: EngineConfig) -> EngineConfig:
        """The real rewrites, for this machine."""
        return self.space.canonical(config, topology=self.topology).config

    def truth(self, config: EngineConfig) -> float | None:
        """The objective without noise; None where the launch fails or its output is wrong."""
        if config.config_id not in self._truth:
            self._truth[config.config_id] = self._objective(config)
        return self._truth[config.config_id]

    def _objective(self, config: EngineConfig) -> float | None:
        if corrupts(config):
            return None
        try:
            levels = [_result(level, estimate([self.speed(config, level)])) for level in self.levels]
        except LaunchFailsError:
            return None
        found = objective(levels, self.goal)
        return found.value if found else None

    @cached_property
    def configurations(self) -> dict[str, EngineConfig]:
        """Every distinct launchable configuration of the grid."""
        found: dict[str, EngineConfig] = {}
        for params in self.space.grid():
            config = self.space.config(params)
            if not self.check(config):
                config = self.canonical(config)
                found[config.config_id] = config
        return found

    @cached_property
    def best(self) -> float:
        """The best that the grid holds."""
        return max(value for config in self.configurations.values() if (value := self.truth(config)) is not None)

    def measure(self, proposal: Proposal, seed: int) -> TrialRecord:
        """The record of a launch: noisy figures, a failure, wrong output, or a stop."""
        # Noise belongs to the launch: the same trial number of the same study always sees the same.
        text = f"{self.name}/{seed}/{proposal.number}"
        rng = random.Random(hashlib.sha256(text.encode()).digest())
        results: list[LevelResult] = []
        facts: dict[str, Any] = {"status": "ok"}
        try:
            offset = (1 + self.launch_sd * rng.gauss(0, 1)) * (1.4 if corrupts(proposal.config) else 1.0)
            for _, load in groupby(self.levels, key=lambda level: level.model_copy(update={"workload": ""})):
                speeds = {level: self.speed(proposal.config, level) * offset for level in load}
                results += self._repeat(speeds, rng)
                rule = proposal.stop_early if len(results) < len(self.levels) else None
                if reason := rule(tuple(results)) if rule else None:
                    facts = {"status": "stopped", "reason": f"stopped early: {reason}"}
                    break
            seconds = {"launch": self.launch_s, "measure": sum(result.window_s for result in results)}
            facts |= {"measurement": Measurement(levels=tuple(results)), "phases_s": seconds}
        except LaunchFailsError as error:
            facts = {"status": "failed", "failure": error.failure, "phases_s": {"launch": self.failed_s}}
        return TrialRecord(
            study=self.name, number=proposal.number, role=proposal.role, config=proposal.config,
            config_id=proposal.config_id, params=proposal.params, lossless=_lossless(proposal.config),
            **{**proposal.facts, **facts},
        )  # fmt: skip

    def _repeat(self, speeds: Mapping[LoadLevel, float], rng: random.Random) -> list[LevelResult]:
        """The workloads of one load, repeated as the ruler would."""
        load = self.space.load
        values: dict[LoadLevel, list[float]] = {level: [] for level in speeds}
        for repeat in range(load.max_repeats):
            for level, speed in speeds.items():
                values[level].append(speed * (1 + self.repeat_sd * rng.gauss(0, 1)))
            known = close_enough([estimate(found) for found in values.values()], load.ci_width)
            if known and repeat + 1 >= load.min_repeats:
                break
            taken = sum(self.window_s(level, value) for level, found in values.items() for value in found)
            if taken * (repeat + 2) / (repeat + 1) > load.level_budget_s * len(speeds):
                break
        return [self._level(level, found) for level, found in values.items()]

    def _level(self, level: LoadLevel, values: list[float]) -> LevelResult:
        seconds = sum(self.window_s(level, value) for value in values)
        return _result(level, estimate(values), seconds)

    def window_s(self, level: LoadLevel, tok_per_s: float) -> float:
        """Seconds of one repeat: its requests' tokens at that speed."""
        return self.plan.requests(level) * self.plan.workload.output_tokens / tok_per_s


def _lossless(config: EngineConfig) -> LosslessResult:
    wrong = 8 if corrupts(config) else 0
    return LosslessResult(prompts=8, identical=8 - wrong, wrong=wrong, passed=not wrong)


def _result(level: LoadLevel, value: Estimate | None, seconds: float = 1.0) -> LevelResult:
    assert value is not None
    return LevelResult(
        level=level, window_s=seconds, requests_ok=32, output_tokens=int(seconds * value.value), output_tok_per_s=value
    )


def modelled_surfaces() -> list[Surface]:
    """Modelled ones; `benchmarks.measured` has those made of records."""
    eight = load_space(SPACES / "eight.yaml").for_engine("sglang")
    kimi = load_space(ROOT / "tune_spaces" / "kimi-k2.5-pcie.yaml").for_engine("sglang")
    return [
        Surface(name, space, machine.topology, modelled(machine), launch_s=machine.launch_s)
        for name, space, machine in (("nvlink", eight, NVLINK), ("pcie", eight, PCIE), ("pcie-sm120", kimi, SM120))
    ]

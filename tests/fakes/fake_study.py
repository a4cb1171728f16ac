"""A study as the pipeline would have written it: two GPUs, a cost model with noise, real record types.

The model: a step costs `plain` ms plus a little per stream; a speculative cycle costs a verify pass and
its drafts; throughput = streams x accept length / cycle. So the anatomy of its records is known.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pipeline.config import (
    Collectives,
    DraftModelSpeculation,
    EngineConfig,
    NgramSpeculation,
    NoSpeculation,
    Speculation,
)
from pipeline.records import (
    Distribution,
    Estimate,
    Failure,
    FailureClass,
    Launch,
    LevelResult,
    LoadLevel,
    LosslessResult,
    Measurement,
    TeardownProof,
    Topology,
    TrialRecord,
)
from pipeline.spec import ObjectiveSpec

MODEL = "smollm2"
LOADS = (8, 1)
PLAIN_MS = {8: 3.2, 1: 2.9}
WORKLOADS = {"chat": 1.0, "extract": 1.35}  # accept lengths are this much longer
_START = datetime(2026, 5, 4, 9, 0, tzinfo=UTC)


@dataclass(frozen=True)
class Shape:
    """What a configuration costs and accepts in the model."""

    config: EngineConfig
    accept: float = 1.0
    cycle: float = 1.0  # in plain steps at one stream
    per_stream: float = 0.0  # added share of a plain step per further stream
    step: float = 1.0  # of collectives and kernels, on every pass


def config(speculation: Speculation | None = None, **collectives: Any) -> EngineConfig:
    """An SGLang configuration at tensor-parallel 2."""
    return EngineConfig(
        engine="sglang",
        model=MODEL,
        tensor_parallel_size=2,
        speculation=speculation or NoSpeculation(),
        collectives=Collectives(**collectives),
    )


def eagle(steps: int, draft_tokens: int | None = None, topk: int = 1) -> DraftModelSpeculation:
    """EAGLE3 with the shipped head."""
    return DraftModelSpeculation(
        algorithm="EAGLE3",
        draft_model="eagle3",
        num_steps=steps,
        eagle_topk=topk,
        num_draft_tokens=draft_tokens or steps + 1,
    )


BASELINE = Shape(config())
WINNER = Shape(config(eagle(3), nccl_algo="allreduce:tree", nccl_proto="LL"), 2.1, 1.45, 0.05, 0.9)
SHAPES: dict[str, Shape] = {
    "ngram4": Shape(config(NgramSpeculation(num_draft_tokens=4)), 1.3, 1.12, 0.08),
    "ngram8": Shape(config(NgramSpeculation(num_draft_tokens=8)), 1.55, 1.2, 0.14),
    "eagle1": Shape(config(eagle(1)), 1.6, 1.22, 0.015),
    "eagle3": Shape(config(eagle(3)), 2.1, 1.45, 0.05),
    "eagle5": Shape(config(eagle(5), nccl_proto="LL"), 2.3, 1.75, 0.09, 0.97),
    "standalone": Shape(
        config(eagle(3).model_copy(update={"algorithm": "STANDALONE", "draft_model": "student"})), 1.75, 1.6, 0.05
    ),
    "ring": Shape(config(nccl_algo="Ring"), step=1.04),
    "best": WINNER,
}  # fmt: skip


@dataclass
class FakeStudy:
    """Builds records in order, on one clock."""

    name: str = "gpu2"
    seed: int = 0
    noise: float = 0.004
    gpu: bool = True
    loads: tuple[int, ...] = LOADS
    records: list[TrialRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random, self._clock = random.Random(self.seed), _START

    def trial(self, shape: Shape, role: str = "search", **facts: Any) -> TrialRecord:
        """A launch with figures."""
        levels = tuple(self._level(shape, load, workload) for load in self.loads for workload in WORKLOADS)
        values = [level.output_tok_per_s.value for level in levels]
        objective = Estimate(value=len(values) / sum(1 / v for v in values), n=3, std=1.0)
        plain = isinstance(shape.config.speculation, NoSpeculation)
        lossless = None if plain else LosslessResult(prompts=16, identical=15, numerics=1, tolerance=0.1, passed=True)
        return self._add(
            shape.config,
            role,
            status="ok",
            measurement=Measurement(levels=levels, objective=objective),
            lossless=lossless,
            phases_s={"launch": 58.0 + self._random.random() * 9, "measure": 41.0, "teardown": 4.2},
            **facts,
        )

    def failed(self, configuration: EngineConfig, failure_class: FailureClass, cause: str) -> TrialRecord:
        """A launch that gave no figures."""
        failure = Failure(
            failure_class=failure_class, cause=cause, exit_code=137, rank="TP1", log_path="trials/engine.log"
        )
        return self._add(
            configuration, "search", status="failed", reason=cause, failure=failure, phases_s={"launch": 44.0}
        )

    def reused(self, earlier: TrialRecord) -> TrialRecord:
        """A point that is the same launch as an earlier one."""
        return self._add(earlier.config, "search", status="reused", reused_from=earlier.number, launch=None)

    def _level(self, shape: Shape, load: int, workload: str) -> LevelResult:
        plain = isinstance(shape.config.speculation, NoSpeculation)
        accept = 1.0 if plain else 1 + (shape.accept - 1) * WORKLOADS[workload]
        cycle = PLAIN_MS[load] * shape.step * (shape.cycle + shape.per_stream * (load - 1))
        cycle *= 1 + self._random.gauss(0, self.noise)
        rate = 1e3 * load * accept / cycle
        tpot = cycle / accept

        def times(mean: float) -> Distribution:
            return Distribution(n=24, mean=mean, p50=mean * 0.99, p95=mean * 1.12)

        tokens = 4096 * load
        return LevelResult(
            level=LoadLevel(workload=workload, concurrency=load),
            window_s=tokens / rate,
            requests_ok=4 * load,
            output_tokens=tokens,
            output_tok_per_s=Estimate(value=rate, n=3, std=rate * 0.003, low=rate * 0.993, high=rate * 1.007),
            ttft_ms=times(14.0 + load),
            tpot_ms=times(tpot),
            e2e_latency_ms=times(14.0 + load + 127 * tpot),
            accept_length=None if plain else accept,
            accept_rate=None if plain else (accept - 1) / 3,
            verify_steps=None if plain else round(tokens / accept),
            client_cpu=0.1,
        )

    def _add(self, configuration: EngineConfig, role: str, **facts: Any) -> TrialRecord:
        number = len(self.records)
        launched = facts.get("status") != "reused"
        gpu = Topology(gpu_count=2, gpu_model="H200", sm=90, peer_access=False, link="nvlink", hostname="node-a")
        record = TrialRecord.model_validate(
            {
                "study": self.name,
                "number": number,
                "role": role,
                "config": configuration,
                "config_id": configuration.config_id,
                "params": _params(configuration),
                "launch": self._launch(configuration, number),
                "topology": gpu if self.gpu else Topology(cpu_count=2),
                "engine_version": "0.5.17",
                "teardown": TeardownProof(group_dead=True, ports_free=True, gpu_memory_back=True, seconds=4.2),
                "started_at": self._clock.isoformat(timespec="seconds") if launched else None,
            }
            | facts
        )
        self._clock += timedelta(seconds=sum(record.phases_s.values()) + 1)
        self.records.append(record)
        return record

    @staticmethod
    def _launch(configuration: EngineConfig, number: int) -> Launch:
        spec = configuration.speculation.model_dump(exclude_none=True)
        argv = ["/opt/venv/bin/python3.12", "-m", "sglang.launch_server", "--model-path", MODEL, "--tp-size", "2"]
        argv += ["--host", "127.0.0.1", "--port", str(41000 + number), "--disable-custom-all-reduce"]
        if spec["algorithm"] != "none":
            argv += ["--speculative-algorithm", spec["algorithm"]]
            argv += ["--speculative-num-draft-tokens", str(spec["num_draft_tokens"])]
        env = {k.upper(): str(v) for k, v in configuration.collectives.model_dump(exclude_none=True).items()}
        return Launch(argv=tuple(argv), env=env, log_path=f"trials/{number:03d}/engine.log")

    def write(self, root: Path, objective: ObjectiveSpec | None = None) -> Path:
        """Write the study's folder; return it."""
        folder = root / self.name
        (folder / "trials").mkdir(parents=True)
        facts = {"objective": (objective or ObjectiveSpec()).model_dump(mode="json"), "engine": "sglang"}
        (folder / "study.json").write_text(json.dumps(facts))
        (folder / "space.yaml").write_text("study: gpu2\n")
        (folder / "records.jsonl").write_text("".join(r.model_dump_json() + "\n" for r in self.records))
        return folder


def _params(configuration: EngineConfig) -> dict[str, Any]:
    """The flat point that the sampler would have chosen."""
    spec = configuration.speculation.model_dump(exclude_none=True, exclude={"draft_model", "adaptive"})
    algorithm = spec.pop("algorithm")
    chosen = {"speculation.algorithm": algorithm} | {f"speculation.{algorithm}.{k}": v for k, v in spec.items()}
    return chosen | {f"collectives.{k}": v for k, v in configuration.collectives.model_dump(exclude_none=True).items()}


def full_study(name: str = "gpu2", seed: int = 0) -> FakeStudy:
    """Baseline, search with failures and a reuse, ablation, confirmation in turns, the baseline again."""
    study = FakeStudy(name, seed)
    study.trial(BASELINE, "baseline")
    tried = [study.trial(shape, "seed" if key == "ngram8" else "search") for key, shape in SHAPES.items()]
    study.failed(
        config(nccl_algo="Tree"), FailureClass.COLLECTIVE, "NCCL has no all-gather for Tree; use allreduce:tree"
    )
    study.failed(config(flashinfer_fusion="auto"), FailureClass.HANG, "no log line for 180 s after SymmDeviceMemory")
    study.reused(tried[0])
    _ablate(study)
    for turn in range(3):
        for shape in _turns((WINNER, SHAPES["eagle3"], BASELINE), turn):
            study.trial(shape, "confirm", round=turn)
    study.trial(BASELINE, "reference")
    return study


def _ablate(study: FakeStudy) -> None:
    parts: dict[str, Shape] = {
        "speculation": Shape(config(nccl_algo="allreduce:tree", nccl_proto="LL"), step=0.9),
        "collectives.nccl_algo": Shape(config(eagle(3), nccl_proto="LL"), 2.1, 1.45, 0.05),
        "collectives.nccl_proto": Shape(config(eagle(3), nccl_algo="allreduce:tree"), 2.1, 1.45, 0.05, 0.9),
    }
    study.trial(WINNER, "ablation")
    for setting, shape in parts.items():
        study.trial(shape, "ablation", undone=setting)


def _turns(shapes: Sequence[Shape], turn: int) -> Iterable[Shape]:
    return (*shapes[turn % len(shapes) :], *shapes[: turn % len(shapes)])


def null_study(name: str = "null") -> FakeStudy:
    """A study in which nothing beats the baseline."""
    study = FakeStudy(name, seed=3)
    study.trial(BASELINE, "baseline")
    slow = Shape(config(NgramSpeculation(num_draft_tokens=16)), 1.2, 1.6, 0.2)
    study.trial(slow)
    for turn in range(3):
        study.trial(slow, "confirm", round=turn)
        study.trial(BASELINE, "confirm", round=turn)
    return study

"""A toy space with known speeds, for tests of the proposer: fast, deterministic, no engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.config import Collectives, EngineConfig, NgramSpeculation, NoSpeculation
from pipeline.proposer import Done, Proposal, Proposer, Wait
from pipeline.records import (
    Distribution,
    Estimate,
    Failure,
    FailureClass,
    LevelResult,
    LoadLevel,
    LosslessResult,
    Measurement,
    TrialRecord,
)
from pipeline.spec import Budget, ObjectiveSpec, SearchSpec

DRAFTS, ALGOS, BACKENDS = (2, 4, 8, 16), (None, "Ring", "allreduce:tree", "Tree"), (None, "triton", "fa3")


@dataclass(frozen=True)
class Broken:
    rule: str
    reason: str

    def text(self) -> str:
        return f"{self.rule}: {self.reason}"


@dataclass
class ToySpace:
    """Speculation × NCCL algorithm × attention backend: 5 × 4 × 3 points."""

    stated: Sequence[dict[str, Any]] = ()

    def suggest(self, trial: Any) -> dict[str, Any]:
        params = {"speculation.algorithm": trial.suggest_categorical("speculation.algorithm", ["none", "NGRAM"])}
        if params["speculation.algorithm"] == "NGRAM":
            name = "speculation.NGRAM.num_draft_tokens"
            params[name] = trial.suggest_categorical(name, list(DRAFTS))
        params["collectives.nccl_algo"] = trial.suggest_categorical("collectives.nccl_algo", list(ALGOS))
        params["attention_backend"] = trial.suggest_categorical("attention_backend", list(BACKENDS))
        return params

    def config(self, params: dict[str, Any]) -> EngineConfig:
        draft = params.get("speculation.NGRAM.num_draft_tokens")
        ngram = params.get("speculation.algorithm") == "NGRAM"
        return EngineConfig(
            engine="sglang",
            model="toy",
            speculation=NgramSpeculation(num_draft_tokens=draft) if ngram else NoSpeculation(),
            collectives=Collectives(nccl_algo=params.get("collectives.nccl_algo")),
            attention_backend=params.get("attention_backend"),
        )

    def baseline(self) -> EngineConfig:
        return self.config({})

    def seeds(self) -> Sequence[dict[str, Any]]:
        return self.stated

    def grid(self) -> Iterator[dict[str, Any]]:
        for draft in (None, *DRAFTS):
            for algo in ALGOS:
                for backend in BACKENDS:
                    spec = {"speculation.algorithm": "none"} if draft is None else {
                        "speculation.algorithm": "NGRAM", "speculation.NGRAM.num_draft_tokens": draft,
                    }  # fmt: skip
                    yield {**spec, "collectives.nccl_algo": algo, "attention_backend": backend}


def toy_speed(config: EngineConfig) -> float | None:
    """tok/s; None is a failed launch. NGRAM 8 and allreduce:tree help, the backend does nothing."""
    if config.collectives.nccl_algo == "Tree":
        return None
    speed = 100.0
    if isinstance(config.speculation, NgramSpeculation):
        speed *= {2: 1.1, 4: 1.2, 8: 1.4, 16: 1.3, None: 1.25}[config.speculation.num_draft_tokens]
    return speed * (1.15 if config.collectives.nccl_algo == "allreduce:tree" else 1.0)


def no_rules(config: EngineConfig) -> tuple[Broken, ...]:
    return ()


def same(config: EngineConfig) -> EngineConfig:
    return config


def level(value: float, key: str = "extract", concurrency: int = 8, ttft: float = 50.0) -> LevelResult:
    return LevelResult(
        level=LoadLevel(workload=key, concurrency=concurrency),
        window_s=10.0,
        requests_ok=40,
        output_tokens=int(10 * value),
        output_tok_per_s=Estimate(value=value),
        ttft_ms=Distribution(n=40, mean=ttft, p50=ttft, p95=ttft),
        tpot_ms=Distribution(n=40, mean=8e3 / value, p50=8e3 / value, p95=8e3 / value),
    )


def record(number: int, config: EngineConfig, value: float | None, role: str = "search", **more: Any) -> TrialRecord:
    """A launched trial: measured at `value` tok/s, or failed with None."""
    facts: dict[str, Any] = {"phases_s": {"launch": 60.0, "measure": 60.0}, "config_id": config.config_id}
    if value is None:
        failure = Failure(failure_class=FailureClass.COLLECTIVE, cause="NCCL error")
        facts |= {"status": "failed", "failure": failure, "reason": failure.cause}
    else:
        facts |= {"status": "ok", "measurement": Measurement(levels=(level(value),))}
    return TrialRecord(**{"study": "toy", "number": number, "role": role, "config": config, **facts, **more})


@dataclass
class Study:
    """Runs a proposer over a speed function, with a ledger that survives the proposer."""

    space: ToySpace = field(default_factory=ToySpace)
    search: SearchSpec = field(default_factory=lambda: SearchSpec(budget=Budget(trials=12)))
    speed: Callable[[EngineConfig], float | None] = toy_speed
    objective: ObjectiveSpec = field(default_factory=ObjectiveSpec)
    noise: float = 0.0
    rules: Callable[[EngineConfig], tuple[Broken, ...]] = no_rules
    canonical: Callable[[EngineConfig], EngineConfig] = same
    concurrency: int = 1
    ledger: list[TrialRecord] = field(default_factory=list)
    launches: list[Proposal] = field(default_factory=list)
    end: str | None = None

    def proposer(self, **more: Any) -> Proposer:
        return Proposer(
            self.space, self.search, self.objective,
            check=self.rules, canonical=self.canonical, records=self.ledger, clock=lambda: 0.0, **more,
        )  # fmt: skip

    def run(self, proposer: Proposer | None = None, stop_after: int | None = None) -> list[TrialRecord]:
        """To the end, or killed once `stop_after` launches were made (those in flight are lost)."""
        proposer = proposer or self.proposer()
        flying: list[Proposal] = []
        for _ in range(500):
            answer = proposer.propose() if len(flying) < self.concurrency else Wait()
            self.ledger.extend(proposer.drain())
            if isinstance(answer, Done):
                self.end = answer.reason
                return self.ledger
            if isinstance(answer, Proposal):
                self.launches.append(answer)
                flying.append(answer)
                if stop_after is not None and len(self.launches) >= stop_after:
                    return self.ledger
            else:
                self._finish(proposer, flying.pop(0))
        raise AssertionError("the study does not end")

    def _finish(self, proposer: Proposer, proposal: Proposal) -> None:
        value = self.speed(proposal.config)
        if value is not None:
            value *= 1 + self.noise * random.Random(proposal.number).gauss(0, 1)
        done = record(proposal.number, proposal.config, value, proposal.role, params=proposal.params, **proposal.facts)
        self.ledger.append(done)
        proposer.observe(done)


def lossless(passed: bool) -> LosslessResult:
    return LosslessResult(prompts=8, identical=8 if passed else 2, wrong=0 if passed else 6, passed=passed)


def roles(records: Iterable[TrialRecord | Proposal]) -> list[str]:
    return [r.role for r in records]

"""A space file as it is stated, and what the command line says instead."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import Field, PositiveInt, field_validator

from pipeline.config import Frozen
from pipeline.errors import InputError, nearest
from pipeline.records import Topology
from pipeline.spec import MOST_STREAMS, Limits, LoadSpec, ObjectiveSpec, SamplerName, SearchSpec, WorkloadSpec


@dataclass(frozen=True)
class Overrides:
    """What the command line says instead of the file; None leaves the file's word.

    `draft_model` is one model, or several as `ALGORITHM=MODEL`.
    """

    engine: str | None = None
    model: str | None = None
    draft_model: str | tuple[str, ...] | None = None
    tensor_parallel_size: int | None = None
    concurrency: tuple[int, ...] | None = None
    trials: int | None = None
    hours: float | None = None
    seed: int | None = None
    sampler: SamplerName | None = None

    def __post_init__(self) -> None:
        numbers: list[tuple[str, float | None, int]] = [
            ("--tensor-parallel-size", self.tensor_parallel_size, 1024),
            ("--trials", self.trials, 1_000_000),
            ("--time-budget", self.hours, 10_000),
            *(("--concurrency", count, MOST_STREAMS) for count in self.concurrency or ()),
        ]
        for flag, value, most in numbers:
            if value is not None and not 0 < value <= most:
                raise InputError(f"{value} does not fit", key=flag, expected=f"a number above 0, up to {most}")
        if len(set(self.concurrency or ())) < len(self.concurrency or ()):
            raise InputError("a level is stated twice", key="--concurrency")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise InputError(f"{self.seed} does not fit", key="--seed", expected="0 to 4294967295")
        for flag, models in (("--model", (self.model,)), ("--draft-model", self.drafts)):
            if any(model is not None and not model.rpartition("=")[2] for model in models):
                raise InputError("no model is named", key=flag, expected="a folder, a hub id or a small model's name")
        _one_of("--engine", self.engine, ("auto", "sglang", "embedded"))
        _one_of("--sampler", self.sampler, get_args(SamplerName))

    @property
    def drafts(self) -> tuple[str, ...]:
        """The draft models as they were given."""
        given = self.draft_model or ()
        return (given,) if isinstance(given, str) else given


def _one_of(flag: str, value: str | None, valid: tuple[str, ...]) -> None:
    if value is not None and value not in valid:
        raise InputError(
            f"{value!r} does not fit", key=flag, expected="one of " + ", ".join(valid), nearest=nearest(value, valid)
        )


class RulesSpec(Frozen):
    """Rules that this study waives by name, to see for itself what they warn of."""

    allow: tuple[str, ...] = ()


class Section(Frozen):
    """One engine's part of the file, as stated; `workload` to `search` replace the common ones."""

    model: str | None = None
    draft_models: dict[str, str] = Field(default_factory=dict)
    tensor_parallel_size: PositiveInt = 1
    release: str | None = None
    architecture: str | None = None
    topology: Topology | None = None
    rules: RulesSpec = RulesSpec()
    fixed: dict[str, Any] | None = None
    space: dict[str, Any] | None = None
    seeds: tuple[dict[str, Any], ...] = ()
    workload: WorkloadSpec | None = None
    load: LoadSpec | None = None
    objective: ObjectiveSpec | None = None
    limits: Limits | None = None
    search: SearchSpec | None = None


class SpaceFile(Frozen):
    """The whole file; the parts from `workload` to `search` hold for both engines unless a section replaces them."""

    study: str
    engine: Literal["auto", "sglang", "embedded"] = "auto"
    allow_lossy: bool = False
    sglang: Section | None = None
    embedded: Section | None = None
    workload: WorkloadSpec = WorkloadSpec()
    load: LoadSpec = LoadSpec(concurrency=(1,))
    objective: ObjectiveSpec = ObjectiveSpec()
    limits: Limits = Limits()
    search: SearchSpec = SearchSpec()

    @field_validator("study")
    @classmethod
    def _names_a_folder(cls, study: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", study):
            raise ValueError(f"{study!r} names no folder; expected up to 64 letters, digits and ._-")
        return study

"""One engine's part of a space file: its points, their configurations, and what to try first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline import checkpoints, rules
from pipeline.config import EngineConfig, EngineName
from pipeline.dimensions import ALGORITHM, Dimension, Point
from pipeline.errors import InputError
from pipeline.records import Topology
from pipeline.spec import Limits, LoadSpec, ObjectiveSpec, SearchSpec, WorkloadSpec

# What "not stated" means, where SGLang says so; only used to tell a default from a choice.
_DEFAULTS: dict[str, Any] = {
    "collectives.custom_all_reduce": True,
    **dict.fromkeys(
        ("collectives." + name for name in (
            "mscclpp", "torch_symm_mem", "symm_mem", "pcie_ipc", "quant_communications", "nccl_p2p_disable",
            "nccl_shm_disable",
        )), False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Space:
    """One engine's space: `dims` in the order in which they are chosen, `fixed` the same in every trial."""

    engine: EngineName
    model: str
    tensor_parallel_size: int
    workload: WorkloadSpec
    load: LoadSpec
    objective: ObjectiveSpec
    limits: Limits
    search: SearchSpec
    dims: tuple[Dimension, ...]
    fixed: Point
    draft_models: dict[str, str]
    stated_seeds: tuple[Point, ...] = ()
    dropped: tuple[str, ...] = ()  # settings that the engine lacks, with the reason
    release: str | None = None
    architecture: str | None = None
    topology: Topology | None = None  # assumed for dry runs elsewhere
    waived: tuple[str, ...] = ()  # rules that the file waives
    places: dict[str, tuple[str, int | None]] = field(default_factory=dict)  # file and line, or flag, of each model

    def suggest(self, trial: Any) -> Point:
        """Choose a point with an Optuna-like trial; dimensions that do not exist there are not asked for."""
        params: Point = {}
        for dimension in self.dims:
            if dimension.active({**self.fixed, **params}):
                params[dimension.name] = dimension.suggest(trial)
        return params

    def config(self, params: Mapping[str, Any]) -> EngineConfig:
        """The configuration of a point; what it does not state is left to the engine."""
        values = {**self.fixed, **params}
        algorithm = values.pop(ALGORITHM, "none")
        groups: dict[str, Point] = {f"speculation.{algorithm}": {}, "collectives": {}, "env": {}}
        if algorithm in self.draft_models:
            groups[f"speculation.{algorithm}"]["draft_model"] = self.draft_models[algorithm]
        top: Point = {}
        for name, value in values.items():
            group, _, rest = name.rpartition(".")
            (groups.setdefault(group, {}) if group else top)[rest] = value
        return EngineConfig.model_validate(
            {
                "engine": self.engine,
                "model": self.model,
                "tensor_parallel_size": self.tensor_parallel_size,
                "speculation": {"algorithm": algorithm, **groups[f"speculation.{algorithm}"]},
                "collectives": groups["collectives"],
                "env": tuple(sorted((n, v) for n, v in groups["env"].items() if v is not None)),
                **{name: value for name, value in top.items() if value is not None},
            }
        )

    def baseline_params(self) -> Point:
        """No speculation and every setting at its default; a setting whose default is no choice is left out."""
        return self._with_defaults({ALGORITHM: "none"} if self.algorithms else {})

    def baseline(self) -> EngineConfig:
        """The configuration that every other one is compared with."""
        return self.config(self.baseline_params())

    def seeds(self) -> tuple[Point, ...]:
        """Points to try first: the file's own, then each algorithm as the engine sets it up by default.

        The latter leave out dimensions for which "not stated" is no choice; `contains` tells.
        """
        found = list(self.stated_seeds)
        if self.search.sglang_defaults:
            found += [self._with_defaults({ALGORITHM: name}) for name in self.algorithms if name != "none"]
        return tuple(seed for index, seed in enumerate(found) if seed not in found[:index])

    def grid(self) -> Iterator[Point]:
        """Every point, in the order of `dims`; InputError where a dimension cannot be listed."""
        return self._points({}, self.dims)

    def size(self) -> int | None:
        """How many points `grid` yields, without listing them; None where they cannot be counted."""
        if any(dimension.values() is None for dimension in self.dims):
            return None
        deciding = {name for dimension in self.dims for name, _ in dimension.when}
        free = [dimension for dimension in self.dims if dimension.name not in deciding]
        decisions = self._points({}, tuple(d for d in self.dims if d.name in deciding))
        return sum(
            math.prod(len(d.values() or ()) for d in free if d.active({**self.fixed, **point})) for point in decisions
        )

    def contains(self, params: Mapping[str, Any]) -> str | None:
        """Why `params` is no point of this space, or None when it is one."""
        by_name = {dimension.name: dimension for dimension in self.dims}
        for name in params:
            if name not in by_name:
                return f"{name} is no dimension of this space"
        for name, dimension in by_name.items():
            reason = self._misfit(dimension, params)
            if reason:
                return f"{name} {reason}"
        return None

    def check(
        self, config: EngineConfig, release: str | None = None, topology: Topology | None = None
    ) -> tuple[rules.Violation, ...]:
        """Rules that the configuration breaks, less those that the file waives."""
        return self.examine(config, release, topology).violations

    def canonical(
        self, config: EngineConfig, release: str | None = None, topology: Topology | None = None
    ) -> rules.Canonical:
        """What the engine would make of the configuration."""
        return self.examine(config, release, topology).canonical

    def examine(
        self, config: EngineConfig, release: str | None = None, topology: Topology | None = None
    ) -> rules.Examined:
        """All that the rules say of the configuration, less the rules that the file waives."""
        found = rules.examine(config, release or self.release, topology or Topology(), self.architecture)
        kept = tuple(violation for violation in found.violations if violation.rule not in self.waived)
        return found._replace(violations=kept)

    def check_paths(self) -> None:
        """Raise InputError for local folders and files that are not there, or drafts that do not fit."""
        self._check_folder("model", self.model)
        for algorithm, draft in self.draft_models.items():
            key = f"draft_models.{algorithm}"
            self._check_folder(key, draft)
            reason = checkpoints.check_draft_model(self.model, draft, algorithm)
            if reason:
                raise self._error(key, reason, "a draft made for this model")

    def _check_folder(self, key: str, model: str) -> None:
        if not checkpoints.is_missing(model):
            return
        raise self._error(
            key, f"no model folder {model}", "a folder with config.json, or a hub id", checkpoints.similar(model)
        )

    def _error(self, key: str, problem: str, expected: str, near: str | None = None) -> InputError:
        source, line = self.places.get(key, (None, None))
        return InputError(
            problem, source=source, line=line, key=f"{self.engine}.{key}", expected=expected, nearest=near
        )

    def complete(self, partial: Mapping[str, Any]) -> Point:
        """A full point: what `partial` leaves out takes its default, or else its first value."""
        params: Point = {}
        for dimension in self.dims:
            if dimension.name in partial:
                params[dimension.name] = partial[dimension.name]
            elif dimension.active({**self.fixed, **params}):
                found = self._default(dimension)
                params[dimension.name] = found[0] if found else (dimension.values() or (dimension.low,))[0]
        return {**params, **{name: value for name, value in partial.items() if name not in params}}

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The speculation algorithms that the space holds."""
        found = next((d.choices for d in self.dims if d.name == ALGORITHM), ())
        return tuple(str(name) for name in found)

    def _with_defaults(self, start: Point) -> Point:
        params = dict(start)
        for dimension in self.dims:
            default = self._default(dimension)
            if default and dimension.name not in params and dimension.active({**self.fixed, **params}):
                params[dimension.name] = default[0]
        return params

    def _default(self, dimension: Dimension) -> tuple[Any, ...]:
        """The one value that means the engine's default, or nothing."""
        if dimension.name == ALGORITHM:
            return ("none",) if dimension.holds("none") else ()
        return next(((v,) for v in (None, _DEFAULTS.get(dimension.name)) if dimension.holds(v)), ())

    def _misfit(self, dimension: Dimension, params: Mapping[str, Any]) -> str | None:
        if not dimension.active({**self.fixed, **params}):
            wanted = " and ".join(f"{name} in {list(values)}" for name, values in dimension.when)
            return f"exists only with {wanted}" if dimension.name in params else None
        if dimension.name not in params:
            return "is not stated"
        if not dimension.holds(params[dimension.name]):
            return f"is {params[dimension.name]!r}, not {dimension.words()}"
        return None

    def _points(self, chosen: Point, dims: tuple[Dimension, ...]) -> Iterator[Point]:
        if not dims:
            yield chosen
            return
        first, rest = dims[0], dims[1:]
        if not first.active({**self.fixed, **chosen}):
            yield from self._points(chosen, rest)
            return
        values = first.values()
        if values is None:
            raise InputError("a range of real numbers cannot be listed", key=first.name, expected="a `step`")
        for value in values:
            yield from self._points({**chosen, first.name: value}, rest)

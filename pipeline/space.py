"""A space file: read, checked as a whole, and split by engine. See docs/space-file.md.

`load_space` checks both engines' parts at once, so that a mistake costs a second and not a launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline import checkpoints, rules
from pipeline.config import EngineName
from pipeline.dimensions import (
    ALGORITHM,
    Dimension,
    Point,
    flatten,
    in_order,
    read_condition,
    read_dimension,
    stated_value,
)
from pipeline.engine_space import Space
from pipeline.errors import InputError, nearest
from pipeline.records import Topology
from pipeline.space_file import Overrides, Section, SpaceFile
from pipeline.spec import LoadSpec, ObjectiveSpec, SearchSpec
from pipeline.workload import located
from pipeline.yamlfile import Document, Key, dotted, load

__all__ = ["EngineChoice", "Overrides", "Space", "SpaceSpec", "choose_engine", "load_space"]

# What the embedded engine can do; the rest of a space is dropped for it, and named.
_EMBEDDED_SETTINGS = {
    ALGORITHM,
    "speculation.NGRAM.num_draft_tokens",
    "speculation.NGRAM.max_trie_depth",
    "speculation.STANDALONE.num_steps",
    "speculation.STANDALONE.draft_model",
    "dtype",
    "context_length",
    "max_running_requests",
}
_EMBEDDED_ALGORITHMS = {"none", "NGRAM", "STANDALONE"}
_NEED_DRAFT = ("EAGLE3", "STANDALONE", "DFLASH")
_CAN_DRAFT = (*_NEED_DRAFT, "EAGLE", "NEXTN")


@dataclass(frozen=True)
class SpaceSpec:
    """A checked space file with the command line's overrides."""

    study: str
    engine: str  # auto, sglang or embedded, after overrides
    allow_lossy: bool
    path: Path
    overrides: Overrides
    document: Document
    file: SpaceFile

    @property
    def need_gpus(self) -> int:
        """GPUs that one SGLang trial takes."""
        stated = self.file.sglang.tensor_parallel_size if self.file.sglang else 1
        return self.overrides.tensor_parallel_size or stated

    def for_engine(self, name: str) -> Space:
        """The part of one engine; InputError where the file or the command line lacks something for it."""
        section = self._section(name)
        space = _Builder(self.document, self.file, section, name, self.overrides).build()
        if not space.model:
            raise self.document.error((name, "model"), "missing model", expected="this key, or --model")
        for algorithm in space.algorithms:
            stated = algorithm in space.draft_models or any(
                d.name.endswith(f"{algorithm}.draft_model") for d in space.dims
            )
            if algorithm in _NEED_DRAFT and not stated:
                raise self.document.error(
                    (name, "draft_models", algorithm), f"{algorithm} needs a draft model",
                    expected=f"this key, or --draft-model {algorithm}=MODEL",
                )  # fmt: skip
        return space

    def _section(self, name: str) -> Section:
        section: Section | None = getattr(self.file, name)
        if section is None:
            others = [other for other in ("sglang", "embedded") if getattr(self.file, other)]
            raise self.document.error((), f"no `{name}` part in this file", expected=f"--engine {others[0]}")
        return section


def load_space(path: Path | str, overrides: Overrides | None = None) -> SpaceSpec:
    """Read and check a space file; every mistake is an InputError with file, line and key."""
    overrides = overrides or Overrides()
    document = load(path)
    file = document.parse(SpaceFile, document.data)
    if file.sglang is None and file.embedded is None:
        raise document.error((), "no engine in this file", expected="a part `sglang` or `embedded`")
    for name, section in (("sglang", file.sglang), ("embedded", file.embedded)):
        if section is not None:
            _Builder(document, file, section, name, Overrides()).build()
    engine = overrides.engine or file.engine
    return SpaceSpec(file.study, engine, file.allow_lossy, Path(path), overrides, document, file)


@dataclass
class _Builder:
    """Turns one section into a `Space`."""

    document: Document
    file: SpaceFile
    section: Section
    engine: Any
    overrides: Overrides

    def build(self) -> Space:
        self.dropped: list[str] = []
        self.lost: tuple[str, ...] = ()
        key, stated = self._stated_space()
        algorithms = self._algorithms(stated, key)
        fixed = self._fixed()
        dims = self._dimensions(flatten(self.document, stated, key), algorithms, fixed, key)
        self._refuse_lossy(fixed, dims)
        space = Space(
            engine=self.engine,
            model=checkpoints.located(self.overrides.model or self.section.model or ""),
            tensor_parallel_size=self._tensor_parallel_size(),
            dims=dims,
            fixed={name: value for name, (value, _) in fixed.items()},
            draft_models={n: checkpoints.located(model) for n, model in self._draft_models(algorithms).items()},
            dropped=tuple(self.dropped),
            release=self.section.release,
            architecture=self._architecture(),
            topology=self.section.topology,
            waived=self._waived(),
            places=self._places(algorithms),
            **self._common(),
        )
        self._check_baseline(space)
        return replace(space, stated_seeds=self._seeds(space))

    def _check_baseline(self, space: Space) -> None:
        """What is fixed is in every trial: a rule that it breaks would leave nothing to launch."""
        for violation in space.check(space.baseline()):
            raise self.document.error((self.engine, "fixed"), f"no trial could start: {violation.text()}")

    def _stated_space(self) -> tuple[Key, Any]:
        """The section's own space; the embedded engine may borrow SGLang's."""
        if self.section.space is None and self.engine == "embedded" and self.file.sglang:
            return ("sglang", "space"), self.file.sglang.space or {}
        return (self.engine, "space"), self.section.space or {}

    def _lacks(self, name: str) -> str | None:
        if name != ALGORITHM and name.startswith("speculation.") and name.split(".")[1] in self.lost:
            return "its algorithm is dropped"
        if self.engine == "sglang":
            return None
        return None if name in _EMBEDDED_SETTINGS else "the embedded engine has no such setting"

    def _fixed(self) -> dict[str, tuple[Any, Key]]:
        found = {}
        for name, key in flatten(self.document, self.section.fixed, (self.engine, "fixed")).items():
            reason = self._lacks(name)
            if reason:
                self._drop(name, reason)
            else:
                found[name] = (stated_value(self.document, name, key), key)
        return found

    def _algorithms(self, stated: Any, key: Key) -> tuple[str, ...]:
        branches = stated.get("speculation", {"none": None})
        if not branches:
            raise self.document.error((*key, "speculation"), "an empty choice", expected="at least one algorithm")
        if not isinstance(branches, dict):
            return ()  # `flatten` says what is wrong
        reasons = {name: self._lacks_algorithm(name) for name in branches}
        self.lost = tuple(name for name, reason in reasons.items() if reason)
        self.dropped += [f"speculation.{name}: {reason}" for name, reason in reasons.items() if reason]
        return tuple(name for name, reason in reasons.items() if not reason) or ("none",)

    def _lacks_algorithm(self, name: str) -> str | None:
        if self.engine == "embedded" and name not in _EMBEDDED_ALGORITHMS:
            return f"the embedded engine has no {name}"
        given = {text.rpartition("=")[0] for text in self.overrides.drafts}
        other_model = self.overrides.model not in (None, self.section.model)
        foreign = other_model and name in self.section.draft_models and not given & {name, ""}
        return f"its draft was made for {self.section.model}; give --draft-model {name}=MODEL" if foreign else None

    def _dimensions(
        self, keys: dict[str, Key], algorithms: tuple[str, ...], fixed: dict[str, tuple[Any, Key]], space_key: Key
    ) -> tuple[Dimension, ...]:
        stated = [Dimension(ALGORITHM, "choices", algorithms, key=(*space_key, "speculation"))]
        for name, key in keys.items():
            if name in fixed:
                raise self.document.error(key, f"also fixed on line {self.document.line(fixed[name][1])}")
            stated.append(read_dimension(self.document, name, key))
        known = {dimension.name: dimension for dimension in stated}
        constants = {name: value for name, (value, _) in fixed.items()}
        conditioned = [self._conditioned(dimension, known, constants) for dimension in stated]
        return self._without_lacking(in_order(self.document, conditioned))

    def _conditioned(self, dimension: Dimension, known: dict[str, Dimension], fixed: Point) -> Dimension:
        if dimension.name == ALGORITHM:
            return dimension
        when = read_condition(self.document, dimension.key, known, fixed)
        group, _, rest = dimension.name.partition(".")
        if group == "speculation":
            when = ((ALGORITHM, (rest.partition(".")[0],)), *when)
        return replace(dimension, when=when)

    def _without_lacking(self, dims: tuple[Dimension, ...]) -> tuple[Dimension, ...]:
        kept: list[Dimension] = []
        gone: set[str] = set()
        for dimension in dims:
            needs = next((name for name, _ in dimension.when if name in gone), None)
            reason = self._lacks(dimension.name) or (f"it exists only with {needs}" if needs else None)
            if not reason:
                kept.append(dimension)
                continue
            gone.add(dimension.name)
            self._drop(dimension.name, reason)
        return tuple(kept)

    def _drop(self, name: str, reason: str) -> None:
        """Name what is dropped; a whole algorithm is named once."""
        if not any(name.startswith(entry.partition(":")[0] + ".") for entry in self.dropped):
            self.dropped.append(f"{name}: {reason}")

    def _refuse_lossy(self, fixed: dict[str, tuple[Any, Key]], dims: tuple[Dimension, ...]) -> None:
        if self.file.allow_lossy:
            return
        stated = [(name, value, key) for name, (value, key) in fixed.items()]
        stated += [(d.name, value, d.key) for d in dims for value in (*d.choices, d.low if not d.choices else None)]
        for name, value, key in stated:
            reason = rules.lossy(name, value)
            if reason:
                raise self.document.error(
                    key,
                    f"{value!r} changes the model's output: {reason}",
                    expected="`allow_lossy: true`, or without it",
                )

    def _draft_models(self, algorithms: tuple[str, ...]) -> dict[str, str]:
        for name in self.section.draft_models:
            if name not in _CAN_DRAFT:
                raise self.document.unknown((self.engine, "draft_models", name), list(_CAN_DRAFT))
        found = dict(self.section.draft_models)
        drafting = [name for name in algorithms if name in _CAN_DRAFT]
        for text in self.overrides.drafts:
            algorithm, _, model = text.rpartition("=")
            if algorithm and algorithm not in _CAN_DRAFT:
                raise InputError(
                    f"{algorithm} takes no draft model", key="--draft-model",
                    expected=f"one of {', '.join(_CAN_DRAFT)}", nearest=nearest(algorithm, _CAN_DRAFT),
                )  # fmt: skip
            found[algorithm or _only(drafting, text)] = model
        return found

    def _places(self, algorithms: tuple[str, ...]) -> dict[str, tuple[str, int | None]]:
        """Where each model is stated: file and line, or the flag."""
        keys: list[Key] = [("model",), *(("draft_models", name) for name in self.section.draft_models)]
        found: dict[str, tuple[str, int | None]] = {
            dotted(key): (self.document.source, self.document.line((self.engine, *key))) for key in keys
        }
        if self.overrides.model:
            found["model"] = ("--model", None)
        given = {text.rpartition("=")[0] for text in self.overrides.drafts}
        drafting = [name for name in _CAN_DRAFT if name in given or ("" in given and name in algorithms)]
        return found | {f"draft_models.{name}": ("--draft-model", None) for name in drafting}

    def _tensor_parallel_size(self) -> int:
        if self.engine == "embedded":
            return 1
        return self.overrides.tensor_parallel_size or self.section.tensor_parallel_size

    def _architecture(self) -> str | None:
        """The class of the model that is really used, as far as it can be told without the network."""
        stated = None if self.overrides.model else self.section.architecture
        return stated or checkpoints.architecture(self.overrides.model or self.section.model or "")

    def _waived(self) -> tuple[str, ...]:
        for index, name in enumerate(self.section.rules.allow):
            if name not in rules.NAMES:
                key: Key = (self.engine, "rules", "allow", index)
                raise self.document.error(key, f"no rule {name!r}", nearest=nearest(name, rules.NAMES))
        return self.section.rules.allow

    def _common(self) -> dict[str, Any]:
        found = {
            name: getattr(self.section, name) or getattr(self.file, name)
            for name in ("workload", "load", "objective", "limits", "search")
        }
        prompts = {name: located(source) for name, source in found["workload"].prompts.items()}
        found["workload"] = found["workload"].model_copy(update={"prompts": prompts})
        if found["load"].trace is not None:
            found["load"] = found["load"].model_copy(update={"trace": located(found["load"].trace)})
        if self.overrides.concurrency:
            found["load"] = found["load"].model_copy(update={"concurrency": self.overrides.concurrency})
        found["search"] = self._search(found["search"])
        self._check_goals(found["objective"], found["load"], tuple(found["workload"].prompts))
        return found

    def _check_goals(self, objective: ObjectiveSpec, load: LoadSpec, workloads: tuple[str, ...]) -> None:
        """A goal over load levels that are not measured would have no value in any trial."""
        key: Key = (*((self.engine,) if self.section.objective else ()), "objective", "goals")
        names = [*workloads, *(level.key for level in load.levels(workloads))]
        for index, goal in enumerate(objective.goals):
            if goal.concurrency is not None and goal.concurrency not in load.concurrency:
                raise self.document.error(
                    (*key, index, "concurrency"), f"no load level has concurrency {goal.concurrency}",
                    expected="one of " + ", ".join(map(str, load.concurrency)),
                )  # fmt: skip
            for name in goal.weights:
                if name not in names:
                    raise self.document.unknown((*key, index, "weights", name), names)

    def _search(self, stated: SearchSpec) -> SearchSpec:
        given = self.overrides
        budget = {"trials": given.trials, "hours": given.hours}
        update: dict[str, Any] = {"seed": given.seed, "sampler": given.sampler}
        update = {name: value for name, value in update.items() if value is not None}
        update["budget"] = stated.budget.model_copy(update={n: v for n, v in budget.items() if v is not None})
        return stated.model_copy(update=update)

    def _seeds(self, space: Space) -> tuple[Point, ...]:
        kept = [(index, seed) for index, seed in enumerate(self.section.seeds) if seed.get(ALGORITHM) not in self.lost]
        return tuple(self._seed(space, seed, index) for index, seed in kept)

    def _seed(self, space: Space, stated: Point, index: int) -> Point:
        key: Key = (self.engine, "seeds", index)
        names = [dimension.name for dimension in space.dims]
        for name in stated:
            if name not in names:
                raise self.document.unknown((*key, name), names)
        seed = space.complete({name: stated_value(self.document, name, (*key, name)) for name in stated})
        reason = space.contains(seed)
        if reason:
            name = reason.split()[0]
            raise self.document.error((*key, name), f"outside of the space: {reason}")
        return seed


def _only(drafting: list[str], model: str) -> str:
    if len(drafting) == 1:
        return drafting[0]
    problem = "several algorithms draft" if drafting else "no algorithm of this space drafts"
    expected = ", ".join(f"{name}={model}" for name in drafting) or None
    raise InputError(problem, key="--draft-model", expected=expected)


@dataclass(frozen=True)
class EngineChoice:
    """The engine of a study, and why."""

    engine: EngineName
    reason: str


def choose_engine(requested: str, topology: Topology, sglang_installed: str | None, need_gpus: int) -> EngineChoice:
    """Choose the engine; never a silent step down from what the space asks for.

    Args:
        requested: `auto`, `sglang` or `embedded`.
        topology: the machine.
        sglang_installed: the release found here, or None.
        need_gpus: tensor-parallel size of the SGLang part.
    """
    have = topology.gpu_count
    if requested == "embedded":
        return EngineChoice("embedded", "asked for")
    if have == 0 and requested == "auto":
        return EngineChoice("embedded", "no GPU on this machine")
    if have == 0:
        raise InputError(
            "SGLang was asked for, but there is no GPU on this machine", key="--engine",
            expected=f"a machine with {need_gpus} GPUs, or --engine embedded",
        )  # fmt: skip
    model = topology.gpu_model or "GPU"
    if sglang_installed is None:
        raise InputError(
            f"{have} x {model} here, but the SGLang package is not installed", key="--engine",
            expected="pip install '.[sglang]', or --engine embedded",
        )  # fmt: skip
    if need_gpus > have:
        raise InputError(
            f"the space needs {need_gpus} GPUs, this machine has {have}", key="tensor_parallel_size",
            expected=f"--tensor-parallel-size {have} (and --model, if the model does not fit), or --engine embedded",
        )  # fmt: skip
    return EngineChoice("sglang", f"{have} x {model}, SGLang {sglang_installed}")

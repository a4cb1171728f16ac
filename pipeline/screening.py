"""Which collective settings are worth a launch: a model's messages, each setting's times, and the screen. Pure.

A decode step of a tensor-parallel transformer sends two all-reduces a layer, one for the embedding, and one
all-gather of the logits. Only settings whose decode messages NCCL carries are timed without the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median, quantiles
from typing import Any, Literal

from pydantic import Field

from pipeline.ablation import settings_of
from pipeline.anatomy import step_ms
from pipeline.config import Collectives, EngineConfig, Frozen
from pipeline.engine_space import Space
from pipeline.errors import InputError
from pipeline.records import LevelResult, Topology, TrialRecord

RULE = "screened-collective"
NOISE = 0.05  # of a step; the drift of the unchanged setting over the run replaces it where that is larger
BYTES = 2  # bf16
GATHERS = 8  # all-gathers in one graph: one alone would mostly time the launch of the graph
_MOST_SIZES = 8
_STREAMS = (8, 1)  # where the space states no concurrency
_LEAST_PAIRS = 4  # a rank correlation of fewer says nothing
_OTHER_KERNELS = ("custom_all_reduce", "mscclpp", "torch_symm_mem", "symm_mem", "pcie_ipc", "quant_communications")


class Shape(Frozen):
    """What of a model decides its messages."""

    hidden_size: int
    layers: int
    vocab_size: int

    @property
    def all_reduces(self) -> int:
        """All-reduces of one step."""
        return 2 * self.layers + 1


class Message(Frozen):
    """What one step sends for `tokens` tokens, in bytes; the all-gather's are one rank's share."""

    tokens: int
    all_reduce_bytes: int
    all_gather_bytes: int


class Times(Frozen):
    """One setting at one size: medians, and the middle half's width as a share of the median step."""

    tokens: int
    all_reduce_us: float
    all_gather_us: float
    step_ms: float
    spread: float


Outcome = Literal["ok", "failed", "hung", "not measured"]


class Result(Frozen):
    """One setting: its times, or why there are none."""

    name: str
    key: str
    changes: dict[str, Any] = Field(default_factory=dict)
    outcome: Outcome
    phase: str | None = None
    cause: str | None = None
    contains: str | None = None  # not tried: it makes all changes of this one, which failed or hung
    times: tuple[Times, ...] = ()
    log_tail: tuple[str, ...] = ()


class Dropped(Frozen):
    """A setting that leaves the space; reads like a broken rule (`pipeline.rules.Violation`)."""

    name: str
    key: str
    reason: str

    def text(self) -> str:
        """One line for tables and records."""
        return f"{RULE}: {self.name}: {self.reason}"


class Screening(Frozen):
    """A whole run of the benchmark."""

    model: str
    ranks: int
    shape: Shape
    messages: tuple[Message, ...]
    noise: float
    drift: float | None = None
    results: tuple[Result, ...]
    dropped: tuple[Dropped, ...] = ()
    left_out: dict[str, str] = Field(default_factory=dict)
    seconds: float
    stages_s: dict[str, float] = Field(default_factory=dict)  # seconds waited for each stage, over all waves
    versions: dict[str, str] = Field(default_factory=dict)
    topology: Topology = Topology()
    spearman: float | None = None
    pairs: int | None = None

    def refuses(self, config: EngineConfig) -> tuple[Dropped, ...]:
        """Why the setting of a configuration (as the engine would make it) was screened out; empty when it was not."""
        key = setting_key(config)
        return tuple(dropped for dropped in self.dropped if dropped.key == key)


@dataclass(frozen=True)
class Setting:
    """One way in which the ranks could talk, as a configuration without speculation."""

    name: str
    key: str
    changes: dict[str, Any]  # against the baseline, under flat names; empty for the baseline's own
    config: EngineConfig


def setting_key(config: EngineConfig) -> str:
    """The part of a configuration that decides how its ranks talk, as text."""
    return json.dumps([config.collectives.model_dump(mode="json", exclude_none=True), sorted(config.env)])


def shape_of(config: Mapping[str, Any], source: str) -> Shape:
    """Read a model's config.json; a multimodal model's language part counts.

    Raises:
        InputError: a size is missing.
    """
    text = config.get("text_config") or config
    names = {"hidden_size": "hidden_size", "layers": "num_hidden_layers", "vocab_size": "vocab_size"}
    for name in names.values():
        if not isinstance(text.get(name), int):
            raise InputError(f"no {name}", source=source, expected="the config.json of a transformer")
    return Shape(**{field: text[name] for field, name in names.items()})


def messages(shape: Shape, ranks: int, tokens: Iterable[int]) -> tuple[Message, ...]:
    """The messages of steps over `tokens` tokens, smallest first; of many sizes, some evenly chosen."""
    sizes = sorted(set(tokens))
    if len(sizes) > _MOST_SIZES:
        stride = (len(sizes) - 1) / (_MOST_SIZES - 1)
        sizes = [sizes[round(index * stride)] for index in range(_MOST_SIZES)]
    share = -(-shape.vocab_size // ranks)
    return tuple(
        Message(tokens=n, all_reduce_bytes=n * shape.hidden_size * BYTES, all_gather_bytes=n * share * BYTES)
        for n in sizes
    )


def token_counts(space: Space) -> set[int]:
    """Tokens of one step at the space's load levels: streams at once times the tokens checked for each."""
    most = space.baseline().max_running_requests
    streams = {min(count, most) for count in space.load.concurrency or _STREAMS}
    return {count * tokens for count in streams for tokens in _checked_tokens(space)}


def _checked_tokens(space: Space) -> set[int]:
    """Tokens that a step may check for one stream; 1 is plain decoding, which the baseline always does."""
    stated = {dimension.name: dimension.values() or () for dimension in space.dims}
    stated |= {name: (value,) for name, value in space.fixed.items()}
    found = {1}
    for name, values in stated.items():
        field = name.rpartition(".")[2] if name.startswith("speculation.") else ""
        extra = {"num_draft_tokens": 0, "block_size": 0, "num_steps": 1}.get(field)
        if extra is not None:
            found |= {int(value) + extra for value in values if value is not None}
    return found


def settings(
    space: Space, release: str | None, topology: Topology | None
) -> tuple[tuple[Setting, ...], dict[str, str]]:
    """The space's distinct collective settings that NCCL alone decides, fewest changes first; others with the reason.

    What a rule of the space refuses is in neither.
    """
    alone = replace(space, dims=tuple(d for d in space.dims if d.name.startswith(("collectives.", "env."))))
    base = space.canonical(space.baseline(), release, topology).config
    found: dict[str, Setting] = {}
    left_out: dict[str, str] = {}
    for config in (space.baseline(), *map(alone.config, alone.grid())):
        examined = space.examine(config, release, topology)
        setting = _setting(examined.canonical.config, base)
        if examined.violations or setting.key in found:
            continue
        if reason := _not_nccl(setting.config):
            left_out.setdefault(setting.name, reason)
        else:
            found[setting.key] = setting
    return tuple(sorted(found.values(), key=lambda setting: len(setting.changes))), left_out


def _setting(config: EngineConfig, base: EngineConfig) -> Setting:
    ours, theirs = settings_of(config), settings_of(base)
    names = sorted({*ours, *theirs})
    changes = {
        name: ours.get(name)
        for name in names
        if name.startswith(("collectives.", "env.")) and ours.get(name) != theirs.get(name)
    }
    words = " ".join(f"{name.partition('.')[2]}={value}" for name, value in changes.items())
    return Setting(words or "as the baseline", setting_key(config), changes, config)


def _not_nccl(config: EngineConfig) -> str | None:
    """Why the messages of a setting need the engine to be timed, None where NCCL carries them."""
    asked: Collectives = config.collectives
    kernel = next((name for name in _OTHER_KERNELS if getattr(asked, name)), None)
    if kernel:
        return f"{kernel} is a kernel of the engine, which this benchmark does not start"
    if asked.flashinfer_fusion not in (None, "off"):
        return "fusion replaces all-reduces by a kernel of the engine, which this benchmark does not start"
    if dict(config.env).get("NCCL_NVLS_ENABLE", "0") != "0" or "nvls" in (asked.nccl_algo or "").casefold():
        return "NVLink multicast is never switched on here"
    return None


def summary(message: Message, all_reduces: int, reduce_ms: Sequence[float], gather_ms: Sequence[float]) -> Times:
    """Figures of one size from the times of whole graphs: `all_reduces` all-reduces, and GATHERS all-gathers."""
    steps = [reduce + gather / GATHERS for reduce, gather in zip(reduce_ms, gather_ms, strict=True)]
    quarters = quantiles(steps, n=4) if len(steps) > 1 else [steps[0]] * 3
    return Times(
        tokens=message.tokens,
        all_reduce_us=1e3 * median(reduce_ms) / all_reduces,
        all_gather_us=1e3 * median(gather_ms) / GATHERS,
        step_ms=median(steps),
        spread=(quarters[2] - quarters[0]) / median(steps),
    )


def implied(setting: Setting, results: Iterable[Result]) -> Result | None:
    """A setting that contains all changes of one that failed or hung is not tried: the same would end it."""
    for result in results:
        ended = result.outcome in ("failed", "hung")
        if ended and result.changes and contains(setting, result.changes):
            cause = f"contains {result.name}, which {result.outcome} by itself"
            return untimed(setting, result.outcome, cause=cause, contains=result.name)
    return None


def contains(setting: Setting, changes: Mapping[str, Any]) -> bool:
    """True when the setting makes all these changes."""
    return changes.items() <= setting.changes.items()


def untimed(setting: Setting, outcome: Outcome, **why: Any) -> Result:
    """A setting without times, and why."""
    return Result(name=setting.name, key=setting.key, changes=setting.changes, outcome=outcome, **why)


def drift_of(first: Sequence[Times], again: Sequence[Times]) -> float:
    """The largest change of a step between two measurements of one setting, as a share."""
    return max((abs(b.step_ms / a.step_ms - 1) for a, b in zip(first, again, strict=True)), default=0.0)


def screen(results: Sequence[Result], noise: float = NOISE) -> tuple[Dropped, ...]:
    """Settings that leave the space: failed, hung, or slower than one and the same other setting at every size.

    Slower means beyond `noise` and both spreads. The baseline's own setting stays whatever it shows, and where
    nothing could be measured nothing is dropped: then the benchmark is at fault, not the settings.
    """
    timed = [result for result in results if result.outcome == "ok"]
    if not timed:
        return ()
    found = ((result, _why(result, timed, noise)) for result in results if result.changes)
    return tuple(Dropped(name=result.name, key=result.key, reason=why) for result, why in found if why)


def _why(result: Result, timed: Sequence[Result], noise: float) -> str | None:
    if result.outcome in ("failed", "hung"):
        where = f" in {result.phase}" if result.phase else ""
        return f"{result.outcome}{where}: {result.cause}"
    better = [other for other in timed if result.outcome == "ok" and _dominates(other, result, noise)]
    if not better:
        return None
    best = min(better, key=lambda other: sum(times.step_ms for times in other.times))
    ratios = [mine.step_ms / theirs.step_ms for mine, theirs in zip(result.times, best.times, strict=True)]
    return f"dominated by {best.name}: {min(ratios):.2f} to {max(ratios):.2f} times its step at every size"


def _dominates(other: Result, result: Result, noise: float) -> bool:
    return bool(other.times) and all(
        mine.step_ms > theirs.step_ms * (1 + noise + mine.spread + theirs.spread)
        for mine, theirs in zip(result.times, other.times, strict=True)
    )


def spearman(results: Iterable[Result], records: Iterable[TrialRecord]) -> tuple[float | None, int]:
    """Do measured trials rank the settings alike? Spearman's rho, None where it cannot be told, and its pairs.

    Only trials that differ in nothing but the collective setting are comparable, so both the benchmark's step
    and the trial's enter as their difference from the mean of such a group at one load level.
    """
    by_key = {result.key: result for result in results if result.outcome == "ok"}
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for record in records:
        result = by_key.get(setting_key(record.config))
        if result and record.status == "ok" and record.measurement:
            alike = record.config.model_copy(update={"collectives": Collectives(), "env": ()}).config_id
            for level in record.measurement.levels:
                pair = step_pair(result, record.config, level)
                if pair:
                    groups.setdefault((alike, level.level.key), []).append((pair[0].step_ms, pair[1]))
    pairs = [pair for group in groups.values() if len(group) > 1 for pair in _centred(group)]
    return _rho(pairs), len(pairs)


def step_pair(result: Result, config: EngineConfig, level: LevelResult) -> tuple[Times, float] | None:
    """One step: the benchmark's times at the closest size, and the trial's milliseconds; None without a size."""
    streams, tokens = level.level.concurrency, _tokens_a_stream(config)
    if streams is None or tokens is None:
        return None
    wanted = min(streams, config.max_running_requests) * tokens
    closest = min(result.times, key=lambda times: abs(times.tokens - wanted))
    return closest, step_ms(level.output_tok_per_s.value, streams, level.accept_length or 1.0)


def _tokens_a_stream(config: EngineConfig) -> int | None:
    stated = config.speculation.model_dump(exclude_none=True)
    if stated["algorithm"] == "none":
        return 1
    tokens = stated.get("num_draft_tokens") or stated.get("block_size")
    return tokens or (stated["num_steps"] + 1 if "num_steps" in stated else None)


def _centred(group: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    a, b = mean(pair[0] for pair in group), mean(pair[1] for pair in group)
    return [(x - a, y - b) for x, y in group]


def _rho(pairs: Sequence[tuple[float, float]]) -> float | None:
    if len(pairs) < _LEAST_PAIRS or any(len(set(side)) < 2 for side in zip(*pairs, strict=True)):
        return None
    from scipy.stats import spearmanr

    return float(spearmanr(*zip(*pairs, strict=True)).statistic)

"""One dimension of a space: its name, its values, when it exists. Built from YAML, checked at once.

Names are flat: `attention_backend`, `collectives.nccl_algo`, `speculation.NGRAM.num_draft_tokens`,
`env.NCCL_CGA_CLUSTER_SIZE`. Each name has one set of values for good, as Optuna asks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel

from pipeline.config import (
    Collectives,
    DflashSpeculation,
    DraftModelSpeculation,
    EngineConfig,
    NgramSpeculation,
    NoSpeculation,
)
from pipeline.yamlfile import Document, Key

Choice = bool | int | float | str | None
Point = dict[str, Any]
ALGORITHM = "speculation.algorithm"
BRANCHES: dict[str, type[BaseModel]] = {
    "none": NoSpeculation,
    "NGRAM": NgramSpeculation,
    **dict.fromkeys(("EAGLE", "EAGLE3", "NEXTN", "STANDALONE"), DraftModelSpeculation),
    "DFLASH": DflashSpeculation,
}
_NOT_SETTINGS = {"engine", "model", "tensor_parallel_size", "speculation", "collectives", "env"}
_FIXED_ONLY = {"extra_args", "trust_remote_code"}
_RANGE_KEYS = {"choices", "low", "high", "step", "log", "type", "when"}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_LISTED = 100_000


@dataclass(frozen=True)
class Dimension:
    """Values of one setting: `choices`, or `low`..`high` by `step` (or log). `when` must hold for it to exist."""

    name: str
    kind: Literal["choices", "int", "float"]
    choices: tuple[Choice, ...] = ()
    low: float = 0
    high: float = 0
    step: float | None = None
    log: bool = False
    when: tuple[tuple[str, tuple[Choice, ...]], ...] = ()
    key: Key = ()

    def active(self, values: Mapping[str, Any]) -> bool:
        """True where the dimension exists, given the values (fixed or chosen) of the others."""
        return all(name in values and _same_in(values[name], allowed) for name, allowed in self.when)

    def suggest(self, trial: Any) -> Choice:
        """Ask an Optuna-like trial for a value."""
        value: Choice
        if self.kind == "choices":
            value = trial.suggest_categorical(self.name, list(self.choices))
        elif self.kind == "int":
            step = int(self.step or 1)
            value = trial.suggest_int(self.name, int(self.low), int(self.high), step=step, log=self.log)
        else:
            value = trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.log)
        return value

    def values(self) -> tuple[Choice, ...] | None:
        """Every value, or None where they cannot be listed (a float range without a step)."""
        if self.kind == "choices":
            return self.choices
        if self.kind == "int":
            return tuple(range(int(self.low), int(self.high) + 1, int(self.step or 1)))
        if self.step is None:
            return None
        count = round((self.high - self.low) / self.step) + 1
        return tuple(round(self.low + index * self.step, 12) for index in range(count))

    def holds(self, value: Any) -> bool:
        """True when `value` is one of the dimension's values."""
        if self.kind != "float":
            return _same_in(value, self.values() or ())
        if not isinstance(value, int | float) or isinstance(value, bool) or not self.low <= value <= self.high:
            return False
        steps = 0.0 if self.step is None else (value - self.low) / self.step
        return math.isclose(steps, round(steps), abs_tol=1e-6)

    def words(self) -> str:
        """The values in words, for messages."""
        if self.kind == "choices":
            return "one of " + ", ".join(map(str, self.choices))
        return f"{self.low:g} to {self.high:g}" + (f" by {self.step:g}" if self.step else "")


def _same_in(value: Any, values: Iterable[Any]) -> bool:
    """Membership that keeps 1 and true apart."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)


@cache
def setting_type(name: str) -> Any:
    """The type of a flat setting; KeyError when there is no such setting."""
    group, _, rest = name.partition(".")
    if group == "env" and rest:
        return str | None
    if group == "collectives":
        return _field(Collectives, rest)
    if name == ALGORITHM:
        return Literal[tuple(BRANCHES)]
    if group == "speculation":
        branch, _, field = rest.partition(".")
        return _field(BRANCHES[branch], field, hidden=("algorithm",))
    return _field(EngineConfig, name, hidden=tuple(_NOT_SETTINGS))


def _field(model: type[BaseModel], name: str, hidden: tuple[str, ...] = ()) -> Any:
    if name in hidden:
        raise KeyError(name)
    field = model.model_fields[name]
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def _children(prefix: tuple[str, ...]) -> list[str]:
    """Valid names one level below `prefix`."""
    if prefix == ("speculation",):
        return list(BRANCHES)
    if prefix == ("collectives",):
        return list(Collectives.model_fields)
    if prefix[:1] == ("speculation",):
        return [name for name in BRANCHES[prefix[1]].model_fields if name != "algorithm"]
    return ["speculation", "collectives", "env", *(n for n in EngineConfig.model_fields if n not in _NOT_SETTINGS)]


def flatten(document: Document, nested: Any, key: Key) -> dict[str, Key]:
    """Map each flat setting below `key` to its place in the file; branches without dimensions are skipped."""
    found: dict[str, Key] = {}
    for name in _entries(document, nested, key, ()):
        here = (*key, name)
        if name in ("collectives", "env"):
            found |= {f"{name}.{n}": (*here, n) for n in _entries(document, nested[name], here, (name,))}
        elif name == "speculation":
            for branch in _entries(document, nested[name], here, (name,)):
                names = _entries(document, nested[name][branch], (*here, branch), (name, branch))
                found |= {f"{name}.{branch}.{n}": (*here, branch, n) for n in names}
        else:
            found[name] = here
    return found


def _entries(document: Document, nested: Any, key: Key, prefix: tuple[str, ...]) -> list[str]:
    if nested is None:
        return []
    if not isinstance(nested, dict):
        raise document.error(key, f"{nested!r} does not fit", expected="a mapping")
    valid = None if prefix == ("env",) else _children(prefix)
    for name in nested:
        if valid is not None and name not in valid:
            raise document.unknown((*key, name), valid)
        if valid is None and not _VARIABLE.fullmatch(name):
            raise document.error((*key, name), "no name of a variable", expected="letters, digits and _")
    return list(nested)


def at(data: Any, key: Key) -> Any:
    """The value that stands at `key`."""
    for part in key:
        data = data[part]
    return data


def stated_value(document: Document, name: str, key: Key) -> Any:
    """One value of a setting, as a configuration holds it."""
    return _typed(document, name, at(document.data, key), key)


def read_dimension(document: Document, name: str, key: Key) -> Dimension:
    """A dimension as the file states it: a list, a single value, or a mapping of choices or a range."""
    stated = at(document.data, key)
    if name in _FIXED_ONLY:
        raise document.error(key, "cannot be searched", expected="this key under `fixed`")
    if not isinstance(stated, dict):
        return Dimension(name, "choices", _choices(document, name, stated, key), key=key)
    for part in stated:
        if part not in _RANGE_KEYS:
            raise document.unknown((*key, part), sorted(_RANGE_KEYS))
    if ("choices" in stated) == ("low" in stated or "high" in stated):
        raise document.error(key, "no values, or two kinds", expected="either `choices`, or `low` and `high`")
    if "choices" in stated:
        _refuse_range_words(document, stated, key)
        return Dimension(name, "choices", _choices(document, name, stated["choices"], (*key, "choices")), key=key)
    return _range(document, name, stated, key)


def _refuse_range_words(document: Document, stated: dict[str, Any], key: Key) -> None:
    for part in ("step", "log", "type"):
        if part in stated:
            raise document.error((*key, part), "means nothing beside `choices`", expected="`low` and `high`")


def _choices(document: Document, name: str, stated: Any, key: Key) -> tuple[Choice, ...]:
    if stated is None or stated == []:
        raise document.error(key, "an empty choice", expected="at least one value")
    if not isinstance(stated, list):
        return (_typed(document, name, stated, key),)
    found: list[Choice] = []
    for index, item in enumerate(stated):
        value = _typed(document, name, item, (*key, index))
        if _same_in(value, found):
            raise document.error((*key, index), f"{item!r} is listed twice")
        found.append(value)
    return tuple(found)


def _typed(document: Document, name: str, value: Any, key: Key) -> Any:
    annotation = setting_type(name)
    if isinstance(value, int) and not isinstance(value, bool) and annotation == (str | None):
        value = str(value)  # NCCL_P2P_LEVEL: 5 and the like
    if name == "extra_args" and isinstance(value, list):
        value = [str(word) if isinstance(word, int) and not isinstance(word, bool) else word for word in value]
    return document.value(annotation, value, key)


def _range(document: Document, name: str, stated: dict[str, Any], key: Key) -> Dimension:
    kind = _range_kind(document, name, stated, key)
    number: Any = int if kind == "int" else float
    low, high = (_bound(document, name, stated, key, part, number) for part in ("low", "high"))
    step = document.value(number | None, stated.get("step"), (*key, "step"))
    log = document.value(bool, stated.get("log", False), (*key, "log"))
    if low > high:
        raise document.error((*key, "high"), f"a reversed range, {low:g} to {high:g}", expected=f"high >= {low:g}")
    if step is not None and not 0 < step <= (high - low or step):
        raise document.error((*key, "step"), f"{step:g} does not fit", expected=f"a step above 0, up to {high - low:g}")
    if log and low <= 0:
        raise document.error((*key, "low"), f"log from {low:g}", expected="low > 0 for a log range")
    if log and step is not None:
        raise document.error((*key, "step"), "a log range has no step", expected="either `log: true` or `step`")
    if step is not None:  # Optuna warns about an end that is no step away
        high = low + math.floor((high - low) / step + 1e-9) * step
    dimension = Dimension(name, kind, low=low, high=high, step=step, log=log, key=key)
    if kind == "int" and (high - low) / (step or 1) > _MAX_LISTED:
        raise document.error(key, f"more than {_MAX_LISTED} values", expected="a smaller range, a `step` or `choices`")
    return dimension


def _bound(document: Document, name: str, stated: dict[str, Any], key: Key, part: str, number: Any) -> Any:
    if part not in stated:
        raise document.error((*key, part), "missing", expected="both `low` and `high`")
    value = document.value(number, stated[part], (*key, part))
    log_zero = bool(stated.get("log")) and value <= 0  # has its own, clearer message
    return value if log_zero else _typed(document, name, value, (*key, part))


def _range_kind(document: Document, name: str, stated: dict[str, Any], key: Key) -> Literal["int", "float"]:
    text = str(setting_type(name)).casefold()
    kind: Literal["int", "float"] | None = "int" if "int" in text else "float" if "float" in text else None
    if kind is None:
        raise document.error(key, "a range of something that is no number", expected="a list of choices")
    asked = document.value(Literal["int", "float"], stated.get("type", kind), (*key, "type"))
    if asked != kind:
        raise document.error((*key, "type"), f"{asked} does not fit", expected=f"{kind} for {name}")
    return kind


def read_condition(
    document: Document, key: Key, known: Mapping[str, Dimension], fixed: Mapping[str, Any]
) -> tuple[tuple[str, tuple[Choice, ...]], ...]:
    """The `when` of the dimension at `key`: flat names of other settings -> the values that switch it on."""
    stated = at(document.data, key)
    if not isinstance(stated, dict) or "when" not in stated:
        return ()
    here = (*key, "when")
    if not isinstance(stated["when"], dict) or not stated["when"]:
        raise document.error(here, "does not fit", expected="a mapping such as `collectives.custom_all_reduce: false`")
    return tuple((name, _allowed(document, (*here, name), name, known, fixed)) for name in stated["when"])


def _allowed(
    document: Document, key: Key, name: str, known: Mapping[str, Dimension], fixed: Mapping[str, Any]
) -> tuple[Choice, ...]:
    if name not in known and name not in fixed:
        raise document.unknown(key, [*known, *fixed])
    values = _choices(document, name, at(document.data, key), key)
    if name in known:
        for value in values:
            if not known[name].holds(value):
                raise document.error(key, f"{value!r} never happens", expected=known[name].words())
    return values


def in_order(document: Document, dimensions: list[Dimension]) -> tuple[Dimension, ...]:
    """File order, but every dimension after those that its `when` names; a circle is an error."""
    ordered: list[Dimension] = []
    waiting = list(dimensions)
    names = {dimension.name for dimension in dimensions}
    while waiting:
        placed = {dimension.name for dimension in ordered}
        ready = next((d for d in waiting if all(n in placed or n not in names for n, _ in d.when)), None)
        if ready is None:
            circle = ", ".join(dimension.name for dimension in waiting)
            raise document.error((*waiting[0].key, "when"), f"conditions in a circle: {circle}")
        ordered.append(ready)
        waiting.remove(ready)
    return tuple(ordered)

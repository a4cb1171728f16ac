"""Strict YAML. Every mistake is one `InputError` with file, line, key, what was expected, nearest name.

YAML 1.1 turns `off` into false, `1:30` into 90 and keeps the last of two equal keys without a word.
Here only `true` and `false` are booleans, `on/off/yes/no` must be quoted, keys are unique words,
and everything else that is not plainly a number is text.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from pipeline.errors import InputError, nearest

Key = tuple[str | int, ...]
M = TypeVar("M", bound=BaseModel)

_MAX_BYTES = 100_000  # the parser takes seconds for more
_MAX_NODES = 20_000  # aliases of aliases can make a small file endless
_SHOWN = 80  # characters of a value in an error
_LARGEST, _LONGEST = 2**63 - 1, 300  # of numbers: their value, their characters
_TAGS = {"map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge", "value"}  # what YAML guesses
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
_DEEPEST = 50
_SWITCH_WORDS = {"on", "off", "yes", "no"}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")


def dotted(key: Key) -> str:
    """Return `sglang.seeds[0].model` for `("sglang", "seeds", 0, "model")`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return text.removeprefix(".")


@dataclass(frozen=True)
class Document:
    """A parsed file: plain data, and the line of every key and item."""

    source: str
    data: dict[str, Any]
    lines: dict[Key, int]

    def line(self, key: Key) -> int | None:
        """The 1-based line of `key`, or of the closest mapping around it."""
        while key and key not in self.lines:
            key = key[:-1]
        return self.lines.get(key)

    def error(self, key: Key, problem: str, *, expected: str | None = None, nearest: str | None = None) -> InputError:
        """Return (not raise) an error about `key` of this file."""
        return InputError(
            problem, source=self.source, line=self.line(key), key=dotted(key), expected=expected, nearest=nearest
        )

    def unknown(self, key: Key, valid: Mapping[str, Any] | list[str]) -> InputError:
        """Return an error about an unknown name: the last part of `key` is none of `valid`."""
        names = list(valid)
        expected = "one of " + ", ".join(names) if 0 < len(names) <= 30 else None
        return self.error(key, "unknown key", expected=expected, nearest=nearest(str(key[-1]), names))

    def parse(self, model: type[M], data: Any, key: Key = ()) -> M:
        """Validate `data`, which stands at `key`, as `model`; words, numbers and booleans are not mixed."""
        try:
            return model.model_validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            raise self._translated(error, data, key, model) from None

    def value(self, annotation: Any, data: Any, key: Key) -> Any:
        """Validate one value, which stands at `key`, against a type."""
        try:
            return TypeAdapter(annotation).validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            raise self._translated(error, data, key, None) from None

    def _translated(self, error: ValidationError, data: Any, key: Key, model: type[BaseModel] | None) -> InputError:
        problems = [(key + _real_location(found["loc"], data, found["type"]), found) for found in error.errors()]
        # A misspelt key is often missing too: name the misspelling.
        where, first = min(problems, key=lambda item: (item[1]["type"] == "missing", self.line(item[0]) or 0))
        kind, context = first["type"], first.get("ctx", {})
        if kind == "extra_forbidden":
            return self.unknown(where, _fields_at(model, where[len(key) : -1]))
        if kind == "missing":
            return self.error(where, "missing", expected="a value: this key is required")
        if isinstance(first["input"], bool) and "bool" not in kind:
            return self.error(
                where, f"{_yaml(first['input'])} is a boolean where a word or number is meant",
                expected=_expected(first) + " (a word that YAML would change must be quoted)",
            )  # fmt: skip
        if kind == "value_error":
            return self.error(where, str(context["error"]))
        near = nearest(str(first["input"]), re.findall(r"'([^']*)'", str(context.get("expected", ""))))
        return self.error(where, f"{_yaml(first['input'])} does not fit", expected=_expected(first), nearest=near)


def load(path: Path | str) -> Document:
    """Read a YAML file whose top level is a mapping."""
    source = str(path)
    text = _read(Path(path))
    reader = _Reader(source)
    try:
        data = reader.read(_compose(text, source), ())
    except RecursionError:
        raise InputError("nested too deeply", source=source, expected="a space file") from None
    return Document(source, data, reader.lines)


def _compose(text: str, source: str) -> yaml.MappingNode:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise InputError(f"not YAML: {error.problem or error.context}", source=source, line=line) from None
    except yaml.YAMLError as error:
        raise InputError(f"not YAML: {error}", source=source) from None
    if not isinstance(node, yaml.MappingNode):
        raise InputError("the file holds no mapping", source=source, line=1, expected="`key: value` lines")
    return node


def _read(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # a pipe would block, a device never end
            raise InputError("not a file", source=str(path), expected="a UTF-8 text file")
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise InputError("larger than 100 kB", source=str(path), expected="a space file")
        return data.decode()
    except FileNotFoundError:
        siblings = [entry.name for entry in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        near = nearest(path.name, siblings)
        raise InputError(
            "no such file", source=str(path), nearest=str(path.with_name(near)) if near else None
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", source=str(path), expected="a UTF-8 text file") from None


class _Reader:
    """Turns YAML nodes into plain data and notes lines; PyYAML's own constructor would lose both."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[Key, int] = {}
        self._open: set[int] = set()

    def read(self, node: yaml.Node, key: Key) -> Any:
        self.lines.setdefault(key, node.start_mark.line + 1)
        if id(node) in self._open:
            raise self._error(node, key, "an alias that contains itself")
        if len(key) > _DEEPEST:
            raise self._error(node, key[:3], "nested too deeply")
        if len(self.lines) > _MAX_NODES:
            raise self._error(node, key, f"more than {_MAX_NODES} values")
        if node.tag.removeprefix("tag:yaml.org,2002:") not in _TAGS:
            raise self._error(node, key, f"the tag {node.tag} is not supported")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, key)
        self._open.add(id(node))
        found = self._mapping(node, key) if isinstance(node, yaml.MappingNode) else self._list(node, key)
        self._open.discard(id(node))
        return found

    def _list(self, node: yaml.Node, key: Key) -> list[Any]:
        return [self.read(item, (*key, index)) for index, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name_node, value_node in node.value:
            name = self._name(name_node, key)
            here = (*key, name)
            if name in found:
                raise self._error(name_node, here, f"stated twice, first on line {self.lines[here]}")
            self.lines[here] = name_node.start_mark.line + 1
            found[name] = self.read(value_node, here)
        return found

    def _name(self, node: yaml.Node, key: Key) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._error(node, key, "a key must be one word")
        value = self._scalar(node, (*key, node.value))
        if not isinstance(value, str):
            raise self._error(
                node, (*key, node.value), f"YAML reads this key as {_yaml(value)}, not as a word: quote it"
            )
        return value

    def _scalar(self, node: yaml.ScalarNode, key: Key) -> Any:
        text = node.value
        if _UNUSABLE.search(text):  # an escape in double quotes
            raise self._error(node, key, "a character that no path, argument or variable can hold")
        if node.style is not None:  # quoted or a block: text, whatever it looks like
            return text
        if text.casefold() in _SWITCH_WORDS:
            raise self._error(
                node, key, f"YAML reads {text} as {_yaml(text.casefold() in ('on', 'yes'))}: quote it",
                expected=f'"{text}" for the word, true or false for a switch',
            )  # fmt: skip
        value = _plain(text)
        if isinstance(value, int | float) and not -_LARGEST <= value <= _LARGEST:
            raise self._error(node, key, f"{text} is too large a number")
        return value

    def _error(self, node: yaml.Node, key: Key, problem: str, expected: str | None = None) -> InputError:
        return InputError(
            problem, source=self.source, line=node.start_mark.line + 1, key=dotted(key), expected=expected
        )


def _plain(text: str) -> Any:
    if text.casefold() in ("", "~", "null"):
        return None
    if text.casefold() in ("true", "false"):
        return text.casefold() == "true"
    digits = text.replace("_", "")
    if len(digits) > _LONGEST:
        return text
    if _INT.fullmatch(digits):
        return int(digits)
    return float(digits) if _FLOAT.fullmatch(digits) else text


def _yaml(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"


def _expected(found: Any) -> str:
    said = str(found["msg"]).removeprefix("Input should be ").removeprefix("a valid ")
    return {"an object": "a mapping", "array": "a list"}.get(said, said)


def _real_location(location: Key, data: Any, kind: str) -> Key:
    """Drop pydantic's own parts (names of union members), which are no keys of the file."""
    kept: list[str | int] = []
    for index, part in enumerate(location):
        is_last = index == len(location) - 1
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int):
            data = data[part] if part < len(data) else None
        elif not (is_last and kind == "missing"):
            continue
        kept.append(part)
    return tuple(kept)


def _fields_at(model: Any, location: Key) -> list[str]:
    """Field names of the model that stands at `location` inside `model`."""
    for part in location:
        found = _models_in(model)
        model = next((m.model_fields[part].annotation for m in found if part in m.model_fields), model)
    return [name for found in _models_in(model) for name in found.model_fields]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType, Annotated, tuple, list, dict):
        return [model for member in get_args(annotation) for model in _models_in(member)]
    return []

"""Which flags a release of SGLang takes: its own parser's when it is installed, else a bundled table.

SGLang's parser accepts abbreviations (`--speculative-eagle-top 8`) and refuses names that it renamed;
both would only be seen at launch, minutes later. Here a wrong name, choice or number is an `InputError`
before anything starts, old names are mapped and said, and abbreviations are refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, nearest

TABLES = Path(__file__).with_name("flags")
_READER = Path(__file__).with_name("sglang_parser.py")
NEWEST = "0.5.23"
READ_LIMIT_S = 180.0  # importing SGLang takes half a minute, more on a cold disk


@dataclass(frozen=True, slots=True)
class Flag:
    """One spelling of a flag: how many values it takes, of what kind, and its newer name if it has one."""

    values: int | str  # 0, 1, or argparse's "+", "*", "?"
    kind: str = "text"  # text | int | float
    choices: tuple[str, ...] = ()
    replaced_by: str | None = None  # "--new-name", or "--new-name=value"
    deprecated: bool = False


@dataclass(frozen=True, slots=True)
class FlagTable:
    """The flags and environment variables of a release, and where they were read."""

    release: str
    source: str
    flags: dict[str, Flag]
    variables: frozenset[str]


@dataclass(frozen=True, slots=True)
class Checked:
    """Arguments that the release accepts, with old names mapped, and what was changed in words."""

    args: tuple[str, ...]
    notes: tuple[str, ...] = ()


def installed_release() -> str | None:
    """The installed SGLang's release, None when there is none; SGLang is not imported."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def flags(release: str | None = None) -> FlagTable:
    """Return the flags of `release`; None means the installed one, or the newest bundled one."""
    return _flags(release, installed_release(), str(_cache_dir()))


@lru_cache(maxsize=8)
def _flags(release: str | None, installed: str | None, cache: str) -> FlagTable:
    wanted = release or installed or NEWEST
    if wanted == installed and (own := _own_parser(wanted, Path(cache))):
        return own
    return _bundled(wanted)


def _bundled(release: str) -> FlagTable:
    """The bundled table of `release`, or of the closest older release, or of the oldest."""
    known = sorted((path.stem for path in TABLES.glob("*.json")), key=_order)
    older = [name for name in known if _order(name) <= _order(release)]
    name = older[-1] if older else known[0]
    source = f"bundled table of {name}" + ("" if name == release else f" (none for {release})")
    return _table(release, source, json.loads((TABLES / f"{name}.json").read_text()))


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in release.split(".")[:4])


def _table(release: str, source: str, data: dict[str, Any]) -> FlagTable:
    found = {
        name: Flag(
            values=row["n"],
            kind=row.get("t", "text"),
            choices=tuple(row.get("c", ())),
            replaced_by=row.get("new"),
            deprecated="new" in row or "old" in row,
        )
        for name, row in data["flags"].items()
    }
    return FlagTable(release, source, found, frozenset(data["variables"]))


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastverify"


def _own_parser(release: str, cache: Path) -> FlagTable | None:
    """Read the installed parser once in a child process; None when it cannot be read."""
    # Another version of the reading script reads anew.
    kept = cache / f"sglang-flags-{release}-{zlib.crc32(_READER.read_bytes()):08x}.json"
    if not kept.is_file():
        text = _read_parser()
        if text is None:
            return None
        cache.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_suffix(f".{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(kept)
    return _table(release, "installed parser", json.loads(kept.read_text()))


def _read_parser() -> str | None:
    # `-P` keeps this folder off the child's path: its `sglang.py` would hide the package.
    command = [sys.executable, "-P", str(_READER)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=READ_LIMIT_S, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    line = done.stdout.strip().rpartition("\n")[2]
    return line if line.startswith('{"flags"') else None


def check_args(args: Sequence[str], release: str | None = None) -> Checked:
    """Check arguments against `release` and map old names.

    Raises:
        InputError: an unknown, abbreviated or stray argument, a wrong choice, number or count of values.
    """
    table = flags(release)
    done: list[str] = []
    notes: list[str] = []
    for name, values in _grouped(args):
        current, more = _current_name(name, table, notes)
        values = [*more, *values]
        _check_values(current, values, table)
        done += [current, *values]
    return Checked(tuple(done), tuple(notes))


def _grouped(args: Sequence[str]) -> list[tuple[str, list[str]]]:
    """`--a 1 --b=2 --c` -> [("--a", ["1"]), ("--b", ["2"]), ("--c", [])]."""
    groups: list[tuple[str, list[str]]] = []
    for word in args:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            groups.append((name, [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise InputError(f"{word!r} belongs to no flag", source="SGLang arguments", expected="--name [value …]")
    return groups


def _current_name(name: str, table: FlagTable, notes: list[str]) -> tuple[str, list[str]]:
    """The name to use for `name` in this release, and the values that come with it."""
    flag = table.flags.get(name)
    replacement = flag.replaced_by if flag else _renamed(name)
    if replacement:
        new, _, value = replacement.partition("=")
        if new in table.flags:
            notes.append(f"{name} is an old name: {replacement} is used instead")
            return new, [value] if value else []
    if flag is None:
        raise _unknown(name, table)
    if flag.deprecated:
        notes.append(f"{name} is deprecated in SGLang {table.release}")
    return name, []


def _renamed(name: str) -> str | None:
    """What any bundled release says an old name became; the newest release forgets some."""
    for path in sorted(TABLES.glob("*.json"), key=lambda p: _order(p.stem), reverse=True):
        flag = _bundled(path.stem).flags.get(name)
        if flag and flag.replaced_by:
            return flag.replaced_by
    return None


def _unknown(name: str, table: FlagTable) -> InputError:
    longer = sorted(full for full in table.flags if full.startswith(name))
    if longer:
        problem = f"abbreviations are refused ({', '.join(longer[:3])}{', …' if len(longer) > 3 else ''})"
        return InputError(problem, source="SGLang arguments", key=name, nearest=longer[0])
    problem = f"no such flag in SGLang {table.release} ({table.source})"
    return InputError(problem, source="SGLang arguments", key=name, nearest=nearest(name, table.flags))


def _check_values(name: str, values: list[str], table: FlagTable) -> None:
    flag = table.flags[name]
    wrong_count = {0: bool(values), 1: len(values) != 1, "+": not values, "?": len(values) > 1}.get(flag.values, False)
    if wrong_count:
        expected = {0: "no value", 1: "one value", "?": "at most one value"}.get(flag.values, "one value or more")
        problem = f"has {len(values)} values"
        raise InputError(problem, source="SGLang arguments", key=name, expected=expected)
    for value in values:
        _check_value(name, value, flag)


def _check_value(name: str, value: str, flag: Flag) -> None:
    if flag.choices and value not in flag.choices:
        expected = " | ".join(flag.choices)
        near = nearest(value, flag.choices)
        raise InputError(
            f"{value!r} is not a choice", source="SGLang arguments", key=name, expected=expected, nearest=near
        )
    if flag.kind == "text":
        return
    number = {"int": int, "float": float}[flag.kind]
    try:
        number(value)
    except ValueError as error:
        expected = "an integer" if flag.kind == "int" else "a number"
        raise InputError(f"{value!r} is no number", source="SGLang arguments", key=name, expected=expected) from error

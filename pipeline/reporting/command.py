"""A recorded launch as a command that can be pasted into a shell."""

from __future__ import annotations

import shlex
from pathlib import PurePath

from pipeline.records import Launch

_PORT = "30000"  # SGLang's own default; the trial's port was picked at random
_OURS = {"PYTHONPATH", "PYTHONUNBUFFERED"}  # how the trial's child was run, not what it was


def pasteable(launch: Launch) -> str:
    """Environment and arguments, one flag a line, with the interpreter and the port made neutral."""
    words = list(launch.argv)
    if words and PurePath(words[0]).name.startswith("python"):
        words[0] = "python3"
    words = [_PORT if before == "--port" else word for before, word in zip(["", *words], words, strict=False)]
    lines = [f"{name}={shlex.quote(value)}" for name, value in sorted(launch.env.items()) if name not in _OURS]
    return " \\\n  ".join([*lines, *_grouped(words)])


def _grouped(words: list[str]) -> list[str]:
    """The program on the first line, then each flag with its values on a line of its own."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--") and lines[0]:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return [" ".join(line) for line in lines]

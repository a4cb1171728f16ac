"""Run as a script by the interpreter that has SGLang: prints its flags, choices and variables as JSON.

Nothing of the project is imported here: it runs beside an installed SGLang, in a child process,
because importing SGLang takes half a minute and its own parser is the only true list of its flags.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# What serves language models; the rest of the package is image models, tests and tools.
SERVING = ("srt", "kernels")
_QUOTED = re.compile(r"""["'](SGL(?:ANG)?_[A-Z0-9_]+)["']""")


def flag_row(action: argparse.Action) -> dict[str, Any]:
    """One flag: `n` values, `t` type, `c` choices, `new` its replacement when it is an old name."""
    row: dict[str, Any] = {"n": 1 if action.nargs is None else action.nargs}
    if action.type in (int, float):
        row["t"] = "int" if action.type is int else "float"
    if action.choices:
        row["c"] = [str(choice) for choice in action.choices]
    if new := getattr(action, "new_flag", None):
        constant = getattr(action, "const_value", None)
        row["new"] = new if "=" in new or constant is None or constant is True else f"{new}={constant}"
    elif "deprecated" in (action.help or "").lower()[:12]:
        row["old"] = 1
    return row


def table(parser: argparse.ArgumentParser, variables: list[str]) -> dict[str, Any]:
    """All flags of a parser, by every spelling of their names."""
    flags = {name: flag_row(a) for a in parser._actions for name in a.option_strings if name.startswith("--")}
    return {"flags": dict(sorted(flags.items())), "variables": variables}


def variables(declared: Iterable[str], package: Path) -> list[str]:
    """Environment variables that SGLang declares, and those that its sources read past their declarations."""
    sources = (path.read_text(errors="replace") for part in SERVING for path in (package / part).rglob("*.py"))
    quoted = {name for text in sources for name in _QUOTED.findall(text)}
    return sorted(quoted | {name for name in declared if name.startswith(("SGLANG_", "SGL_"))})


def main() -> None:
    """Print the table of the SGLang that this interpreter imports."""
    import sglang  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt.environ import envs  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found,unused-ignore]

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    package = Path(next(iter(sglang.__path__)))
    json.dump(table(parser, variables(dir(type(envs)), package)), sys.stdout)


if __name__ == "__main__":
    main()

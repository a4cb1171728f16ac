"""What the documentation names is there, and what is there has its place in it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "mlflow" / "README.md", *sorted((ROOT / "docs").glob("*.md")))
COMMAND = re.compile(r"python3? -m ((?:pipeline|serve|benchmarks)[\w.]*)")
FILE = re.compile(r"\b((?:pipeline|serve|benchmarks|tune_spaces|requirements|tests)/[\w/.-]+\.\w+)")


def _names(folders: Iterable[str], pattern: str) -> set[str]:
    return {path.name for folder in folders for path in (ROOT / folder).glob(pattern)}


def test_the_design_has_a_place_for_every_module_and_names_no_other() -> None:
    house = (ROOT / "docs" / "design.md").read_text().split("```")[3]
    named = set(re.findall(r"\b(\w+\.py)\b", house))
    unlisted = _names(("pipeline", "serve", "serve/engines"), "[!_]*.py") - named
    gone = named - _names(("pipeline", "serve", "requirements"), "**/*.py")
    assert not unlisted and not gone, f"without a place: {sorted(unlisted)}; gone: {sorted(gone)}"


def test_commands_and_files_named_in_the_documentation_exist() -> None:
    for page in PAGES:
        text = page.read_text()
        modules = [ROOT / name.replace(".", "/") for name in COMMAND.findall(text)]
        missing = {m.name for m in modules if not m.with_suffix(".py").is_file() and not (m / "__main__.py").is_file()}
        missing |= {name for name in FILE.findall(text) if not (ROOT / name).exists()}
        assert not missing, f"{page.name} names {sorted(missing)}"

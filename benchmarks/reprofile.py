"""Read the stored traces of a GPU run again: where the milliseconds of a decode step went.

    python benchmarks/reprofile.py benchmarks/results/gpu2

A trace `NAME.RANK.trace.json.gz` belongs to that profile of its rank in `*.profiles.json` whose step was as long: it
says the configuration, and how long its step took without the profiler. Writes `reprofiled.json` there. Nothing is
measured here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pipeline.profile import StepProfile, doubts, parse
from pipeline.reporting.model import Report, Verdict
from pipeline.reporting.sections import sections
from pipeline.reporting.text import table
from pipeline.trace import load_trace


def main(folder: Path) -> int:
    """Print the table; return 0, or 1 where the parts do not add up."""
    stored = [StepProfile(**p) for file in sorted(folder.glob("*.profiles.json")) for p in json.loads(file.read_text())]
    found = [again(path, stored) for path in sorted((folder / "traces").glob("*.trace.json.gz"))]
    (folder / "reprofiled.json").write_text(json.dumps([p.model_dump() for p in found], indent=1) + "\n")
    report = Report(title=folder.name, verdict=Verdict(headline="", reason=""), profiles=tuple(found))
    print("\n".join(table(section.table) for section in sections(report) if section.table))
    for profile in found:
        print(f"{profile.label} {profile.rank}: waiting {profile.waiting_ms:.2f} ms under the profiler")
    print("\n".join(doubts(found)))
    return 1 if doubts(found) else 0


def again(path: Path, stored: list[StepProfile]) -> StepProfile:
    """One trace by today's method, with what was stored of its launch."""
    rank = path.name.split(".")[1]
    profile = parse(load_trace(path), rank=rank)
    first = min((p for p in stored if p.rank == rank), key=lambda p: abs(p.step_ms - profile.step_ms))
    return profile.model_copy(update={"label": first.label, "measured_step_ms": first.measured_step_ms})


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

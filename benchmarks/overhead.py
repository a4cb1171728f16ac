"""What a trial costs besides its engine: a real study on the embedded engine, its phases, and what is left.

    python -m benchmarks.overhead [--space tune_spaces/verify.yaml] [--out benchmarks/results/overhead.json]

Launch (deploy and ready), measurement, teardown and the driver's one-off start and end are reported each; what is left
is the trial's wall time in the driver less its phases. Aims: at most 1 s a trial and at most 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pipeline.facts import versions
from pipeline.records import TrialRecord
from pipeline.store import Study

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("deploy", "ready", "measure", "teardown", "rest")
AIM_S, AIM_SHARE = 1.0, 0.05


def run_study(space: Path, runs: Path) -> tuple[list[TrialRecord], float]:
    """Run a study on the embedded engine; return its launched records and the command's seconds in all."""
    argv = [sys.executable, "-m", "pipeline.tune", str(space), "--engine", "embedded", "--runs", str(runs)]
    began = time.monotonic()
    subprocess.run(argv, check=True, cwd=ROOT, timeout=900, stdout=subprocess.DEVNULL)
    total_s = time.monotonic() - began
    records = Study.open("latest", runs).records()
    return [record for record in records if record.status in ("ok", "failed", "stopped")], total_s


def summary(records: list[TrialRecord], total_s: float) -> dict[str, Any]:
    """Means per phase, what is left per trial, and whether the aims hold."""
    walls = [sum(record.phases_s.values()) for record in records]
    rest = [record.phases_s["rest"] for record in records]
    share = sum(rest) / sum(walls)
    return {
        "trials": len(records),
        "mean_s": {name: round(statistics.fmean(r.phases_s.get(name, 0.0) for r in records), 3) for name in PHASES},
        "rest_s": {"mean": round(statistics.fmean(rest), 3), "max": round(max(rest), 3)},
        "rest_share": round(share, 4),
        "driver_once_s": round(total_s - sum(walls), 1),  # trials run one after another here
        "study_s": round(total_s, 1),
        "aims": {"rest ≤ 1 s a trial": statistics.fmean(rest) <= AIM_S, "rest ≤ 5 %": share <= AIM_SHARE},
        "cpus": os.cpu_count(),
        "versions": versions(),
    }


def main() -> None:
    """Run, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "overhead.json")
    parser.add_argument("--space", type=Path, default=ROOT / "tune_spaces" / "verify.yaml")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs:
        result = {"space": args.space.name, **summary(*run_study(args.space, Path(runs)))}
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

"""Everything that is shown on real GPUs, as one resumable script.

    python benchmarks/gpu_suite.py --state DIR --out DIR --seconds 560 [--steps gpu2 gpu2-pcie …]

Each step is a command of the project. A step that has ended well is not run again; a study goes on
where it stopped. The script ends by itself before `--seconds` are over and packs what there is into
`OUT/suite.tar.gz`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SPACES = HERE.parent / "tune_spaces"
TRACE, TRACE_BYTES = ".trace.json.gz", 14 << 20
RESERVE_S = 45.0  # a study's last trial ends, Ray stops, results are packed
LEAST_S = {"study": 110.0, "command": 30.0}


@dataclass(frozen=True)
class Step:
    """One command; `argv` gets the state folder and the seconds it may take."""

    name: str
    kind: str
    argv: Callable[[Path, float], list[str]]


def study(name: str, *extra: str) -> Step:
    """A study of `tune_spaces/NAME.yaml`, begun or resumed."""

    def argv(state: Path, seconds: float) -> list[str]:
        runs = state / "runs"
        resume = ["--resume", name] if (runs / name / "study.json").exists() else []
        return [
            sys.executable, "-m", "pipeline.tune", str(SPACES / f"{name}.yaml"), "--engine", "sglang",
            "--runs", str(runs), "--stop-after", str(int(seconds)), *extra, *resume,
        ]  # fmt: skip

    return Step(name, "study", argv)


def command(name: str, *words: str) -> Step:
    """A command of the project; `{state}` in its words becomes the state folder."""
    return Step(name, "command", lambda state, _: [sys.executable, *(word.format(state=state) for word in words)])


def collectives(name: str) -> Step:
    """The collective settings of `tune_spaces/NAME.yaml`, timed without the engine."""

    def argv(state: Path, seconds: float) -> list[str]:
        return [
            sys.executable, "-m", "pipeline.collectives", str(SPACES / f"{name}.yaml"),
            "--out", str(state / "collectives.json"), "--seconds", str(int(min(55, seconds - 15))),
        ]  # fmt: skip

    return Step("collectives", "command", argv)


STEPS = (
    study("gpu2"),
    study("gpu2-pcie"),
    collectives("gpu2-pcie"),
)  # fmt: skip


def run(step: Step, state: Path, seconds: float) -> int:
    """Run one step for at most `seconds`; its output goes on and into a log."""
    log = state / f"{step.name}.log"
    argv = step.argv(state, seconds - RESERVE_S if step.kind == "study" else seconds)
    print(f"== {step.name}: {' '.join(argv)}", flush=True)
    with log.open("a") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = _end(process)
    print("\n".join(log.read_text().splitlines()[-40:]), flush=True)
    return code


def _end(process: subprocess.Popen[bytes]) -> int:
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return 124


def finished(step: Step, state: Path) -> bool:
    """True when the step has said that it is done."""
    facts = state / "runs" / step.name / "study.json"
    if step.kind == "study":
        return facts.exists() and bool(json.loads(facts.read_text()).get("finished"))
    return (state / f"{step.name}.done").exists()


def main() -> None:
    """Run what is left of the steps, in order, within the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--steps", nargs="*", default=[step.name for step in STEPS])
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    args.state.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    for step in (step for step in STEPS if step.name in args.steps):
        left = deadline - time.monotonic() - 10
        if finished(step, args.state) or left < LEAST_S[step.kind]:
            print(f"== {step.name}: {'done' if finished(step, args.state) else 'no time left'}", flush=True)
            continue
        code = run(step, args.state, left)
        if code == 0 and step.kind == "command":
            (args.state / f"{step.name}.done").touch()
        print(f"== {step.name}: exit {code}, {deadline - time.monotonic():.0f} s left", flush=True)
    pack(args.state, args.out)


def pack(state: Path, out: Path) -> None:
    """Everything but the raw traces in one archive, and of those what fits, one archive a study."""
    with tarfile.open(out / "suite.tar.gz", "w:gz") as archive:
        archive.add(state, arcname="suite", filter=lambda entry: None if entry.name.endswith(TRACE) else entry)
    for run in sorted((state / "runs").glob("*/study.json")):
        left = TRACE_BYTES
        with tarfile.open(out / f"traces-{run.parent.name}.tar", "w") as archive:
            for trace in sorted(run.parent.rglob(f"*{TRACE}"), key=lambda path: path.stat().st_size):
                left -= trace.stat().st_size
                if left > 0:
                    archive.add(trace, arcname=str(trace.relative_to(state)))


if __name__ == "__main__":
    main()

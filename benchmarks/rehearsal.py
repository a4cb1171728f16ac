"""The 8-GPU run without its GPUs: the same commands on a stated machine, with the fake engine in SGLang's place.

    python -m benchmarks.rehearsal [--out benchmarks/results/gpu8/rehearsal]

tune, promote, serve, one chat, stop: each the command that a person types. On the day, with eight real GPUs and SGLang
installed, the same lines are run without `FASTVERIFY_TOPOLOGY` and `FASTVERIFY_SGLANG_COMMAND`. What this cannot show
is anything about speed: the fake engine's times come from a cost model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.fakes.running import serving

ROOT = Path(__file__).resolve().parents[1]
MACHINE = {"gpu_count": 8, "gpu_model": "NVIDIA H200", "sm": 90, "peer_access": False, "link": "pcie"}
TUNE = ("pipeline.tune", "tune_spaces/verify.yaml", "--engine", "sglang", "--concurrency", "8", "--concurrency", "1")


def environment() -> dict[str, str]:
    """The stated machine, and the fake engine as SGLang's command."""
    fake = ROOT / "tests" / "fakes" / "sglang_server.py"
    return os.environ | {
        "FASTVERIFY_TOPOLOGY": json.dumps(MACHINE),
        "FASTVERIFY_SGLANG_COMMAND": f"{sys.executable} {fake}",
        "FAKE_SGLANG_KNOBS": json.dumps({"cost_model": 0.3}),
        "PYTHONPATH": str(ROOT),
    }


def run(*words: str) -> dict[str, Any]:
    """Run one command; its words, exit code, seconds and output."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=1800
    )
    print(f"{' '.join(words)}: exit {done.returncode}, {time.monotonic() - began:.0f} s", flush=True)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
    return {
        "command": f"python -m {' '.join(words)}",
        "exit": done.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "output": done.stdout,
    }


def serve_and_chat(champion: Path) -> dict[str, Any]:
    """Serve the champion, ask it one thing, stop it."""
    with serving(champion, environment()) as url:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
            model = json.load(answer)["data"][0]["id"]
        question = {
            "model": model,
            "messages": [{"role": "user", "content": "Which GPUs are you on?"}],
            "max_tokens": 8,
        }
        body, kind = json.dumps(question).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, kind)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return {"command": "python -m serve", "model": model, "status": answer.status, "answer": json.load(answer)}


def main() -> None:
    """Run the steps, write the transcript, the ledger and the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu8" / "rehearsal")
    parser.add_argument("--trials", type=int, default=8)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        runs = Path(temporary) / "runs"
        where = ("--runs", str(runs))
        steps = [
            run(*TUNE, "--trials", str(args.trials), *where),
            run("pipeline.promote", "verify", "--soak-minutes", "0.2", *where),
            run("pipeline.report", str(runs / "verify"), "--markdown"),
        ]
        steps.append(serve_and_chat(runs / "champion.json"))
        text = json.dumps(steps, indent=1, ensure_ascii=False)
        for path, name in ((temporary, "."), (sys.executable, "python3"), (str(ROOT), ".")):
            text = text.replace(path, name)
        (args.out / "transcript.json").write_text(text + "\n")
        (args.out / "report.md").write_text(json.loads(text)[2]["output"])
        shutil.copy(runs / "champion.yaml", args.out)
    if any(step.get("exit") for step in steps):
        sys.exit(1)


if __name__ == "__main__":
    main()

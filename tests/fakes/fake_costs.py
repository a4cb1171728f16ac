"""A verify-step cost model, so that a search over the fake has a real optimum.

Step time = compute + all-reduces x their cost under the collective settings + drafting; accept
length = 1 + the sum of p^k over the draft depth. Constants are shaped like a PCIe box's, in ms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

ALGO = {"Ring": 1.0, "allreduce:tree": 0.72, "Tree": 0.72}
PROTO = {"LL": 0.9, "LL128": 0.85, "Simple": 1.1}
AGREEMENT = {"NGRAM": 0.45, "EAGLE": 0.66, "EAGLE3": 0.72, "STANDALONE": 0.6, "NEXTN": 0.7, "DFLASH": 0.65}
DRAFT_MS = {"NGRAM": 0.0, "EAGLE": 0.5, "EAGLE3": 0.5, "STANDALONE": 1.4, "NEXTN": 0.7, "DFLASH": 0.9}


@dataclass(frozen=True)
class Costs:
    """Milliseconds per step at one stream, what each further stream adds, and tokens per step."""

    step_ms: float
    per_stream_ms: float
    accept_length: float | None


def _number(flags: Mapping[str, str], name: str, default: int) -> int:
    return int(flags.get(name, default))


def all_reduce_ms(flags: Mapping[str, str], env: Mapping[str, str]) -> float:
    """One all-reduce of a decode step."""
    if _number(flags, "tp-size", 1) == 1:
        return 0.0
    custom = "disable-custom-all-reduce" not in flags and env.get("NCCL_P2P_DISABLE") != "1"
    if custom:
        return 0.05
    channels = int(env.get("NCCL_MAX_NCHANNELS", 8))
    shape = 1.0 + 0.06 * abs(math.log2(channels / 4))
    fused = 0.92 if "flashinfer-allreduce-fusion-backend" in flags else 1.0
    return 0.14 * ALGO.get(env.get("NCCL_ALGO", ""), 0.95) * PROTO.get(env.get("NCCL_PROTO", ""), 1.0) * shape * fused


def costs(flags: Mapping[str, str], env: Mapping[str, str]) -> Costs:
    """Timing of a configuration given as SGLang flags and variables."""
    reduces = 61 * all_reduce_ms(flags, env)
    algorithm = flags.get("speculative-algorithm")
    if algorithm is None:
        return Costs(4.0 + reduces, 0.05, None)
    drafts = _number(flags, "speculative-num-draft-tokens", _number(flags, "speculative-num-steps", 3) + 1)
    depth = _number(flags, "speculative-num-steps", drafts - 1)
    topk = _number(flags, "speculative-eagle-topk", 1)
    agreement = min(0.95, AGREEMENT[algorithm] * (1 + 0.12 * math.log2(topk)) if topk > 1 else AGREEMENT[algorithm])
    accepted = sum(agreement**k for k in range(1, min(depth, drafts - 1) + 1))
    verify = 4.0 + 0.22 * drafts + 1.25 * reduces + DRAFT_MS[algorithm] * depth
    return Costs(verify, 0.05 + 0.02 * drafts, 1 + accepted)

"""What wins at which load: crossovers, and SGLang's adaptive configuration made from them.

`speculative_adaptive_config`, as read in SGLang 0.5.23 (`speculative/adaptive_spec_params.py`): a JSON
object whose keys are batch sizes; a batch takes the entry of the largest key not above it (the smallest
key for smaller batches); `candidate_steps` lists the draft depths it may move between by the accepted
drafts it sees, 0 meaning plain decoding. Only EAGLE and EAGLE3 with topk 1 may use it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from pipeline.config import DraftModelSpeculation, EngineConfig
from pipeline.reporting.model import Crossover, LoadAdvice, Point

ADAPTIVE = frozenset({"EAGLE", "EAGLE3"})


def advise(
    points: Sequence[Point], configs: Mapping[str, EngineConfig], *, noise: float, static: str | None
) -> LoadAdvice | None:
    """Best configuration at each load of each workload; None when fewer than two such were measured.

    Args:
        points: pooled figures of configurations that may win.
        configs: configuration by id.
        noise: the study's noise floor as a share.
        static: the winner over all loads, in words.
    """
    best = _best(points)
    if len(best) < 2:
        return None
    several = len({load for _, load in best}) > 1
    adaptive, note = adaptive_config(points, configs, noise=noise) if several else (None, "")
    return LoadAdvice(
        best=tuple((w, c, p.name, p.speedup or 1.0) for (w, c), p in sorted(best.items())),
        crossovers=tuple(_crossovers(points, best, noise)),
        static=static,
        adaptive=adaptive,
        adaptive_note=note,
    )


def _best(points: Sequence[Point]) -> dict[tuple[str, int], Point]:
    best: dict[tuple[str, int], Point] = {}
    for point in points:
        if point.concurrency is None:
            continue
        where = (point.workload, point.concurrency)
        if where not in best or point.tok_per_s.value > best[where].tok_per_s.value:
            best[where] = point
    return best


def _crossovers(points: Sequence[Point], best: Mapping[tuple[str, int], Point], noise: float) -> list[Crossover]:
    speed = {(p.config_id, p.workload, p.concurrency): p.tok_per_s.value for p in points}
    by_workload: dict[str, list[int]] = defaultdict(list)
    for workload, load in sorted(best):
        by_workload[workload].append(load)
    found = []
    for workload, loads in by_workload.items():
        for low, high in pairwise(loads):
            below, above = best[workload, low], best[workload, high]
            if below.config_id == above.config_id:
                continue
            gains = (
                below.tok_per_s.value / speed.get((above.config_id, workload, low), below.tok_per_s.value) - 1,
                above.tok_per_s.value / speed.get((below.config_id, workload, high), above.tok_per_s.value) - 1,
            )
            found.append(
                Crossover(
                    workload=workload,
                    below=low,
                    above=high,
                    best_below=below.name,
                    best_above=above.name,
                    inside_noise=min(gains) <= noise,
                )
            )
    return found


def adaptive_config(
    points: Sequence[Point], configs: Mapping[str, EngineConfig], *, noise: float
) -> tuple[dict[str, Any] | None, str]:
    """SGLang's adaptive configuration from what was measured, or None and why not.

    A depth is a candidate at a load when its throughput, over the workloads there, is within noise of the
    load's best; depth 0 is plain decoding.
    """
    depths = {cid: depth for cid, config in configs.items() if (depth := _depth(config)) is not None}
    families = {configs[cid].speculation.algorithm for cid, depth in depths.items() if depth}
    if not families & ADAPTIVE:
        return None, "SGLang adapts the draft depth by load for EAGLE and EAGLE3 with topk 1 only; none was measured."
    family = max(families & ADAPTIVE, key=lambda name: _peak(points, name))
    usable = {c: d for c, d in depths.items() if not d or configs[c].speculation.algorithm == family}
    by_load: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (cid, load), values in _by_config_and_load(points).items():
        if cid in usable:
            by_load[load][usable[cid]].append(len(values) / sum(1 / value for value in values))
    entries = {str(load): {"candidate_steps": _candidates(found, noise)} for load, found in sorted(by_load.items())}
    chosen = {tuple(entry["candidate_steps"]) for entry in entries.values()}
    if len(chosen) == 1 and len(min(chosen)) == 1:
        depth = min(chosen)[0]
        return (
            None,
            f"Nothing to adapt: {family} is fastest at {depth} draft steps at every load (0 is plain decoding).",
        )
    return (
        entries,
        f"For {family} with topk 1; save it and add --speculative-adaptive-config FILE --speculative-adaptive.",
    )


def _depth(config: EngineConfig) -> int | None:
    """Draft depth that SGLang's adaptive mode could choose: 0 for plain decoding, None for what it cannot."""
    spec = config.speculation
    if spec.algorithm == "none":
        return 0
    if isinstance(spec, DraftModelSpeculation) and spec.algorithm in ADAPTIVE and spec.eagle_topk == 1:
        return spec.num_steps
    return None


def _peak(points: Sequence[Point], algorithm: str) -> float:
    return max((p.speedup or 0.0 for p in points if p.algorithm == algorithm), default=0.0)


def _by_config_and_load(points: Sequence[Point]) -> dict[tuple[str, int], list[float]]:
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for point in points:
        if point.concurrency is not None:
            found[point.config_id, point.concurrency].append(point.tok_per_s.value)
    return found


def _candidates(found: Mapping[int, Sequence[float]], noise: float) -> list[int]:
    best = {depth: max(values) for depth, values in found.items()}
    top = max(best.values())
    return sorted(depth for depth, value in best.items() if value >= top * (1 - noise))

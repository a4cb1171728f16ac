"""A search planned without a launch: counts, pruning, dead dimensions, time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pipeline.plan import plan_search
from pipeline.records import Topology
from pipeline.space import Space, load_space

SPACES = Path(__file__).parents[2] / "tune_spaces"
HEAD = "study: s\nsglang:\n  model: m\n  tensor_parallel_size: 8\n  draft_models: {EAGLE3: d}\n  space:\n"
NVLINK = Topology(gpu_count=8, sm=90, link="nvlink", peer_access=True)


def _space(tmp_path: Path, body: str) -> Space:
    file = tmp_path / "s.yaml"
    file.write_text(HEAD + body)
    return load_space(file).for_engine("sglang")


def test_counts_add_up_and_each_rule_says_why(tmp_path: Path) -> None:
    space = _space(
        tmp_path,
        "    speculation:\n      none:\n"
        "      EAGLE3: {num_steps: [1, 2], eagle_topk: [1, 4], num_draft_tokens: [4, 16]}\n",
    )
    plan = plan_search(space)
    # chains: 2 depths, each written twice; trees: 1 step holds 4 tokens only, 2 steps hold 16 too
    assert (plan.total_points, plan.distinct, plan.duplicates) == (9, 1 + 2 + 3, 2)
    assert plan.pruned["tree-capacity"].count == 1
    assert plan.distinct + plan.duplicates + sum(p.count for p in plan.pruned.values()) == plan.total_points
    assert any("tree-capacity: 1" in line and "read" in line for line in plan.lines())


def test_a_dimension_is_dead_only_where_the_machine_is_known(tmp_path: Path) -> None:
    space = _space(tmp_path, "    collectives: {nccl_proto: [LL, Simple], symm_mem: [true, false]}\n")
    assert plan_search(space, None, NVLINK).dead == ("collectives.nccl_proto",)
    assert plan_search(space).dead == ()


def test_a_waste_of_time_is_seen_before_it_begins(tmp_path: Path) -> None:
    space = _space(tmp_path, "    mem_fraction_static: [0.5, 0.6, 0.7]\n")
    plan = plan_search(space, seconds_per_launch=120)
    # the baseline states no fraction; 3 - 1 more to search, 3 to ablate, rounds of 3 to confirm
    assert plan.launches == 1 + 2 + 3 + 3 * space.search.confirm_rounds
    assert plan.hours == pytest.approx(plan.launches * 120 / 3600)
    assert plan_search(space).seconds_per_launch > 90


def test_risky_points_are_shown(tmp_path: Path) -> None:
    space = _space(tmp_path, "    speculation: {none: , NGRAM: }\n    collectives: {symm_mem: [true, false]}\n")
    assert plan_search(space).warned["symm-mem-speculation"].count == 1


def test_more_streams_than_requests_may_run_is_noted(tmp_path: Path) -> None:
    space = _space(tmp_path, "    attention_backend: [triton]\n  load: {concurrency: [64, 1]}\n")
    assert "max_running_requests is 48" in plan_search(space).notes[0]
    space = _space(tmp_path, "    attention_backend: [triton]\n  load: {concurrency: [48]}\n")
    assert plan_search(space).notes == ()


def test_large_and_endless_spaces_are_sampled_and_say_so(tmp_path: Path) -> None:
    numbers = "{low: 1, high: 64}"
    body = (
        f"    collectives: {{nccl_nthreads: {numbers}, nccl_min_nchannels: {numbers}, nccl_max_nchannels: {numbers}}}\n"
    )
    plan = plan_search(_space(tmp_path, body))
    assert plan.total_points == 64**3
    assert plan.sampled is not None
    assert plan.pruned["nccl-channels"].count / 64**3 == pytest.approx(0.5, abs=0.05)
    assert "about" in plan.lines()[0]
    endless = plan_search(_space(tmp_path, "    mem_fraction_static: {low: 0.5, high: 0.9}\n"))
    assert endless.total_points is None


def test_the_story_s_machine_prunes_fusion_and_says_why() -> None:
    space = load_space(SPACES / "kimi-k2.5-pcie.yaml").for_engine("sglang")
    plan = plan_search(space, None, space.topology)
    assert "SM120" in plan.pruned["fusion-sm"].example
    assert "SM90 or SM10x" in plan.pruned["fusion-sm"].reason
    assert plan.dead == ("collectives.custom_all_reduce",)


def test_the_main_space_is_counted_in_time() -> None:
    space = load_space(SPACES / "verify.yaml").for_engine("sglang")
    began = time.process_time()
    plan = plan_search(space)
    assert plan.sampled is None
    assert plan.total_points == space.size()
    assert 1000 < plan.distinct < 20_000
    assert time.process_time() - began < 6  # about 1 s on a quiet core

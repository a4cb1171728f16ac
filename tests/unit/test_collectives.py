"""Messages of a model, settings of a space, the screen, and whether the trials agree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.collectives import FILE, lines, study_screen
from pipeline.collectives_bench import cause_of
from pipeline.config import Collectives, EngineConfig, NgramSpeculation
from pipeline.drive import Job, _proposer
from pipeline.errors import InputError
from pipeline.proposer import Proposal
from pipeline.records import Estimate, LevelResult, LoadLevel, Measurement, Topology, TrialRecord
from pipeline.screening import (
    GATHERS,
    Message,
    Result,
    Screening,
    Setting,
    Shape,
    Times,
    drift_of,
    implied,
    messages,
    screen,
    setting_key,
    settings,
    shape_of,
    spearman,
    summary,
    token_counts,
)
from pipeline.space import EngineChoice, Overrides, Space, load_space
from pipeline.store import Study

SPACES = Path(__file__).parents[2] / "tune_spaces"
SHAPE = Shape(hidden_size=576, layers=30, vocab_size=49152)


def space(name: str) -> Space:
    return load_space(SPACES / f"{name}.yaml").for_engine("sglang")


def times(*steps: float, spread: float = 0.0) -> tuple[Times, ...]:
    return tuple(
        Times(tokens=8 * 2**i, all_reduce_us=1.0, all_gather_us=1.0, step_ms=step, spread=spread)
        for i, step in enumerate(steps)
    )


def result(name: str, *steps: float, **more: Any) -> Result:
    algo = None if name == "base" else name
    changes = {"collectives.nccl_algo": algo} if algo else {}
    config = EngineConfig(engine="sglang", model="m", collectives=Collectives(nccl_algo=algo))
    facts = {"outcome": "ok", "times": times(*steps, spread=more.pop("spread", 0.0)), **more}
    return Result(name=name, key=setting_key(config), changes=changes, **facts)


def test_messages_are_the_model_s_own() -> None:
    assert SHAPE.all_reduces == 61
    (found,) = messages(SHAPE, 2, [8])
    assert found == Message(tokens=8, all_reduce_bytes=8 * 576 * 2, all_gather_bytes=8 * 49152 // 2 * 2)
    (uneven,) = messages(SHAPE.model_copy(update={"vocab_size": 7}), 2, [1])
    assert uneven.all_gather_bytes == 8  # the vocabulary is padded to the ranks


@given(st.sets(st.integers(1, 5000), min_size=1))
def test_many_sizes_are_thinned_but_keep_their_ends(tokens: set[int]) -> None:
    found = [message.tokens for message in messages(SHAPE, 2, tokens)]
    assert found == sorted(set(found)) and set(found) <= tokens and len(found) <= 8
    assert (found[0], found[-1]) == (min(tokens), max(tokens))


def test_shape_reads_the_language_part_and_names_what_is_missing() -> None:
    text = {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 16}
    assert shape_of({"vision_config": {}, "text_config": text}, "x") == Shape(hidden_size=8, layers=2, vocab_size=16)
    with pytest.raises(InputError, match=r"m/config\.json: no vocab_size"):
        shape_of({"hidden_size": 8, "num_hidden_layers": 2}, "m/config.json")


PCIE = """\
study: s
sglang:
  model: m
  tensor_parallel_size: 2
  draft_models: {EAGLE3: e, STANDALONE: s}
  rules: {allow: [bare-tree]}
  load: {concurrency: [8, 1]}
  fixed:
    max_running_requests: 6
    env: {NCCL_NVLS_ENABLE: 0}
    collectives: {nccl_p2p_disable: true, custom_all_reduce: false}
  space:
    speculation:
      none:
      NGRAM: {num_draft_tokens: [4, 8]}
      EAGLE3: {num_steps: [1, 3], eagle_topk: 1}
    collectives:
      nccl_algo: [null, "allreduce:tree", Tree]
      nccl_proto: [null, LL]
      nccl_max_nchannels: [null, 4]
"""


def pcie(tmp_path: Path) -> Space:
    file = tmp_path / "pcie.yaml"
    file.write_text(PCIE)
    return load_space(file).for_engine("sglang")


def test_tokens_of_a_step_are_streams_times_checked_tokens(tmp_path: Path) -> None:
    # 1 plain; NGRAM 4 and 8; EAGLE3's steps and one; of 8 streams only 6 run at once
    assert token_counts(pcie(tmp_path)) == {n * c for n in (1, 2, 4, 8) for c in (1, 6)}


def test_settings_of_a_space_begin_with_the_baseline_s_and_its_single_changes(tmp_path: Path) -> None:
    found, left_out = settings(pcie(tmp_path), "0.5.17", Topology(gpu_count=2))
    assert len(found) == 3 * 2 * 2 and not left_out
    assert found[0].name == "as the baseline" and found[0].changes == {}
    assert [len(setting.changes) for setting in found] == sorted(len(setting.changes) for setting in found)
    assert all(setting.config.collectives.nccl_p2p_disable for setting in found)
    assert "nccl_algo=Tree" in {setting.name for setting in found}


def test_what_the_engine_s_kernels_carry_is_left_out_and_said() -> None:
    nvlink = space("gpu2")
    found, left_out = settings(nvlink, "0.5.17", nvlink.topology)
    assert [setting.name for setting in found] == ["custom_all_reduce=False"]
    assert "kernel of the engine" in left_out["as the baseline"]


def test_multicast_is_never_switched_on(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(
        "study: s\nsglang:\n  model: m\n  tensor_parallel_size: 2\n  load: {concurrency: [1]}\n"
        "  fixed: {collectives: {custom_all_reduce: false}}\n"
        "  space: {collectives: {nccl_algo: [null, NVLS]}, env: {NCCL_NVLS_ENABLE: [null, '1']}}\n"
    )
    found, left_out = settings(load_space(file).for_engine("sglang"), None, Topology())
    assert [setting.name for setting in found] == ["as the baseline"]
    assert set(left_out.values()) == {"NVLink multicast is never switched on here"}


def test_a_summary_counts_single_messages_and_the_whole_step() -> None:
    found = summary(Message(tokens=8, all_reduce_bytes=2, all_gather_bytes=2), 61, [6.1, 6.1, 6.2], [0.8, 0.8, 0.8])
    assert found.all_reduce_us == pytest.approx(100)
    assert found.all_gather_us == pytest.approx(1e3 * 0.8 / GATHERS)
    assert found.step_ms == pytest.approx(6.1 + 0.1)
    assert 0 < found.spread < 0.02


def test_a_setting_that_another_beats_everywhere_leaves() -> None:
    (dropped,) = screen([result("base", 1.0, 2.0), result("Ring", 1.2, 2.6)])
    assert dropped.name == "Ring"
    assert dropped.text() == ("screened-collective: Ring: dominated by base: 1.20 to 1.30 times its step at every size")


def test_a_setting_that_wins_somewhere_or_is_within_noise_stays() -> None:
    assert screen([result("base", 1.0, 2.0), result("Ring", 0.9, 9.0)]) == ()
    assert screen([result("base", 1.0, 2.0), result("Ring", 1.04, 2.9)]) == ()
    assert screen([result("base", 1.0, 2.0), result("Ring", 1.2, 2.6)], noise=0.25) == ()
    assert screen([result("base", 1.0, 2.0), result("Ring", 1.2, 2.6, spread=0.2)]) == ()


def test_it_takes_one_better_setting_not_several() -> None:
    """Ring is beaten at each size, by a different one: no single choice replaces it."""
    assert [d.name for d in screen([result("a", 1.0, 3.0), result("b", 3.0, 1.0), result("Ring", 2.0, 2.0)])] == []


def test_the_baseline_s_own_setting_never_leaves() -> None:
    assert screen([result("base", 9.0), result("Ring", 1.0)]) == ()


def test_what_failed_or_hung_leaves_unless_nothing_worked() -> None:
    tree = result("Tree", outcome="failed", times=(), phase="all-gather warm-up", cause="no algorithm")
    hung = result("Ring", outcome="hung", times=(), phase="measurement", cause="no answer within 10 s")
    lost = result("late", outcome="not measured", times=(), cause="no time was left")
    dropped = screen([result("base", 1.0), tree, hung, lost])
    assert [d.reason for d in dropped] == [
        "failed in all-gather warm-up: no algorithm", "hung in measurement: no answer within 10 s",
    ]  # fmt: skip
    assert screen([tree, hung]) == ()


@given(st.lists(st.lists(st.floats(0.1, 10), min_size=3, max_size=3), min_size=1, max_size=6))
def test_the_fastest_setting_of_any_size_always_stays(rows: list[list[float]]) -> None:
    results = [result(f"s{i}", *row) for i, row in enumerate(rows)]
    left = {r.name for r in results} - {d.name for d in screen(results)}
    for size in range(3):
        assert min(results, key=lambda r: r.times[size].step_ms).name in left


def test_a_setting_that_contains_a_failed_one_is_not_tried() -> None:
    config = EngineConfig(engine="sglang", model="m")
    both = Setting("both", "k", {"collectives.nccl_algo": "Tree", "collectives.nccl_proto": "LL"}, config)
    other = Setting("other", "o", {"collectives.nccl_proto": "LL"}, config)
    tree = result("Tree", outcome="failed", times=(), cause="x")
    found = implied(both, [result("base", 1.0), tree])
    assert found is not None and found.outcome == "failed"
    assert found.cause == "contains Tree, which failed by itself"
    assert implied(other, [tree]) is None
    assert implied(both, [result("base", outcome="failed", times=(), cause="x")]) is None  # says nothing of others


def test_drift_is_the_largest_change_of_a_step() -> None:
    assert drift_of(times(1.0, 2.0), times(1.1, 1.9)) == pytest.approx(0.1)


def test_the_cause_is_what_nccl_says_last() -> None:
    text = "NCCL error in: a.cpp:1, invalid usage\nncclInvalidUsage: x\nLast error:\nError : no algorithm\n"
    assert cause_of(text) == "Error : no algorithm"
    assert cause_of("NCCL error in: a.cpp\nncclX\nLast error:\n") == "NCCL error in: a.cpp"
    assert cause_of("CUDA error: out of memory\nCompile with …") == "CUDA error: out of memory"
    assert cause_of("") == ""


def trial(number: int, algo: str | None, speed: float, **more: Any) -> TrialRecord:
    config = EngineConfig(engine="sglang", model="m", collectives=Collectives(nccl_algo=algo), **more)
    level = LevelResult(
        level=LoadLevel(workload="open", concurrency=8), window_s=1, requests_ok=8, output_tokens=100,
        output_tok_per_s=Estimate(value=speed),
    )  # fmt: skip
    return TrialRecord(
        study="s", number=number, role="search", status="ok", config=config, config_id=config.config_id,
        measurement=Measurement(levels=(level,)),
    )  # fmt: skip


def test_spearman_compares_only_trials_that_differ_in_the_setting() -> None:
    results = [result("base", 1.0), result("a", 2.0), result("b", 3.0), result("c", 4.0)]
    agreeing = [trial(i, name, 1000 - 100 * i) for i, name in enumerate((None, "a", "b", "c"))]
    assert spearman(results, agreeing) == (pytest.approx(1.0), 4)
    turned = [trial(i, name, 600 + 100 * i) for i, name in enumerate((None, "a", "b", "c"))]
    assert spearman(results, turned) == (pytest.approx(-1.0), 4)
    # Other drafts make steps longer; pooled without regard to that, these would seem to agree.
    drafts = [NgramSpeculation(num_draft_tokens=n) for n in (2, 4, 8, 16)]
    alone = [trial(i, name, 1000 - 100 * i, speculation=drafts[i]) for i, name in enumerate((None, "a", "b", "c"))]
    assert spearman(results, alone) == (None, 0)


def test_spearman_cannot_be_told_from_few_or_equal_trials() -> None:
    results = [result("base", 1.0), result("a", 2.0), result("b", 3.0), result("c", 4.0)]
    assert spearman(results, [trial(0, None, 900), trial(1, "a", 800)]) == (None, 2)
    assert spearman(results, [trial(i, n, 500) for i, n in enumerate((None, "a", "b", "c"))]) == (None, 4)
    failed = [trial(i, n, 500).model_copy(update={"status": "failed"}) for i, n in enumerate((None, "a", "b", "c"))]
    assert spearman(results, failed) == (None, 0)


def screening(**more: Any) -> Screening:
    tree = result("Tree", outcome="failed", times=(), cause="no algorithm")
    results = (result("base", 1.0, 2.0), result("Ring", 1.5, 2.5), tree)
    facts: dict[str, Any] = {
        "model": "m", "ranks": 2, "shape": SHAPE, "messages": messages(SHAPE, 2, [8, 16]), "noise": 0.05,
        "results": results, "dropped": screen(results), "left_out": {"fusion": "a kernel"}, "seconds": 9.0,
    }  # fmt: skip
    return Screening(**{**facts, **more})


def test_a_configuration_is_refused_for_its_setting_whatever_it_drafts() -> None:
    ring = EngineConfig(engine="sglang", model="m", collectives=Collectives(nccl_algo="Ring"))
    found = screening()
    assert [d.name for d in found.refuses(ring.model_copy(update={"speculation": NgramSpeculation()}))] == ["Ring"]
    assert found.refuses(EngineConfig(engine="sglang", model="m")) == ()
    assert Screening.model_validate_json(found.model_dump_json()).refuses(ring) == found.refuses(ring)


def test_the_text_says_what_leaves_and_why() -> None:
    text = "\n".join(lines(screening()))
    assert "Tree    leaves: failed: no algorithm" in text
    assert "Ring     1.500    2.500  leaves: dominated by base: 1.25 to 1.50" in text
    assert "not timed: fusion: a kernel" in text
    assert "3 settings in 9 s\n" in text and "not reached" not in text
    late = result("LL", outcome="not measured", times=(), cause="no time was left")
    more = "\n".join(lines(screening(results=(*screening().results, late), stages_s={"import": 4.4, "end": 0.2})))
    assert "4 settings in 9 s (import 4 s, end 0 s)" in more
    assert "not reached, so still in the space: LL" in more
    assert "Spearman" not in text
    assert "Spearman with the trials: 0.50 over 8 measurements; leave" in lines(screening(spearman=0.5, pairs=8))[-1]
    assert "may be used" in lines(screening(spearman=0.8, pairs=8))[-1]
    assert "cannot tell" in lines(screening(pairs=2))[-1]


def test_without_gpus_one_clear_error() -> None:
    command = [sys.executable, "-m", "pipeline.collectives", str(SPACES / "gpu2-pcie.yaml")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={"PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: the collective benchmark needs 2 GPUs, this machine has 0\n"


STUDY = """\
study: s
sglang:
  model: m
  tensor_parallel_size: 2
  load: {concurrency: [1]}
  fixed: {collectives: {custom_all_reduce: false}}
  seeds:
    - {collectives.nccl_algo: Ring}
  space: {collectives: {nccl_algo: [null, Ring]}}
search: {screen_collectives: SCREEN, budget: {trials: 4}, sampler: grid}
"""


def job(tmp_path: Path, screen: str = "true") -> Job:
    file = tmp_path / "s.yaml"
    file.write_text(STUDY.replace("SCREEN", screen))
    part = load_space(file).for_engine("sglang")
    choice = EngineChoice("sglang", "a test")
    return Job("s", file, part, choice, Topology(gpu_count=2), None, Overrides(), tmp_path / "runs")


def test_the_search_never_launches_a_screened_setting(tmp_path: Path) -> None:
    asked = job(tmp_path)
    study = Study.create("s", asked.space_file, {}, asked.runs)
    base = asked.space.canonical(asked.space.baseline(), None, asked.topology).config
    (ring,) = (one for one in settings(asked.space, None, asked.topology)[0] if one.changes)
    slow = Result(name=ring.name, key=ring.key, changes=ring.changes, outcome="ok", times=times(9.0))
    fast = Result(name="base", key=setting_key(base), outcome="ok", times=times(1.0))
    found = screening(results=(fast, slow), dropped=screen([fast, slow]))
    (study.folder / FILE).write_text(found.model_dump_json())

    kept = study_screen(study.folder, asked.space, None, asked.topology, print)  # a resumed study asks its file
    proposer = _proposer(asked, study, (), kept)
    first = proposer.propose()
    assert isinstance(first, Proposal) and first.role == "baseline"
    record = trial(first.number, None, 900).model_copy(
        update={"role": "baseline", "config": first.config, "config_id": first.config_id}
    )
    proposer.observe(record)
    assert not (isinstance(then := proposer.propose(), Proposal) and then.config.collectives.nccl_algo == "Ring")
    (pruned,) = (r for r in proposer.drain() if r.status == "pruned" and r.role == "seed")
    assert pruned.reason is not None
    assert pruned.reason.startswith("screened-collective: nccl_algo=Ring: dominated by base: 9.00")


def test_the_screen_is_off_unless_asked_for_and_no_reason_to_stop(tmp_path: Path) -> None:
    said: list[str] = []
    off = job(tmp_path, "false")
    assert study_screen(tmp_path, off.space, None, Topology(gpu_count=2), said.append) is None and not said
    on = job(tmp_path)
    assert study_screen(tmp_path, on.space, None, Topology(gpu_count=1), said.append) is None
    assert said == ["no collective screen: the collective benchmark needs 2 GPUs, this machine has 1"]
    assert not (tmp_path / FILE).exists()

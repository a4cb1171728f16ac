"""A space: points, configurations, seeds, the baseline; and the shipped files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import EngineConfig
from pipeline.errors import InputError
from pipeline.records import Topology
from pipeline.space import Overrides, Space, load_space

FILES = sorted((Path(__file__).parents[2] / "tune_spaces").glob("*.yaml"))
TEXT = """\
study: s
sglang:
  model: m
  tensor_parallel_size: 8
  draft_models: {EAGLE3: head, STANDALONE: small}
  fixed:
    max_running_requests: 64
    env: {NCCL_CGA_CLUSTER_SIZE: 2}
  load: {concurrency: [8, 1]}
  seeds:
    - {speculation.algorithm: NGRAM, speculation.NGRAM.num_draft_tokens: 8}
  space:
    collectives:
      nccl_algo: {choices: [Ring, "allreduce:tree"], when: {collectives.custom_all_reduce: false}}
      custom_all_reduce: [true, false]
      flashinfer_fusion: [null, "off"]
    speculation:
      none:
      NGRAM:
        num_draft_tokens: [2, 4, 8]
      EAGLE3:
        num_steps: {low: 1, high: 5, step: 2}
        eagle_topk: [1]
      STANDALONE:
        num_steps: {low: 1, high: 2}
    mem_fraction_static: {low: 0.5, high: 0.8, step: 0.15}
embedded:
  model: tiny
  draft_models: {STANDALONE: tinier}
  fixed: {attention_backend: triton, dtype: float32}
load: {concurrency: [4]}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("space") / "s.yaml"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="module")
def space(path: Path) -> Space:
    return load_space(path).for_engine("sglang")


def _all_spaces() -> list[Any]:
    return [
        pytest.param(file, engine, id=f"{file.stem}-{engine}")
        for file in FILES
        for engine in ("sglang", "embedded")
        if getattr(load_space(file).file, engine) is not None
    ]


def test_dimensions_come_after_those_that_they_depend_on(space: Space) -> None:
    names = [dimension.name for dimension in space.dims]
    assert names[0] == "speculation.algorithm"
    assert names.index("collectives.custom_all_reduce") < names.index("collectives.nccl_algo")


def test_a_point_becomes_the_configuration_that_it_says(space: Space) -> None:
    config = space.config(
        {
            "speculation.algorithm": "EAGLE3",
            "speculation.EAGLE3.num_steps": 3,
            "speculation.EAGLE3.eagle_topk": 1,
            "collectives.custom_all_reduce": False,
            "collectives.nccl_algo": "Ring",
            "mem_fraction_static": 0.65,
        }
    )
    assert config.speculation.model_dump(exclude_none=True) == {
        "algorithm": "EAGLE3", "draft_model": "head", "num_steps": 3, "eagle_topk": 1, "adaptive": False,
    }  # fmt: skip
    assert (config.collectives.custom_all_reduce, config.collectives.nccl_algo) == (False, "Ring")
    assert (config.max_running_requests, config.mem_fraction_static) == (64, 0.65)
    assert config.env == (("NCCL_CGA_CLUSTER_SIZE", "2"),)
    assert (config.model, config.tensor_parallel_size) == ("m", 8)


def test_the_baseline_is_what_is_fixed_and_nothing_else(space: Space) -> None:
    baseline = space.baseline()
    assert baseline.speculation.algorithm == "none"
    assert baseline.max_running_requests == 64
    assert space.config(space.baseline_params()) == baseline
    bare = EngineConfig(engine="sglang", model="m", tensor_parallel_size=8, max_running_requests=64, env=baseline.env)
    assert space.canonical(baseline).config == space.canonical(bare).config


def test_grid_lists_each_point_once_and_size_counts_them(space: Space) -> None:
    points = list(space.grid())
    assert len(points) == space.size() == 9 * 3 * 2 * 3
    assert len({tuple(sorted(point.items(), key=str)) for point in points}) == len(points)
    assert all(space.contains(point) is None for point in points)


def test_dimensions_exist_only_where_their_condition_holds(space: Space) -> None:
    for point in space.grid():
        assert ("collectives.nccl_algo" in point) is (point["collectives.custom_all_reduce"] is False)
        branches = {name.split(".")[1] for name in point if name.count(".") == 2}
        assert branches <= {point["speculation.algorithm"]}


def test_contains_says_why_not(space: Space) -> None:
    point = next(iter(space.grid()))
    assert space.contains(point) is None
    assert "not stated" in str(space.contains({**point, "speculation.algorithm": "NGRAM"}))
    assert "exists only with" in str(space.contains({**point, "speculation.NGRAM.num_draft_tokens": 4}))
    assert "no dimension" in str(space.contains({**point, "colour": 1}))
    assert space.contains({**point, "mem_fraction_static": 0.1 + 0.55}) is None  # not the same float as 0.65
    assert "not 0.5 to 0.8" in str(space.contains({**point, "mem_fraction_static": 0.55}))
    assert "not one of True, False" in str(space.contains({**point, "collectives.custom_all_reduce": 1}))


def test_seeds_are_completed_and_every_algorithm_brings_its_default(space: Space) -> None:
    stated, *defaults = space.seeds()
    assert space.contains(stated) is None
    assert stated["speculation.NGRAM.num_draft_tokens"] == 8
    assert stated["collectives.flashinfer_fusion"] is None
    assert [seed["speculation.algorithm"] for seed in defaults] == ["NGRAM", "EAGLE3", "STANDALONE"]
    eagle: Any = space.config(defaults[1]).speculation
    assert (eagle.draft_model, eagle.num_steps, eagle.eagle_topk, eagle.num_draft_tokens) == ("head", None, None, None)


def test_a_seed_may_give_a_variable_as_a_number_as_its_choices_do(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    text = TEXT.replace("space:\n    collectives", "space:\n    env: {OMP_NUM_THREADS: [null, 2]}\n    collectives", 1)
    file.write_text(text.replace("num_draft_tokens: 8}", "num_draft_tokens: 8, env.OMP_NUM_THREADS: 2}", 1))
    space = load_space(file).for_engine("sglang")
    assert ("OMP_NUM_THREADS", "2") in space.config(space.stated_seeds[0]).env


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_every_suggested_point_lies_in_the_space_and_is_a_valid_configuration(space: Space, seed: int) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    trial = study.ask()
    point = space.suggest(trial)
    assert trial.params == point
    assert space.contains(point) is None
    assert EngineConfig.model_validate(space.config(point).model_dump()) == space.config(point)


def test_one_optuna_study_takes_every_point(space: Space) -> None:
    """Optuna refuses a name whose choices change between trials."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    for value in range(40):
        trial = study.ask()
        space.suggest(trial)
        study.tell(trial, float(value))
    assert len(study.trials) == 40


def test_ranges_of_real_numbers_cannot_be_listed(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("study: s\nsglang:\n  model: m\n  space:\n    mem_fraction_static: {low: 0.5, high: 0.8}\n")
    space = load_space(file).for_engine("sglang")
    assert space.size() is None
    assert space.contains({"speculation.algorithm": "none", "mem_fraction_static": 0.777}) is None
    with pytest.raises(InputError, match=r"cannot be listed.*`step`"):
        list(space.grid())


def test_what_the_embedded_engine_lacks_is_dropped_and_named(path: Path) -> None:
    space = load_space(path).for_engine("embedded")
    assert (space.model, space.tensor_parallel_size) == ("tiny", 1)
    assert {dimension.name for dimension in space.dims} == {
        "speculation.algorithm", "speculation.NGRAM.num_draft_tokens", "speculation.STANDALONE.num_steps",
    }  # fmt: skip
    named = {text.partition(":")[0] for text in space.dropped}
    assert {"speculation.EAGLE3", "collectives.nccl_algo", "attention_backend", "mem_fraction_static"} <= named
    assert space.baseline().attention_backend is None
    assert not space.check(space.baseline())


def test_an_engine_that_has_none_of_the_algorithms_still_has_plain_decoding(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("study: s\nembedded:\n  model: m\n  space:\n    speculation: {EAGLE: {num_steps: [1, 2]}}\n")
    space = load_space(file).for_engine("embedded")
    assert (list(space.grid()), len(space.dropped)) == ([{"speculation.algorithm": "none"}], 1)


def test_overrides(path: Path) -> None:
    given = Overrides(
        model="other", draft_model=("EAGLE3=a", "STANDALONE=b"), tensor_parallel_size=2, concurrency=(16,), trials=5,
        hours=1.5, seed=7, sampler="random", engine="sglang",
    )  # fmt: skip
    spec = load_space(path, given)
    space = spec.for_engine("sglang")
    assert (spec.engine, spec.need_gpus) == ("sglang", 2)
    assert (space.model, space.tensor_parallel_size, space.load.concurrency) == ("other", 2, (16,))
    assert space.draft_models == {"EAGLE3": "a", "STANDALONE": "b"}
    assert (space.search.budget.trials, space.search.budget.hours) == (5, 1.5)
    assert (space.search.seed, space.search.sampler) == (7, "random")


def test_another_model_needs_drafts_of_its_own(path: Path) -> None:
    space = load_space(path, Overrides(model="other")).for_engine("sglang")
    assert space.algorithms == ("none", "NGRAM")
    assert "its draft was made for m; give --draft-model EAGLE3=MODEL" in " ".join(space.dropped)
    assert space.stated_seeds
    some = load_space(path, Overrides(model="other", draft_model="EAGLE3=a")).for_engine("sglang")
    assert some.algorithms == ("none", "NGRAM", "EAGLE3")
    given = load_space(path, Overrides(model="other", draft_model=("EAGLE3=a", "STANDALONE=b"))).for_engine("sglang")
    assert given.algorithms == ("none", "NGRAM", "EAGLE3", "STANDALONE")


def test_the_model_class_is_that_of_the_model_really_used(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    file = tmp_path / "s.yaml"
    file.write_text(TEXT.replace("  model: m\n", "  model: m\n  architecture: Qwen3MoeForCausalLM\n"))
    assert load_space(file).for_engine("sglang").architecture == "Qwen3MoeForCausalLM"
    assert load_space(file, Overrides(model="x/y")).for_engine("sglang").architecture is None
    assert load_space(file, Overrides(model=str(tmp_path))).for_engine("sglang").architecture == "LlamaForCausalLM"


def test_a_section_replaces_the_common_part(path: Path) -> None:
    spec = load_space(path)
    assert spec.for_engine("sglang").load.concurrency == (8, 1)
    assert spec.for_engine("embedded").load.concurrency == (4,)


def test_spaces_travel_between_processes(path: Path, space: Space) -> None:
    assert pickle.loads(pickle.dumps(space)) == space
    assert pickle.loads(pickle.dumps(load_space(path))).for_engine("sglang") == space


def test_a_waived_rule_does_not_prune(tmp_path: Path) -> None:
    text = TEXT.replace("[Ring, ", "[Tree, ")
    file = tmp_path / "a.yaml"
    tree = {"collectives.custom_all_reduce": False, "collectives.nccl_algo": "Tree"}
    file.write_text(text)
    space = load_space(file).for_engine("sglang")
    assert [v.rule for v in space.check(space.config(tree))] == ["bare-tree"]
    file.write_text(text.replace("  seeds:", "  rules: {allow: [bare-tree]}\n  seeds:"))
    space = load_space(file).for_engine("sglang")
    assert space.check(space.config(tree)) == ()
    assert space.waived == ("bare-tree",)


# -- the shipped files


@pytest.mark.parametrize(("file", "engine"), _all_spaces())
def test_shipped_spaces_are_sound(file: Path, engine: str) -> None:
    space = load_space(file).for_engine(engine)
    topology = space.topology or Topology()
    assert space.check(space.baseline(), topology=topology) == ()
    for seed in space.stated_seeds:
        assert space.contains(seed) is None
        assert space.check(space.config(seed), topology=topology) == ()
    assert space.dropped == ()


def test_the_example_in_the_documentation_is_a_space_file(tmp_path: Path) -> None:
    text = (FILES[0].parents[1] / "docs" / "space-file.md").read_text()
    file = tmp_path / "example.yaml"
    file.write_text(text.partition("```yaml\n")[2].partition("```")[0])
    assert load_space(file).for_engine("sglang").size() == 232
    assert load_space(file).for_engine("embedded").size() == 5


def test_the_main_space_gives_the_embedded_engine_enough_to_do() -> None:
    space = load_space(FILES[0].with_name("verify.yaml")).for_engine("embedded")
    assert len({space.canonical(space.config(point)).config.config_id for point in space.grid()}) >= 8
    assert space.load.concurrency == (1,)


def test_the_pcie_study_may_ask_for_the_failing_tree() -> None:
    space = load_space(FILES[0].with_name("gpu2-pcie.yaml")).for_engine("sglang")
    assert any(seed.get("collectives.nccl_algo") == "Tree" for seed in space.seeds())
    for point in space.grid():
        collectives = space.config(point).collectives
        assert (collectives.nccl_p2p_disable, collectives.custom_all_reduce) == (True, False)

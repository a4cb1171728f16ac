"""Rules of validity and rewriting: each as SGLang behaves, and unknown facts keep a setting alive."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import rules
from pipeline.config import EngineConfig
from pipeline.records import Topology
from pipeline.rule_facts import release_numbers

H200 = Topology(gpu_count=8, gpu_model="NVIDIA H200", sm=90, link="nvlink", peer_access=True)
B200 = Topology(gpu_count=8, gpu_model="NVIDIA B200", sm=100, link="nvlink", peer_access=True)
PCIE = Topology(gpu_count=8, gpu_model="NVIDIA RTX PRO 6000", sm=120, link="pcie")
UNKNOWN = Topology()
DRAFT = {"algorithm": "EAGLE3", "draft_model": "head"}
NGRAM = {"algorithm": "NGRAM", "num_draft_tokens": 8}


def _config(ranks: int = 8, engine: str = "sglang", **fields: Any) -> EngineConfig:
    return EngineConfig.model_validate({"engine": engine, "model": "m", "tensor_parallel_size": ranks, **fields})


def _broken(
    config: EngineConfig, topology: Topology = UNKNOWN, release: str | None = "0.5.23", arch: str | None = None
) -> list[str]:
    return [violation.rule for violation in rules.check(config, release, topology, arch)]


def _resolved(config: EngineConfig, topology: Topology = UNKNOWN, arch: str | None = None) -> EngineConfig:
    return rules.canonical(config, "0.5.23", topology, arch).config


@pytest.mark.parametrize(
    ("rule", "fields"),
    [
        ("draft-shape-partial", {"speculation": {**DRAFT, "eagle_topk": 1}}),
        ("draft-shape-partial", {"speculation": {**DRAFT, "num_draft_tokens": 4}}),
        ("draft-shape-topk", {"speculation": {**DRAFT, "num_steps": 3}}),
        ("draft-shape-topk", {"speculation": {**DRAFT, "num_steps": 3, "eagle_topk": 4}}),
        ("tree-capacity", {"speculation": {**DRAFT, "num_steps": 1, "eagle_topk": 4, "num_draft_tokens": 8}}),
        ("draft-model", {"speculation": {"algorithm": "EAGLE3"}}),
        ("draft-model", {"speculation": {"algorithm": "STANDALONE"}}),
        ("draft-model", {"speculation": {"algorithm": "DFLASH"}}),
        (
            "narrow-backend",
            {
                "speculation": {**DRAFT, "num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 8},
                "attention_backend": "trtllm_mha",
            },
        ),
        ("paged-tree", {"speculation": NGRAM, "attention_backend": "fa3", "extra_args": ("--page-size", "64")}),
        (
            "paged-tree",
            {
                "speculation": {**DRAFT, "num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 8},
                "attention_backend": "flashmla_sparse",
                "extra_args": ("--page-size=64",),
            },
        ),
        (
            "rejection-sampling",
            {
                "speculation": {**DRAFT, "num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 8},
                "extra_args": ("--speculative-use-rejection-sampling",),
            },
        ),
        (
            "rejection-sampling",
            {
                "speculation": {**DRAFT, "accept_threshold_acc": 0.5},
                "extra_args": ("--speculative-use-rejection-sampling",),
            },
        ),
        ("adaptive-steps", {"speculation": {**DRAFT, "adaptive": True, "num_steps": 2}}),
        ("rejection-sampling", {"speculation": NGRAM, "extra_args": ("--speculative-use-rejection-sampling",)}),
        ("attention-dp", {"speculation": NGRAM, "extra_args": ("--enable-dp-attention",)}),
        ("pipeline-parallel", {"speculation": NGRAM, "extra_args": ("--pp-size=2",)}),
        ("ngram-torch-native", {"speculation": NGRAM, "attention_backend": "torch_native"}),
        ("ngram-corpus-budget", {"speculation": {**NGRAM, "external_corpus_path": "a.jsonl"}}),
        ("bare-tree", {"collectives": {"nccl_algo": "Tree"}}),
        ("bare-tree", {"collectives": {"nccl_algo": "tree,NVLSTree"}}),
        ("bare-nvls", {"collectives": {"nccl_algo": "NVLS"}}),
        ("nccl-channels", {"collectives": {"nccl_min_nchannels": 8, "nccl_max_nchannels": 4}}),
        ("said-twice", {"env": (("NCCL_PROTO", "LL"),)}),
        ("said-twice", {"extra_args": ("--disable-custom-all-reduce",)}),
        ("said-twice", {"extra_args": ("--attention-backend=fa3",)}),
        ("overwritten-variable", {"env": (("CUDA_DEVICE_MAX_CONNECTIONS", "1"),)}),
        ("overwritten-variable", {"collectives": {"symm_mem": True}, "env": (("NCCL_NVLS_ENABLE", "0"),)}),
    ],
)
def test_what_sglang_refuses_or_dies_of(rule: str, fields: dict[str, Any]) -> None:
    assert _broken(_config(**fields)) == [rule]


@pytest.mark.parametrize(
    "fields",
    [
        {"speculation": DRAFT},
        {"speculation": {**DRAFT, "num_steps": 3, "eagle_topk": 1}},
        {"speculation": {**DRAFT, "num_steps": 2, "eagle_topk": 4, "num_draft_tokens": 16}},
        {"speculation": {"algorithm": "NEXTN"}},
        {"speculation": NGRAM, "attention_backend": "flashinfer", "extra_args": ("--page-size", "64")},
        {"speculation": DRAFT, "extra_args": ("--speculative-use-rejection-sampling",)},
        {"speculation": {**DRAFT, "adaptive": True, "num_steps": 3}},
        {"speculation": {**DRAFT, "adaptive": True, "eagle_topk": 1}},
        {
            "speculation": {**NGRAM, "external_corpus_path": "a"},
            "extra_args": ("--speculative-ngram-external-sam-budget", "4"),
        },
        {"collectives": {"nccl_algo": "allreduce:tree"}},
        {"collectives": {"nccl_algo": "Tree,Ring"}},
        {"collectives": {"nccl_algo": "^Tree"}},
        {"collectives": {"nccl_min_nchannels": 4, "nccl_max_nchannels": 4}},
        {"env": (("NCCL_NVLS_ENABLE", "0"),)},
    ],
)
def test_what_sglang_accepts(fields: dict[str, Any]) -> None:
    assert _broken(_config(**fields)) == []


def test_the_tree_holds_exactly_what_its_shape_has_room_for() -> None:
    shape = {**DRAFT, "num_steps": 2, "eagle_topk": 4}  # 4 + 16 drafts and the bonus token
    assert _broken(_config(speculation={**shape, "num_draft_tokens": 21})) == []
    assert _broken(_config(speculation={**shape, "num_draft_tokens": 22})) == ["tree-capacity"]


def test_bare_tree_is_explained_and_offers_the_spelling_that_works() -> None:
    (violation,) = rules.check(_config(collectives={"nccl_algo": "Tree"}), "0.5.23", PCIE)
    assert "allreduce:tree" in violation.text()
    assert violation.source == "measured"
    assert _broken(_config(ranks=1, collectives={"nccl_algo": "Tree"})) == []


@pytest.mark.parametrize("backend", ["auto", "trtllm", "mnnvl", "cutedsl"])
def test_fusion_is_refused_on_sm120_in_every_form_but_off(backend: str) -> None:
    assert "fusion-sm" in _broken(_config(collectives={"flashinfer_fusion": backend}), PCIE)
    assert _broken(_config(collectives={"flashinfer_fusion": "off"}), PCIE) == []
    assert "fusion-sm" not in _broken(_config(collectives={"flashinfer_fusion": backend}), H200)
    assert "fusion-sm" not in _broken(_config(collectives={"flashinfer_fusion": backend}), UNKNOWN)


def test_cutedsl_needs_sm100_and_a_release_that_knows_it() -> None:
    config = _config(collectives={"flashinfer_fusion": "cutedsl"})
    assert _broken(config, H200) == ["fusion-cutedsl-sm"]
    assert _broken(config, B200) == []
    assert _broken(config, B200, release="0.5.17") == ["fusion-cutedsl-release"]


def test_a_draft_model_may_be_left_out_only_where_the_target_has_its_own() -> None:
    config = _config(speculation={"algorithm": "EAGLE"})
    assert _broken(config, arch="DeepseekV3ForCausalLM") == []
    assert _broken(config, arch="LlamaForCausalLM") == ["draft-model"]
    assert _broken(config, arch=None) == []


def test_a_default_shape_is_checked_as_sglang_resolves_it() -> None:
    config = _config(speculation=DRAFT, attention_backend="trtllm_mha")
    assert _broken(config, arch="LlamaForCausalLM") == ["narrow-backend"]  # default topk 4
    assert _broken(config, arch="Qwen3ForCausalLM") == []  # default topk 1


def test_more_ranks_than_gpus() -> None:
    assert _broken(_config(ranks=4), Topology(gpu_count=2)) == ["gpu-count"]
    assert _broken(_config(ranks=4), UNKNOWN) == []


def test_symmetric_memory_with_speculation_is_a_warning_not_a_refusal() -> None:
    config = _config(collectives={"symm_mem": True}, speculation=NGRAM)
    assert _broken(config) == []
    assert [w.rule for w in rules.warnings(config, None, UNKNOWN)] == ["symm-mem-speculation"]
    assert rules.warnings(_config(collectives={"symm_mem": True}), None, UNKNOWN) == ()


# -- rewrites


def test_chains_of_equal_depth_are_one_configuration() -> None:
    chains = [_config(speculation={**DRAFT, "num_steps": 3, "eagle_topk": 1, "num_draft_tokens": n}) for n in (2, 4, 8)]
    assert {_resolved(chain).config_id for chain in chains} == {_resolved(chains[1]).config_id}
    assert _resolved(chains[0]).speculation.num_draft_tokens == 4  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arch", "shape"), [("LlamaForCausalLM", (5, 4, 8)), ("Qwen3ForCausalLM", (3, 1, 4)), (None, (None, None, None))]
)
def test_default_draft_shape_by_model_class(arch: str | None, shape: tuple[int | None, ...]) -> None:
    found: Any = _resolved(_config(speculation=DRAFT), arch=arch).speculation
    assert (found.num_steps, found.eagle_topk, found.num_draft_tokens) == shape


def test_standalone_has_one_default_for_all_models() -> None:
    found: Any = _resolved(_config(speculation={"algorithm": "STANDALONE", "draft_model": "d"})).speculation
    assert (found.num_steps, found.eagle_topk, found.num_draft_tokens) == (3, 1, 4)


def test_ngram_defaults_as_a_real_server_reported_them() -> None:
    stated = {
        "algorithm": "NGRAM", "num_draft_tokens": 12, "min_bfs_breadth": 1, "max_bfs_breadth": 10, "match_type": "BFS",
        "max_trie_depth": 18,
    }  # fmt: skip
    assert _resolved(_config(speculation={"algorithm": "NGRAM"})) == _resolved(_config(speculation=stated))


def test_adaptive_falls_back_where_it_is_not_supported() -> None:
    off: Any = _resolved(_config(speculation={**DRAFT, "adaptive": True, "num_steps": 3, "eagle_topk": 4})).speculation
    assert off.adaptive is False
    on: Any = _resolved(_config(speculation={**DRAFT, "adaptive": True, "num_steps": 5})).speculation
    assert (on.adaptive, on.eagle_topk, on.num_draft_tokens) == (True, 1, 6)


def test_nextn_is_eagle() -> None:
    nextn, eagle = ({"algorithm": name, "draft_model": "d"} for name in ("NEXTN", "EAGLE"))
    assert _resolved(_config(speculation=nextn)) == _resolved(_config(speculation=eagle))


def test_one_rank_has_no_collectives() -> None:
    busy = {"custom_all_reduce": False, "nccl_proto": "LL", "flashinfer_fusion": "auto", "symm_mem": True}
    assert _resolved(_config(ranks=1, collectives=busy)) == _resolved(_config(ranks=1))


def test_nccl_is_dead_only_where_custom_all_reduce_is_surely_active() -> None:
    slow, fast = (_config(collectives={"nccl_proto": proto}) for proto in ("LL", "Simple"))
    assert _resolved(slow, H200) == _resolved(fast, H200)
    assert _resolved(slow, UNKNOWN) != _resolved(fast, UNKNOWN)
    assert _resolved(slow, PCIE) != _resolved(fast, PCIE)
    off = [_config(collectives={"nccl_proto": p, "custom_all_reduce": False}) for p in ("LL", "Simple")]
    assert _resolved(off[0], H200) != _resolved(off[1], H200)


@pytest.mark.parametrize(
    ("ranks", "topology", "active"),
    [
        (8, H200, True),
        (8, PCIE, False),
        (2, PCIE, True),  # two PCIe GPUs may have peer access: unknown, so the setting stays
        (2, Topology(link="pcie", peer_access=False), False),
        (3, H200, False),
        (8, UNKNOWN, True),
    ],
)
def test_custom_all_reduce_is_dropped_where_the_machine_cannot(ranks: int, topology: Topology, active: bool) -> None:
    on, off = (_resolved(_config(ranks, collectives={"custom_all_reduce": value}), topology) for value in (True, False))
    assert (on != off) is active
    assert _resolved(_config(ranks), topology) == on


def test_unstated_fusion_depends_on_the_model_class_and_the_gpus() -> None:
    def fusion(arch: str | None, topology: Topology, stated: str | None = None) -> str | None:
        return _resolved(
            _config(collectives={"flashinfer_fusion": stated}), topology, arch
        ).collectives.flashinfer_fusion

    assert fusion("Qwen3MoeForCausalLM", H200) == fusion("Qwen3MoeForCausalLM", H200, "auto") == "trtllm"
    assert fusion("Qwen3MoeForCausalLM", B200) == "mnnvl"
    assert fusion("LlamaForCausalLM", H200) == "off"
    assert fusion("KimiK25ForConditionalGeneration", PCIE) == "off"
    assert fusion(None, H200) is None


def test_torch_symmetric_memory_falls_away_without_support() -> None:
    config = _config(collectives={"torch_symm_mem": True})
    assert _resolved(config, PCIE) == _resolved(_config(), PCIE)
    assert _resolved(config, H200) != _resolved(_config(), H200)


def test_deterministic_inference_pins_the_collectives() -> None:
    flags = {"extra_args": ("--enable-deterministic-inference",)}
    configs = [_config(**flags, collectives={"nccl_algo": algo}) for algo in (None, "Ring", "allreduce:tree")]
    assert len({_resolved(config) for config in configs}) == 1


def test_what_is_overruled_is_said_and_what_is_filled_in_is_not() -> None:
    chain = _config(speculation={**DRAFT, "num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 8})
    (words,) = rules.canonical(chain, None, UNKNOWN).rewrites
    assert "8 -> 4" in words
    assert rules.canonical(_config(speculation={"algorithm": "NGRAM"}), None, UNKNOWN).rewrites == ()


# -- the embedded engine


def test_embedded_engine_ignores_what_it_lacks() -> None:
    bare = _config(1, "embedded", speculation={"algorithm": "NGRAM", "num_draft_tokens": 12})
    busy = _config(
        1,
        "embedded",
        speculation={"algorithm": "NGRAM", "max_bfs_breadth": 4},
        attention_backend="triton",
        dtype="auto",
        collectives={"nccl_proto": "LL"},
    )
    assert _resolved(bare) == _resolved(busy)
    assert _resolved(bare).dtype == "float32"
    assert _resolved(bare) != _resolved(bare.model_copy(update={"dtype": "bfloat16"}))


@pytest.mark.parametrize(
    ("rule", "ranks", "speculation"),
    [
        ("embedded-algorithm", 1, DRAFT),
        ("embedded-ranks", 2, {"algorithm": "none"}),
        ("embedded-draft-model", 1, {"algorithm": "STANDALONE"}),
        ("embedded-window", 1, {"algorithm": "NGRAM", "num_draft_tokens": 1}),
    ],
)
def test_what_the_embedded_engine_refuses(rule: str, ranks: int, speculation: dict[str, Any]) -> None:
    assert rule in _broken(_config(ranks, "embedded", speculation=speculation))


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("speculation.EAGLE3.accept_threshold_single", 0.9, True),
        ("speculation.EAGLE3.accept_threshold_acc", 1.0, False),
        ("collectives.quant_communications", True, True),
        ("collectives.quant_communications", False, False),
        ("kv_cache_dtype", "fp8_e4m3", True),
        ("kv_cache_dtype", "bf16", False),
        ("env.SGLANG_SIMULATE_ACC_LEN", "3", True),
        ("extra_args", ("--kv-cache-dtype=fp8_e5m2",), True),
        ("extra_args", ("--log-level", "info"), False),
        ("collectives.nccl_proto", "LL", False),
    ],
)
def test_settings_that_change_the_output(name: str, value: Any, refused: bool) -> None:
    assert (rules.lossy(name, value) is not None) is refused


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0.5.17", (0, 5, 17)), ("0.5.23.post1", (0, 5, 23)), ("0.5.23rc1", (0, 5, 23)), (None, (0, 5, 23))],
)
def test_releases_are_compared_as_numbers(text: str | None, numbers: tuple[int, ...]) -> None:
    assert release_numbers(text) == numbers


def test_every_rule_has_a_name_of_its_own_and_says_why() -> None:
    assert len(set(rules.NAMES)) == len(rules.NAMES)


# -- properties

_drafts = st.fixed_dictionaries(
    {"algorithm": st.sampled_from(["EAGLE", "EAGLE3", "NEXTN", "STANDALONE"])},
    optional={
        "draft_model": st.just("d"),
        "num_steps": st.integers(1, 7),
        "eagle_topk": st.integers(1, 8),
        "num_draft_tokens": st.integers(1, 32),
        "adaptive": st.booleans(),
        "accept_threshold_single": st.just(1.0),
    },
)
_ngrams = st.fixed_dictionaries(
    {"algorithm": st.just("NGRAM")},
    optional={"num_draft_tokens": st.integers(1, 32), "max_bfs_breadth": st.integers(1, 12)},
)
_collectives = st.fixed_dictionaries(
    {},
    optional={
        "custom_all_reduce": st.booleans(),
        "symm_mem": st.booleans(),
        "torch_symm_mem": st.booleans(),
        "pcie_ipc": st.booleans(),
        "flashinfer_fusion": st.sampled_from(["off", "auto", "trtllm", "mnnvl", "cutedsl"]),
        "nccl_algo": st.sampled_from(["Ring", "Tree", "allreduce:tree"]),
        "nccl_proto": st.sampled_from(["LL", "LL128", "Simple"]),
        "nccl_max_nchannels": st.integers(1, 32),
        "nccl_p2p_disable": st.booleans(),
    },
)
_configs = st.builds(
    EngineConfig,
    engine=st.sampled_from(["sglang", "embedded"]),
    model=st.just("m"),
    tensor_parallel_size=st.sampled_from([1, 2, 3, 8]),
    speculation=st.one_of(st.just({"algorithm": "none"}), _drafts, _ngrams),
    collectives=_collectives,
    attention_backend=st.sampled_from([None, "triton", "trtllm_mha"]),
    dtype=st.sampled_from([None, "auto", "bfloat16"]),
    extra_args=st.sampled_from([(), ("--enable-dp-attention",), ("--enable-deterministic-inference",)]),
)
_topologies = st.sampled_from([UNKNOWN, H200, B200, PCIE, Topology(link="pcie", peer_access=False, sm=80)])
_archs = st.sampled_from([None, "LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
_releases = st.sampled_from([None, "0.5.17", "0.5.23"])


@given(_configs, _releases, _topologies, _archs)
def test_canonical_is_idempotent_and_valid(
    config: EngineConfig, release: str | None, topology: Topology, arch: str | None
) -> None:
    once = rules.canonical(config, release, topology, arch).config
    assert rules.canonical(once, release, topology, arch) == rules.Canonical(config=once)
    assert EngineConfig.model_validate(once.model_dump()) == once


@given(_configs, _configs, _topologies)
def test_equal_canonical_forms_have_equal_ids(a: EngineConfig, b: EngineConfig, topology: Topology) -> None:
    one, other = (rules.canonical(config, None, topology).config for config in (a, b))
    assert (one == other) is (one.config_id == other.config_id)


@given(_configs, _releases, _topologies, _archs)
def test_a_launchable_configuration_stays_launchable_in_canonical_form(
    config: EngineConfig, release: str | None, topology: Topology, arch: str | None
) -> None:
    if not rules.check(config, release, topology, arch):
        resolved = rules.canonical(config, release, topology, arch).config
        assert rules.check(resolved, release, topology, arch) == ()

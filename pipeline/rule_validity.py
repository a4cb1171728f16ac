"""What SGLang refuses, or dies of, as data: read in its source, or seen on real GPUs.

A rule looks at the configuration as SGLang would make it (`facts.config`), or at what was asked
(`facts.asked`) where SGLang raises before it rewrites.
"""

from __future__ import annotations

from pipeline.config import DraftModelSpeculation
from pipeline.rule_facts import (
    FLAG_FIELDS,
    NCCL_VARIABLES,
    OVERWRITTEN_VARIABLES,
    SELF_DRAFTING_ARCHITECTURES,
    SYMM_VARIABLES,
    Facts,
    Rule,
)

_ADAPTIVE_STEPS = (0, 1, 3, 5, 7)  # candidate_steps of SGLang's default adaptive configuration
_ALL_REDUCE_ONLY = {"tree", "nvlstree", "collnetdirect", "collnetchain"}


def _gpus(facts: Facts) -> str | None:
    have = facts.topology.gpu_count
    return f"{facts.ranks} GPUs needed, {have} here" if 0 < have < facts.ranks else None


def _asked_draft(facts: Facts) -> DraftModelSpeculation | None:
    """The draft shape as stated, unless adaptive speculation will really fill it in."""
    asked, adaptive = facts.asked.speculation, facts.drafting is not None and facts.drafting.adaptive
    return asked if isinstance(asked, DraftModelSpeculation) and not adaptive else None


def _partial_shape(facts: Facts) -> str | None:
    asked = _asked_draft(facts)
    if asked is None or asked.num_steps is not None or (asked.eagle_topk is None and asked.num_draft_tokens is None):
        return None
    return "num_steps is not stated, but eagle_topk or num_draft_tokens is"


def _missing_topk(facts: Facts) -> str | None:
    asked = _asked_draft(facts)
    if asked is None or asked.num_steps is None:
        return None
    if asked.eagle_topk is None:
        return "num_steps is stated without eagle_topk"
    if asked.eagle_topk > 1 and asked.num_draft_tokens is None:
        return f"eagle_topk {asked.eagle_topk} is stated without num_draft_tokens"
    return None


def _tree_capacity(facts: Facts) -> str | None:
    draft = facts.drafting
    if draft is None or not (draft.num_steps and draft.eagle_topk and draft.num_draft_tokens):
        return None
    steps, width, tokens = draft.num_steps, draft.eagle_topk, draft.num_draft_tokens
    room = width + (steps - 1) * width**2
    if width == 1 or tokens - 1 <= room:
        return None
    return f"a tree of {steps} steps and width {width} holds {room} drafts, not {tokens - 1}"


def _draft_model(facts: Facts) -> str | None:
    speculation = facts.drafting or facts.dflash
    if speculation is None or speculation.draft_model:
        return None
    if speculation.algorithm in ("EAGLE3", "STANDALONE", "DFLASH"):
        return f"{speculation.algorithm} without a draft model"
    if facts.architecture is None or facts.architecture in SELF_DRAFTING_ARCHITECTURES:
        return None
    return f"{facts.architecture} has no draft layer of its own"


def _narrow_backend(facts: Facts) -> str | None:
    draft, backend = facts.drafting, facts.config.attention_backend
    if draft is None or (draft.eagle_topk or 1) == 1 or backend not in ("trtllm_mha", "flashmla"):
        return None
    return f"eagle_topk {draft.eagle_topk} on {backend}"


def _paged_tree(facts: Facts) -> str | None:
    page = facts.number("--page-size")
    backend = facts.config.attention_backend
    if page <= 1 or backend is None:
        return None
    if facts.ngram is not None and (facts.ngram.max_bfs_breadth or 10) > 1 and backend != "flashinfer":
        return f"NGRAM trees with pages of {page} on {backend}"
    draft = facts.drafting
    if draft is not None and (draft.eagle_topk or 1) > 1 and backend not in ("flashinfer", "fa3", "triton"):
        return f"eagle_topk {draft.eagle_topk} with pages of {page} on {backend}"
    return None


def _adaptive_steps(facts: Facts) -> str | None:
    draft = facts.drafting
    if draft is None or not draft.adaptive or draft.adaptive_config or draft.num_steps in (None, *_ADAPTIVE_STEPS):
        return None
    return f"num_steps {draft.num_steps} is none of {', '.join(map(str, _ADAPTIVE_STEPS))}"


def _rejection(facts: Facts) -> str | None:
    if facts.flag("--speculative-use-rejection-sampling") is None or not facts.speculates:
        return None
    draft = facts.drafting
    if draft is None or draft.algorithm == "STANDALONE":
        return f"rejection sampling with {facts.config.speculation.algorithm}"
    if (draft.eagle_topk or 1) != 1:
        return f"rejection sampling with eagle_topk {draft.eagle_topk}"
    return "rejection sampling with accept thresholds" if _thresholds(draft) else None


def _thresholds(draft: DraftModelSpeculation) -> bool:
    return draft.accept_threshold_single is not None or draft.accept_threshold_acc is not None


def _attention_dp(facts: Facts) -> str | None:
    algorithm = facts.config.speculation.algorithm
    return (
        f"{algorithm} with data-parallel attention"
        if facts.attention_dp and algorithm in ("NGRAM", "STANDALONE")
        else None
    )


def _pipeline(facts: Facts) -> str | None:
    algorithm = facts.config.speculation.algorithm
    stages = facts.number("--pp-size", "--pp", "--pipeline-parallel-size")
    return f"{algorithm} over {stages} pipeline stages" if stages > 1 and algorithm not in ("none", "EAGLE") else None


def _ngram_backend(facts: Facts) -> str | None:
    return "NGRAM on torch_native" if facts.ngram and facts.config.attention_backend == "torch_native" else None


def _ngram_corpus(facts: Facts) -> str | None:
    ngram = facts.ngram
    if ngram is None or not ngram.external_corpus_path:
        return None
    budget, room = facts.number("--speculative-ngram-external-sam-budget", absent=0), (ngram.num_draft_tokens or 12) - 1
    return None if 1 <= budget <= room else f"a corpus budget of {budget} for {room} drafts"


def _fusion(facts: Facts) -> str | None:
    """The stated FlashInfer backend, where it will be used."""
    stated = facts.asked.collectives.flashinfer_fusion
    return stated if facts.ranks > 1 and stated not in (None, "off") else None


def _fusion_sm(facts: Facts) -> str | None:
    fusion = _fusion(facts)
    wrong = fusion and facts.sm_major not in (None, 9, 10)
    return f"fusion {fusion} on SM{facts.topology.sm}" if wrong else None


def _fusion_cutedsl(facts: Facts) -> str | None:
    wrong = _fusion(facts) == "cutedsl" and facts.sm_major == 9
    return f"fusion cutedsl on SM{facts.topology.sm}" if wrong else None


def _fusion_cutedsl_unknown(facts: Facts) -> str | None:
    return "fusion cutedsl" if _fusion(facts) == "cutedsl" else None


def _bare_algorithm(facts: Facts, names: set[str]) -> str | None:
    stated = facts.asked.collectives.nccl_algo
    if facts.ranks == 1 or not stated or ":" in stated or stated.startswith("^"):
        return None
    words = [word.strip().casefold() for word in stated.split(",")]
    return f"NCCL_ALGO={stated}; write allreduce:{words[0]}" if all(word in names for word in words) else None


def _bare_tree(facts: Facts) -> str | None:
    return _bare_algorithm(facts, _ALL_REDUCE_ONLY)


def _bare_nvls(facts: Facts) -> str | None:
    return _bare_algorithm(facts, {"nvls"})


def _channels(facts: Facts) -> str | None:
    low, high = facts.asked.collectives.nccl_min_nchannels, facts.asked.collectives.nccl_max_nchannels
    return f"from {low} to {high} channels" if low is not None and high is not None and low > high else None


def _said_twice(facts: Facts) -> str | None:
    for name, _ in facts.asked.env:
        if name in NCCL_VARIABLES:
            return f"{name} in env; state collectives.{NCCL_VARIABLES[name]}"
    for word in facts.asked.extra_args:
        flag = word.partition("=")[0]
        if flag in FLAG_FIELDS:
            return f"{flag} in extra_args; state {FLAG_FIELDS[flag]}"
    return None


def _overwritten(facts: Facts) -> str | None:
    named = {name for name, _ in facts.asked.env}
    symmetric = facts.asked.collectives.symm_mem or facts.flag("--enable-nccl-nvls") is not None
    for name in (*OVERWRITTEN_VARIABLES, *(SYMM_VARIABLES if symmetric else ())):
        if name in named:
            return f"{name} in env"
    return None


def _symm_mem_speculation(facts: Facts) -> str | None:
    risky = facts.config.collectives.symm_mem and facts.speculates and facts.ranks > 1
    return f"symm_mem with {facts.config.speculation.algorithm} on {facts.ranks} GPUs" if risky else None


def _embedded_lacks(facts: Facts) -> str | None:
    algorithm = facts.asked.speculation.algorithm
    return f"{algorithm} on the embedded engine" if algorithm not in ("none", "NGRAM", "STANDALONE") else None


def _embedded_ranks(facts: Facts) -> str | None:
    ranks = facts.asked.tensor_parallel_size
    return f"tensor_parallel_size {ranks} on one CPU" if ranks > 1 else None


def _embedded_draft(facts: Facts) -> str | None:
    draft = facts.drafting
    return "STANDALONE without a draft model" if draft is not None and not draft.draft_model else None


def _embedded_window(facts: Facts) -> str | None:
    tokens = facts.ngram.num_draft_tokens if facts.ngram else None
    return f"num_draft_tokens {tokens} leaves no draft" if tokens is not None and tokens < 2 else None


RULES = (
    Rule("gpu-count", "every tensor-parallel rank needs a GPU of its own", "measured", _gpus),
    Rule(
        "draft-shape-partial",
        "SGLang asserts, without a word, that num_steps comes with the other two",
        "read",
        _partial_shape,
    ),
    Rule(
        "draft-shape-topk",
        "SGLang compares the missing value with a number and dies of a TypeError",
        "read",
        _missing_topk,
    ),
    Rule("tree-capacity", "torch.topk fails at capture: 'selected index k out of range'", "read", _tree_capacity),
    Rule("draft-model", "SGLang would load the target twice and die", "read", _draft_model),
    Rule("narrow-backend", "this attention backend verifies chains only (eagle_topk 1)", "read", _narrow_backend),
    Rule("paged-tree", "this attention backend cannot verify a tree over pages", "read", _paged_tree),
    Rule("adaptive-steps", "adaptive speculation starts from one of its candidate steps", "read", _adaptive_steps),
    Rule(
        "rejection-sampling", "it works only for EAGLE and EAGLE3 chains with both thresholds at 1", "read", _rejection
    ),
    Rule("attention-dp", "SGLang refuses it", "read", _attention_dp),
    Rule("pipeline-parallel", "SGLang speculates over pipeline stages with EAGLE only", "read", _pipeline),
    Rule("ngram-torch-native", "the server reports startup and dies in its warm-up", "read", _ngram_backend),
    Rule(
        "ngram-corpus-budget",
        "--speculative-ngram-external-sam-budget must be 1 to num_draft_tokens - 1",
        "read",
        _ngram_corpus,
    ),
    Rule(
        "fusion-sm",
        "FlashInfer all-reduce fusion requires SM90 or SM10x; SGLang raises in the worker",
        "read",
        _fusion_sm,
    ),
    Rule("fusion-cutedsl-sm", "the cutedsl backend needs SM100", "read", _fusion_cutedsl, since=(0, 5, 23)),
    Rule(
        "fusion-cutedsl-release", "0.5.17 does not know this backend", "read", _fusion_cutedsl_unknown, until=(0, 5, 17)
    ),
    Rule(
        "bare-tree",
        "NCCL's Tree implements all-reduce only; the all-gather of the logits fails at capture",
        "measured",
        _bare_tree,
    ),
    Rule("bare-nvls", "NCCL's NVLS does not implement every collective; the others fail", "read", _bare_nvls),
    Rule("nccl-channels", "NCCL_MIN_NCHANNELS is above NCCL_MAX_NCHANNELS", "read", _channels),
    Rule("said-twice", "one of the two would silently overwrite the other", "read", _said_twice),
    Rule("overwritten-variable", "SGLang overwrites this variable by itself", "read", _overwritten),
    Rule(
        "embedded-algorithm",
        "the embedded engine has none, NGRAM and STANDALONE",
        "read",
        _embedded_lacks,
        engine="embedded",
    ),
    Rule("embedded-ranks", "the embedded engine runs in one process", "read", _embedded_ranks, engine="embedded"),
    Rule("embedded-draft-model", "STANDALONE drafts with a second model", "read", _embedded_draft, engine="embedded"),
    Rule("embedded-window", "num_draft_tokens counts the bonus token", "read", _embedded_window, engine="embedded"),
)

# Launchable, but worth a word: these trials must be checked with care.
WARNINGS = (
    Rule(
        "symm-mem-speculation",
        "reported to corrupt output silently, with a perfect accept length",
        "read",
        _symm_mem_speculation,
    ),
)

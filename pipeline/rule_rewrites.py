"""What SGLang changes by itself, as data, in the order in which it matters.

Two configurations that come out alike are one launch. A setting that nothing reads becomes None.
"""

from __future__ import annotations

from typing import Any

from pipeline.config import NGRAM_DEFAULTS, Collectives, DraftModelSpeculation, NgramSpeculation
from pipeline.rule_facts import (
    CUTEDSL_ARCHITECTURES,
    FUSED_ARCHITECTURES,
    NCCL_FIELDS,
    WIDE_TREE_ARCHITECTURES,
    Facts,
    Rewrite,
)

_SWITCHES = (
    "mscclpp", "torch_symm_mem", "symm_mem", "pcie_ipc", "quant_communications", "nccl_p2p_disable", "nccl_shm_disable",
)  # fmt: skip
_EMBEDDED_KEEPS = {"engine", "model", "tensor_parallel_size", "speculation", "collectives", "dtype", "context_length",
                   "max_running_requests", "extra_args", "env"}  # fmt: skip

Changes = dict[str, Any]


def _single_rank(facts: Facts) -> Changes:
    stated = facts.config.collectives.model_dump(exclude_none=True)
    return {f"collectives.{name}": None for name in stated} if facts.ranks == 1 else {}


def _switches_off(facts: Facts) -> Changes:
    return {f"collectives.{name}": None for name in _SWITCHES if getattr(facts.config.collectives, name) is False}


def _deterministic(facts: Facts) -> Changes:
    if facts.flag("--enable-deterministic-inference") is None or facts.ranks == 1:
        return {}
    return {
        "collectives.nccl_algo": "allreduce:tree", "collectives.nccl_min_nchannels": None,
        "collectives.nccl_max_nchannels": None, "collectives.custom_all_reduce": False,
        "collectives.torch_symm_mem": None, "collectives.flashinfer_fusion": "off",
        "sampling_backend": "pytorch",
    }  # fmt: skip


def _custom_all_reduce(facts: Facts) -> Changes:
    if facts.ranks == 1:
        return {}
    return {"collectives.custom_all_reduce": facts.custom_all_reduce_active is not False}


def _torch_symm_mem(facts: Facts) -> Changes:
    lacking = facts.ranks not in (2, 4, 6, 8) or facts.sm_major not in (None, 9, 10)
    return {"collectives.torch_symm_mem": None} if facts.config.collectives.torch_symm_mem and lacking else {}


def _pcie_ipc(facts: Facts) -> Changes:
    return {"collectives.pcie_ipc": None} if facts.config.collectives.pcie_ipc else {}


def _fusion(facts: Facts) -> Changes:
    """Resolve `auto` and "not stated" as far as the model's class and the GPUs tell."""
    stated: str | None = facts.config.collectives.flashinfer_fusion
    if facts.ranks == 1 or stated not in (None, "auto"):
        return {}
    if stated is None:
        stated = _unstated_fusion(facts)
    if stated == "auto" and facts.sm_major in (9, 10):
        stated = "trtllm" if facts.sm_major == 9 else "mnnvl"
    return {"collectives.flashinfer_fusion": stated}


def _unstated_fusion(facts: Facts) -> str | None:
    if facts.sm_major not in (None, 9, 10) or facts.attention_dp:
        return "off"
    if facts.architecture is None:
        return None
    if facts.architecture in CUTEDSL_ARCHITECTURES:
        return None  # depends on more than is known here
    if facts.architecture not in FUSED_ARCHITECTURES:
        return "off"
    moved = facts.flag("--moe-a2a-backend") not in (None, "none")
    return "off" if moved else "auto"


def _nccl_dead(facts: Facts) -> Changes:
    if facts.custom_all_reduce_active is not True:
        return {}
    collectives = facts.config.collectives
    return {f"collectives.{name}": None for name in NCCL_FIELDS if getattr(collectives, name) is not None}


def _nextn(facts: Facts) -> Changes:
    draft = facts.drafting
    return {"speculation.algorithm": "EAGLE"} if draft is not None and draft.algorithm == "NEXTN" else {}


def _thresholds(facts: Facts) -> Changes:
    draft = facts.drafting
    names = ("accept_threshold_single", "accept_threshold_acc")
    return {f"speculation.{name}": None for name in names if draft is not None and getattr(draft, name) == 1.0}


def _adaptive(facts: Facts) -> Changes:
    draft = facts.drafting
    if draft is None or not draft.adaptive:
        return {}
    if draft.algorithm == "STANDALONE" or draft.eagle_topk not in (None, 1) or facts.attention_dp:
        return {"speculation.adaptive": False, "speculation.adaptive_config": None}
    steps = draft.num_steps or (None if draft.adaptive_config else 3)  # the middle of its candidate steps
    return {
        "speculation.eagle_topk": 1, "speculation.num_steps": steps,
        "speculation.num_draft_tokens": None if steps is None else steps + 1,
    }  # fmt: skip


def _adaptive_config(facts: Facts) -> Changes:
    draft = facts.drafting
    return {"speculation.adaptive_config": None} if draft is not None and not draft.adaptive else {}


def _default_shape(facts: Facts) -> Changes:
    draft = facts.drafting
    if draft is None or (draft.num_steps, draft.eagle_topk, draft.num_draft_tokens) != (None, None, None):
        return {}
    if draft.adaptive or (draft.algorithm != "STANDALONE" and facts.architecture is None):
        return {}
    wide = draft.algorithm != "STANDALONE" and facts.architecture in WIDE_TREE_ARCHITECTURES
    return _shape(*((5, 4, 8) if wide else (3, 1, 4)))


def _shape(steps: int, width: int, tokens: int) -> Changes:
    return {
        "speculation.num_steps": steps, "speculation.eagle_topk": width, "speculation.num_draft_tokens": tokens,
    }  # fmt: skip


def _chain(facts: Facts) -> Changes:
    draft = facts.drafting
    if draft is None or draft.eagle_topk != 1 or draft.num_steps is None:
        return {}
    return {"speculation.num_draft_tokens": draft.num_steps + 1}


def _ngram_defaults(facts: Facts) -> Changes:
    ngram = facts.ngram
    if ngram is None:
        return {}
    return {f"speculation.{n}": v for n, v in NGRAM_DEFAULTS["sglang"].items() if getattr(ngram, n) is None}


def _embedded_settings(facts: Facts) -> Changes:
    unused = [name for name in type(facts.config).model_fields if name not in _EMBEDDED_KEEPS]
    fields = type(facts.config).model_fields
    found: Changes = {name: fields[name].default for name in unused}
    found |= {f"collectives.{name}": None for name in Collectives.model_fields}
    return found


def _embedded_dtype(facts: Facts) -> Changes:
    return {"dtype": "float32"} if facts.config.dtype in (None, "auto") else {}


def _embedded_ngram(facts: Facts) -> Changes:
    ngram = facts.ngram
    if ngram is None:
        return {}
    usual = NGRAM_DEFAULTS["embedded"]
    names = [name for name in NgramSpeculation.model_fields if name != "algorithm"]
    return {f"speculation.{n}": (getattr(ngram, n) or usual[n]) if n in usual else None for n in names}


def _embedded_chain(facts: Facts) -> Changes:
    draft = facts.drafting
    if draft is None:
        return {}
    kept = ("algorithm", "draft_model")
    fields = DraftModelSpeculation.model_fields
    steps = draft.num_steps or 3
    return {f"speculation.{n}": f.default for n, f in fields.items() if n not in kept} | _shape(steps, 1, steps + 1)


REWRITES = (
    Rewrite("single-rank", "one rank has nobody to talk to", "read", _single_rank),
    Rewrite("switch-off", "off is what not stated means", "read", _switches_off),
    Rewrite("deterministic", "deterministic inference pins the collectives", "read", _deterministic),
    Rewrite(
        "custom-all-reduce", "on by default; SGLang drops it where the machine cannot do it", "read", _custom_all_reduce
    ),
    Rewrite(
        "torch-symm-mem", "not available for these GPUs and this many ranks; SGLang only warns", "read", _torch_symm_mem
    ),
    Rewrite("pcie-ipc", "this release does not know the variable", "read", _pcie_ipc, until=(0, 5, 17)),
    Rewrite("fusion", "auto depends on the GPUs, and not stated on the model's class too", "read", _fusion),
    Rewrite("nccl-dead", "SGLang's own all-reduce goes first, NCCL barely sees decoding", "measured", _nccl_dead),
    Rewrite("nextn", "NEXTN is EAGLE by another name", "read", _nextn),
    Rewrite("thresholds", "1 is the default", "read", _thresholds),
    Rewrite("adaptive", "adaptive speculation is a chain, and off where it is not supported", "read", _adaptive),
    Rewrite("adaptive-config", "read only with adaptive speculation", "read", _adaptive_config),
    Rewrite("default-shape", "SGLang's own draft shape for this model's class", "read", _default_shape),
    Rewrite("chain", "eagle_topk 1 is a chain: num_draft_tokens becomes num_steps + 1", "read", _chain),
    Rewrite("ngram-defaults", "SGLang's own NGRAM settings", "measured", _ngram_defaults),
    Rewrite(
        "embedded-settings", "the embedded engine has no such setting", "read", _embedded_settings, engine="embedded"
    ),
    Rewrite("embedded-dtype", "float32 is the embedded engine's default", "read", _embedded_dtype, engine="embedded"),
    Rewrite("embedded-ngram", "the embedded engine's own NGRAM settings", "read", _embedded_ngram, engine="embedded"),
    Rewrite("embedded-chain", "the embedded engine drafts a chain", "read", _embedded_chain, engine="embedded"),
)

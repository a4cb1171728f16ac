"""What a rule may look at, and what SGLang's flags and variables are called in a configuration."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.config import (
    Collectives,
    DflashSpeculation,
    DraftModelSpeculation,
    EngineConfig,
    EngineName,
    NgramSpeculation,
)
from pipeline.records import Topology

NEWEST = (0, 5, 23)  # rules of an unknown release are this one's
Source = Literal["measured", "read"]

# Variables that a configuration states through `collectives`.
NCCL_FIELDS = tuple(name for name in Collectives.model_fields if name.startswith("nccl_"))
NCCL_VARIABLES = {name.upper(): name for name in NCCL_FIELDS}
# Flags that a configuration states through its own fields.
FLAG_FIELDS = {
    "--model": "model", "--model-path": "model", "--tp": "tensor_parallel_size", "--tp-size": "tensor_parallel_size",
    "--tensor-parallel-size": "tensor_parallel_size", "--attention-backend": "attention_backend",
    "--sampling-backend": "sampling_backend", "--dtype": "dtype", "--kv-cache-dtype": "kv_cache_dtype",
    "--load-format": "load_format", "--context-length": "context_length",
    "--max-running-requests": "max_running_requests", "--mem-fraction-static": "mem_fraction_static",
    "--cuda-graph-max-bs-decode": "cuda_graph_max_bs", "--disable-prefill-cuda-graph": "prefill_cuda_graph",
    "--trust-remote-code": "trust_remote_code", "--disable-custom-all-reduce": "collectives.custom_all_reduce",
    "--enable-mscclpp": "collectives.mscclpp", "--enable-torch-symm-mem": "collectives.torch_symm_mem",
    "--enable-symm-mem": "collectives.symm_mem", "--enable-quant-communications": "collectives.quant_communications",
    "--flashinfer-allreduce-fusion-backend": "collectives.flashinfer_fusion",
    "--enforce-disable-flashinfer-allreduce-fusion": "collectives.flashinfer_fusion",
    "--enable-flashinfer-allreduce-fusion": "collectives.flashinfer_fusion",
    "--speculative-algorithm": "speculation", "--speculative-draft-model-path": "draft_models",
    "--speculative-num-steps": "speculation", "--speculative-eagle-topk": "speculation",
    "--speculative-num-draft-tokens": "speculation", "--speculative-adaptive": "speculation",
    "--speculative-accept-threshold-single": "speculation", "--speculative-accept-threshold-acc": "speculation",
}  # fmt: skip
# SGLang sets these itself, whatever the environment says.
OVERWRITTEN_VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS",)
# --enable-symm-mem and --enable-nccl-nvls overwrite these.
SYMM_VARIABLES = ("NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE")

# Model classes for which "not stated" turns FlashInfer all-reduce fusion on (SM90 and SM10x, tensor-parallel).
FUSED_ARCHITECTURES = frozenset(
    {
        "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "GptOssForCausalLM",
        "GlmMoeDsaForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "MistralLarge3ForCausalLM",
        "Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration", "Qwen3NextForCausalLM",
        "Qwen4ExpForConditionalGeneration", "KimiK25ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
        "InternS2PreviewForConditionalGeneration", "Qwen3_5ForConditionalGeneration", "NemotronHForCausalLM",
        "NemotronHPuzzleForCausalLM", "NemotronH_Omni_Reasoning_V3",
    }
)  # fmt: skip
CUTEDSL_ARCHITECTURES = frozenset({"MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM"})
# Model classes that carry their own draft layer, so that EAGLE and NEXTN need no draft model.
SELF_DRAFTING_ARCHITECTURES = frozenset(
    {
        "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM",
        "BailingMoeV2_5ForCausalLM", "MistralLarge3ForCausalLM", "PixtralForConditionalGeneration",
        "HYV3ForCausalLM", "HYV4ForCausalLM", "Qwen4ExpForConditionalGeneration",
    }
)  # fmt: skip
WIDE_TREE_ARCHITECTURES = frozenset({"LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM"})


@dataclass(frozen=True)
class Facts:
    """One configuration on one machine. `asked` is as stated, `config` as SGLang would make it."""

    asked: EngineConfig
    config: EngineConfig
    release: tuple[int, ...]
    topology: Topology
    architecture: str | None

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks."""
        return self.config.tensor_parallel_size

    @property
    def sm_major(self) -> int | None:
        """9 for Hopper, 10 for data-centre Blackwell, 12 for RTX PRO 6000; None where unknown."""
        return None if self.topology.sm is None else self.topology.sm // 10

    @property
    def drafting(self) -> DraftModelSpeculation | None:
        """The speculation with a draft model, if it is one."""
        return self.config.speculation if isinstance(self.config.speculation, DraftModelSpeculation) else None

    @property
    def ngram(self) -> NgramSpeculation | None:
        """NGRAM, if it is."""
        return self.config.speculation if isinstance(self.config.speculation, NgramSpeculation) else None

    @property
    def dflash(self) -> DflashSpeculation | None:
        """DFLASH, if it is."""
        return self.config.speculation if isinstance(self.config.speculation, DflashSpeculation) else None

    @property
    def speculates(self) -> bool:
        """True for every algorithm but `none`."""
        return self.config.speculation.algorithm != "none"

    def flag(self, *names: str) -> str | None:
        """The value of the first of these flags in `extra_args`; an empty text for a switch, None if absent."""
        words = self.config.extra_args
        for index, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name in names:
                following = words[index + 1] if index + 1 < len(words) else "--"
                return value if equals else ("" if following.startswith("--") else following)
        return None

    def number(self, *names: str, absent: int = 1) -> int:
        """The whole number that a flag gives, `absent` where there is none."""
        text = self.flag(*names) or ""
        return int(text) if text.isdecimal() else absent

    @property
    def attention_dp(self) -> bool:
        """True where attention is data-parallel."""
        return self.flag("--enable-dp-attention") is not None or self.number("--attn-dp-size") > 1

    @property
    def custom_all_reduce_active(self) -> bool | None:
        """Whether SGLang will really use its own all-reduce; None where the machine does not tell.

        SGLang drops it by itself on unsupported sizes, on more than two PCIe-only GPUs and without peer access.
        """
        stated, link = self.config.collectives.custom_all_reduce, self.topology.link
        if stated is False or self.ranks not in (2, 4, 6, 8) or self.topology.peer_access is False:
            return False
        if link == "pcie" and self.ranks > 2:
            return False
        known = link == "nvlink" or (link == "pcie" and self.topology.peer_access is True)
        return True if known else None


@dataclass(frozen=True)
class Rule:
    """One rule of validity. `broken` says what is wrong, or None; `since` and `until` are inclusive releases."""

    name: str
    reason: str
    source: Source
    broken: Callable[[Facts], str | None]
    since: tuple[int, ...] = ()
    until: tuple[int, ...] | None = None
    engine: EngineName = "sglang"


@dataclass(frozen=True)
class Rewrite:
    """Something SGLang silently changes. `changes` gives flat names and what they become."""

    name: str
    reason: str
    source: Source
    changes: Callable[[Facts], dict[str, Any]]
    since: tuple[int, ...] = ()
    until: tuple[int, ...] | None = None
    engine: EngineName = "sglang"


def holds(rule: Rule | Rewrite, engine: EngineName, release: tuple[int, ...]) -> bool:
    """True where the rule belongs to this engine and release."""
    return rule.engine == engine and release >= rule.since and (rule.until is None or release <= rule.until)


def release_numbers(text: str | None) -> tuple[int, ...]:
    """`0.5.17.post1` -> (0, 5, 17); unknown counts as the newest release that the rules were read in."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text or "")
    return tuple(int(part) for part in found.groups("0")) if found else NEWEST

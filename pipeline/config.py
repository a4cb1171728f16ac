"""What one engine launch is asked to be: frozen, validated, hashable, without side effects.

`None` means "not stated: the engine decides". Nothing here reads the machine, files or the
environment; whether a release of SGLang accepts the configuration is `rules.py`'s business.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

EngineName = Literal["sglang", "embedded"]
FusionBackend = Literal["off", "auto", "trtllm", "mnnvl", "cutedsl"]


class Frozen(BaseModel):
    """Base of all models: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class NoSpeculation(Frozen):
    """Plain decoding: one token a step."""

    algorithm: Literal["none"] = "none"


class NgramSpeculation(Frozen):
    """Drafts copied from the prompt and past output. Names follow `--speculative-ngram-*`."""

    algorithm: Literal["NGRAM"] = "NGRAM"
    num_draft_tokens: PositiveInt | None = None
    min_bfs_breadth: PositiveInt | None = None
    max_bfs_breadth: PositiveInt | None = None
    match_type: Literal["BFS", "PROB"] | None = None
    max_trie_depth: PositiveInt | None = None
    external_corpus_path: str | None = None


class DraftModelSpeculation(Frozen):
    """Drafts from a second model: an EAGLE head, an MTP head (NEXTN) or a small model (STANDALONE).

    `num_steps`, `eagle_topk` and `num_draft_tokens` are all set or all None (SGLang asserts otherwise).
    """

    algorithm: Literal["EAGLE", "EAGLE3", "NEXTN", "STANDALONE"]
    draft_model: str | None = None
    num_steps: PositiveInt | None = None
    eagle_topk: PositiveInt | None = None
    num_draft_tokens: PositiveInt | None = None
    adaptive: bool = False
    adaptive_config: str | None = None
    accept_threshold_single: float | None = None
    accept_threshold_acc: float | None = None


class DflashSpeculation(Frozen):
    """Block-diffusion drafts, verified a block at a time."""

    algorithm: Literal["DFLASH"] = "DFLASH"
    draft_model: str | None = None
    block_size: PositiveInt | None = None


Speculation = Annotated[
    NoSpeculation | NgramSpeculation | DraftModelSpeculation | DflashSpeculation,
    Field(discriminator="algorithm"),
]


class Collectives(Frozen):
    """How tensor-parallel ranks talk. `nccl_*` become NCCL_* variables, verbatim."""

    custom_all_reduce: bool | None = None
    mscclpp: bool | None = None
    torch_symm_mem: bool | None = None
    symm_mem: bool | None = None
    pcie_ipc: bool | None = None
    flashinfer_fusion: FusionBackend | None = None
    quant_communications: bool | None = None
    nccl_algo: str | None = None
    nccl_proto: str | None = None
    nccl_min_nchannels: PositiveInt | None = None
    nccl_max_nchannels: PositiveInt | None = None
    nccl_buffsize: PositiveInt | None = None
    nccl_nthreads: PositiveInt | None = None
    nccl_p2p_level: str | None = None
    nccl_p2p_disable: bool | None = None
    nccl_shm_disable: bool | None = None


class EngineConfig(Frozen):
    """One launchable configuration. Two equal configurations are one trial."""

    engine: EngineName
    model: str
    tensor_parallel_size: PositiveInt = 1
    speculation: Speculation = NoSpeculation()
    collectives: Collectives = Collectives()
    attention_backend: str | None = None
    sampling_backend: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    load_format: str | None = None
    context_length: PositiveInt | None = None
    max_running_requests: PositiveInt = 48
    mem_fraction_static: float | None = Field(default=None, gt=0, lt=1)
    cuda_graph_max_bs: PositiveInt | None = None
    prefill_cuda_graph: bool | None = None
    trust_remote_code: bool = False
    extra_args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    @property
    def config_id(self) -> str:
        """Twelve hex digits that name this configuration's content."""
        text = json.dumps(self.model_dump(mode="json", exclude_none=True), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def words(self, beside: EngineConfig | None = None) -> str:
        """A short description for tables, such as `NGRAM draft=8 nccl_proto=LL`, without what is usual for n-grams.

        Args:
            beside: a configuration whose settings need not be said again, such as the baseline.
        """
        spec = self.speculation.model_dump(exclude_none=True, exclude={"draft_model", "adaptive_config"})
        usual = NGRAM_DEFAULTS[self.engine] if spec["algorithm"] == "NGRAM" else {}
        parts = [str(spec.pop("algorithm"))]
        parts += [
            f"{_SHORT.get(key, key)}={value}"
            for key, value in spec.items()
            if value is not False and (key == "num_draft_tokens" or value != usual.get(key))
        ]
        collectives = self.collectives.model_dump(exclude_none=True)
        parts += [f"{_SHORT.get(key, key)}={_word(value)}" for key, value in collectives.items()]
        own = {name: getattr(self, name) for name in _ENGINE_WORDS}
        parts += [f"{_SHORT.get(name, name)}={_word(value)}" for name, value in own.items() if value is not None]
        parts += [f"{name}={value}" for name, value in self.env]
        known = set(beside.words().split()) if beside is not None else set()
        return " ".join(part for part in parts if "=" not in part or part not in known)


# What each engine takes where an n-gram setting is not stated.
NGRAM_DEFAULTS: dict[EngineName, dict[str, int | str]] = {
    "sglang": {
        "num_draft_tokens": 12, "min_bfs_breadth": 1, "max_bfs_breadth": 10, "match_type": "BFS", "max_trie_depth": 18,
    },
    "embedded": {"num_draft_tokens": 12, "max_trie_depth": 2},
}  # fmt: skip

# The engine's own settings that two configurations of a study may differ in.
_ENGINE_WORDS = (
    "attention_backend", "sampling_backend", "dtype", "kv_cache_dtype", "load_format", "mem_fraction_static",
    "cuda_graph_max_bs", "prefill_cuda_graph",
)  # fmt: skip

_SHORT = {
    "attention_backend": "attn",
    "sampling_backend": "sampling",
    "kv_cache_dtype": "kv",
    "mem_fraction_static": "mem",
    "cuda_graph_max_bs": "graph_bs",
    "prefill_cuda_graph": "prefill_graph",
    "num_draft_tokens": "draft",
    "num_steps": "steps",
    "eagle_topk": "topk",
    "custom_all_reduce": "car",
    "flashinfer_fusion": "fusion",
    "nccl_min_nchannels": "nccl_min_ch",
    "nccl_max_nchannels": "nccl_max_ch",
}


def _word(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)

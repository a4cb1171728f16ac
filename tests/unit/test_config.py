"""A configuration in words: what a reader of a table must tell apart, and nothing that is the same everywhere."""

from __future__ import annotations

import pytest

from pipeline.config import NGRAM_DEFAULTS, Collectives, EngineConfig, EngineName, NgramSpeculation


@pytest.mark.parametrize(
    ("engine", "changed", "words"),
    [
        ("sglang", {}, "NGRAM draft=12 nccl_proto=LL"),
        ("sglang", {"max_bfs_breadth": 4, "num_draft_tokens": 8}, "NGRAM draft=8 max_bfs_breadth=4 nccl_proto=LL"),
        ("embedded", {"num_draft_tokens": 4}, "NGRAM draft=4 nccl_proto=LL"),
        ("embedded", {"max_trie_depth": 18}, "NGRAM draft=12 max_trie_depth=18 nccl_proto=LL"),
    ],
)
def test_what_an_engine_takes_anyway_is_left_out_of_the_words(
    engine: EngineName, changed: dict[str, int], words: str
) -> None:
    speculation = NgramSpeculation.model_validate(NGRAM_DEFAULTS[engine] | changed)
    config = EngineConfig(engine=engine, model="m", speculation=speculation, collectives=Collectives(nccl_proto="LL"))
    assert config.words() == words


def test_settings_that_two_configurations_differ_in_are_in_their_words_and_shared_ones_need_not_be() -> None:
    # Real SGLang on a CPU: a study's three configurations were all "none attn=torch_native".
    base = EngineConfig(engine="sglang", model="m", dtype="float32", env=(("OMP_NUM_THREADS", "1"),))
    other = base.model_copy(update={"sampling_backend": "flashinfer", "prefill_cuda_graph": False})
    assert base.words() == "none dtype=float32 OMP_NUM_THREADS=1"
    assert other.words() == "none sampling=flashinfer dtype=float32 prefill_graph=off OMP_NUM_THREADS=1"
    assert (base.words(beside=base), other.words(beside=base)) == ("none", "none sampling=flashinfer prefill_graph=off")

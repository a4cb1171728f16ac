"""The SGLang launch plan: its text is the contract."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import (
    Collectives,
    DflashSpeculation,
    DraftModelSpeculation,
    EngineConfig,
    NgramSpeculation,
    NoSpeculation,
    Speculation,
)
from pipeline.errors import InputError
from pipeline.records import Launch
from serve.engines.sglang import asked_not_got, child_environment, plan

FIXTURES = Path(__file__).parent.parent / "fixtures" / "sglang-0.5.17"


def launch(config: EngineConfig, release: str = "0.5.23", inherited: dict[str, str] | None = None) -> Launch:
    return plan(config, port=30001, gpu_ids=(0, 1), inherited=inherited or {}, release=release, command=("sgl",))


def text(config: EngineConfig, release: str = "0.5.23") -> str:
    return " ".join(launch(config, release).argv)


PLAIN = NoSpeculation()


def config(speculation: Speculation = PLAIN, **more: object) -> EngineConfig:
    return EngineConfig.model_validate(
        {"engine": "sglang", "model": "org/m", "tensor_parallel_size": 2, "speculation": speculation, **more}
    )


HEAD = "sgl --model-path org/m --tp-size 2"
TAIL = "--max-running-requests 48 --host 127.0.0.1 --port 30001 --enable-metrics --decode-log-interval 8"


@pytest.mark.parametrize("release", ["0.5.17", "0.5.23"])
@pytest.mark.parametrize(
    ("speculation", "golden"),
    [
        (NoSpeculation(), ""),
        (
            NgramSpeculation(num_draft_tokens=8, max_bfs_breadth=4, match_type="PROB", max_trie_depth=12),
            "--speculative-algorithm NGRAM --speculative-num-draft-tokens 8 --speculative-ngram-max-bfs-breadth 4 "
            "--speculative-ngram-match-type PROB --speculative-ngram-max-trie-depth 12 ",
        ),
        (
            NgramSpeculation(min_bfs_breadth=1, external_corpus_path="corpus.jsonl"),
            "--speculative-algorithm NGRAM --speculative-ngram-min-bfs-breadth 1 "
            "--speculative-ngram-external-corpus-path corpus.jsonl ",
        ),
        (
            DraftModelSpeculation(
                algorithm="EAGLE3", draft_model="org/head", num_steps=3, eagle_topk=4, num_draft_tokens=8
            ),
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path org/head --speculative-num-steps 3 "
            "--speculative-eagle-topk 4 --speculative-num-draft-tokens 8 ",
        ),
        (
            DraftModelSpeculation(algorithm="EAGLE", adaptive=True, adaptive_config="a.json"),
            "--speculative-algorithm EAGLE --speculative-adaptive --speculative-adaptive-config a.json ",
        ),
        (
            DraftModelSpeculation(algorithm="STANDALONE", draft_model="d", accept_threshold_single=0.9),
            "--speculative-algorithm STANDALONE --speculative-draft-model-path d "
            "--speculative-accept-threshold-single 0.9 ",
        ),
        (DraftModelSpeculation(algorithm="NEXTN"), "--speculative-algorithm NEXTN "),
        (
            DflashSpeculation(draft_model="d", block_size=16),
            "--speculative-algorithm DFLASH --speculative-draft-model-path d --speculative-dflash-block-size 16 ",
        ),
    ],
)
def test_each_speculation_is_spelled_in_both_releases(speculation: Speculation, golden: str, release: str) -> None:
    assert text(config(speculation), release) == f"{HEAD} {golden}{TAIL}"


@pytest.mark.parametrize(
    ("collectives", "golden"),
    [
        (Collectives(custom_all_reduce=False), "--disable-custom-all-reduce "),
        (Collectives(custom_all_reduce=True), ""),
        (Collectives(flashinfer_fusion="off"), "--enforce-disable-flashinfer-allreduce-fusion "),
        (Collectives(flashinfer_fusion="auto"), "--flashinfer-allreduce-fusion-backend auto "),
        (Collectives(flashinfer_fusion="trtllm"), "--flashinfer-allreduce-fusion-backend trtllm "),
        (Collectives(flashinfer_fusion="mnnvl"), "--flashinfer-allreduce-fusion-backend mnnvl "),
        (Collectives(flashinfer_fusion="cutedsl"), "--flashinfer-allreduce-fusion-backend cutedsl "),
        (Collectives(mscclpp=True, torch_symm_mem=True), "--enable-mscclpp --enable-torch-symm-mem "),
        (Collectives(symm_mem=True, quant_communications=True), "--enable-symm-mem --enable-quant-communications "),
        (Collectives(mscclpp=False, symm_mem=False), ""),
    ],
)
def test_each_collective_is_spelled(collectives: Collectives, golden: str) -> None:
    assert text(config(collectives=collectives)) == f"{HEAD} {golden}{TAIL}"


def test_every_other_setting_is_spelled() -> None:
    asked = config(
        attention_backend="triton",
        sampling_backend="pytorch",
        dtype="bfloat16",
        kv_cache_dtype="fp8_e4m3",
        load_format="dummy",
        context_length=4096,
        max_running_requests=64,
        mem_fraction_static=0.8,
        cuda_graph_max_bs=16,
        prefill_cuda_graph=False,
        trust_remote_code=True,
        extra_args=("--random-seed", "7"),
    )
    assert text(asked) == (
        f"{HEAD} --attention-backend triton --sampling-backend pytorch --dtype bfloat16 --kv-cache-dtype fp8_e4m3 "
        "--load-format dummy --context-length 4096 --max-running-requests 64 --mem-fraction-static 0.8 "
        "--cuda-graph-max-bs-decode 16 --disable-prefill-cuda-graph --trust-remote-code --host 127.0.0.1 --port 30001 "
        "--enable-metrics --decode-log-interval 8 --random-seed 7"
    )


def test_nccl_settings_and_gpus_become_variables() -> None:
    asked = Collectives(
        nccl_algo="allreduce:tree",
        nccl_proto="LL128",
        nccl_min_nchannels=2,
        nccl_max_nchannels=8,
        nccl_buffsize=4194304,
        nccl_nthreads=256,
        nccl_p2p_level="PHB",
        nccl_p2p_disable=True,
        nccl_shm_disable=False,
    )
    assert launch(config(collectives=asked, env=(("NCCL_DEBUG", "WARN"),))).env == {
        "NCCL_ALGO": "allreduce:tree",
        "NCCL_PROTO": "LL128",
        "NCCL_MIN_NCHANNELS": "2",
        "NCCL_MAX_NCHANNELS": "8",
        "NCCL_BUFFSIZE": "4194304",
        "NCCL_NTHREADS": "256",
        "NCCL_P2P_LEVEL": "PHB",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "0",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "WARN",
    }


def test_pcie_ipc_is_a_variable_that_only_the_newer_release_has() -> None:
    asked = config(collectives=Collectives(pcie_ipc=True))
    assert launch(asked).env["SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"] == "1"
    with pytest.raises(InputError, match=r"0\.5\.17 has no PCIe-IPC"):
        launch(asked, "0.5.17")
    assert (
        "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE" not in launch(config(collectives=Collectives(pcie_ipc=False)), "0.5.17").env
    )


def test_stale_variables_are_scrubbed_and_places_survive() -> None:
    inherited = {
        "PATH": "/bin",
        "PYTHONPATH": "lib",
        "HF_HOME": "hf",
        "CUDA_HOME": "/usr/local/cuda",
        "FLASHINFER_WORKSPACE_DIR": "fi",
        "NCCL_ALGO": "Ring",
        "NCCL_NVLS_ENABLE": "1",
        "SGLANG_SIMULATE_ACC_LEN": "4",
        "CUDA_LAUNCH_BLOCKING": "1",
        "CUDA_VISIBLE_DEVICES": "GPU-1234",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "OMP_NUM_THREADS": "1",
    }
    planned = launch(config(), inherited=inherited)
    assert planned.scrubbed == (
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_VISIBLE_DEVICES",
        "NCCL_ALGO",
        "NCCL_NVLS_ENABLE",
        "OMP_NUM_THREADS",
        "SGLANG_SIMULATE_ACC_LEN",
        "TORCH_NCCL_BLOCKING_WAIT",
    )
    child = child_environment(planned, inherited)
    assert child == {
        "PATH": "/bin",
        "PYTHONPATH": "lib",
        "HF_HOME": "hf",
        "CUDA_HOME": "/usr/local/cuda",
        "FLASHINFER_WORKSPACE_DIR": "fi",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }


def test_without_own_gpus_the_schedulers_choice_holds() -> None:
    planned = plan(config(), port=1, inherited={"CUDA_VISIBLE_DEVICES": "3"}, command=("sgl",))
    assert planned.scrubbed == () and "CUDA_VISIBLE_DEVICES" not in planned.env


POLICY = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def test_site_policy_survives_apart_from_the_configuration() -> None:
    planned = launch(config(), inherited=POLICY | {"NCCL_PROTO": "LL"})
    assert planned.kept == ("NCCL_NVLS_ENABLE=0", "NVSHMEM_DISABLE_NVLS=1", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1")
    assert planned.scrubbed == ("NCCL_PROTO",)
    assert child_environment(planned, POLICY)["NCCL_NVLS_ENABLE"] == "0"


@pytest.mark.parametrize(
    "overruling",
    [
        config(collectives=Collectives(symm_mem=True)),
        config(extra_args=("--enable-nccl-nvls",)),
        config(env=(("NCCL_NVLS_ENABLE", "1"),)),
    ],
)
def test_site_policy_cannot_be_overruled(overruling: EngineConfig) -> None:
    with pytest.raises(InputError, match="NCCL_NVLS_ENABLE=0"):
        launch(overruling, inherited=POLICY)
    launch(overruling)  # fine where the site says nothing


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"attention_backend": "tritton"}, "did you mean 'triton'"),
        ({"extra_args": ("--speculative-eagle-top", "8")}, "abbreviations are refused"),
        ({"extra_args": ("--no-such-flag",)}, "no such flag"),
        ({"env": (("SGLANG_ENABLE_PCIE_IPC_ALLREDUC", "1"),)}, "did you mean 'SGLANG_ENABLE_PCIE_IPC_ALLREDUCE'"),
        ({"env": (("NCCL_ALGO", "Tree"),), "collectives": Collectives(nccl_algo="Ring")}, "by the configuration"),
    ],
)
def test_what_the_release_does_not_take_is_an_input_error(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        launch(config(**wrong))


def test_fusion_backend_of_a_newer_release_is_refused_by_an_older() -> None:
    with pytest.raises(InputError, match="trtllm"):
        launch(config(collectives=Collectives(flashinfer_fusion="cutedsl")), "0.5.17")


def test_old_names_are_mapped_and_said() -> None:
    planned = launch(config(extra_args=("--cuda-graph-max-bs", "8")))
    assert planned.argv[-2:] == ("--cuda-graph-max-bs-decode", "8")
    assert "--cuda-graph-max-bs is an old name" in planned.notes[0]


def test_the_command_can_be_replaced() -> None:
    assert plan(config(), port=1, inherited={}).argv[:3] == (sys.executable, "-m", "sglang.launch_server")
    wrapped = {"FASTVERIFY_SGLANG_COMMAND": "docker run 'my image'"}
    assert plan(config(), port=1, inherited=wrapped).argv[:3] == ("docker", "run", "my image")


optional = st.none() | st.integers(1, 64)
speculations = st.one_of(
    st.just(NoSpeculation()),
    st.builds(NgramSpeculation, num_draft_tokens=optional, max_bfs_breadth=optional, max_trie_depth=optional),
    st.builds(
        DraftModelSpeculation,
        algorithm=st.sampled_from(["EAGLE", "EAGLE3", "NEXTN", "STANDALONE"]),
        num_steps=optional,
        eagle_topk=optional,
        num_draft_tokens=optional,
        adaptive=st.booleans(),
    ),
)
bits = st.none() | st.booleans()
collectives = st.builds(
    Collectives, custom_all_reduce=bits, mscclpp=bits, torch_symm_mem=bits, symm_mem=bits, nccl_p2p_disable=bits,
    flashinfer_fusion=st.sampled_from([None, "off", "auto", "trtllm", "mnnvl"]), nccl_max_nchannels=optional,
)  # fmt: skip


@settings(max_examples=60)
@given(speculations, collectives, st.sampled_from(["0.5.17", "0.5.23"]))
def test_every_configuration_is_launchable_text(speculation: Speculation, asked: Collectives, release: str) -> None:
    planned = launch(config(speculation, collectives=asked), release)
    assert planned.argv.count("--max-running-requests") == 1
    assert not {"None", "True", "False", "none"} & set(planned.argv)
    assert all(isinstance(value, str) for value in planned.env.values())
    fusion = [a for a in planned.argv if "allreduce-fusion" in a]
    assert len(fusion) == (asked.flashinfer_fusion is not None)


def server_info(name: str) -> dict[str, object]:
    with gzip.open(FIXTURES / f"{name}.server_info.json.gz", "rt") as file:
        info: dict[str, object] = json.load(file)
    return info


def test_what_sglang_rewrote_is_named() -> None:
    asked = config(
        DraftModelSpeculation(algorithm="EAGLE3", num_steps=3, eagle_topk=1, num_draft_tokens=8),
        tensor_parallel_size=1,
        max_running_requests=64,
        mem_fraction_static=0.6,
        attention_backend="triton",
    )
    assert asked_not_got(asked, server_info("eagle3_tp1")) == {
        "speculative_num_draft_tokens": (8, 4),
        "max_running_requests": (64, 48),
    }


def test_nothing_is_named_when_all_was_got() -> None:
    asked = config(tensor_parallel_size=1, mem_fraction_static=0.6, cuda_graph_max_bs=None)
    assert asked_not_got(asked, server_info("base_tp1")) == {}


def test_fusion_that_came_on_by_itself_is_named() -> None:
    asked = config(collectives=Collectives(flashinfer_fusion="off", custom_all_reduce=True))
    got = {"flashinfer_allreduce_fusion_backend": "auto", "disable_custom_all_reduce": True, "max_running_requests": 48}
    assert asked_not_got(asked, got) == {
        "flashinfer_allreduce_fusion_backend": (None, "auto"),
        "disable_custom_all_reduce": (False, True),
    }

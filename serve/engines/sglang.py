"""A configuration as the command and environment of one SGLang server: data, nothing is started here."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.config import (
    Collectives,
    DflashSpeculation,
    DraftModelSpeculation,
    EngineConfig,
    NgramSpeculation,
    Speculation,
)
from pipeline.errors import InputError, nearest
from pipeline.records import Launch
from serve.engines import sglang_flags

COMMAND_VARIABLE = "FASTVERIFY_SGLANG_COMMAND"  # replaces `python -m sglang.launch_server`: a container, a wrapper
DECODE_LOG_INTERVAL = 8  # steps; SGLang folds its accept counters in only then, every 40 by default

# Inherited variables that would change what is measured. Places and tool paths are not among them. OMP's: Ray sets the
# threads of a replica to 1, which nobody who launches the same command by hand would have.
_STALE = re.compile(r"^(NCCL|SGLANG|SGL|CUDA|TORCH_NCCL|TORCH_SYMM_MEM|NVSHMEM|FLASHINFER|MSCCLPP|UCX|OMP)_")
_PLACES = re.compile(r"^CUDA_(HOME|PATH|ROOT|CACHE_PATH)$|_(DIR|DIRS|CACHE|BASE|PATH|HOME)$")
_WHAT_IF = "none; python -m pipeline.simulate STUDY tries accept lengths outside of the trials"
# What a host must keep switched off: survives, but only with the value that disables.
SITE_POLICY = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
_OVERRULES_NVLS = ("--enable-symm-mem", "--enable-nccl-nvls")  # SGLang sets NCCL_NVLS_ENABLE=1 under them
_OWN_DEFAULTS = {
    "NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0", "NCCL_GRAPH_REGISTER": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "8",
}  # fmt: skip
_PCIE_IPC = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"


def plan(
    config: EngineConfig,
    *,
    port: int,
    host: str = "127.0.0.1",
    gpu_ids: Sequence[int] = (),
    inherited: Mapping[str, str],
    metrics: bool = True,
    release: str | None = None,
    command: Sequence[str] | None = None,
) -> Launch:
    """Return the launch of `config`.

    Args:
        gpu_ids: NVML indices of the GPUs to use; empty leaves the inherited choice.
        inherited: the environment that the child would inherit; stale variables in it are scrubbed.
        release: whose flags to check against; None is the installed one, else the newest known.
        command: replaces `python -m sglang.launch_server`; so does FASTVERIFY_SGLANG_COMMAND in `inherited`.

    Raises:
        InputError: something in `config` that this release of SGLang, or the site's policy, does not take.
    """
    kept = _kept(inherited)
    place = {"--host": host, "--port": port, "--enable-metrics": metrics, "--decode-log-interval": DECODE_LOG_INTERVAL}
    args = [*_words({**_asked(config), **place}), *config.extra_args]
    checked = sglang_flags.check_args(args, release)
    env = _environment(config, gpu_ids, release)
    _hold_policy(checked.args, env, kept)
    return Launch(
        argv=(*_command(command, inherited), *checked.args),
        env=env,
        scrubbed=tuple(sorted(_scrubbed(inherited, gpu_ids, kept))),
        kept=tuple(f"{name}={value}" for name, value in sorted(kept.items())),
        notes=checked.notes,
        base_url=f"http://{host}:{port}",
        gpu_ids=tuple(gpu_ids),
    )


def _command(command: Sequence[str] | None, inherited: Mapping[str, str]) -> Sequence[str]:
    given = command or shlex.split(inherited.get(COMMAND_VARIABLE, ""))
    return given or (sys.executable, "-m", "sglang.launch_server")


def _asked(config: EngineConfig) -> dict[str, Any]:
    """Every flag that the configuration states; None and False say nothing, True is the bare flag."""
    return {
        "--model-path": config.model,
        "--tp-size": config.tensor_parallel_size,
        **_speculation(config.speculation),
        **_collectives(config.collectives),
        "--attention-backend": config.attention_backend,
        "--sampling-backend": config.sampling_backend,
        "--dtype": config.dtype,
        "--kv-cache-dtype": config.kv_cache_dtype,
        "--load-format": config.load_format,
        "--context-length": config.context_length,
        # Explicit in every trial: under speculation SGLang would silently lower it to 48.
        "--max-running-requests": config.max_running_requests,
        "--mem-fraction-static": config.mem_fraction_static,
        "--cuda-graph-max-bs-decode": config.cuda_graph_max_bs,
        "--disable-prefill-cuda-graph": config.prefill_cuda_graph is False,
        "--trust-remote-code": config.trust_remote_code,
    }


def _words(flags: Mapping[str, Any]) -> list[str]:
    stated = {name: value for name, value in flags.items() if value is not None and value is not False}
    return [word for name, value in stated.items() for word in ([name] if value is True else [name, str(value)])]


def _speculation(spec: Speculation) -> dict[str, Any]:
    match spec:
        case NgramSpeculation():
            own: dict[str, Any] = {
                "num-draft-tokens": spec.num_draft_tokens,
                "ngram-min-bfs-breadth": spec.min_bfs_breadth,
                "ngram-max-bfs-breadth": spec.max_bfs_breadth,
                "ngram-match-type": spec.match_type,
                "ngram-max-trie-depth": spec.max_trie_depth,
                "ngram-external-corpus-path": spec.external_corpus_path,
            }
        case DraftModelSpeculation():
            own = {
                "draft-model-path": spec.draft_model,
                "num-steps": spec.num_steps,
                "eagle-topk": spec.eagle_topk,
                "num-draft-tokens": spec.num_draft_tokens,
                "adaptive": spec.adaptive,
                "adaptive-config": spec.adaptive_config,
                "accept-threshold-single": spec.accept_threshold_single,
                "accept-threshold-acc": spec.accept_threshold_acc,
            }
        case DflashSpeculation():
            own = {"draft-model-path": spec.draft_model, "dflash-block-size": spec.block_size}
        case _:
            return {}  # SGLang has no word for "none": the flag stays away
    return {f"--speculative-{name}": value for name, value in {"algorithm": spec.algorithm, **own}.items()}


def _collectives(asked: Collectives) -> dict[str, Any]:
    fusion = asked.flashinfer_fusion
    return {
        # There is no flag that turns the custom kernel on: it is on unless disabled or unsupported.
        "--disable-custom-all-reduce": asked.custom_all_reduce is False,
        "--enable-mscclpp": asked.mscclpp,
        "--enable-torch-symm-mem": asked.torch_symm_mem,
        "--enable-symm-mem": asked.symm_mem,
        "--enable-quant-communications": asked.quant_communications,
        # Unset is SGLang's own "auto" for some models, so "off" must be enforced.
        "--enforce-disable-flashinfer-allreduce-fusion": fusion == "off",
        "--flashinfer-allreduce-fusion-backend": fusion if fusion != "off" else None,
    }


def _environment(config: EngineConfig, gpu_ids: Sequence[int], release: str | None) -> dict[str, str]:
    asked = config.collectives.model_dump(exclude_none=True)
    env = {name.upper(): _word(value) for name, value in asked.items() if name.startswith("nccl_")}
    if config.collectives.pcie_ipc is not None:
        env |= _pcie_ipc(config.collectives.pcie_ipc, release)
    if gpu_ids:
        # Integers: UUIDs silently drop custom all-reduce. NVML counts in bus order, CUDA by default does not.
        env |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpu_ids))}
    for name, value in config.env:
        _check_variable(name, value, env, release)
        env[name] = value
    return env


def _word(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _pcie_ipc(wanted: bool, release: str | None) -> dict[str, str]:
    table = sglang_flags.flags(release)
    if _PCIE_IPC in table.variables:
        return {_PCIE_IPC: _word(wanted)}
    if wanted:
        raise InputError(f"SGLang {table.release} has no PCIe-IPC all-reduce", key="collectives.pcie_ipc")
    return {}


def _check_variable(name: str, value: str, stated: Mapping[str, str], release: str | None) -> None:
    if stated.get(name, value) != value:
        raise InputError(f"is set to {value!r} here and to {stated[name]!r} by the configuration", key=f"env.{name}")
    if not name.startswith("SGLANG_"):
        return
    if name.startswith("SGLANG_SIMULATE_"):  # accept lengths, and which experts are asked
        raise InputError("makes results up: no trial may", key=f"env.{name}", expected=_WHAT_IF)
    known = sglang_flags.flags(release).variables
    if name not in known:
        raise InputError("SGLang has no such variable", key=f"env.{name}", nearest=nearest(name, known))


def _hold_policy(args: Iterable[str], env: Mapping[str, str], kept: Mapping[str, str]) -> None:
    """Refuse what would overrule the site: SGLang itself rewrites NCCL_NVLS_ENABLE under some flags."""
    for name, value in kept.items():
        if env.get(name, value) != value:
            raise InputError(f"this host keeps {name}={value}", key=f"env.{name}")
    if "NCCL_NVLS_ENABLE" in kept and (flag := next((a for a in args if a in _OVERRULES_NVLS), None)):
        raise InputError("would switch NVLink multicast on, and this host keeps NCCL_NVLS_ENABLE=0", key=flag)


def _kept(inherited: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in SITE_POLICY.items() if inherited.get(name) == value}


def _scrubbed(inherited: Mapping[str, str], gpu_ids: Sequence[int], kept: Mapping[str, str]) -> list[str]:
    stale = [name for name in inherited if _STALE.match(name) and not _PLACES.search(name) and name not in kept]
    # Without GPUs of our own choice, what the caller's scheduler chose for it still holds.
    return [name for name in stale if gpu_ids or name not in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")]


def collective_environment(
    config: EngineConfig, inherited: Mapping[str, str], release: str | None = None
) -> dict[str, str]:
    """The environment of `config`'s engine, for a child that sends its messages without being it.

    What SGLang itself sets where nobody else did is in it (its `entrypoints/engine.py` and `parallel_hook.py`).
    """
    kept = _kept(inherited)
    env = _environment(config, (), release)
    _hold_policy((), env, kept)
    stale = _scrubbed(inherited, (), kept)
    return _OWN_DEFAULTS | {name: value for name, value in inherited.items() if name not in stale} | env


def child_environment(launch: Launch, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment that the engine really gets: inherited, minus scrubbed, plus the configuration's."""
    return {name: value for name, value in inherited.items() if name not in launch.scrubbed} | launch.env


def asked_not_got(config: EngineConfig, server_info: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that SGLang changed: its name of each, what was asked, what it resolved to.

    A name that this release does not report is left out. `{}` for another engine.
    """
    if config.engine != "sglang":
        return {}
    asked = {flag[2:].replace("-", "_"): value for flag, value in _asked(config).items()}
    asked = {name: value for name, value in asked.items() if value is not None and value is not False}
    fusion, custom = config.collectives.flashinfer_fusion, config.collectives.custom_all_reduce
    if fusion == "off":
        asked["flashinfer_allreduce_fusion_backend"] = None
    if custom:
        asked["disable_custom_all_reduce"] = False
    got = {name: server_info[name] for name in asked if name in server_info and name != "model_path"}
    limits = [state.get("effective_max_running_requests_per_dp") for state in server_info.get("internal_states") or ()]
    got |= {"max_running_requests": min(limits)} if limits and None not in limits else {}
    return {name: (asked[name], value) for name, value in got.items() if asked[name] != value}

"""The embedded CPU engine as a launch: configuration to command and environment, as data.

`DIMENSIONS` is what it has of the search space; everything else does not exist on it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from pipeline.config import DraftModelSpeculation, EngineConfig, NgramSpeculation, NoSpeculation
from pipeline.errors import InputError, nearest
from pipeline.records import Launch

ALGORITHMS = ("none", "NGRAM", "STANDALONE")

# Flat parameter names of a space. An NGRAM's trie depth is the longest run of tokens that it matches;
# a STANDALONE's drafts are chains (topk 1), so that its draft tokens are its steps and one more.
DIMENSIONS = frozenset(
    {
        "speculation.algorithm",
        "speculation.NGRAM.num_draft_tokens",
        "speculation.NGRAM.max_trie_depth",
        "speculation.STANDALONE.draft_model",
        "speculation.STANDALONE.num_steps",
        "speculation.STANDALONE.eagle_topk",
        "speculation.STANDALONE.num_draft_tokens",
        "dtype",
        "context_length",
        "max_running_requests",
    }
)

# Ray sets OMP_NUM_THREADS to 1 for a replica; the server sets its own threads.
SCRUBBED_PREFIXES = ("OMP_", "MKL_", "KMP_", "GOMP_")
_ALWAYS = {"engine", "model", "extra_args", "env"}
_ROOT = Path(__file__).resolve().parents[2]


def plan(
    config: EngineConfig,
    *,
    port: int,
    host: str = "127.0.0.1",
    gpu_ids: tuple[int, ...] = (),
    inherited: Mapping[str, str],
    folder_of: Callable[[str], object] = str,
) -> Launch:
    """The server's command and what its environment adds; nothing is started.

    Args:
        folder_of: where a model named in the configuration lies on this machine.

    Raises:
        InputError: the configuration states what this engine does not have.
    """
    _refuse_unknown(config)
    settings: dict[str, str | int | None] = {
        "model-path": str(folder_of(config.model)),
        "served-model-name": config.model,
        "host": host,
        "port": port,
        "dtype": config.dtype,
        "context-length": config.context_length,
        # It runs one request at a time: as many as SGLang would run at once may wait here.
        "max-queued-requests": config.max_running_requests,
        **_speculation(config, folder_of),
    }
    flags = [part for name, value in settings.items() if value is not None for part in (f"--{name}", str(value))]
    return Launch(
        argv=(sys.executable, "-m", "serve.embedded.server", *flags, *config.extra_args),
        env=_environment(inherited) | dict(config.env),
        scrubbed=tuple(sorted(name for name in inherited if name.startswith(SCRUBBED_PREFIXES))),
        base_url=f"http://{host}:{port}",
        gpu_ids=gpu_ids,
    )


def _speculation(config: EngineConfig, folder_of: Callable[[str], object]) -> dict[str, str | int | None]:
    match config.speculation:
        case NgramSpeculation() as ngram:
            return {
                "speculative-algorithm": "NGRAM",
                "speculative-num-draft-tokens": ngram.num_draft_tokens,
                "speculative-ngram-max-trie-depth": ngram.max_trie_depth,
            }
        case DraftModelSpeculation() as draft:
            return {
                "speculative-algorithm": "STANDALONE",
                "speculative-draft-model-path": str(folder_of(draft.draft_model)) if draft.draft_model else None,
                "speculative-num-steps": draft.num_steps,
                "speculative-eagle-topk": draft.eagle_topk,
                "speculative-num-draft-tokens": draft.num_draft_tokens,
            }
    return {}


def _environment(inherited: Mapping[str, str]) -> dict[str, str]:
    paths = [str(_ROOT), *filter(None, [inherited.get("PYTHONPATH")])]
    return {
        "HF_HUB_OFFLINE": "1",  # weights are fetched before a study, never by a trial
        "PYTHONPATH": os.pathsep.join(paths),  # whatever the working directory
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _refuse_unknown(config: EngineConfig) -> None:
    algorithm = config.speculation.algorithm
    if algorithm not in ALGORITHMS:
        raise InputError(
            f"the embedded engine has no {algorithm}",
            key="speculation.algorithm",
            expected=f"one of {', '.join(ALGORITHMS)}",
            nearest=nearest(algorithm, ALGORITHMS),
        )
    unknown = sorted(name for name in _stated(config) if name not in DIMENSIONS)
    if unknown:
        raise InputError("the embedded engine does not have this setting", key=unknown[0])


def _stated(config: EngineConfig) -> set[str]:
    """Flat names of the settings that differ from their defaults."""
    plain = EngineConfig(engine=config.engine, model=config.model)
    top = {name for name in EngineConfig.model_fields if getattr(config, name) != getattr(plain, name)}
    stated = top - _ALWAYS - {"speculation", "collectives"}
    stated |= {f"collectives.{name}" for name in config.collectives.model_dump(exclude_none=True)}
    if not isinstance(config.speculation, NoSpeculation):
        chosen = config.speculation.model_dump(exclude_defaults=True, exclude={"algorithm"})
        stated |= {f"speculation.{config.speculation.algorithm}.{name}" for name in chosen}
    return stated

"""Configurations without this machine in them: model folders by name, found again under FASTVERIFY_MODELS."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.config import EngineConfig
from pipeline.errors import InputError

MODELS_VARIABLE = "FASTVERIFY_MODELS"


def portable(config: EngineConfig) -> EngineConfig:
    """The configuration with every folder or file replaced by its last name.

    Raises:
        InputError: a path is inside `extra_args` or `env`, where nothing can replace it.
    """
    found = _mapped(config, lambda word: Path(word).name if Path(word).is_absolute() else word)
    fixed = [*found.extra_args, *(value for _, value in found.env)]
    for word in fixed:
        if Path(word.partition("=")[2] or word).is_absolute():
            raise InputError(f"the configuration names a path of this machine: {word}", expected="a relative one")
    return found


def localized(config: EngineConfig, environ: Mapping[str, str] = os.environ) -> EngineConfig:
    """The configuration with the names that lie under FASTVERIFY_MODELS replaced by those folders."""
    root = environ.get(MODELS_VARIABLE)
    if root is None:
        return config
    return _mapped(config, lambda word: str(Path(root) / word) if (Path(root) / word).exists() else word)


def _mapped(config: EngineConfig, change: Callable[[str], str]) -> EngineConfig:
    data: dict[str, Any] = config.model_dump()
    data["model"] = change(data["model"])
    for name in ("draft_model", "external_corpus_path", "adaptive_config"):
        if data["speculation"].get(name):
            data["speculation"][name] = change(data["speculation"][name])
    return EngineConfig.model_validate(data)

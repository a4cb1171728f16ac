"""What a local model folder says about itself, read before a launch would find out minutes later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.errors import nearest


def is_path(model: str) -> bool:
    """True for what can only be a folder, not a hub id."""
    return model.startswith(("/", "./", "../", "~"))


def expanded(path: str) -> Path:
    """The path with `~` filled in, as far as that home is known."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def located(model: str) -> str:
    """A local folder's absolute path, since engines run in other places; anything else as it is."""
    path = expanded(model)
    return str(path.absolute()) if is_path(model) or (model and (path / "config.json").is_file()) else model


def is_missing(model: str) -> bool:
    """True where `model` is a path and no folder stands there."""
    return is_path(model) and not expanded(model).is_dir()


def similar(model: str) -> str | None:
    """The folder beside the missing one whose name is closest."""
    path = expanded(model)
    siblings = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    near = nearest(path.name, siblings)
    return str(path.with_name(near)) if near else None


def architecture(model: str) -> str | None:
    """The first architecture that the folder's config.json names; None for hub ids and unreadable folders."""
    names = (_json(model, "config.json") or {}).get("architectures") or [None]
    return names[0] if isinstance(names[0], str) else None


def context_length(model: str) -> int | None:
    """Tokens that the folder's config.json allows a conversation; None for hub ids and where it does not say."""
    stated = _text(_json(model, "config.json") or {}).get("max_position_embeddings")
    return stated if isinstance(stated, int) else None


def check_draft_model(target: str, draft: str, algorithm: str) -> str | None:
    """Why a local draft does not fit a local target, or None where it does or cannot be told.

    An EAGLE head is made for one hidden size; a STANDALONE draft shares the target's vocabulary, token by token.
    """
    ours, theirs = _json(target, "config.json"), _json(draft, "config.json")
    if ours is None or theirs is None:
        return None
    if algorithm == "STANDALONE":
        return _differ(ours, theirs, "vocab_size") or _other_tokens(target, draft)
    wanted = theirs.get("target_hidden_size", theirs.get("hidden_size"))
    if algorithm in ("EAGLE", "EAGLE3") and wanted is not None and wanted != _text(ours).get("hidden_size"):
        return f"hidden_size of the target is {_text(ours).get('hidden_size')}, the draft was made for {wanted}"
    return None


def _differ(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> str | None:
    a, b = _text(ours).get(name), _text(theirs).get(name)
    return f"{name} of the target is {a}, of the draft {b}" if a != b else None


def _other_tokens(target: str, draft: str) -> str | None:
    ours, theirs = _vocabulary(target), _vocabulary(draft)
    if ours is None or theirs is None or ours == theirs:
        return None
    token = next(token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token))
    return f"the tokenizers differ: {token!r} is {ours.get(token)} in the target, {theirs.get(token)} in the draft"


def _vocabulary(model: str) -> dict[str, int] | None:
    vocabulary = ((_json(model, "tokenizer.json") or {}).get("model") or {}).get("vocab")
    return vocabulary if isinstance(vocabulary, dict) else None


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a multimodal configuration."""
    return config.get("text_config") or config


def _json(model: str, name: str) -> dict[str, Any] | None:
    path = expanded(model) / name
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None

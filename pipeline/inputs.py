"""What a space file points to: models, prompts, a trace. Looked at before a launch would find out."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Mapping

from pipeline import checkpoints
from pipeline.engine_space import Space
from pipeline.errors import InputError, nearest
from pipeline.models import MODELS, folder, known
from pipeline.space import SpaceSpec
from pipeline.workload import load_prompts, read_trace
from pipeline.yamlfile import Key
from serve.engines.sglang import COMMAND_VARIABLE


def check_models(spec: SpaceSpec, part: Space) -> None:
    """Whether the embedded engine's models can be had at all; nothing is fetched. InputError otherwise."""
    named = {"model": part.model, **{f"draft_models.{name}": model for name, model in part.draft_models.items()}}
    for key, model in named.items():
        if not known(model):
            source, line = part.places.get(key, (str(spec.path), None))
            raise InputError(
                f"no model {model!r}", source=source, line=line, key=f"embedded.{key}",
                expected="a small model's name, a folder with a config.json, or a hub id such as org/name",
                nearest=nearest(model, MODELS),
            )  # fmt: skip


def check_command(environment: Mapping[str, str]) -> None:
    """Whether the command in SGLang's place, where one is stated, is one. InputError otherwise."""
    stated = environment.get(COMMAND_VARIABLE)
    if stated is None:
        return
    try:
        words = shlex.split(stated)
    except ValueError as error:
        raise InputError(f"{error}: {stated}", key=COMMAND_VARIABLE, expected="a command line") from None
    if words and shutil.which(words[0]) is None:
        raise InputError(f"no program {words[0]!r}", key=COMMAND_VARIABLE, expected="a command that can be run here")


def check_workload(spec: SpaceSpec, part: Space) -> None:
    """Read prompts and trace, and hold the answers' length against the model's context. InputError otherwise."""
    workload, load = (_place(spec, part, name) for name in ("workload", "load"))
    for name, source in part.workload.prompts.items():
        _read(spec, (*workload, "prompts", name), load_prompts, source)
    if part.load.trace is not None:
        _read(spec, (*load, "trace"), read_trace, part.load.trace)
    context = part.fixed.get("context_length") or checkpoints.context_length(folder(part.model))
    for name in ("output_tokens", "greedy_tokens"):
        tokens = getattr(part.workload, name)
        if context is not None and tokens >= context:
            raise spec.document.error(
                (*workload, name), f"{tokens} tokens do not fit the context of {part.model}",
                expected=f"fewer than {context}: the prompt needs room too",
            )  # fmt: skip


def _place(spec: SpaceSpec, part: Space, name: str) -> Key:
    """Where a part that both engines may share is stated."""
    own = getattr(getattr(spec.file, part.engine), name) is not None
    return (part.engine, name) if own else (name,)


def _read(spec: SpaceSpec, key: Key, read: Callable[[str], object], source: str) -> None:
    """Read a file; an error that does not lie inside it is about the key that names it."""
    try:
        read(source)
    except InputError as error:
        if error.line is not None:
            raise
        raise spec.document.error(key, error.problem, expected=error.expected, nearest=error.nearest) from None

"""One model behind transformers' `generate()`: one request at a time, tokens handed on as they come."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

# Read when torch is loaded. Threads that spin while they wait cost five times the CPU, and most of the
# speed, as soon as anything else wants a core: a load generator, Ray, another engine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from serve.embedded.records import Ask, Outcome, Step, Tally, Token
from serve.embedded.text import TextStream

DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}


class _Recorder:
    """A logits processor that keeps log-probabilities by position.

    Under speculation a position is seen several times (the draft's look at it, then the target's);
    the target comes last, so the last one holds.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._rows: dict[int, torch.Tensor] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._rows[input_ids.shape[1]] = scores[0].float().log_softmax(-1)
        return scores

    def token(self, position: int, token: int) -> Token:
        """The token chosen at a position, with the logprobs seen there."""
        row = self._rows[position]
        values, ids = row.topk(self._top)
        top = zip(ids.tolist(), values.tolist(), strict=True)
        return Token(token, row[token].item(), tuple(top))

    def forget(self) -> None:
        """Drop what has been handed on: a row is as wide as the vocabulary."""
        self._rows.clear()


class _Done(Exception):  # noqa: N818 (an ending, not an error)
    """Raised through `generate()`, whose own stopping criteria would cost one more pass."""


class _Run:
    """One request while it runs: takes the tokens, counts them, and says when to stop."""

    def __init__(self, ask: Ask, text: TextStream, end_ids: frozenset[int], speculative: bool) -> None:
        self.ask, self._text, self._end_ids = ask, text, end_ids
        self.recorder = None if ask.logprobs is None else _Recorder(ask.logprobs)
        self.proposed = 0
        self._speculative = speculative
        self._completion = self._steps = self._correct = 0
        self._prompt_seen = False
        self.matched: str | int | None = None
        self.emit: Callable[[Step], None] = lambda step: None
        self.cancelled: Callable[[], bool] = lambda: False

    def put(self, tokens: torch.Tensor) -> None:
        """Take the tokens of one step from `generate()`; the first call brings the prompt.

        Raises:
            _Done: at a stop string, an end token, or when the client went away.
        """
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        kept: list[Token] = []
        text = ""
        for token in tokens.flatten().tolist():
            kept.append(self._token(token, len(kept)))
            text += self._take(token)
            if self.matched is not None:
                break
        if self.recorder is not None:
            self.recorder.forget()
        self._completion += len(kept)
        self._steps += 1
        self._correct += len(kept) - 1
        self.emit(Step(text, tuple(kept), self.tally()))
        if self.matched is not None or self.cancelled():
            raise _Done

    def end(self) -> None:
        """`generate()` is through; nothing to do."""

    def _token(self, token: int, offset: int) -> Token:
        if self.recorder is None:
            return Token(token)
        return self.recorder.token(len(self.ask.prompt_ids) + self._completion + offset, token)

    def _take(self, token: int) -> str:
        if token in self._end_ids and not self.ask.ignore_eos:
            self.matched = token
            return ""
        text = self._text.push(token)
        self.matched = self._text.matched
        return text

    def tally(self) -> Tally:
        """The counts so far."""
        counts = (self._steps, self._correct, self.proposed) if self._speculative else ()
        return Tally(len(self.ask.prompt_ids), self._completion, *counts)

    def outcome(self) -> Outcome:
        """How it ended."""
        text = self._text.finish()
        self.matched = self._text.matched if self.matched is None else self.matched
        stopped = self.matched is not None
        reason: Literal["stop", "length", "abort"] = "stop" if stopped else "abort" if self.cancelled() else "length"
        return Outcome(reason, self.matched, text, self.tally())


class _CountedCandidates:
    """A candidate generator that says how many drafts it proposed; all else is the inner one's."""

    def __init__(self, inner: Any, run: _Run) -> None:
        self._inner, self._run = inner, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """Pass on, and count."""
        candidates = self._inner.get_candidates(input_ids, **kwargs)
        self._run.proposed += candidates[0].shape[1] - input_ids.shape[1]
        return candidates


class Engine:
    """A model, its tokenizer and, for STANDALONE, a draft model, loaded for one algorithm.

    Raises:
        OSError: a folder holds no model.
        ValueError: the context length or the draft's vocabulary does not fit the model.
    """

    def __init__(self, model: Path, args: argparse.Namespace, draft: Path | None = None) -> None:
        torch.set_num_threads(args.threads)
        transformers.logging.set_verbosity_error()  # it warns about its own draft loop at every request
        transformers.logging.disable_progress_bar()
        self._args = args
        dtype = DTYPES[args.dtype]
        self._model: Any = _load(model, dtype)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.vocab_size: int = self._model.config.vocab_size
        self.context_length = self._context_length()
        # Emptied, so that nothing but the request decides how it is decoded.
        loaded, self._model.generation_config = self._model.generation_config, GenerationConfig()
        self.end_ids = _end_ids(loaded, self.tokenizer)
        self._draft = None if draft is None else self._load_draft(draft, dtype)
        self._lookup = _lookup(args)
        self.dtype = str(dtype).removeprefix("torch.")
        self.version = f"transformers {transformers.__version__}"
        self._run: _Run | None = None
        self._count_candidates()

    def _context_length(self) -> int:
        own: int = self._model.config.max_position_embeddings
        asked: int = self._args.context_length or own
        if asked > own:
            raise ValueError(f"--context-length {asked} is longer than the model's own {own}")
        return asked

    def _load_draft(self, folder: Path, dtype: torch.dtype) -> Any:
        draft = _load(folder, dtype)
        sizes = self.vocab_size, draft.config.vocab_size
        if sizes[0] != sizes[1]:
            raise ValueError(
                "STANDALONE needs a draft model of the same vocabulary as the target model, "
                "but got target vocab_size={} and draft vocab_size={}".format(*sizes)
            )
        draft.generation_config = GenerationConfig(
            num_assistant_tokens=self._args.speculative_num_steps,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        return draft

    def _count_candidates(self) -> None:
        make = self._model._get_candidate_generator

        def counted(*args: Any, **kwargs: Any) -> Any:
            assert self._run is not None
            return _CountedCandidates(make(*args, **kwargs), self._run)

        self._model._get_candidate_generator = counted

    def decode(self, ids: list[int]) -> str:
        """The text of tokens, without the special ones."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def generate(self, ask: Ask, emit: Callable[[Step], None], cancelled: Callable[[], bool]) -> Outcome:
        """Answer one request; `emit` gets each step. Blocks, and is for one thread at a time."""
        run = _Run(ask, TextStream(self.decode, ask.stop), self.end_ids, self._args.speculative_algorithm is not None)
        run.emit, run.cancelled, self._run = emit, cancelled, run
        seed = ask.seed if ask.seed is not None else self._args.random_seed
        torch.seed() if seed is None else torch.manual_seed(seed)
        ids = torch.tensor([ask.prompt_ids])
        with torch.inference_mode(), suppress(_Done):
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=self._generation_config(ask),
                streamer=run,
                logits_processor=[] if run.recorder is None else [run.recorder],
                assistant_model=self._draft,
            )
        return run.outcome()

    def _generation_config(self, ask: Ask) -> GenerationConfig:
        # An id past the vocabulary never comes: that is how an end token is ignored.
        never = self.vocab_size
        end_ids = [never] if ask.ignore_eos else sorted(self.end_ids) or [never]
        config = GenerationConfig(max_new_tokens=ask.max_tokens, eos_token_id=end_ids, pad_token_id=end_ids[0])
        config.update(**self._lookup)
        if ask.temperature > 0:
            config.update(do_sample=True, temperature=ask.temperature, top_p=ask.top_p, top_k=ask.top_k)
        return config


def _load(folder: Path, dtype: torch.dtype) -> Any:
    if not (folder / "config.json").is_file():
        raise OSError(f"{folder} holds no model: it has no config.json")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _lookup(args: argparse.Namespace) -> dict[str, int]:
    """Settings of prompt lookup. The pass that checks n - 1 copied tokens yields n: SGLang counts those."""
    if args.speculative_algorithm != "NGRAM":
        return {}
    return {
        "prompt_lookup_num_tokens": args.speculative_num_draft_tokens - 1,
        "max_matching_ngram_size": args.speculative_ngram_max_trie_depth,
    }


def _end_ids(config: GenerationConfig, tokenizer: Any) -> frozenset[int]:
    ids = config.eos_token_id if config.eos_token_id is not None else tokenizer.eos_token_id
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])

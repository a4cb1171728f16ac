"""The embedded server's command line: SGLang's names wherever SGLang has the flag.

No torch here, so that `--help` and a wrong flag answer at once. A wrong flag exits with 2, as SGLang's does.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

ALGORITHMS = ("NGRAM", "STANDALONE")
DEFAULT_NGRAM_DRAFT_TOKENS = 12  # SGLang's own defaults: 12 for NGRAM, 3 steps for a draft model
DEFAULT_NUM_STEPS = 3
DEFAULT_MATCH_LENGTH = 2  # generate()'s own


def usable_cpus() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the flags and fill in what speculation leaves open. Exits with 2 on a wrong flag."""
    parser = _parser()
    args = parser.parse_args(argv)
    args.served_model_name = args.served_model_name or args.model_path
    _resolve_speculation(args, parser)
    return args


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive integer")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "serve.embedded.server", description="A CPU engine that answers like SGLang.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--model-path", "--model", required=True, help="a folder, a known name or a hub id")
    add("--served-model-name", help="the id in /v1/models (default: the model as given)")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000)
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto is float32: exactly lossless")
    add("--context-length", type=_positive, help="default: the model's own")
    add("--max-queued-requests", type=_positive, default=64, help="one more is answered with 503")
    add("--threads", type=_positive, default=usable_cpus(), help="torch's threads (default: the usable cores)")
    add("--random-seed", type=int, help="seed of requests that give none")
    add("--decode-log-interval", type=_positive, default=40, help="decode steps between two log lines")
    add("--speculative-algorithm", type=str.upper, choices=ALGORITHMS)
    add("--speculative-draft-model-path", help="STANDALONE's draft model: a folder or a known name")
    add("--speculative-num-steps", type=_positive, help="STANDALONE: tokens that the draft model proposes a step")
    add("--speculative-eagle-topk", type=int, choices=(1,), help="drafts are chains")
    add("--speculative-num-draft-tokens", type=_positive, help="tokens that one pass verifies, bonus token included")
    add("--speculative-ngram-max-trie-depth", type=_positive, help="NGRAM: longest run of tokens to match")
    return parser


def _resolve_speculation(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if args.speculative_algorithm == "NGRAM":
        _resolve_ngram(args, parser)
    elif args.speculative_algorithm == "STANDALONE":
        _resolve_standalone(args, parser)
    elif given := [name for name, value in vars(args).items() if name.startswith("speculative_") and value]:
        parser.error(f"--{given[0].replace('_', '-')} needs --speculative-algorithm")


def _resolve_ngram(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    args.speculative_num_draft_tokens = args.speculative_num_draft_tokens or DEFAULT_NGRAM_DRAFT_TOKENS
    args.speculative_ngram_max_trie_depth = args.speculative_ngram_max_trie_depth or DEFAULT_MATCH_LENGTH
    if args.speculative_num_draft_tokens < 2:
        parser.error("--speculative-num-draft-tokens counts the bonus token: NGRAM needs at least 2")


def _resolve_standalone(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if not args.speculative_draft_model_path:
        parser.error("STANDALONE needs --speculative-draft-model-path")
    args.speculative_num_steps = args.speculative_num_steps or DEFAULT_NUM_STEPS
    args.speculative_eagle_topk = 1
    # SGLang does the same for topk 1: a chain of that many drafts, and the bonus token.
    args.speculative_num_draft_tokens = args.speculative_num_steps + 1

"""Turns shipped weights into model folders. Run in a child of its own: `… gguf FILE OUT`, `… student TARGET OUT`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"


def convert_gguf(gguf: Path, out: Path) -> None:
    """Write a GGUF's model, dequantized to float32, and its tokenizer with the chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    how = GgufConfig(gguf_file=gguf.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=how
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def make_student(target: Path, out: Path) -> None:
    """Write the two-layer draft model: the shipped layers, the target's embedding, tokenizer and config."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    tensors = load_file(WEIGHTS / "student.safetensors")
    with safe_open(target / "model.safetensors", framework="pt") as weights:
        embedding = weights.get_tensor("model.embed_tokens.weight")
    tensors["model.embed_tokens.weight"] = embedding.to(torch.bfloat16)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config |= json.loads((WEIGHTS / "config.json").read_text()) | {"dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(config, indent=2))
    for file in target.iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "generation_config")):
            shutil.copy(file, out)


if __name__ == "__main__":
    kind, source, destination = sys.argv[1:]
    {"gguf": convert_gguf, "student": make_student}[kind](Path(source), Path(destination))

"""A tiny model for the benchmark: its configuration in a folder, its weights random."""

from __future__ import annotations

import json
from pathlib import Path

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "dtype": "float32",
}


def tiny_folder(parent: Path) -> Path:
    """A folder with the configuration of a tiny model and no weights."""
    path = parent / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TINY))
    return path

"""A tiny model for the benchmark: its configuration in a folder, its weights random; prompts, and tables it wrote."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import torch
from kv_models import prompt as tokens_of

CPU = torch.device("cpu")
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


def prompt(length: int) -> torch.Tensor:
    """Token ids [1,length], none of them twice."""
    return torch.tensor([tokens_of(length)])


def rows_of(path: Path) -> list[dict[str, str]]:
    """The lines of a table in CSV."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def refuse_to_measure(*arguments: object) -> dict[str, object]:
    """In the place of what measures."""
    raise AssertionError("measured again")

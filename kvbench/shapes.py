"""The shape of a model's cache, from a table or a configuration: no weights and no network needed."""

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class CacheShape:
    """L layers of H_kv KV heads and H_q query heads with head dimension D; dtype of keys and values."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


KNOWN = {
    "codellama_34b": CacheShape(48, 64, 8, 128, torch.float16),
    "gemma_7b_it": CacheShape(28, 16, 16, 256, torch.bfloat16),
    "llama2_13b": CacheShape(40, 40, 40, 128, torch.float16),
    "llama2_13b_chat": CacheShape(40, 40, 40, 128, torch.float16),
    "llama2_70b_chat": CacheShape(80, 64, 8, 128, torch.float16),
    "llama2_7b": CacheShape(32, 32, 32, 128, torch.float16),
    "llama2_7b_80k": CacheShape(32, 32, 32, 128, torch.float16),
    "llama2_7b_chat": CacheShape(32, 32, 32, 128, torch.float16),
    "llama31_8b_instruct": CacheShape(32, 32, 8, 128, torch.bfloat16),
    "llama32_3b_instruct": CacheShape(28, 24, 8, 128, torch.bfloat16),
    "llama3_70b_instruct": CacheShape(80, 64, 8, 128, torch.bfloat16),
    "llama3_8b": CacheShape(32, 32, 8, 128, torch.float16),
    "llama3_8b_instruct": CacheShape(32, 32, 8, 128, torch.float16),
    "llama3_8b_prolong_512k_instruct": CacheShape(32, 32, 8, 128, torch.bfloat16),
    "llama_7b": CacheShape(32, 32, 32, 128, torch.float16),
    "mistral_7b_instruct_v02": CacheShape(32, 32, 8, 128, torch.float16),
    "mistral_7b_instruct_v03": CacheShape(32, 32, 8, 128, torch.float16),
    "qwen25_32b_instruct": CacheShape(64, 40, 8, 128, torch.bfloat16),
    "qwen25_3b_instruct": CacheShape(36, 16, 2, 128, torch.bfloat16),
    "qwen25_7b_instruct": CacheShape(28, 28, 4, 128, torch.bfloat16),
}
"""Models of conf/model whose weights are not part of this package; figures from their published configurations."""


def cache_shape(model: str) -> CacheShape:
    """The shape for a name of conf/model, a folder with a config.json, or such a file.

    Raises ValueError where there is none, or it does not say what is needed.
    """
    if model in KNOWN:
        return KNOWN[model]
    path = Path(str(resources.files("kvbench") / "pocket")) if model == "pocket" else Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        return from_config(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"model={model} is neither a model known here ({', '.join(['pocket', *KNOWN])}) nor a folder "
            "with a config.json"
        ) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"model={model}: {path} does not say {error}, which the size of a cache depends on") from error


def from_config(config: dict[str, Any]) -> CacheShape:
    """The shape that a config.json of transformers says. KeyError for what is missing."""
    config = config.get("text_config", config)
    heads = config["num_attention_heads"]
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    return CacheShape(
        layers=config["num_hidden_layers"],
        query_heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        dtype=DTYPES[dtype],
    )

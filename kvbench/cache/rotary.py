"""Rotary embeddings whose frequencies depend on the length of what a model is called with (longrope, dynamic NTK).

transformers chooses them by the highest position of each call. A prompt read by one call is so rotated alike from
its first token to its last; read by several, its early keys would be rotated otherwise than its late queries.
Hence: a prompt beyond `uniform_length` has to come in one call, out of which the cache cuts the schedule's blocks.
A decoded token beyond it is rotated by the length reached then, while stored keys stay as they were rotated: that is
what transformers does with its own cache, and here it is done likewise.
"""

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel


def uniform_length(config: PreTrainedConfig) -> int | None:
    """Tokens up to which calls of any length are rotated alike; None where all calls are."""
    lengths = []
    for part in _parts(config):
        if part["rope_type"] == "longrope":
            lengths.append(part["original_max_position_embeddings"])
        elif "dynamic" in part["rope_type"]:
            lengths.append(config.max_position_embeddings)
    return min(lengths, default=None)


def beyond(alike: int | None, tokens: int) -> bool:
    """Whether `tokens` tokens are more than every call rotates alike."""
    return alike is not None and tokens > alike


def forget_lengths(model: PreTrainedModel) -> None:
    """Rotate a new prompt by its length; otherwise dynamic NTK uses the longest length processed so far."""
    if not any("dynamic" in part["rope_type"] for part in _parts(model.config.get_text_config(decoder=True))):
        return
    rotating: Any
    for rotating in model.modules():
        if hasattr(rotating, "max_seq_len_cached") and hasattr(rotating, "original_inv_freq"):
            rotating.inv_freq = rotating.original_inv_freq.to(rotating.inv_freq.device, copy=True)
            rotating.max_seq_len_cached = rotating.original_max_seq_len


def _parts(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The rotary parameters, one set for all layers or one for each kind of them."""
    given: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    parts = [given] if "rope_type" in given else given.values()
    return [part for part in parts if isinstance(part, dict) and "rope_type" in part]

"""The attention function and the mask function registered with transformers under the name `kvbench`."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvbench.cache import KVCache, check_interface
from kvbench.layer import KVLayer
from kvbench.policies.observation import Arithmetic

__all__ = ["KVCache", "kvbench_attention", "kvbench_mask", "prepare"]

NAME = "kvbench"
HARMLESS = {
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "is_causal",
    "logits_to_keep",
    "past_key_values",
    "position_embeddings",
    "num_items_in_batch",
}
"""Arguments models hand through to attention that do not change what it computes over a causal cache."""


def kvbench_attention(
    module: nn.Module,
    query: Tensor,
    key: "KVLayer | Tensor",
    value: "KVLayer | Tensor",
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Attention over what a KVCache layer holds: query [B,H_q,M,D] -> [B,M,H_q,D].

    Honours scaling, softcap and sliding_window; ValueError for anything else that would change attention.
    """
    if not isinstance(key, KVLayer):
        raise ValueError("kvbench attention reads a KVCache: pass past_key_values=KVCache(model.config, policy)")
    _refuse_unknown(module, dropout, sliding_window, attention_mask, kwargs)
    how = Arithmetic(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, sliding_window)
    return key.forward(query, attention_mask, how).transpose(1, 2), None


def _refuse_unknown(
    module: nn.Module, dropout: float, sliding_window: int | None, mask: Tensor | None, kwargs: dict[str, Any]
) -> None:
    name = type(module).__name__
    unknown = sorted(k for k, v in kwargs.items() if v is not None and k not in HARMLESS)
    if unknown:
        raise ValueError(
            f"{name} passes {', '.join(unknown)} to its attention, which kvbench does not know; it is refused"
        )
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError(f"{name} asks for attention that is not causal, which an evicting cache cannot give")
    if dropout:
        raise ValueError(f"{name} asks for attention dropout {dropout}: call model.eval() before generating")
    if mask is not None and mask.dim() != 2:
        raise ValueError("kvbench takes 2D padding masks [batch, tokens]; a 4D attention mask cannot follow evictions")
    kinds = getattr(module.config, "layer_types", None)
    kind = kinds[module.layer_idx] if kinds else None
    if kind not in (None, "full_attention", "sliding_attention"):
        raise ValueError(f"{name} has a layer of type {kind!r}; kvbench knows full_attention and sliding_attention")
    if kind == "sliding_attention" and sliding_window is None:
        raise ValueError(f"{name} has sliding-window layers but does not pass sliding_window to its attention")


def kvbench_mask(
    *args: Any,  # noqa: ANN401
    attention_mask: Tensor | None = None,
    q_length: int | None = None,
    cache_position: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,  # noqa: ANN401
) -> Tensor | None:
    """Which of the call's new tokens are real, bool [B,M]; None if all are. Causality is decided from stored positions.

    ValueError if the model changes the causal mask (bidirectional blocks, packed sequences).
    """
    if not allow_is_causal_skip:
        raise ValueError(
            "the model changes the causal mask (packed or bidirectional tokens), which kvbench does not follow"
        )
    if attention_mask is None:
        return None
    new = (
        q_length
        if q_length is not None
        else (attention_mask.shape[-1] if cache_position is None else len(cache_position))
    )
    real = attention_mask[:, -new:].to(torch.bool)
    return None if bool(real.all()) else real


AttentionInterface.register(NAME, kvbench_attention)
AttentionMaskInterface.register(NAME, kvbench_mask)


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Switch the model to kvbench's attention; ValueError if it does not follow transformers' attention interface."""
    check_interface(model.config.get_text_config(decoder=True))
    model.set_attn_implementation(NAME)
    return model

"""What each layer of a model stores, and up to which length its rotary embedding is uniform.

A layer stores its own keys and values, a recurrent state, both, or nothing (layers that share those of another layer).
Policies, budgets and statistics count only the attention layers, those with their own keys and values, from 0.

Some rotary embeddings (longrope, dynamic NTK) change their frequencies with the highest position of a call. A long
prompt in several calls would have early keys and late queries of different frequencies, so it must come in one call,
which the cache splits into blocks. Decoded tokens are rotated by the length reached so far, and stored keys stay as
they are; transformers' own cache does the same, except for the models in `AGAIN`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

RECURRENT = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
"""Types of layers with a recurrent or convolutional state. The hybrid types also store keys and values."""
NOTHING = ("moe", "mlp")
"""Types of layers that store nothing."""
AGAIN = ("phi3", "phimoe", "phi4_multimodal")
"""Models of which `model.generate` discards the cache where the text exceeds `uniform_length`, and computes the text so
far again as one prompt, with the factors of long texts. kvbench's loop does the same, under every policy."""
RESTARTING = ("jamba", "zamba")
"""Models whose recurrent layers (Mamba 1) restart at every call of several tokens in transformers."""


@dataclass(frozen=True)
class Layout:
    """The layers of a model, by their index in the model.

    layers: number of layers. attention: layers that store keys and values, in order. states: number of states of every
    recurrent layer. continues: whether recurrent layers continue from their state in a call of several tokens. owners:
    for each layer that reads the keys and values of another layer, that layer. latent: attention layers store latents.
    uniform_length: number of tokens up to which the length of a call does not change rotations; None: any.
    restart_length: the same, if a longer text is computed again from its beginning; None: it continues.
    """

    layers: int
    attention: tuple[int, ...]
    states: Mapping[int, int]
    continues: bool
    owners: Mapping[int, int]
    latent: bool
    uniform_length: int | None
    restart_length: int | None

    @cached_property
    def places(self) -> dict[int, int]:
        """The index of each attention layer in the cache, by its index in the model."""
        return {index: place for place, index in enumerate(self.attention)}

    @cached_property
    def owned(self) -> frozenset[int]:
        """The attention layers, by their index in the cache, that other layers read too."""
        return frozenset(self.places[owner] for owner in self.owners.values())

    def rotates_by_length(self, tokens: int) -> bool:
        """Whether the rotations of a call depend on its length, if it reaches this number of tokens."""
        return self.uniform_length is not None and tokens > self.uniform_length

    def needs_one_call(self, tokens: int) -> bool:
        """Whether a prompt that ends after this number of tokens must come in one call to give the same results."""
        return not self.continues or self.rotates_by_length(tokens)


def layout_of(config: PreTrainedConfig) -> Layout:
    """The layout of a model, from the text part of its configuration."""
    text = config.get_text_config(decoder=True)
    count = text.num_hidden_layers
    kinds = list(getattr(text, "layer_types", None) or ["full_attention"] * count)
    own = len(kinds) - (getattr(text, "num_kv_shared_layers", None) or 0)  # the last layers have no own keys and values
    last = {kind: index for index, kind in enumerate(kinds[: max(own, 0)])}
    states = getattr(text, "number_of_conv_states", None) or 1
    without = ("linear_attention", "conv", *NOTHING)
    return Layout(
        layers=count,
        attention=tuple(index for index, kind in enumerate(kinds) if kind not in without and index < own),
        states={index: states for index, kind in enumerate(kinds) if kind in RECURRENT},
        continues=text.model_type not in RESTARTING,
        owners={index: last[kind] for index, kind in enumerate(kinds) if index >= own and kind in last},
        latent=getattr(text, "kv_lora_rank", None) is not None,
        uniform_length=_uniform_length(text),
        restart_length=_uniform_length(text) if text.model_type in AGAIN else None,
    )


def kv_shapes(config: PreTrainedConfig, layers: Sequence[int] | None = None) -> list[tuple[int, int, int]]:
    """KV heads and the sizes of a token's key and value, of some layers (None: the attention layers).

    For latents, the sizes of the latent and of the rotated part of the key. Read from a text configuration; the shapes
    of the model itself are in `kvbench.models.trial.layer_shapes`.
    """
    layout = layout_of(config)
    layers = layout.attention if layers is None else layers
    if layout.latent:
        return [(1, config.kv_lora_rank, config.qk_rope_head_dim)] * len(layers)
    differ = getattr(config, "per_layer_attributes", None)
    shapes = []
    for own in (config.per_layer_config[index] if differ else config for index in layers):
        dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
        shapes.append((getattr(own, "num_key_value_heads", None) or own.num_attention_heads, dim, dim))
    return shapes


def reset_rotation(model: PreTrainedModel) -> None:
    """Rotate a new prompt by its own length. Dynamic NTK otherwise uses the longest length of all calls so far."""
    if not any("dynamic" in part["rope_type"] for part in _rope_parts(model.config.get_text_config(decoder=True))):
        return
    module: Any
    for module in model.modules():
        if hasattr(module, "max_seq_len_cached") and hasattr(module, "original_inv_freq"):
            module.inv_freq = module.original_inv_freq.to(module.inv_freq.device, copy=True)
            module.max_seq_len_cached = module.original_max_seq_len


def _uniform_length(config: PreTrainedConfig) -> int | None:
    lengths = []
    for part in _rope_parts(config):
        if part["rope_type"] == "longrope":
            lengths.append(part["original_max_position_embeddings"])
        elif "dynamic" in part["rope_type"]:
            lengths.append(config.max_position_embeddings)
    return min(lengths, default=None)


def _rope_parts(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The rotary parameters: one set for all layers, or one for each type of layer."""
    given: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    parts = [given] if "rope_type" in given else given.values()
    return [part for part in parts if isinstance(part, dict) and "rope_type" in part]

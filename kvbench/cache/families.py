"""Every rule about types of models: which are supported, what their layers store, their windows and rotations.

A layer stores its own keys and values, a recurrent state, both, or nothing (layers that share those of another layer).
Policies, budgets and statistics count only the attention layers, those with their own keys and values, from 0.

Some rotary embeddings (longrope, dynamic NTK) change their frequencies with the highest position of a call. A long
prompt in several calls would have early keys and late queries of different frequencies, so it must come in one call,
which the cache splits into blocks. Decoded tokens are rotated by the length reached so far, and stored keys stay as
they are; transformers' own cache does the same, except for the models in `AGAIN`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS = ("full_attention", "sliding_attention", "hybrid", "hybrid_sliding")
"""Supported types of layers with attention."""
RECURRENT = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
"""Types of layers with a recurrent or convolutional state. The hybrid types also store keys and values."""
NOTHING = ("moe", "mlp")
"""Types of layers that store nothing."""
AGAIN = ("phi3", "phimoe", "phi4_multimodal")
"""Models of which `model.generate` discards the cache where the text exceeds `uniform_length`, and computes the text so
far again as one prompt, with the factors of long texts. kvbench's loop does the same, under every policy."""
RESTARTING = ("jamba", "zamba")
"""Models whose recurrent layers (Mamba 1) restart at every call of several tokens in transformers."""

OUTPUTS = ("o_proj", "out_proj", "dense")
"""Names of the output projection of an attention module."""
GGUF_ROPE_SCALING = ("gpt-oss",)
"""Architectures of GGUF files of which transformers reads the scaling of the rotary embedding."""
ELSEWHERE = ("minimax", "recurrent_gemma")
"""Models that store the states of their recurrent layers outside transformers' cache."""
INSTEAD = "use a model in which every layer stores keys and values, such as Llama, Mistral, Qwen3 or Gemma 3"
NO_INTERFACE = "does not use transformers' attention interface, so kvbench cannot manage its cache"


class InterfaceError(ValueError):
    """A model uses its cache or its attention in a way that kvbench does not support."""


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


def rotary_of(module: nn.Module) -> nn.Module | None:
    """A new rotary embedding of an attention module's model, from the class in its code; None if it is unknown."""
    family, code = type(module).__name__.removesuffix("Attention"), sys.modules[type(module).__module__]
    found: Any = getattr(code, f"{family}RotaryEmbedding", None) or getattr(code, f"{family}TextRotaryEmbedding", None)
    known = {"self", "x", "position_ids", "layer_type"}
    if found is None or not signature(found.forward).parameters.keys() <= known:
        return None
    made: nn.Module = found(config=module.config)
    return made


def rotary_arguments(rotary: nn.Module, module: Any) -> dict[str, str]:  # noqa: ANN401 - attributes have no type
    """Arguments of a rotary embedding beside the positions: the type of the module's layer, where types differ."""
    typed = "layer_type" in signature(rotary.forward).parameters
    return {"layer_type": module.config.layer_types[module.layer_idx]} if typed else {}


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


# --- windows ---------------------------------------------------------------------------------------------------------
def in_window(config: PreTrainedConfig, tokens: int) -> bool:
    """Whether a text of this many tokens is within the model's sliding window, which hides none of them yet."""
    window = getattr(config.get_text_config(decoder=True), "sliding_window", None)
    return window is not None and tokens <= window


def layer_slides(config: PreTrainedConfig, index: int | None) -> tuple[bool, bool]:
    """Whether a layer has a sliding window, and whether the configuration names the types of layers.

    index: of the layer in the model; None where several layers share their attention's weights.
    """
    kinds = getattr(config, "layer_types", None)
    if not kinds or index is None:
        window = getattr(config, "sliding_window", None)
        return window is not None and getattr(config, "use_sliding_window", True), False
    return kinds[index] in ("sliding_attention", "hybrid_sliding"), True


# --- supported models ------------------------------------------------------------------------------------------------
def model_class_of(config: PreTrainedConfig) -> Any:  # noqa: ANN401 - a class of transformers
    """The causal language model class of a configuration; None if transformers has none (remote code)."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # here: `import kvbench` must not import all models

    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def name_of(config: PreTrainedConfig) -> str:
    """The name of a configuration's model, for messages."""
    model_class = model_class_of(config)
    return type(config).__name__.removesuffix("Config") if model_class is None else model_class.__name__


def check_interface(config: PreTrainedConfig) -> None:
    """Raise InterfaceError unless kvbench can manage the cache of the model of this text configuration."""
    model_class, name = model_class_of(config), name_of(config)
    if not hasattr(config, "num_hidden_layers"):
        raise InterfaceError(f"{name} has several stacks of layers, but a KVCache supports one; {INSTEAD}")
    kinds, supported = getattr(config, "layer_types", None) or (), dict.fromkeys((*KINDS, *RECURRENT, *NOTHING))
    unknown = ", ".join(sorted({*kinds} - {*supported}))
    if unknown:
        raise InterfaceError(f"{name} has layers of type {unknown}; supported are {', '.join(supported)}; {INSTEAD}")
    layout = layout_of(config)
    crossing = getattr(config, "cross_attention_layers", None) or ()
    stateful = model_class is not None and model_class._is_stateful and not layout.states and not kinds
    refusals = {
        f"layers {', '.join(map(str, crossing))} of {name} attend to another input than the text "
        "(cross_attention_layers)": crossing,
        f"{name} scales queries by their place in the batch (floor_scale)": getattr(config, "floor_scale", None),
        f"no layer of {name} stores its own keys and values": not layout.attention,
        f"{name} stores the states of its recurrent layers outside transformers' cache": (
            config.model_type in ELSEWHERE or stateful
        ),
        # Not `_supports_attention_backend`: some models use the attention interface without that flag (StableLM).
        f"{name} {NO_INTERFACE}": model_class is not None and not model_class._can_set_attn_implementation(),
    }
    for message, applies in refusals.items():
        if applies:
            raise InterfaceError(f"{message}; {INSTEAD}")

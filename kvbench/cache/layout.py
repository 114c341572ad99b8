"""What each layer of a model stores: its own keys and values, a recurrent state, both, or nothing (shared layers).

A policy, its budget and its statistics know only the layers with keys and values of their own and count them from 0:
the attention layers of a cache. Everything that names a layer to a reader gives the model's index.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from transformers import PreTrainedConfig

from kvbench.cache.rotary import beyond, uniform_length

RECURRENT = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
"""Types of layers with a convolutional or recurrent state; the hybrid ones keep keys and values too."""
NOTHING = ("moe", "mlp")
"""Types of layers that keep nothing."""
BEGIN_ANEW = ("jamba", "zamba")
"""Models whose recurrences (Mamba 1) transformers restarts at every call with several tokens."""


@dataclass(frozen=True)
class Layout:
    """The layers of a model, by its own indices.

    layers: number of layers. attention: layers that store keys and values, in order. states: number of states of a
    recurrent or convolutional layer. continues: whether such a layer continues from its state in a call with several
    tokens; otherwise it restarts. owners: for a layer that reads the keys and values of another layer, that layer.
    latent: attention layers keep latents, one for all heads.
    """

    layers: int
    attention: tuple[int, ...]
    states: Mapping[int, int] = field(default_factory=dict)
    continues: bool = True
    owners: Mapping[int, int] = field(default_factory=dict)
    latent: bool = False

    @cached_property
    def owned(self) -> frozenset[int]:
        """The places of attention layers that others read too."""
        return frozenset(self.places[owner] for owner in self.owners.values())

    @property
    def places(self) -> dict[int, int]:
        """The place of each attention layer in the cache, by its index in the model."""
        return {index: place for place, index in enumerate(self.attention)}


def layout_of(config: PreTrainedConfig) -> Layout:
    """The layout of the model of a text configuration."""
    count = config.num_hidden_layers
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * count)
    owners = _owners(config, kinds)
    without = ("linear_attention", "conv", *NOTHING)
    attention = [index for index, kind in enumerate(kinds) if kind not in without and index not in owners]
    number = getattr(config, "number_of_conv_states", None) or 1
    states = {index: number for index, kind in enumerate(kinds) if kind in RECURRENT}
    latent = getattr(config, "kv_lora_rank", None) is not None
    return Layout(count, tuple(attention), states, config.model_type not in BEGIN_ANEW, owners, latent)


def _owners(config: PreTrainedConfig, kinds: Sequence[str]) -> dict[int, int]:
    """The last layers read what the last one of their type before them stored (Gemma 3n, Gemma 4)."""
    first = len(kinds) - (getattr(config, "num_kv_shared_layers", None) or 0)
    last = {kind: index for index, kind in enumerate(kinds[:first])}
    return {index: last[kinds[index]] for index in range(first, len(kinds))}


def continues(config: PreTrainedConfig) -> bool:
    """Whether a call with several tokens continues from the last state; see `Layout`."""
    return layout_of(config.get_text_config(decoder=True)).continues


def in_one_call(config: PreTrainedConfig, tokens: int) -> bool:
    """Whether a prompt of this length must be processed in one call, because several calls would give other results."""
    text = config.get_text_config(decoder=True)
    return not continues(text) or beyond(uniform_length(text), tokens)


def attention_layers(config: PreTrainedConfig) -> int:
    """Number of layers that store keys and values, among which a policy divides its budget."""
    return len(layout_of(config.get_text_config(decoder=True)).attention)

"""Supported models: the shape of their cache according to the configuration, and their requirements on a cache."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from kvbench.cache.layout import NOTHING, RECURRENT, layout_of

KINDS = ("full_attention", "sliding_attention", "hybrid", "hybrid_sliding")
"""Types of layers with attention that kvbench follows; every other sees something else of the past tokens."""
INDEXED = ("indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention")
"""Types of layers with an indexer; the last two are names that older versions of transformers have."""
ELSEWHERE = ("minimax", "recurrent_gemma")
"""Models that keep the states of their recurrent layers elsewhere than in the layers of transformers' cache."""
INSTEAD = "use a model in which every layer stores keys and values, such as Llama, Mistral, Qwen3 or Gemma 3"


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def uncompiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Exclude a function from `torch.compile`. Unlike `torch.compiler.disable`, it keeps the types of the function."""
    return cast(Callable[Parameters, Result], torch.compiler.disable(function))


class InterfaceError(ValueError):
    """A model uses its cache or its attention in a way that kvbench does not support."""


class _NoTensorError(InterfaceError, AttributeError):
    """Also an AttributeError, so that `hasattr` returns False."""


def model_class_of(config: PreTrainedConfig) -> Any:  # noqa: ANN401 - a class of transformers
    """The causal language model class of a configuration; None if transformers has none (remote code)."""
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def name_of(config: PreTrainedConfig) -> str:
    """The name of a configuration's model, for sentences."""
    model_class = model_class_of(config)
    return type(config).__name__.removesuffix("Config") if model_class is None else model_class.__name__


def check_interface(config: PreTrainedConfig) -> None:
    """InterfaceError unless every layer of the model of this text configuration hands its attention to transformers."""
    model_class, name = model_class_of(config), name_of(config)
    _check_own_cache(config, name)
    _check_kinds(config, name)
    _check_states(config, name, model_class is not None and model_class._is_stateful)
    # Not `_supports_attention_backend`: some models use the attention interface without that flag (StableLM).
    if model_class is not None and not model_class._can_set_attn_implementation():
        raise InterfaceError(written_in(name))


def written_in(name: str) -> str:
    """The sentence for a model whose attention cannot be replaced."""
    return (
        f"{name} does not follow transformers' attention interface (its attention is written into the model), so "
        f"kvbench cannot manage its cache; {INSTEAD}"
    )


def _check_kinds(config: PreTrainedConfig, name: str) -> None:
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()) or getattr(config, "floor_scale", None):
        raise InterfaceError(
            f"{name} attends within chunks of the text, or scales queries by their place in the whole batch (Llama 4), "
            f"which kvbench does not support; {INSTEAD}"
        )
    known = dict.fromkeys((*KINDS, *RECURRENT, *NOTHING))
    others = sorted({kind for kind in getattr(config, "layer_types", None) or () if kind not in known})
    indexed = [kind for kind in others if kind in INDEXED]
    if indexed:
        raise InterfaceError(
            f"{name} has an indexer that selects the tokens of each query ({indexed[0]}) by separate keys, which "
            f"kvbench does not store; {INSTEAD}"
        )
    if others:
        raise InterfaceError(f"{name} has layers of type {', '.join(others)}; supported are {', '.join(known)}")


def _check_states(config: PreTrainedConfig, name: str, stateful: bool) -> None:
    """InterfaceError for models without attention, and where the states of recurrent layers cannot go along."""
    layout = layout_of(config)
    if not layout.attention:
        raise InterfaceError(
            f"{name} has only recurrent layers, and no tokens can be evicted from their states; {INSTEAD}"
        )
    silent = stateful and not layout.states and not getattr(config, "layer_types", None)
    if config.model_type in ELSEWHERE or silent:
        raise InterfaceError(
            f"{name} stores the states of its recurrent layers outside transformers' cache, so kvbench cannot move "
            f"them with their sequences; {INSTEAD}"
        )


def _check_own_cache(config: PreTrainedConfig, name: str) -> None:
    if not hasattr(config, "num_hidden_layers"):
        raise InterfaceError(f"{name} has several stacks of layers, but a KVCache supports one; {INSTEAD}")
    if (getattr(config, "num_kv_shared_layers", None) or 0) >= config.num_hidden_layers:
        raise InterfaceError(
            f"every layer of {name} uses the keys and values of another model, so it has no cache; {INSTEAD}"
        )
    crossing = getattr(config, "cross_attention_layers", None)
    if crossing:
        raise InterfaceError(
            f"layers {', '.join(map(str, crossing))} of {name} attend to another input than the text "
            f"(cross_attention_layers), so they store no tokens of the text; {INSTEAD}"
        )


def kv_shapes(config: PreTrainedConfig, layers: Sequence[int] | None = None) -> list[tuple[int, int, int]]:
    """KV heads of some layers (None: the layers that policies compress), and the sizes of a token's key and value.

    For latents, the sizes of the latent and of the rotated part of the key. Based on the text configuration only; the
    shapes of the model itself are in `kvbench.models.trial.layer_shapes`.
    """
    layout = layout_of(config)
    layers = layout.attention if layers is None else layers
    if layout.latent:
        return [(1, config.kv_lora_rank, config.qk_rope_head_dim)] * len(layers)
    own = getattr(config, "per_layer_attributes", None)
    found = [_kv_shape(config.per_layer_config[i] if own else config) for i in layers]
    return [(heads, dim, dim) for heads, dim in found]


def _kv_shape(config: Any) -> tuple[int, int]:  # noqa: ANN401 - a configuration, or its part for one layer
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return kv_heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class NotATensor:
    """What a layer of the cache hands to the model in place of keys and values: nothing to compute with.

    A model that computes with them before its attention is refused.
    """

    if not TYPE_CHECKING:  # else every attribute would seem to exist

        def __getattr__(self, name: str) -> NoReturn:
            """Only called for what the layer itself has not."""
            if hasattr(Tensor, name):
                raise _NoTensorError(_computes(name))
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        raise _NoTensorError(_computes(getattr(function, "__name__", str(function))))


def check_attention(config: PreTrainedConfig) -> None:
    """ValueError for a model that attends otherwise than a KVCache can be read."""
    if config._attn_implementation != "kvbench":
        raise ValueError(
            f"the configuration of this cache asks for attention with {config._attn_implementation!r}, which "
            'cannot read a KVCache: call model.set_attn_implementation("kvbench") first, and make the cache with '
            "that model.config"
        )


def check_kind(own: PreTrainedConfig, called: Any) -> None:  # noqa: ANN401 - a module's attributes have no type
    """ValueError if the configuration of the model that calls is of another kind than the cache's own."""
    for field in ("model_type", "num_hidden_layers", "hidden_size"):
        mine, its = getattr(own, field, None), getattr(called, field, None)
        if mine != its:
            raise ValueError(
                f"this KVCache was made from another model's configuration ({field}={mine}, the model has {its}): "
                "make it with KVCache(model.config, policy)"
            )


class NoRollback:
    """What a layer of the cache refuses: appended tokens are neither taken back nor handed to another sequence."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise ValueError("kvbench caches do not follow beam search; generate with num_beams=1")

    def crop(self, *args: object, **kwargs: object) -> None:
        raise ValueError(
            "kvbench caches cannot be cropped (tokens once taken in are not taken back, whatever the policy), so "
            "assistant and prompt-lookup decoding cannot use them"
        )

    batch_repeat_interleave = batch_select_indices = crop


def _computes(name: str) -> str:
    return (
        f"the model uses keys or values of its cache outside attention (it calls {name!r}; a package that wraps "
        "attention functions may also do so), but kvbench passes them only to attention; " + INSTEAD
    )

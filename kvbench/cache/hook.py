"""The attention function and the mask function registered with transformers under the name `kvbench`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from kvbench.cache import NAME
from kvbench.cache.calls import Columns
from kvbench.cache.families import InterfaceError, check_interface, layer_slides
from kvbench.cache.interface import NotATensor, uncompiled
from kvbench.cache.registration import REGISTRY
from kvbench.errors import counted
from kvbench.policies.model_layer import Latents
from kvbench.policies.observation import AttentionParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HARMLESS = {
    "position_ids",
    "cache_position",
    "position_embeddings",
    "past_key_values",
    "num_items_in_batch",
    "logits_to_keep",
    "layer_idx",
    "is_causal",  # checked apart
}
"""Arguments of attention that change nothing over a causal cache."""
HARMLESS_WORDS = ("output", "return", "rout", "expert", "loss", "label")
"""Words in the names of arguments about a model's outputs, its experts and its training."""
CHANGING_WORDS = (
    *("sink", "s_aux", "bias", "alibi", "softmax", "softcap", "temperature", "scale"),
    *("mask", "causal", "bidirectional", "window", "block", "chunk", "sparse", "indices", "seq"),
)
"""Words in the names of arguments that change attention, switches included."""

_WINDOWS: WeakKeyDictionary[nn.Module, tuple[int | None, int | None]] = WeakKeyDictionary()
"""The window that each attention module passed last, and that of its layer, because reading the configuration takes
longer than all other checks of a layer."""


class LayerCaller(Protocol):
    """A cache whose layers are called by the attention function."""

    def attend(
        self, call: LayerCall, module: nn.Module, queries: Tensor, columns: Columns, params: AttentionParams
    ) -> Tensor:
        """The attention output [B,H_q,M,D] of queries [B,H_q,M,D]."""


class LayerCall(NotATensor):
    """Stands for a layer's new keys and values [B,H_kv,M,D], from `cache.update` to the attention function.

    index: of the layer in the model. done: the layer has attended.
    """

    def __init__(self, cache: LayerCaller, index: int, keys: Tensor, values: Tensor) -> None:
        self.cache, self.index, self.done = cache, index, False
        self.new_keys, self.new_values = keys, values

    def attend(self, module: nn.Module, queries: Tensor, columns: Columns, params: AttentionParams) -> Tensor:
        """The attention output of queries [B,H_q,M,D]. InterfaceError for a second layer with these keys and values."""
        if self.done:
            raise InterfaceError(
                f"the model reads the keys and values of layer {self.index} in another layer too, which its "
                "configuration does not say (num_kv_shared_layers)"
            )
        self.done = True
        return self.cache.attend(self, module, queries, columns, params)


class _Expected(threading.local):
    call: LayerCall | None = None
    window: int | None = None


_EXPECTED = _Expected()
"""The call of a layer with latents, whose attention then gets plain tensors, which the model expands. The window of the
newest mask, for models without `layer_types`."""


def expect_expanded(call: LayerCall) -> None:
    """The next attention is that of a layer with latents, and gets expanded tensors instead of this call."""
    _EXPECTED.call = call


def _latent_call(module: nn.Module, value: LayerCall | Tensor) -> tuple[LayerCall, Latents]:
    """The call of a layer whose attention receives expanded tensors, and the expansion of its latents.

    Raises ValueError for attention without a cache, and for a model without a method that expands latents.
    """
    call, _EXPECTED.call = _EXPECTED.call, None
    if call is None or isinstance(value, LayerCall) or call.index != module.layer_idx:
        raise ValueError(
            "kvbench attention reads a KVCache: pass past_key_values=KVCache(model.config, policy); a vision or audio "
            f'tower has none: model.set_attn_implementation({{"text_config": "{NAME}"}}) sets only the text part'
        )
    expand: Any = getattr(module, "expand_kv", None)
    if expand is None:
        raise InterfaceError(f"{_name(module)} has no method expand_kv, which expands its latents")
    return call, Latents(expand, value.shape[-1])


@uncompiled
def kvbench_attention(
    module: nn.Module,
    query: Tensor,
    key: LayerCall | Tensor,
    value: LayerCall | Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Attention over what a KVCache layer holds: query [B,H_q,M,D] -> [B,M,H_q,D].

    Supports scaling, softcap, sliding_window and s_aux [H_q] (logits of attention sinks, as in gpt-oss). ValueError for
    other arguments that change attention.
    """
    call, latents = (key, None) if isinstance(key, LayerCall) else _latent_call(module, value)
    _refuse_unknown(module, kwargs)
    passed, window = _WINDOWS.get(module, (..., None))
    if passed != sliding_window:
        window = _window(module, sliding_window)
        _WINDOWS[module] = sliding_window, window
    if dropout:
        raise ValueError(f"{_name(module)} asks for attention dropout {dropout}: call model.eval() before generating")
    if attention_mask is not None and attention_mask.shape[1::2] == (1, 1):  # as `kvbench_mask` makes it
        attention_mask = attention_mask[:, 0, :, 0]
    if attention_mask is not None and (attention_mask.dim() != 2 or attention_mask.dtype != torch.bool):
        raise ValueError("kvbench takes 2D padding masks [batch, tokens]; a 4D attention mask cannot follow evictions")
    sinks = None if s_aux is None else s_aux.detach()[None]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = AttentionParams(scale, softcap, window, sinks, latents=latents)
    columns = Columns(attention_mask, kwargs.get("position_ids"))
    return call.attend(module, query, columns, how).transpose(1, 2).contiguous(), None


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _refuse_unknown(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise InterfaceError for arguments that change attention, or that could change it.

    Arguments about outputs, routing and training are ignored, and so are unknown switches, unless their name is about
    attention. Numbers and tensors of unknown names may be read by attention, so they are not ignored.
    """
    unknown = [
        name
        for name, value in kwargs.items()
        if value is not None and value is not False and name not in HARMLESS
        if _contains(CHANGING_WORDS, name) or not (isinstance(value, bool | str) or _contains(HARMLESS_WORDS, name))
    ]
    if unknown:
        raise InterfaceError(
            f"{_name(module)} passes {', '.join(sorted(unknown))} to its attention, which kvbench does not support"
        )
    if kwargs.get("output_attentions"):
        raise InterfaceError("kvbench computes no attention weights, so output_attentions=True is not supported")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise InterfaceError(f"{_name(module)} uses attention that is not causal, which kvbench does not support")


@lru_cache(maxsize=256)  # every layer passes the same few names at every token
def _contains(words: tuple[str, ...], name: str) -> bool:
    return any(word in name for word in words)


def _window(module: nn.Module, passed: int | None) -> int | None:
    """The sliding window of a layer: what it passes to attention, else what the model's mask has for its type.

    Raises InterfaceError for a window that the model does not use.
    """
    config: Any = module.config
    slides, typed = layer_slides(config, getattr(module, "layer_idx", None))
    if passed is not None or not slides:
        return passed
    window: int | None = getattr(config, "sliding_window", None)
    if not window or not (typed or window == _EXPECTED.window):
        raise InterfaceError(
            f"{_name(module)} has a sliding window that is passed neither to its attention nor to its mask "
            f"(sliding_window={window}), so kvbench cannot apply it; set sliding_window=null in its configuration"
        )
    return window


@uncompiled
def kvbench_mask(
    *args: Any,  # noqa: ANN401
    attention_mask: Tensor | None = None,
    q_length: int,
    kv_length: int | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> Tensor | None:
    """All tokens seen by the end of the call that are no padding, bool [B,1,N,1]; None without a mask.

    Attention is causal by position. ValueError if the model changes the causal mask (bidirectional blocks, packed
    sequences, chosen tokens), for a call without tokens, and for a mask that does not cover the tokens seen.
    """
    _EXPECTED.call = None  # of a call that failed
    _EXPECTED.window = local_size
    if not allow_is_causal_skip:
        raise InterfaceError(
            "the model changes the causal mask (packed, bidirectional, crossing or chosen tokens), which kvbench does "
            "not follow"
        )
    seen = (kv_length or q_length) - q_length
    if q_length == 0:
        raise ValueError(
            f"the call brings no token that the cache has not seen: it has seen {seen}, so pass the ids of the whole "
            "text to model.generate, or new ids with an attention_mask of all tokens; for another text make a new "
            "KVCache, or call reset()"
        )
    if attention_mask is None or attention_mask.is_meta:  # a trial without numbers has no padding
        return None
    if kv_length is not None and attention_mask.shape[-1] != kv_length:
        raise ValueError(
            f"attention_mask has {counted(attention_mask.shape[-1], 'column')}, but the cache has seen "
            f"{counted(seen, 'token')} "
            f"(evicted ones included) and the call brings {q_length}: pass a mask with "
            f"{counted(kv_length, 'column')}, or none "
            "without padding; for another text make a new KVCache, or call reset()"
        )
    return attention_mask.to(torch.bool)[:, None, :, None]


def register() -> None:
    """Register both functions with transformers, whose registries take seconds to import."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, kvbench_attention)
    AttentionMaskInterface.register(NAME, kvbench_mask)


if REGISTRY in sys.modules:  # otherwise it is registered right after the import of the registry
    register()


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Switch the model to kvbench's attention; ValueError if it does not follow transformers' attention interface.

    Vision and audio towers, which have no cache, keep their attention.
    """
    _set_attention(model, NAME)
    return model


@contextmanager
def attention(model: PreTrainedModel, name: str = NAME) -> Iterator[None]:
    """The decoder of a model with an attention function; afterwards it is as before. ValueError as in `prepare`."""
    before = _attention_of(model)
    _set_attention(model, name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _set_attention(model: PreTrainedModel, name: str) -> None:
    check_interface(model.config.get_text_config(decoder=True))
    model.set_attn_implementation(dict.fromkeys(_attention_of(model), name))


def _attention_of(model: PreTrainedModel) -> dict[str, str]:
    """The attention functions of a model and of its decoder, by the names that `set_attn_implementation` takes."""
    config, decoder = model.config, model.config.get_text_config(decoder=True)
    parts = {name: part for name in config.sub_configs if (part := getattr(config, name)) is decoder}
    return {"": config._attn_implementation, **{name: part._attn_implementation for name, part in parts.items()}}


def check_attention(config: PreTrainedConfig) -> None:
    """Raise ValueError if the model's attention function cannot read a cache of its configuration.

    Also restores our attention function if a package has wrapped all registered ones (kvpress does on import, to mask
    keys of its own caches): ours gets a layer's call instead of keys.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if getattr(ALL_ATTENTION_FUNCTIONS[NAME], "__module__", "").partition(".")[0] == "kvpress":
        ALL_ATTENTION_FUNCTIONS[NAME] = kvbench_attention
    if config._attn_implementation != NAME:
        raise ValueError(
            f"the configuration of this cache has attn_implementation={config._attn_implementation!r}, which "
            f'cannot read a KVCache: call model.set_attn_implementation("{NAME}") first, and make the cache with '
            "that model.config"
        )

"""The attention function and the mask function registered with transformers under the name `kvbench`."""

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvbench.cache import NAME
from kvbench.cache.interface import InterfaceError, NotATensor, check_interface, uncompiled
from kvbench.policies.model_layer import Latents
from kvbench.policies.observation import AttentionParams

HARMLESS = {
    "position_ids",
    "cache_position",
    "position_embeddings",
    "past_key_values",
    "num_items_in_batch",
    "logits_to_keep",
    "layer_idx",
}
"""Values other than flags that models hand through to attention and that change nothing over a causal cache."""
HARMLESS_WORDS = ("output", "return", "rout", "expert", "loss", "label")
"""Words in the names of arguments about what a model returns, how it routes its experts and how it is trained."""
CHANGING_WORDS = (
    *("sink", "s_aux", "bias", "alibi", "softmax", "softcap", "temperature", "scale"),
    *("mask", "causal", "bidirectional", "window", "block", "chunk", "sparse", "indices", "seq"),
)
"""Words in the names of arguments that change attention, switches included."""

_WINDOWS: WeakKeyDictionary[nn.Module, tuple[int | None, int | None]] = WeakKeyDictionary()
"""The window that each attention module passed last, and that of its layer: asking a configuration costs more than all
other checks, and they come at every token in every layer."""


class LayerCall(NotATensor):
    """Stands for a layer's new keys and values, from `cache.update` to the attention function.

    attend: takes the module that attends, queries [B,H_q,M,D], the mask, the attention's parameters.
    """

    def __init__(
        self, layer: int, attend: Callable[[nn.Module, Tensor, Tensor | None, AttentionParams], Tensor]
    ) -> None:
        self.layer = layer
        self._attend = attend
        self._done = False

    def __call__(self, reader: nn.Module, queries: Tensor, mask: Tensor | None, how: AttentionParams) -> Tensor:
        """The layer's attention output [B,H_q,M,D]. InterfaceError where another layer reads the same keys."""
        if self._done:
            raise InterfaceError(
                f"the model reads the keys and values of layer {self.layer} in another layer too, which its "
                "configuration does not say (num_kv_shared_layers)"
            )
        self._done = True
        return self._attend(reader, queries, mask, how)


class SharedCall(LayerCall):
    """The same for a layer whose keys and values later layers read too: `read` takes their queries."""

    def __init__(self, call: LayerCall, read: Callable[[Tensor, AttentionParams], Tensor]) -> None:
        super().__init__(call.layer, call._attend)
        self._read = read

    def __call__(self, reader: nn.Module, queries: Tensor, mask: Tensor | None, how: AttentionParams) -> Tensor:
        """Attention output [B,H_q,M,D] of the owner, which comes first, or of a reader, maybe of the last queries."""
        return self._read(queries, how) if self._done else super().__call__(reader, queries, mask, how)

    def to(self, *args: object, **kwargs: object) -> Self:
        """Models hand it on to the device of a reader, whose queries go to that of the store instead."""
        return self


class _Expected(threading.local):
    call: LayerCall | None = None
    window: int | None = None


_EXPECTED = _Expected()
"""The call of a layer whose latents the model now expands: what attention gets is then plain tensors. The window of
the mask that was made last: of all layers, in models that name no types of them."""


def expect(call: LayerCall) -> None:
    """The next attention is this layer's, whatever keys and values it is given."""
    _EXPECTED.call = call


def _latent_call(module: nn.Module, value: LayerCall | Tensor) -> tuple[LayerCall, Latents]:
    """The call of a layer whose attention receives expanded tensors, and the expansion of its latents.

    Raises ValueError for attention without a cache, and for a model without a method that expands latents.
    """
    call, _EXPECTED.call = _EXPECTED.call, None
    if call is None or isinstance(value, LayerCall) or call.layer != module.layer_idx:
        raise ValueError(_without_cache(module))
    expand: Any = getattr(module, "expand_kv", None)
    if expand is None:
        raise InterfaceError(f"{_name(module)} does not say how it expands its latents (it has no expand_kv)")
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

    Honours scaling, softcap, sliding_window and s_aux [H_q] (the logits of attention sinks, as gpt-oss has them);
    ValueError for anything else that would change attention.
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
    return call(module, query, attention_mask, how).transpose(1, 2).contiguous(), None


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _without_cache(module: nn.Module) -> str:
    sentence = "kvbench attention reads a KVCache: pass past_key_values=KVCache(model.config, policy)"
    if module.training:
        sentence += (
            "; where one was passed, gradient checkpointing took it away (a layer that is computed twice would store "
            "its tokens twice): call model.gradient_checkpointing_disable() or model.eval()"
        )
    return sentence


def _refuse_unknown(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise InterfaceError for arguments that change attention, or that could change it.

    What models hand through about their outputs, routing and training is left alone, however new: a switch changes
    attention only if its name says so. Numbers and tensors of unknown names may be read by attention, so they are not
    ignored.
    """
    unknown = [name for name in kwargs.keys() - HARMLESS if _changes_attention(name, kwargs[name])]
    if unknown:
        raise InterfaceError(
            f"{_name(module)} passes {', '.join(sorted(unknown))} to its attention, which kvbench does not support"
        )
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise InterfaceError(f"{_name(module)} uses attention that is not causal, which kvbench does not support")


def _changes_attention(name: str, value: object) -> bool:
    if value is None or value is False or name == "is_causal":
        return False
    return _says_one_of(CHANGING_WORDS, name) or not (
        isinstance(value, bool | str) or _says_one_of(HARMLESS_WORDS, name)
    )


@lru_cache(maxsize=256)  # a handful of names comes in every layer at every token
def _says_one_of(words: tuple[str, ...], name: str) -> bool:
    return any(word in name for word in words)


def _window(module: nn.Module, passed: int | None) -> int | None:
    """The sliding window of a layer: what it passes to attention, else what the model's mask has for its type.

    Raises InterfaceError for a window that the model does not use.
    """
    config = module.config
    kinds = getattr(config, "layer_types", None)
    index = getattr(module, "layer_idx", None)  # None where several layers share their attention's weights
    kind = kinds[index] if kinds and index is not None else None
    window: int | None = getattr(config, "sliding_window", None)
    if kind is None:
        slides = window is not None and getattr(config, "use_sliding_window", True)
    else:
        slides = kind in ("sliding_attention", "hybrid_sliding")
    if passed is not None or not slides:
        return passed
    if not window or (kind is None and window != _EXPECTED.window):
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
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> Tensor | None:
    """The new tokens of the call that are no padding, bool [B,1,M,1]; None if all are. Attention is causal by position.

    ValueError if the model changes the causal mask (bidirectional blocks, packed sequences, chosen tokens), or if
    prompts are padded on the right, where new tokens would follow padding.
    """
    _EXPECTED.call = None  # of a call that failed
    _EXPECTED.window = local_size
    if not allow_is_causal_skip:
        raise InterfaceError(
            "the model changes the causal mask (packed, bidirectional, crossing or chosen tokens), which kvbench does "
            "not follow"
        )
    if attention_mask is None or attention_mask.is_meta:  # a trial without numbers has no padding
        return None
    real = attention_mask[:, -q_length:].to(torch.bool)
    if q_length > 1 and bool((real.any(-1) & ~real[:, -1]).any()):
        raise ValueError(
            "attention_mask must mark padding on the left only, so that every prompt ends in the last column: "
            'tokenize with padding_side="left"'
        )
    return None if bool(real.all()) else real[:, None, :, None]


AttentionInterface.register(NAME, kvbench_attention)
AttentionMaskInterface.register(NAME, kvbench_mask)


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Switch the model to kvbench's attention; ValueError if it does not follow transformers' attention interface."""
    check_interface(model.config.get_text_config(decoder=True))
    model.set_attn_implementation(NAME)
    return model

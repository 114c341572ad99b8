"""Calls a model without weights (meta device), to check its use of cache and attention before loading it."""

import logging
from copy import deepcopy
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvbench.cache import NAME
from kvbench.cache.cache import KVCache
from kvbench.cache.families import (
    INSTEAD,
    NO_INTERFACE,
    InterfaceError,
    check_interface,
    kv_shapes,
    layout_of,
    model_class_of,
)
from kvbench.config.presets import make_policy

TOKENS = 3

log = logging.getLogger(__name__)


def try_out(config: PreTrainedConfig) -> None:
    """Raise InterfaceError if kvbench does not support models of this configuration. No weights are needed.

    The call runs on the meta device, with shapes but without numbers. It may end early in a model that reads numbers;
    the rest is then checked when the loaded model runs.
    """
    check_interface(config.get_text_config(decoder=True))
    model = _without_weights(config)
    if model is None:
        return
    _check_places(model)
    cache = KVCache(model.config, make_policy("full"), prompt_length=TOKENS)
    if _finishes(model, cache):
        layout = layout_of(cache.config)
        layers = zip(layout.attention, cache.attention_layers, strict=True)
        unused = [str(index) for index, layer in layers if not layer.is_initialized]
        unused += [str(index) for index in layout.states if not cache.has_previous_state(index)]
        if unused:
            raise InterfaceError(
                f"layers {', '.join(unused)} of {type(model).__name__} store nothing in the cache, so kvbench "
                f"cannot compress them; {INSTEAD}"
            )


def _check_places(model: PreTrainedModel) -> None:
    """Raise InterfaceError for models with positions that start after the padding index (RoBERTa) instead of at 0."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None and "position" in name:
            raise InterfaceError(
                f"{type(model).__name__} counts positions from {module.padding_idx + 1} (after the padding index of "
                f"{name.rpartition('.')[2]}), but kvbench counts them from 0; {INSTEAD}"
            )


def layer_shapes(config: PreTrainedConfig) -> dict[int, tuple[int, int, int]]:
    """KV heads, key size and value size of every attention layer.

    They are measured in a call of the model, because some configurations do not contain the differences between layers.
    For layers that the call does not reach, and for remote code, they are read from the configuration.
    """
    text = config.get_text_config(decoder=True)
    layout = layout_of(text)
    shapes = dict(zip(layout.attention, kv_shapes(text, layout.attention), strict=True))
    model = _without_weights(config)
    if model is not None:
        cache = KVCache(model.config, make_policy("full"), prompt_length=TOKENS)
        _finishes(model, cache)
        for index, layer in zip(layout.attention, cache.attention_layers, strict=True):
            if layer.keys is not None and layer.values is not None:
                shapes[index] = layer.keys.shape[1], layer.keys.shape[-1], layer.values.shape[-1]
    return shapes


def state_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of the states of recurrent layers, per sequence."""
    if not layout_of(config).states:
        return 0
    model = _without_weights(config, dtype)
    if model is None:
        return 0
    cache = KVCache(model.config, make_policy("full"), prompt_length=TOKENS)
    _finishes(model, cache)
    return cache.state_nbytes


def _without_weights(config: PreTrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel | None:
    """The model on the meta device; None for remote code, which runs only when the model is loaded."""
    model_class: Any = model_class_of(config)
    if model_class is None:
        return None
    text = config if type(config) is model_class.config_class else config.get_text_config(decoder=True)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = model_class._from_config(deepcopy(text), attn_implementation=NAME, dtype=dtype)
            model.eval()
            if model._can_set_experts_implementation():
                model.set_experts_implementation("batched_mm")  # which reads no numbers
            return model
    except KeyError as error:
        if error.args == (NAME,):  # the model class has its own attention classes
            raise InterfaceError(f"{model_class.__name__} {NO_INTERFACE}; {INSTEAD}") from error
        raise


def _finishes(model: PreTrainedModel, cache: KVCache) -> bool:
    """Whether a call finishes. InterfaceErrors are raised; errors caused by the meta device are not."""
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long, device="meta"), past_key_values=cache)
    except InterfaceError:
        raise
    except Exception as error:  # any error that a model's code raises for meta tensors
        log.debug("the trial of %s ended early: %s", type(model).__name__, error)
        return False
    return True

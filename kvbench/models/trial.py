"""One call of a model without its weights: what it would ask of its cache and its attention, in a moment."""

import logging
from copy import deepcopy
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvbench.cache import NAME
from kvbench.cache.cache import KVCache
from kvbench.cache.interface import INSTEAD, InterfaceError, check_interface, kv_shapes, model_class_of, written_in
from kvbench.cache.layout import layout_of
from kvbench.config.presets import make_policy

TOKENS = 3

log = logging.getLogger(__name__)


def try_out(config: PreTrainedConfig) -> None:
    """InterfaceError where a model of this configuration does what kvbench cannot follow; no weights are needed.

    The call runs on the meta device, where there are shapes and no numbers: it may end early where a model looks at
    numbers, after its first attention. What follows is checked when it really runs.
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
        without = [str(index) for index, layer in layers if not layer.is_initialized]
        without += [str(index) for index in layout.states if not cache.has_previous_state(index)]
        if without:
            raise InterfaceError(
                f"layers {', '.join(without)} of {type(model).__name__} keep nothing in the cache, so kvbench could "
                f"not make them smaller; {INSTEAD}"
            )


def _check_places(model: PreTrainedModel) -> None:
    """InterfaceError where places are counted from behind the padding's (RoBERTa), while kvbench counts from 0."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None and "position" in name:
            raise InterfaceError(
                f"{type(model).__name__} counts its tokens' places from {module.padding_idx + 1} on (the padding index "
                f"of its {name.rpartition('.')[2]}), while kvbench counts them from 0; {INSTEAD}"
            )


def layer_shapes(config: PreTrainedConfig) -> dict[int, tuple[int, int, int]]:
    """KV heads of every layer that attends, and numbers it stores of a token's key and value.

    As the model's code has it: some configurations do not say in what their layers differ. Where the trial ends before
    a layer, and for code of the model's own, as the configuration says.
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
    """Bytes that the states of a model's recurrent layers take for each sequence."""
    if not layout_of(config.get_text_config(decoder=True)).states:
        return 0
    model = _without_weights(config, dtype)
    if model is None:
        return 0
    cache = KVCache(model.config, make_policy("full"), prompt_length=TOKENS)
    _finishes(model, cache)
    return cache.state_nbytes


def count_parameters(config: PreTrainedConfig) -> int | None:
    """Numbers in the weights of a model of this configuration, tied ones once; None for code of the model's own."""
    model = _without_weights(config)
    return None if model is None else int(model.num_parameters())


def _without_weights(config: PreTrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel | None:
    """The model as its code builds it, every weight a shape; None for code of its own, run only when it is loaded."""
    model_class: Any = model_class_of(config)
    if model_class is None:
        return None
    own = config if type(config) is model_class.config_class else config.get_text_config(decoder=True)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = model_class._from_config(deepcopy(own), attn_implementation=NAME, dtype=dtype)
            model.eval()
            if model._can_set_experts_implementation():
                model.set_experts_implementation("batched_mm")  # which asks for no numbers
            return model
    except KeyError as error:
        if error.args == (NAME,):  # it chooses from attentions of its own
            raise InterfaceError(written_in(model_class.__name__)) from error
        raise


def _finishes(model: PreTrainedModel, cache: KVCache) -> bool:
    """Whether the call comes to its end. Errors of ours are raised; those that a lack of numbers brings are not."""
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long, device="meta"), past_key_values=cache)
    except InterfaceError:
        raise
    except Exception as error:  # whatever a model's own code makes of tensors without numbers
        log.debug("the trial of %s ended early: %s", type(model).__name__, error)
        return False
    return True

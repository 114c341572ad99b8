"""Decoder layers compiled with torch.compile, one by one: attention over the cache stays as it is."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.errors import UsageError, first_line
from kvbench.policies.policy import Policy

TRIAL = (3, 5, 1)  # tokens of the first calls, which compile the layers: for prompts of any length, and for one token
# An index of a layer is an argument of the compiled code, so that all layers share it; every batch size, dtype and
# length 1 or more may need code of its own.
SHARED = {"allow_unspec_int_on_nn_module": True, "recompile_limit": 64}


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of a model; none if it has no list of them."""
    base = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    layers = getattr(base, "layers", None)
    return list(layers) if isinstance(layers, nn.ModuleList) else []


@contextmanager
def compiled_layers(model: PreTrainedModel, wanted: bool, backend: str = "inductor") -> Iterator[None]:
    """Run the decoder layers compiled inside, if `wanted`. UsageError for a model that cannot be compiled."""
    if not wanted:
        yield
        return
    layers = decoder_layers(model)
    if not layers or getattr(model, "hf_device_map", None):
        why = "are on several devices" if layers else "are in no list of modules"
        raise _refusal(model, f"its decoder layers {why}")
    try:
        for layer in layers:
            layer.compile(backend=backend)
        with torch._dynamo.config.patch(SHARED):
            _try_out(model)
            yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


@torch.inference_mode()
def _try_out(model: PreTrainedModel) -> None:
    """Call the model for prompts of two lengths and for a token, which compiles its layers."""
    ids = torch.zeros(1, sum(TRIAL), dtype=torch.long, device=model.device)
    cache = KVCache(model.config, Policy(name="full"), prompt_length=sum(TRIAL))
    try:
        for part in ids.split(TRIAL, dim=1):
            model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    except Exception as error:  # Dynamo, Inductor and compilers of C++ and CUDA raise errors of many types
        raise _refusal(model, first_line(error)) from error


def _refusal(model: PreTrainedModel, why: str) -> UsageError:
    return UsageError(
        f"engine.compile=true: {type(model).__name__} cannot be compiled ({why}): use engine.compile=false"
    )

"""The requirements of a KVCache on a model, on the calls of its layers, and on a policy."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from kvbench.cache import NAME
from kvbench.cache.layout import NOTHING, RECURRENT, layout_of
from kvbench.cache.registration import unwrap
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import PromptChoice
from kvbench.policies.press import KVPress

KINDS = ("full_attention", "sliding_attention", "hybrid", "hybrid_sliding")
"""Supported types of layers with attention."""
ELSEWHERE = ("minimax", "recurrent_gemma")
"""Models that store the states of their recurrent layers outside transformers' cache."""
INSTEAD = "use a model in which every layer stores keys and values, such as Llama, Mistral, Qwen3 or Gemma 3"
NO_INTERFACE = "does not use transformers' attention interface, so kvbench cannot manage its cache"

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def uncompiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Exclude a function from `torch.compile`. Unlike `torch.compiler.disable`, it keeps the types of the function."""
    return cast(Callable[Parameters, Result], torch.compiler.disable(function))


class InterfaceError(ValueError):
    """A model uses its cache or its attention in a way that kvbench does not support."""


def model_class_of(config: PreTrainedConfig) -> Any:  # noqa: ANN401 - a class of transformers
    """The causal language model class of a configuration; None if transformers has none (remote code)."""
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


class _NotATensorError(InterfaceError, AttributeError):
    """Also an AttributeError, so that `hasattr` returns False."""


class NotATensor:
    """Replaces a layer's keys and values between the cache and the attention function.

    InterfaceError for a model that computes with them.
    """

    if not TYPE_CHECKING:  # else every attribute would seem to exist

        def __getattr__(self, name: str) -> NoReturn:
            """Called only for attributes that do not exist."""
            if hasattr(Tensor, name):
                raise _NotATensorError(_computes(name))
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        raise _NotATensorError(_computes(getattr(function, "__name__", str(function))))


def _computes(name: str) -> str:
    return (
        f"the model uses keys or values of its cache outside attention (it calls {name!r}; a package that wraps "
        f"attention functions may also do so), but kvbench passes them only to attention; {INSTEAD}"
    )


class NoRollback:
    """Methods of a layer that would remove its newest tokens, or move tokens to other sequences: all are refused."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise ValueError("kvbench caches do not support beam search; generate with num_beams=1")

    def crop(self, *args: object, **kwargs: object) -> None:
        raise ValueError(
            "kvbench caches cannot be cropped, because policies do not undo the appending of tokens, so assisted and "
            "prompt-lookup decoding are not supported"
        )

    batch_repeat_interleave = batch_select_indices = crop


# --- who uses a cache: the model that calls it, and its policy -------------------------------------------------------
def check_model(
    config: PreTrainedConfig, before: ReferenceType[nn.Module] | None, module: nn.Module
) -> ReferenceType[nn.Module]:
    """A reference to the first attention module of the model that calls a cache. before: that of earlier calls.

    ValueError if the model is not of the kind the cache was made for, or not the one that called it before.
    """
    if before is not None and before() is not None:
        raise ValueError(
            "this KVCache holds what another model computed: make a cache for each model, KVCache(model.config, "
            "policy), or call cache.reset() first"
        )
    for field in ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"):
        mine, its = vars(config).get(field), vars(module.config).get(field)  # some configurations refuse getattr
        if mine != its:
            raise ValueError(
                f"this KVCache was made from another model's configuration ({field}={mine}, the model has {its}): "
                "make it with KVCache(model.config, policy)"
            )
    return ref(module)


def check_attention(config: PreTrainedConfig) -> None:
    """Raise ValueError if the model's attention function cannot read a cache of its configuration."""
    unwrap()
    if config._attn_implementation != NAME:
        raise ValueError(
            f"the configuration of this cache has attn_implementation={config._attn_implementation!r}, which "
            f'cannot read a KVCache: call model.set_attn_implementation("{NAME}") first, and make the cache with '
            "that model.config"
        )


def check_policy(policy: object) -> None:
    """ValueError for what is no policy, and for policies that only our own generation can drive."""
    if not isinstance(policy, Policy):
        raise ValueError(f"policy must be a Policy, such as make_policy('snapkv', 512) gives, got {policy!r}")
    if isinstance(policy, KVPress):
        raise ValueError(
            f"{policy.name} compresses transformers' own cache, not ours, so it can only generate: use "
            "kvbench.generate, or a task whose answers are written"
        )
    if isinstance(policy.pre_pass, PromptChoice):
        raise ValueError(f"{policy.name} rewrites the prompt before it is cached: use kvbench.generate")

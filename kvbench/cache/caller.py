"""Checks of a cache's users: the model that calls it, and the policies it can be made for."""

from weakref import ReferenceType, ref

from torch import nn
from transformers import PreTrainedConfig

from kvbench.cache import NAME
from kvbench.cache.registration import unwrap
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import PromptChoice
from kvbench.policies.press import KVPress


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
    for field in ("model_type", "num_hidden_layers", "hidden_size"):
        mine, its = getattr(config, field, None), getattr(module.config, field, None)
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

"""Who uses a cache: the model that calls it, and the policies it can be made for."""

from collections.abc import Sequence
from weakref import ReferenceType, ref

from torch import Tensor, nn
from transformers import PreTrainedConfig

from kvbench.cache import NAME
from kvbench.cache.group import PolicyGroup
from kvbench.cache.registration import unwrap
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import PromptChoice
from kvbench.policies.press import KVPress


class Caller:
    """The model that calls a cache made for a text configuration: one and the same, of the kind it was made for."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config
        self.reader: ReferenceType[nn.Module] | None = None  # its first attention

    def check_attention(self) -> None:
        """Raise ValueError if the model's attention function cannot read this cache."""
        unwrap()
        if self._config._attn_implementation != NAME:
            raise ValueError(
                f"the configuration of this cache has attn_implementation={self._config._attn_implementation!r}, which "
                f'cannot read a KVCache: call model.set_attn_implementation("{NAME}") first, and make the cache with '
                "that model.config"
            )

    def check(self, module: nn.Module) -> None:
        """ValueError if the model whose first attention runs is not of the kind the cache was made for, or another."""
        reader = None if self.reader is None else self.reader()
        if reader is module:
            return
        if reader is not None:
            raise ValueError(
                "this KVCache holds what another model computed: make a cache for each model, KVCache(model.config, "
                "policy), or call cache.reset() first"
            )
        for field in ("model_type", "num_hidden_layers", "hidden_size"):
            mine, its = getattr(self._config, field, None), getattr(module.config, field, None)
            if mine != its:
                raise ValueError(
                    f"this KVCache was made from another model's configuration ({field}={mine}, the model has {its}): "
                    "make it with KVCache(model.config, policy)"
                )
        self.reader = ref(module)


def check_heads(groups: Sequence[PolicyGroup], index: int, keys: Tensor) -> None:
    """ValueError if a layer's first keys [B,H_kv,M,D] have other KV heads than the first layer's, where none may."""
    for group in groups:
        if group.layers[0].opened and group.policy.granularity != "query_head":
            others = [group.layers[0].store.keys.shape[1]] * (len(group.layers) - 1)
            group.policy.allocator.check_heads([*others, keys.shape[1]])


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

"""Several caches behind one call of the model: variants that share a prompt, and rows that decode side by side.

Shapes: R rows of a batch, H_q query heads, H_kv KV heads, M new tokens of a call, D head dim.
"""

from collections.abc import Sequence
from weakref import proxy

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from kvbench.cache.attention import attend
from kvbench.cache.interface import Handed, NoStates, OneWay
from kvbench.cache.kv_cache import KVCache
from kvbench.cache.queue import EvictionQueue
from kvbench.cache.registration import unwrap
from kvbench.cache.uncompiled import uncompiled
from kvbench.policies.observation import Arithmetic, Known
from kvbench.policies.stores.slots import owned


class RowLayer(Handed, OneWay, CacheLayerMixin):
    """One model layer of all caches."""

    is_sliding = False
    supports_early_init = False
    is_initialized = True

    def __init__(self, whole: "RowsCache", index: int) -> None:
        self._whole: RowsCache = proxy(whole)  # references both ways would keep all caches until garbage is looked for
        self._index = index
        self._new: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: every cache opens its own store."""

    @uncompiled
    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple["RowLayer", "RowLayer"]:
        """Keep the new keys and values at hand and hand the layer itself to the attention function."""
        if self._index == 0:
            unwrap()
        self._new = (key_states, value_states)
        return self, self

    def get_seq_length(self) -> int:
        return self._whole.seen_before

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.23

    def check_model(self, module: nn.Module) -> None:
        """ValueError if the attention of another kind of model reads these caches."""
        if self._index == 0:
            for cache in self._whole.caches:
                cache.check_model(module)

    def forward(self, queries: Tensor, mask: Tensor | None, how: Arithmetic) -> Tensor:
        """Attention of every row over what its cache holds, evictions as scheduled: [R,H_q,M,D] -> [R,H_q,M,D]."""
        assert mask is None, "rows are never padded"
        assert self._new is not None
        (keys, values), self._new = self._new, None
        readers = self._whole.readers()
        widths = [max(1, caches[0].sequences) for caches in readers]
        parts = zip(queries.split(widths), keys.split(widths), values.split(widths), strict=True)
        out = [
            (self._one if len(caches) == 1 else self._shared)(caches, *part, how)
            for caches, part in zip(readers, parts, strict=True)
        ]
        self._whole.layer_done(self._index)
        return out[0] if len(out) == 1 else torch.cat(out)

    def _one(self, caches: Sequence[KVCache], queries: Tensor, keys: Tensor, values: Tensor, how: Arithmetic) -> Tensor:
        """Rows with a cache of their own; 0 if the cache failed."""
        (cache,) = caches
        if cache.error is not None:
            return _nothing(queries, values)
        try:
            layer = cache.layers[self._index]
            layer.hand(keys, values)
            return layer.forward(queries, None, how)
        except Exception as error:  # whatever it is, it ends this row and no other
            cache.fail(error)
            return _nothing(queries, values)

    def _shared(
        self, caches: Sequence[KVCache], queries: Tensor, keys: Tensor, values: Tensor, how: Arithmetic
    ) -> Tensor:
        """A prompt that several caches take in whole: attention is computed once, and what policies look at too."""
        keys, values = owned(keys), owned(values)  # of a fused projection, once and not for every cache
        known: dict[str, Known] = {}
        shown = {}
        for cache in caches:
            if cache.error is not None:
                continue
            try:
                layer = cache.layers[self._index]
                layer.hand(keys, values)
                shown[cache] = layer.begin(queries, how, known.setdefault(cache.policy.granularity, {}))
            except Exception as error:
                cache.fail(error)
        if not shown:
            return _nothing(queries, values)
        reader = min(shown, key=_cost)
        out = attend(shown[reader], reader.policy.scorer)
        for cache, evidence in shown.items():
            try:
                cache.layers[self._index].finish(evidence)
            except Exception as error:
                cache.fail(error)
        return out


def _nothing(queries: Tensor, values: Tensor) -> Tensor:
    """What rows without a cache read: 0."""
    return values.new_zeros(*queries.shape[:3], values.shape[-1])


def _cost(cache: KVCache) -> tuple[bool, bool]:
    """Whose attention serves all variants best: it sums weights up on its way, over keys as the model made them."""
    policy = cache.policy
    return policy.granularity == "query_head", policy.scorer is None or policy.scorer.sums_up is None


class RowsCache(NoStates, Cache):
    """The caches of the rows that the model is called with.

    `seat` says who reads the next calls. A cache that fails (`KVCache.error`) is passed over from then on, and what its
    rows read is 0.
    """

    layers: list[RowLayer]  # type: ignore[assignment]

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config.get_text_config(decoder=True)
        self.queue = EvictionQueue()
        self.caches: list[KVCache] = []
        self._share = False
        super().__init__(layers=[RowLayer(self, index) for index in range(self.config.num_hidden_layers)])

    def seat(self, caches: Sequence[KVCache], share: bool = False) -> None:
        """Let these caches read the next calls, each as many rows as it holds sequences.

        share: all read one and the same row, a whole prompt as one step that attends before it evicts.
        """
        self.caches, self._share = list(caches), share
        for cache in caches:
            cache.lead_by(self.queue)

    def readers(self) -> list[list[KVCache]]:
        """The caches by what they read, in the order of the rows."""
        return [self.caches] if self._share else [[cache] for cache in self.caches]

    @property
    def seen_before(self) -> int:
        """The most tokens that any of the caches has seen."""
        return max((cache.seen_before for cache in self.caches), default=0)

    def layer_done(self, index: int) -> None:
        """All rows are through with layer `index`: after the last one, evictions that waited are carried out."""
        if index != len(self.layers) - 1:
            return
        self.queue.end_call()
        for cache in self.caches:
            if cache.error is None:
                try:
                    cache.end_call()
                except Exception as error:
                    cache.fail(error)

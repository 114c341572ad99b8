"""The layers of a cache with the interface of transformers: their contents for all sequences.

Shapes: B batch, H_kv KV heads, C slots, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvbench.cache.interface import NoRollback
from kvbench.cache.layer import Layer
from kvbench.cache.sequence import CachedSequence
from kvbench.policies.stores.slots import padded


def stacked(kept: Sequence[Tensor]) -> Tensor:
    """Tokens held by each layer, [B,H_kv] or [H_kv], as one tensor [L,...]. ValueError if layers differ in KV heads."""
    heads = [layer.shape[-1] for layer in kept]
    if len(set(heads)) > 1:
        raise ValueError(
            f"the layers have {min(heads)} to {max(heads)} KV heads, so their tokens do not fit "
            "one tensor: call kept_tokens() of each layer of cache.attention_layers"
        )
    return torch.stack(list(kept))


class EmptyLayer(NoRollback):
    """A layer of a model that stores no keys and values."""

    is_initialized = True
    is_sliding = False
    is_compileable = False
    supports_early_init = False
    keys = values = None

    def get_max_length(self) -> int:
        return -1


class KVLayer(NoRollback, CacheLayerMixin):
    """An attention layer for all sequences. Sequences with fewer tokens than others have empty slots at the end."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, sequences: Sequence[CachedSequence], index: int) -> None:
        self._sequences = sequences
        self._index = index

    @property
    def states(self) -> list[Layer]:
        """The contents for each sequence."""
        return [sequence.layers[self._index] for sequence in self._sequences]

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether a token was appended."""
        return all(state.opened for state in self.states)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """[B,H_kv,C,D] as attention sees them, or latents, None before the first token."""
        return padded([state.store.keys for state in self.states]) if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """[B,H_kv,C,D] as attention sees them, None before the first token."""
        return padded([state.store.values for state in self.states]) if self.is_initialized else None

    @property
    def positions(self) -> Tensor:
        """LongTensor [B,H_kv,C]: original position of each slot, -1 = empty."""
        if not self.is_initialized:
            return torch.empty(0, 0, 0, dtype=torch.long)
        return padded([state.positions for state in self.states], fill=-1)

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held: keys, values, positions, running statistics, observation windows."""
        return sum(state.nbytes for state in self.states)

    @property
    def spare_nbytes(self) -> int:
        """Bytes reserved but unused: capacity for new tokens, and the slots of evicted ones."""
        return sum(state.spare_nbytes for state in self.states)

    def kept_tokens(self) -> Tensor:
        """[B,H_kv] tokens held."""
        return (self.positions >= 0).sum(-1)

    # --- the interface of transformers ---------------------------------------------------------------------------
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the first tokens create the stores."""

    def update(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        raise ValueError("a layer of a KVCache is updated by its cache: cache.update(keys, values, layer)")

    def get_seq_length(self) -> int:
        return max((sequence.before for sequence in self._sequences), default=0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


def tokens_read(sequence: CachedSequence) -> list[list[int]] | None:
    """Tokens that the newest query read, [L][H_kv]; None before the first decoded token."""
    reads = [layer.pages.read for layer in sequence.layers if layer.pages is not None]
    return [read[0].tolist() for read in reads if read is not None] or None


def nbytes_read(sequence: CachedSequence) -> int | None:
    """Bytes of their keys, values and positions, and of the data that selected them, in all layers; None as above."""
    total, position = 0, 4
    for layer in sequence.layers:
        if layer.pages is None or layer.pages.read is None:
            return None
        tokens = int(layer.pages.read[0].sum())
        key, value = (x.shape[-1] * x.element_size() for x in (layer.store.keys, layer.store.values))
        total += tokens * (key + value + position) + layer.pages.nbytes_scanned
        reader = sequence.policy.reader
        if reader is not None and reader.reads_keys:  # keys of tokens that were not selected
            others = layer.count * layer.store.keys.shape[1] - tokens
            total += others * (key + position)
    return total

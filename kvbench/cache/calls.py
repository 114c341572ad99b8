"""The calls of a model: which columns are tokens, and whether a call continues the earlier ones.

Shapes: B batch, M new tokens of a call, N tokens seen by its end, padding included.
"""

from collections.abc import Sequence
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from kvbench.errors import counted


class Columns(NamedTuple):
    """What the model passes about the tokens of a call: mask [B,N] bool (or [B,M]) of real tokens, None if all are;
    position_ids [B or 1,M], None if the model does not pass them on.
    """

    mask: Tensor | None
    position_ids: Tensor | None


class CallingModel:
    """The model that calls a cache: the same one in every call, in one dtype, with positions that count on."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config
        self._reader: ReferenceType[nn.Module] | None = None  # its first attention module
        self._dtype: torch.dtype | None = None
        self._shifts: dict[int, int] = {}  # of each sequence, its positions in the model minus its own

    def check(self, module: nn.Module) -> None:
        """ValueError if the first attention module is that of another model, or of another kind than the cache's."""
        if self._reader is not None and self._reader() is module:
            return
        if self._reader is not None and self._reader() is not None:
            raise ValueError(
                "this KVCache holds what another model computed: make a cache for each model, KVCache(model.config, "
                "policy), or call cache.reset() first"
            )
        for field in ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"):
            mine, its = vars(self._config).get(field), vars(module.config).get(field)  # some refuse getattr
            if mine != its:
                raise ValueError(
                    f"this KVCache was made from another model's configuration ({field}={mine}, the model has {its}): "
                    "make it with KVCache(model.config, policy)"
                )
        self._reader = ref(module)

    def real(self, columns: Columns, queries: Tensor, seen: Sequence[int]) -> Tensor | None:
        """The new tokens of a call that are no padding, bool [B,M]; None if all are.

        queries [B,H_q,M,D]. seen: tokens of every sequence before the call, empty before the first. ValueError for
        another dtype or number of sequences than before, for padding on the right, and for a mask or positions that
        contradict earlier calls: the model would rotate new tokens as if evicted ones had never been there.
        """
        if self._dtype not in (None, queries.dtype):
            raise ValueError(
                f"this KVCache holds numbers in {self._dtype}, but the model computes in {queries.dtype} now: make a "
                "new cache after the model was converted"
            )
        self._dtype, batch, new = queries.dtype, queries.shape[0], queries.shape[2]
        if seen and len(seen) != batch:
            raise ValueError(
                f"this KVCache has {counted(len(seen), 'sequence')}, but the call brings {batch}: make a "
                "cache for every batch, "
                "KVCache(model.config, policy), or call cache.reset() first"
            )
        mask, real = columns.mask, None
        before, counts = list(seen) or [0] * batch, [new] * batch
        if mask is not None:
            now = mask[:, -new:]
            padded = (now[:, :-1] & ~now[:, 1:]).any(-1).long()  # behind a token
            past, counts, on_the_right = torch.stack([mask.sum(-1) - now.sum(-1), now.sum(-1), padded]).tolist()
            if any(on_the_right):
                raise ValueError(
                    "attention_mask must mark padding on the left only, so that every prompt ends in the last column: "
                    'tokenize with padding_side="left"'
                )
            for row, (marked, held) in enumerate(zip(past, before, strict=True)):
                if mask.shape[1] > new and marked != held:
                    raise ValueError(
                        f"attention_mask marks {marked} earlier tokens of sequence {row}, but the cache has seen "
                        f"{held}: pass the mask of the earlier calls with new columns behind it, or no mask without "
                        "padding"
                    )
            real = None if min(counts) == new else now
        places = columns.position_ids
        if places is not None and places.dim() == 2 and places.shape[1] == new and not places.is_meta:
            self._check_positions(places.expand(batch, -1), real, before, counts)
        return real

    def _check_positions(self, places: Tensor, real: Tensor | None, seen: Sequence[int], counts: Sequence[int]) -> None:
        """ValueError unless the positions [B,M] of every sequence count on by one, also from those of earlier calls."""
        own = torch.arange(places.shape[1], device=places.device) if real is None else real.long().cumsum(-1) - 1
        shift = places - (own + places.new_tensor(seen)[:, None])
        if real is not None:
            shift = torch.where(real, shift, shift[:, -1:])
        shifts = self._shifts
        for row, (low, high) in enumerate(torch.stack(shift.aminmax(dim=-1), dim=-1).tolist()):
            if counts[row] and (low, high) != (shifts.setdefault(row, low),) * 2:
                found = low if low != shifts[row] else high
                message = (
                    f"position_ids of sequence {row} do not continue those of its earlier tokens: got "
                    f"{found + seen[row]} where {shifts[row] + seen[row]} follows. Positions count every token seen, "
                    "evicted ones included: leave position_ids out, give attention_mask a column for each of them, and "
                    "do not set use_cache=False"
                )
                if seen[row] and places.shape[1] > 1 and found < 0:  # a text of several tokens, such as another prompt
                    advice = "make a new one, or call reset(), for another text. To continue the text:"
                    message = f"this KVCache already holds {counted(seen[row], 'token')}: {advice} {message}"
                raise ValueError(message)

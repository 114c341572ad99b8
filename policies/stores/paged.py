"""The paged store: slots are allocated and freed in pages, as in serving engines.

Shapes: B batch, H KV heads, C slots.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.policies.checks import check_choices, whole_number
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.store import LayerStore, Store


@dataclass(frozen=True)
class Paged(Store):
    """Keys and values as the model made them, in pages of `page` slots that all KV heads of a layer share.

    The bytes of a page count until it is free, including slots without a token.

    page: slots per page, as in the selection. free: `compact` moves the kept tokens together, so that n tokens take
    ceil(n / page) pages; `page` moves nothing, and a page is freed when no KV head keeps a token in it.
    """

    exact = True

    page: int = 16
    free: Literal["compact", "page"] = "compact"

    def __post_init__(self) -> None:
        whole_number("page", self.page, 1)
        check_choices(self)

    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        return PagedStore(keys, values, statistics, width, self)


class PagedStore(SlotStore):
    """Slot i of every segment belongs to page i // page. `how`: the settings."""

    def __init__(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int, how: Paged) -> None:
        super().__init__(keys, values, statistics, width)
        self.how = how

    @property
    def step_format(self) -> None:
        """Pages are moved and freed one by one."""

    def keep(self, mask: Tensor, spare: int, count: int | None = None) -> Tensor:
        page = self.how.page
        if self.how.free == "compact" or mask.is_meta:
            most = int(mask.sum(-1).amax()) if count is None else count
            return super().keep(mask, spare + -(most + spare) % page, count)
        used = F.pad(mask, (0, -mask.shape[-1] % page)).any(1, keepdim=True).unflatten(-1, (-1, page)).any(-1)
        held = used.repeat_interleave(page, -1)[..., : mask.shape[-1]].expand_as(mask)
        most = int(held.sum(-1).amax())
        slots = super().keep(held, spare + -(most + spare) % page)
        self.positions.masked_fill_(~(mask & held).gather(-1, slots), -1)
        self._packed = self._ascending = bool((self.positions >= 0).all())
        return slots

    def _gather(self, mask: Tensor, most: int, spare: int, even: bool) -> Tensor:
        """Move whole pages to the front, in their order, with the empty slots inside."""
        if self.how.free == "compact" or not self.used:
            return super()._gather(mask, most, spare, even)
        slots = (~mask).to(torch.uint8).argsort(dim=-1, stable=True)[..., :most]
        self._move(slots, spare)
        self.memory["positions"].narrow(2, 0, most).masked_fill_(~mask.gather(-1, slots), -1)
        return slots

    def _lengthen(self, more: int, tokens: Mapping[str, Tensor]) -> None:
        super()._lengthen(more if tokens else more + -(self.used + more) % self.how.page, tokens)

    def _fill_hole(self, tokens: dict[str, Tensor]) -> None:
        """Without moving tokens, only the slots after the newest token take new ones."""
        if self.how.free == "compact":
            super()._fill_hole(tokens)
        else:
            self._write_at_end(tokens, 1)

    def _spare_nbytes(self) -> int:
        """Bytes of the slots behind the newest page."""
        spare = max(0, self.first.shape[2] - self.used - -self.used % self.how.page)
        return spare * self.first.shape[:2].numel() * (sum(x.nbytes for x in self.memory.values()) // self.capacity)

"""ThinK: the keys of a prompt without the channels that its newest queries weigh least.

Shapes: H KV heads, G query heads per KV head, r query rows per KV head, N tokens, D head dim, D' held.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.checks import number, whole_number
from kvbench.policies.observation import Observation
from kvbench.policies.stores.code_attention import scores_by_block
from kvbench.policies.stores.codes import Codes, Column
from kvbench.policies.stores.quantised import ColumnStore, QuantisedLayerStore
from kvbench.policies.stores.slot_store import SlotStore


class PrunedKeys(Codes):
    """Keys [1,H,N,D'] of the channels [1,H,D'] int16, rising; the others read 0. Filled once, at the prompt's end."""

    def __init__(self, dim: int, channels: Tensor) -> None:
        super().__init__()
        self.dim, self.channels = dim, channels

    def encode(self, x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"x": x.gather(-1, self._index(x.shape[2]))}

    def _index(self, rows: int) -> Tensor:
        """The channels as an index into [1,H,rows,D]."""
        return self.channels.long()[:, :, None].expand(-1, -1, rows, -1)

    def decode(self, some: slice) -> Tensor:
        x = widen(self.queue.view("x")[:, :, some])
        return x.new_zeros(*x.shape[:3], self.dim).scatter_(-1, self._index(x.shape[2]), x)[:, :, None]

    def scores(self, rows: Tensor) -> Tensor:
        own = rows.gather(-1, self._index(rows.shape[2]))
        return scores_by_block(own, self.tokens, lambda some: self.queue.view("x")[:, :, None, some])

    def sizes(self) -> dict[str, int]:
        return {"pruned keys": self.queue.nbytes("x"), "channels": self.channels.nbytes}


class ThinKLayerStore(QuantisedLayerStore):
    """The prompt is dense until it is in and evicted; then channels of its older keys go. Later tokens keep all."""

    store: "ThinK"

    def __init__(self, store: "ThinK", dense: SlotStore) -> None:
        super().__init__(store, dense)
        self._squares: Tensor | None = None  # [1,H,D] of the window's queries, summed over them and the group

    def kinds(self) -> dict[str, int]:
        squares = {} if self._squares is None else {"statistics": self._squares.nbytes}
        return {**super().kinds(), **squares}

    @property
    def watching(self) -> bool:
        return self.in_prompt

    def observe(self, observation: Observation, prompt: int) -> None:
        places = observation.query_positions[0]
        window = (places >= max(prompt - self.store.query_window, 0)) & (places < prompt)
        squares = widen(observation.queries[:, :, window]).square().sum(2)
        squares = squares.unflatten(1, (-1, observation.group)).sum(2)
        self._squares = squares if self._squares is None else self._squares + squares

    def _to_columns(self) -> None:
        super()._to_columns()
        if self._held is not None:  # the stores of the heads have their parts
            self._squares = None

    def _of_head(self, contents: dict[str, Tensor], head: int, count: int) -> QuantisedLayerStore:
        found = super()._of_head(contents, head, count)
        assert isinstance(found, ThinKLayerStore)
        found._squares = None if self._squares is None else self._squares[:, head : head + 1].clone()
        return found

    def flush(self, prompt: bool) -> None:
        keys = self._columns[0]
        due = max(keys.tail.count - self.store.residual, 0)
        if prompt and due:
            channels = self._chosen(keys)
            keys.encode(due, keys.tail.oldest("x", due), lambda x: PrunedKeys(x.shape[-1], channels))
        self._squares = None

    def _chosen(self, keys: Column) -> Tensor:
        """The channels [1,H,D'] of the highest score, rising; equal scores: the lower channel stays."""
        x = widen(keys.tail.view("x"))
        squares = x.square().sum(2)
        scores = squares if self._squares is None else squares * self._squares
        assert self._squares is not None or x.is_meta, "the prompt was observed"
        staying = x.shape[-1] - int(self.store.ratio * x.shape[-1] + 1e-9)
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        return order[..., :staying].sort(-1).values.to(torch.int16)


@dataclass(frozen=True)
class ThinK(ColumnStore):
    """Of each KV head's older keys, the channels of the lowest score are not held; values stay.

        s_d = mean_(q in "window") q_d^2 * mean_j k_(j,d)^2

    The mean over queries is over the window's and the query heads of the group, the one over keys over all that are
    held when the prompt is in (and was evicted). floor(ratio D) channels go. A key takes D' numbers, and a KV head a
    list of its D' channels; the newest `residual` keys and those of later tokens keep all channels.

    ratio: share of the channels that go. query_window: newest queries of the prompt that judge. residual: newest
    tokens of the prompt that keep all channels.
    Source: Xu et al. 2024, arXiv 2407.21018, section 3 (ratio 0.4 and 0.5 are its own).
    """

    slug_letters: ClassVar[Mapping[str, str]] = {"r": "ratio", "w": "query_window"}
    layer = ThinKLayerStore

    ratio: float = 0.4
    query_window: int = 32
    residual: int = 32

    def __post_init__(self) -> None:
        number("ratio", self.ratio, 0, below=1)
        whole_number("query_window", self.query_window, 1)
        whole_number("residual", self.residual, 0)

"""The contract of a reader: every token is held, and a decoded query reads some of them.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, T tokens held, P pages, p tokens of a page, D head dim.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.policies.observation import State


@dataclass(frozen=True)
class Reading:
    """One layer before the attention of one decoded query of every sequence.

    queries [B,H_q,1,D]; keys [B,H_kv,T,D] in order of position, positions [B,H_kv,T] (-1 = empty slot, at the end);
    summaries: what the reader made of each page, [B,H_kv,P,...] by name. visible: bool [B,H_kv,T], the tokens that the
    query may see. scaling, softcap: of the attention's logits.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    positions: Tensor
    summaries: State
    visible: Tensor
    scaling: float
    softcap: float | None

    @property
    def group(self) -> int:
        return self.queries.shape[1] // self.keys.shape[1]


class Reader(ABC):
    """Scores pages of neighbouring tokens for a query. Subclasses are frozen dataclasses of their knobs.

    The policy's budget is what a decoded query may read: tokens per KV head, or a share of the prompt. Where more is
    held, the floor(budget / page) pages with the highest scores are read, of equal scores the older, and attention is
    computed over their tokens alone. A prompt's queries read all. page: tokens of a page, 1 to choose single tokens.
    """

    page: int

    mass: float | None = None
    """Read as few pages as reach this share of the sum of all scores, without a budget; None: the budget's pages."""

    reads_keys: ClassVar[bool] = False
    """Whether all keys are read to choose the tokens: they are then counted as read."""

    def reads_all(self, layer: int) -> bool:
        """Whether the queries of a layer read everything, beyond the budget."""
        return False

    @abstractmethod
    def summarise(self, keys: Tensor, present: Tensor) -> State:
        """What is held of pages, by name: keys [B,H_kv,P,p,D], present [B,H_kv,P,p] bool -> [B,H_kv,P,...] each.

        Called when a page's tokens come; its bytes are counted as held, and as read with every query.
        """

    @abstractmethod
    def score(self, reading: Reading) -> Tensor:
        """[B,H_kv,P], higher = read; pages without a token that the query may see are left out by the caller."""

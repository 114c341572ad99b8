"""The interface of sparse attention: a decoded query reads some of the tokens that are stored.

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, T stored tokens, P pages, p tokens per page, D head
dim.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.references import sink_factor
from kvbench.policies.observation import State


@dataclass(frozen=True)
class Reading:
    """One layer before the attention of one decoded query per sequence.

    queries [B,H_q,1,D]; keys [B,H_kv,T,D] in order of position, positions [B,H_kv,T] (-1 = empty slot, at the end);
    summaries: the reader's summaries of each page, [B,H_kv,P,...] by name. visible: bool [B,H_kv,T], the tokens that
    are visible to the query. scaling, softcap, sinks: parameters of attention, see `AttentionParams`. budgets, prompts:
    the budget and the prompt of each sequence, in tokens.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    positions: Tensor
    summaries: State
    visible: Tensor
    scaling: float
    softcap: float | None
    sinks: Tensor | None = None
    budgets: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()

    @property
    def group(self) -> int:
        return self.queries.shape[1] // self.keys.shape[1]

    def weights(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """The attention weight of one token of each page, [B,H_kv,P] averaged over the query heads of a group.

        logits [B,H_kv,G,P]: scaled products, the same for all visible tokens of a page; tokens [B,H_kv,P]: how many.
        The model's softcap and attention sinks apply as in its own attention.
        """
        count = tokens[:, :, None].to(logits)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        logits = logits + count.log()  # the softmax runs over tokens
        rows = logits.softmax(-1) / count.clamp(min=1)
        if self.sinks is not None:
            sinks = self.sinks.view(len(self.sinks), *logits.shape[1:3])
            rows = rows * sink_factor(logits.logsumexp(-1), sinks)[..., None]
        means: Tensor = rows.nan_to_num(0).mean(2)
        return means


class ReadPlan(NamedTuple):
    """How a reader uses the budget of one sequence.

    page: tokens per page. tokens: the most tokens that a query attends to. cuts: whether a page may be read in part,
    its older tokens first; otherwise pages are read whole. kept: tokens of the prompt per KV head that the policy's
    scorer keeps, if the reader `evicts`.
    """

    page: int
    tokens: int
    cuts: bool = False
    kept: int = 0


class Reader(ABC):
    """Scores pages of neighbouring tokens for a query. Subclasses are frozen dataclasses of parameters.

    The policy's budget limits the tokens that a decoded query reads: tokens per KV head, or a share of the prompt. If
    more tokens are stored, only the floor(budget / page) pages with the highest scores take part in attention; ties go
    to the older page. Queries of a prompt read all tokens. page: tokens per page, 1 to select single tokens.
    """

    page: int

    mass: float | None = None
    """Read the fewest pages that reach this share of the sum of all scores, without a budget; None: use the budget."""

    evicts: ClassVar[bool] = False
    """Whether the policy has a scorer, which keeps `ReadPlan.kept` tokens of a prompt; otherwise all are kept."""

    reads_keys: ClassVar[bool] = False
    """Whether the selection reads all keys, which are then counted as read."""

    def reads_all(self, layer: int) -> bool:
        """Whether the queries of a layer read all tokens, regardless of the budget."""
        return False

    def plan(self, budget: int, prompt: int) -> ReadPlan:
        """The plan for a sequence with this budget and this prompt, in tokens; every page has `page` tokens."""
        return ReadPlan(self.page, budget)

    def nbytes_scanned(self, reading: Reading) -> int:
        """Bytes that are read to choose pages, of all sequences: every summary, unless a reader reads less of them."""
        return sum(x.nbytes for x in reading.summaries.values())

    @abstractmethod
    def summarise(self, keys: Tensor, present: Tensor) -> State:
        """Compute page summaries by name: keys [B,H_kv,P,p,D], present [B,H_kv,P,p] bool -> [B,H_kv,P,...] each.

        Called when tokens are appended to a page. The bytes are part of the cache; by default every query reads them.
        """

    @abstractmethod
    def score(self, reading: Reading) -> Tensor:
        """Page scores [B,H_kv,P], higher = read. The caller skips pages without a visible token."""


def channel_bounds(keys: Tensor, present: Tensor) -> State:
    """Minimum and maximum of each channel over the keys of a page: [B,H_kv,P,p,D] -> [B,H_kv,P,D]; 0 if it is empty."""
    absent = ~present[..., None]
    smallest = keys.masked_fill(absent, torch.inf).amin(-2)
    largest = keys.masked_fill(absent, -torch.inf).amax(-2)
    empty = ~present.any(-1, keepdim=True)
    return {"smallest": smallest.masked_fill(empty, 0), "largest": largest.masked_fill(empty, 0)}

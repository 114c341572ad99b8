"""Sparse attention: a decoded query reads the pages of stored tokens that the policy's reader scores highest.

Shapes: B batch, L layers, H_kv KV heads, T slots, P pages, p tokens of a page, D head dim.
"""

import torch
from torch import Tensor

from kvbench.kernels.prompt import masked_attention
from kvbench.kernels.references import visible
from kvbench.kernels.selection import take
from kvbench.policies.observation import AttentionParams, State
from kvbench.policies.policy import Policy, budget_tokens, read_plan
from kvbench.policies.readers.reader import Reader, Reading, ReadPlan
from kvbench.policies.stores.store import LayerStore


class PageReads:
    """The pages of one layer: their summaries, and the number of tokens that decoded queries read.

    summaries: [B,H_kv,P,...] by name. summarised: number of tokens in them. read, most [1,H_kv]
    int32: tokens read by the newest query, and the most that any query read. nbytes_scanned: bytes of the summaries
    that the newest query read.
    """

    def __init__(self, policy: Policy, index: int) -> None:
        self._policy = policy
        self._index = index
        self.summaries: State = {}
        self.summarised = 0
        self.read: Tensor | None = None
        self.most: Tensor | None = None
        self.nbytes_scanned = 0

    @property
    def _reader(self) -> Reader:
        assert self._policy.reader is not None
        return self._policy.reader

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        return sum(x.nbytes for x in (self.read, self.most, *self.summaries.values()) if x is not None)

    def update(self, store: LayerStore, decodes: bool, count: int, prompt: int) -> None:
        """Summarise the tokens that a step appended; a prompt that is evicted first, with the first decoded token.

        count, prompt: tokens that the layer holds, and tokens of the prompt.
        """
        if self._reader.evicts and not decodes:
            self.summaries, self.summarised = {}, 0
        elif not self._reader.reads_all(self._index):
            self.summarise(store, count, prompt)

    def summarise(self, store: LayerStore, count: int, prompt: int) -> None:
        """Summarise all pages from the first one with a new token; see `update`."""
        size, slots = read_plan(self._policy, prompt).page, store.positions.shape[2]
        first, last = self.summarised // size, -(-slots // size)
        self.summarised = count
        pages = torch.arange(first, last, device=store.positions.device)[:, None]
        here = pages * size + torch.arange(size, device=pages.device)
        here = here.expand(*store.positions.shape[:2], -1, -1)  # [B,H_kv,P',p]
        flat = here.clamp(max=slots - 1).flatten(2)
        keys = take(store.keys, flat).unflatten(2, here.shape[2:])
        present = (here < slots) & (store.positions.gather(-1, flat).view_as(here) >= 0)
        for name, new in self._reader.summarise(keys, present).items():
            old = self.summaries.get(name, new[:, :, :0])
            if old.shape[2] == last:
                old[:, :, first:] = new
            else:
                self.summaries[name] = torch.cat([old[:, :, :first], new], dim=2)

    def attend(
        self, queries: Tensor, at: Tensor, store: LayerStore, params: AttentionParams, prompt: int
    ) -> Tensor | None:
        """Attention of a decoded query [1,H_q,1,D] at position [1,1] over the tokens it reads; None if it reads all."""
        policy, reader = self._policy, self._reader
        positions, plan = store.positions, read_plan(policy, prompt)
        chosen = visible(at, positions, params.sliding_window)[:, :, 0]
        fits = reader.mass is None and positions.shape[2] <= plan.tokens
        reads_all = fits or reader.reads_all(self._index)
        self.nbytes_scanned = 0
        if not reads_all:
            reading = Reading(
                layer=self._index,
                queries=queries,
                keys=store.keys,
                positions=positions,
                summaries=self.summaries,
                visible=chosen,
                scaling=params.scaling,
                softcap=params.softcap,
                sinks=params.sinks,
                budgets=(budget_tokens(policy, prompt),),
                prompts=(prompt,),
            )
            chosen = chosen_slots(reader, reading, plan)
            self.nbytes_scanned = reader.nbytes_scanned(reading)
        self.read = chosen.sum(-1, dtype=torch.int32)
        self.most = self.read.clone() if self.most is None else torch.maximum(self.most, self.read)
        if reads_all:
            return None
        order = chosen.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., : plan.tokens]
        places = positions.gather(-1, order).masked_fill(~chosen.gather(-1, order), -1)
        call = queries, take(store.keys, order), take(store.values, order), at, places
        return masked_attention(*call, params.scaling, params.softcap, params.sliding_window, params.sinks)


def chosen_slots(reader: Reader, reading: Reading, plan: ReadPlan) -> Tensor:
    """The slots that are read, bool [B,H_kv,T]."""
    seen, scores, page, tokens = reading.visible, reader.score(reading), plan.page, plan.tokens
    page_of = (torch.arange(seen.shape[-1], device=seen.device) // page).expand_as(seen)  # of each slot
    if plan.cuts:  # rank slots instead of pages
        scores, present, most = scores.gather(-1, page_of), seen, tokens
    else:
        present = torch.zeros_like(scores).scatter_add_(-1, page_of, seen.to(scores.dtype)) > 0
        most = tokens // page
    order = scores.masked_fill(~present, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    if reader.mass is None:
        best = torch.arange(order.shape[-1], device=order.device).expand_as(order) < most
    else:
        shares = scores.masked_fill(~present, 0).gather(-1, order)
        best = shares.cumsum(-1) - shares < reader.mass * shares.sum(-1, keepdim=True)
    chosen = torch.zeros_like(present).scatter_(-1, order, best)
    if not plan.cuts:
        chosen = chosen.gather(-1, page_of)
    if reader.mass is None:
        chosen = chosen | (seen.sum(-1, keepdim=True) <= tokens)
    return seen & chosen

"""Sparse attention: a decoded query reads the pages of stored tokens that the policy's reader scores highest.

Shapes: B batch, L layers, H_kv KV heads, T slots, P pages, p tokens of a page, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.cache.attention import LayerStep
from kvbench.kernels.prompt import masked_attention
from kvbench.kernels.references import visible
from kvbench.policies.constants import on_device
from kvbench.policies.observation import State
from kvbench.policies.policy import Policy, budget_tokens, read_plan
from kvbench.policies.readers.reader import Reader, Reading, ReadPlan
from kvbench.policies.stores.slots import take
from kvbench.policies.stores.store import LayerStore


class PageReads:
    """The pages of one layer: their summaries, and the number of tokens that decoded queries read.

    summaries: [B,H_kv,P,...] by name. summarised: number of tokens in them, for each sequence. read, most [B,H_kv]
    int32: tokens read by the newest query, and the most that any query read. nbytes_scanned: bytes of the summaries
    that the newest query read.
    """

    def __init__(self, policy: Policy, index: int) -> None:
        self._policy = policy
        self._index = index
        self.summaries: State = {}
        self.summarised: list[int] = []
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

    def update(self, step: LayerStep, counts: Sequence[int], prompts: Sequence[int]) -> None:
        """Summarise the tokens that a step appended; a prompt that is evicted first, with the first decoded token.

        counts, prompts: tokens that the layer holds, and tokens of the prompt, for each sequence.
        """
        if self._reader.evicts and step.now.phase != "decode":
            self.summaries, self.summarised = {}, []
        elif not self._reader.reads_all(self._index):
            self.summarise(step.store, counts, prompts)

    def summarise(self, store: LayerStore, counts: Sequence[int], prompts: Sequence[int]) -> None:
        """Summarise all pages from the first one with a new token; see `update`."""
        sizes = [read_plan(self._policy, length).page for length in prompts]
        slots = store.positions.shape[2]
        first = min(n // size for n, size in zip(self.summarised or [0] * len(sizes), sizes, strict=True))
        last = max(-(-slots // size) for size in sizes)
        self.summarised = list(counts)
        pages = torch.arange(first, last, device=store.positions.device)[:, None]
        within = torch.arange(max(sizes), device=pages.device)
        size = on_device(tuple(sizes), pages.device)[:, None, None, None]
        here = (pages * size + within).expand(-1, store.positions.shape[1], -1, -1)  # [B,H_kv,P',p]
        flat = here.clamp(max=slots - 1).flatten(2)
        keys = take(store.keys, flat).unflatten(2, here.shape[2:])
        present = (here < slots) & (within < size) & (store.positions.gather(-1, flat).view_as(here) >= 0)
        for name, new in self._reader.summarise(keys, present).items():
            old = self.summaries.get(name, new[:, :, :0])
            if old.shape[2] == last:
                old[:, :, first:] = new
            else:
                self.summaries[name] = torch.cat([old[:, :, :first], new], dim=2)

    def attend(self, prompts: Sequence[int], step: LayerStep) -> Tensor | None:
        """Attention [B,H_q,1,D] of a decoded query over the tokens it reads; None if it reads all tokens."""
        policy, reader, store, params = self._policy, self._reader, step.store, step.params
        positions, plans = store.positions, [read_plan(policy, length) for length in prompts]
        chosen = visible(step.now.positions, positions, params.sliding_window)[:, :, 0]
        fits = reader.mass is None and positions.shape[2] <= min(plan.tokens for plan in plans)
        reads_all = fits or reader.reads_all(self._index)
        self.nbytes_scanned = 0
        if not reads_all:
            reading = Reading(
                layer=self._index,
                queries=step.queries,
                keys=store.keys,
                positions=positions,
                summaries=self.summaries,
                visible=chosen,
                scaling=params.scaling,
                softcap=params.softcap,
                sinks=params.sinks,
                budgets=tuple(budget_tokens(policy, length) for length in prompts),
                prompts=tuple(prompts),
            )
            chosen = chosen_slots(reader, reading, plans)
            self.nbytes_scanned = reader.nbytes_scanned(reading)
        read = chosen.sum(-1, dtype=torch.int32)
        self.most = read.clone() if self.most is None else torch.maximum(self.most, read)
        # A sequence without a token in this step keeps the number of its last query.
        self.read = read if self.read is None else torch.where(step.now.positions >= 0, read, self.read)
        if reads_all:
            return None
        longest = max(plan.tokens for plan in plans)
        order = chosen.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :longest]
        places = positions.gather(-1, order).masked_fill(~chosen.gather(-1, order), -1)
        call = step.queries, take(store.keys, order), take(store.values, order), step.now.positions, places
        return masked_attention(*call, params.scaling, params.softcap, params.sliding_window, params.sinks)


def chosen_slots(reader: Reader, reading: Reading, plans: Sequence[ReadPlan]) -> Tensor:
    """The slots that are read, bool [B,H_kv,T]; plans: of each sequence."""
    seen, scores, cuts = reading.visible, reader.score(reading), plans[0].cuts
    limits = zip(*((plan.page, plan.tokens) for plan in plans), strict=True)
    page, tokens = (on_device(numbers, seen.device)[:, None, None] for numbers in limits)
    page_of = (torch.arange(seen.shape[-1], device=seen.device) // page).expand_as(seen)  # of each slot
    if cuts:  # rank slots instead of pages
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
    if not cuts:
        chosen = chosen.gather(-1, page_of)
    if reader.mass is None:
        chosen = chosen | (seen.sum(-1, keepdim=True) <= tokens)
    return seen & chosen

"""What a decoded query reads of the tokens that a layer holds: the pages that the policy's reader scores highest.

Shapes: B batch, L layers, H_kv KV heads, T slots, P pages, p tokens of a page, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.cache.attention import LayerStep
from kvbench.kernels.prompt import masked_attention
from kvbench.kernels.references import visible
from kvbench.policies.layer_budgets import budget_tokens, read_plan
from kvbench.policies.observation import State
from kvbench.policies.policy import Policy
from kvbench.policies.readers.reader import Reader, Reading, ReadPlan
from kvbench.policies.stores.slots import take
from kvbench.policies.stores.store import LayerStore


class PageReads:
    """The pages of one layer: their summaries, and what the newest decoded query read of them.

    summaries: [B,H_kv,P,...] by name. read, most: tokens that the newest query read and that any one read, [B,H_kv]
    int32. nbytes_read: bytes of the summaries the newest query looked through.
    """

    def __init__(self) -> None:
        self.summaries: State = {}
        self.read: Tensor | None = None
        self.most: Tensor | None = None
        self.nbytes_read = 0
        self.begun = False  # all tokens that are held have been summarised

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        counts = sum(x.nbytes for x in (self.read, self.most) if x is not None)
        return counts + sum(x.nbytes for x in self.summaries.values())

    def update(
        self,
        policy: Policy,
        layer: int,
        step: LayerStep,
        before: Sequence[int],
        after: Sequence[int],
        prompts: Sequence[int],
    ) -> None:
        """Summarize the pages of a step's tokens; of a prompt that is evicted, with the first decoded token."""
        reader = policy.reader
        assert reader is not None
        if reader.evicts and step.now.phase != "decode":
            self.summaries, self.begun = {}, False
        elif not reader.reads_all(layer):
            sizes = [read_plan(policy, length).page for length in prompts]
            self.append(reader, step.store, before, after, sizes)

    def append(
        self, reader: Reader, held: LayerStore, before: Sequence[int], after: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """Summarise the pages of new tokens. before, after: number of tokens of each sequence before and after them.

        sizes: tokens per page of each sequence.
        """
        slots = held.positions.shape[2]
        before = before if self.begun else [0] * len(after)
        last = max(-(-slots // size) for size in sizes)
        if self.begun and max(a - b for b, a in zip(before, after, strict=True)) == 1:  # a page of each sequence
            newest = [max(n - 1, 0) // size for n, size in zip(after, sizes, strict=True)]
            pages = held.positions.new_tensor(newest)[:, None].long()
        else:
            first = min(n // size for n, size in zip(before, sizes, strict=True))
            pages = torch.arange(first, last, device=held.positions.device).expand(len(after), -1)
        self.begun = True
        size = pages.new_tensor(sizes)[:, None, None, None]
        within = torch.arange(max(sizes), device=pages.device)
        where = pages[:, None, :, None] * size + within  # [B,1,n,p]
        where = where.expand(-1, held.positions.shape[1], -1, -1)
        inside = (where < slots) & (within < size)
        flat = where.clamp(max=slots - 1).flatten(2)
        keys = take(held.keys, flat).unflatten(2, where.shape[2:])
        present = inside & (held.positions.gather(-1, flat).view_as(where) >= 0)
        for name, new in reader.summarise(keys, present).items():
            old = self.summaries.get(name)
            if old is None:
                old = new.new_zeros(*new.shape[:2], 0, *new.shape[3:])
            if old.shape[2] < last:
                more = new.new_zeros(*new.shape[:2], last - old.shape[2], *new.shape[3:])
                old = torch.cat([old, more], dim=2)
            at = pages[:, None].expand(-1, new.shape[1], -1).view(*new.shape[:3], *[1] * (new.dim() - 3))
            self.summaries[name] = old.scatter_(2, at.expand_as(new), new)

    def attend(self, policy: Policy, layer: int, prompts: Sequence[int], step: LayerStep) -> Tensor | None:
        """Attention [B,H_q,1,D] of a decoded query over what it reads; None where that is all that is held."""
        reader, held, params = policy.reader, step.store, step.params
        assert reader is not None
        positions = held.positions
        chosen = visible(step.now.positions, positions, params.sliding_window)[:, :, 0]
        plans, slots = [read_plan(policy, prompt) for prompt in prompts], positions.shape[2]
        most = [plan.tokens for plan in plans]
        whole = reader.reads_all(layer) or (reader.mass is None and slots <= min(most))
        self.nbytes_read = 0
        if not whole:
            budgets = tuple(budget_tokens(policy, prompt) for prompt in prompts)
            found = (layer, step.queries, held.keys, positions, self.summaries, chosen, params.scaling, params.softcap)
            reading = Reading(*found, budgets, tuple(prompts))
            chosen = chosen_slots(reader, reading, plans)
            self.nbytes_read = reader.nbytes_scanned(reading)
        self._note(chosen.sum(-1, dtype=torch.int32), step.now.positions >= 0)
        if whole:
            return None
        order = chosen.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., : max(most)]
        places = positions.gather(-1, order).masked_fill(~chosen.gather(-1, order), -1)
        call = step.queries, take(held.keys, order), take(held.values, order), step.now.positions, places
        return masked_attention(*call, params.scaling, params.softcap, params.sliding_window, params.sinks)

    def _note(self, read: Tensor, present: Tensor) -> None:
        """Remember what was read [B,H_kv] by the sequences that have a token, bool [B,1]."""
        self.read = read if self.read is None else torch.where(present, read, self.read)
        self.most = read.clone() if self.most is None else torch.maximum(self.most, read)


def chosen_slots(reader: Reader, reading: Reading, plans: Sequence[ReadPlan]) -> Tensor:
    """The slots that are read, bool [B,H_kv,T]."""
    seen, scores = reading.visible, reader.score(reading)
    slots = seen.shape[-1]
    size = scores.new_tensor([plan.page for plan in plans], dtype=torch.long)[:, None, None]
    most = size.new_tensor([plan.tokens for plan in plans])[:, None, None]
    page_of = (torch.arange(slots, device=seen.device) // size).expand_as(seen)  # of each slot
    fits = seen.sum(-1, keepdim=True) <= most
    if plans[0].cuts:
        order = scores.gather(-1, page_of).masked_fill(~seen, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        best = torch.arange(slots, device=seen.device).expand_as(order) < most
        return seen & (fits | torch.zeros_like(seen).scatter_(-1, order, best))
    visible_pages = torch.zeros_like(scores).scatter_add_(-1, page_of, seen.to(scores.dtype)) > 0
    order = scores.masked_fill(~visible_pages, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    if reader.mass is not None:
        sorted_scores = scores.masked_fill(~visible_pages, 0).gather(-1, order)
        before = sorted_scores.cumsum(-1) - sorted_scores
        best, fits = before < reader.mass * sorted_scores.sum(-1, keepdim=True), torch.zeros_like(fits)
    else:
        best = torch.arange(scores.shape[-1], device=order.device).expand_as(order) < most // size
    read = torch.zeros_like(visible_pages).scatter_(-1, order, best)
    return seen & (fits | read.gather(-1, page_of))

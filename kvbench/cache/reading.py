"""What a decoded query reads of a layer that holds every token: the pages that the policy's reader scores highest.

Shapes: B batch, L layers, H_kv KV heads, T slots, P pages, p tokens of a page, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.cache.attention import LayerStep
from kvbench.kernels.prompt import masked_attention
from kvbench.kernels.references import visible
from kvbench.policies.layer_budgets import read_budget
from kvbench.policies.observation import State
from kvbench.policies.policy import Policy
from kvbench.policies.readers.reader import Reader, Reading
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

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        counts = sum(x.nbytes for x in (self.read, self.most) if x is not None)
        return counts + sum(x.nbytes for x in self.summaries.values())

    def append(self, reader: Reader, held: LayerStore, before: Sequence[int], after: Sequence[int]) -> None:
        """Summarise the pages of tokens that came: sequences held so many tokens `before`, and `after`."""
        page, slots = reader.page, held.positions.shape[2]
        first, last = min(before) // page, -(-slots // page)
        if max(a - b for b, a in zip(before, after, strict=True)) == 1:  # a page of each sequence
            pages = held.positions.new_tensor([max(n - 1, 0) // page for n in after])[:, None].long()
        else:
            pages = torch.arange(first, last, device=held.positions.device).expand(len(after), -1)
        where = pages[:, None, :, None] * page + torch.arange(page, device=pages.device)  # [B,1,n,p]
        where = where.expand(-1, held.positions.shape[1], -1, -1)
        inside = where < slots
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
        budgets, slots = [read_budget(policy, prompt) for prompt in prompts], positions.shape[2]
        whole = reader.reads_all(layer) or (reader.mass is None and slots <= min(budgets))
        if not whole:
            chosen = self._chosen(reader, layer, budgets, step, chosen)
        self._note(chosen.sum(-1, dtype=torch.int32), step.now.positions >= 0)
        self.nbytes_read = 0 if whole else sum(x.nbytes for x in self.summaries.values())
        if whole:
            return None
        order = chosen.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., : max(budgets)]
        places = positions.gather(-1, order).masked_fill(~chosen.gather(-1, order), -1)
        call = step.queries, take(held.keys, order), take(held.values, order), step.now.positions, places
        return masked_attention(*call, params.scaling, params.softcap, params.sliding_window, params.sinks)

    def _chosen(self, reader: Reader, layer: int, budgets: Sequence[int], step: LayerStep, seen: Tensor) -> Tensor:
        """The slots of the pages that are read, bool [B,H_kv,T]; seen: those that the query may see."""
        held, slots = step.store, seen.shape[-1]
        params = step.params
        found = (layer, step.queries, held.keys, held.positions, self.summaries, seen, params.scaling, params.softcap)
        scores = reader.score(Reading(*found))
        pages = scores.shape[-1]
        visible_pages = F.pad(seen, (0, pages * reader.page - slots)).unflatten(-1, (pages, reader.page)).any(-1)
        order = scores.masked_fill(~visible_pages, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        if reader.mass is not None:
            sorted_scores = scores.masked_fill(~visible_pages, 0).gather(-1, order)
            before = sorted_scores.cumsum(-1) - sorted_scores
            best = before < reader.mass * sorted_scores.sum(-1, keepdim=True)
            return seen & _spread(torch.zeros_like(visible_pages).scatter_(-1, order, best), reader.page, slots)
        budget = seen.new_tensor(budgets, dtype=torch.long)[:, None, None]
        best = torch.arange(pages, device=order.device).expand_as(order) < budget // reader.page
        read = torch.zeros_like(visible_pages).scatter_(-1, order, best)
        fits = seen.sum(-1, keepdim=True) <= budget
        return seen & (fits | _spread(read, reader.page, slots))

    def _note(self, read: Tensor, present: Tensor) -> None:
        """Remember what was read [B,H_kv] by the sequences that have a token, bool [B,1]."""
        self.read = read if self.read is None else torch.where(present, read, self.read)
        self.most = read.clone() if self.most is None else torch.maximum(self.most, read)


def _spread(pages: Tensor, page: int, slots: int) -> Tensor:
    """What holds of pages [B,H_kv,P], of each of their slots: [B,H_kv,T]."""
    return pages.repeat_interleave(page, dim=-1)[..., :slots]

"""Layers where a token sees its own chunk of the text and nothing before it (Llama 4).

A layer holds the newest chunk of every sequence: the token at position p lies in slot p % chunk, so that a new chunk
overwrites the last one. No policy makes it smaller; what it holds are states of its group, which go with its sequences.

Shapes: B batch, H_q query heads, H_kv KV heads, M new tokens, C slots (at most a chunk), D head dim.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.cache.attention import attend
from kvbench.cache.group import PolicyGroup
from kvbench.cache.layer import EmptyLayer
from kvbench.cache.step import LayerStep, Projected
from kvbench.cache.steps import BatchStep
from kvbench.policies.needs import Needs
from kvbench.policies.observation import AttentionParams
from kvbench.policies.stores.dense import DenseStore


class ChunkLayer(EmptyLayer):
    """One layer of all sequences. index: the layer's, in the model; chunk: tokens of a chunk."""

    def __init__(self, index: int, chunk: int) -> None:
        self._names = f"{index}.keys", f"{index}.values"
        self._chunk = chunk

    def attend(self, group: PolicyGroup, steps: Iterable[BatchStep], new: Projected, params: AttentionParams) -> Tensor:
        """Take the tokens of a call in, step by step: attention output [B,H_q,M,D]."""
        out = new.values.new_zeros(*new.queries.shape[:3], new.values.shape[-1])
        for step in steps:
            for now in in_chunks(step, self._chunk):
                out[:, :, now.columns] += self._attend(group, new.columns(now.columns), now, params)
        return out

    def copy(self, group: PolicyGroup, others: Iterable[PolicyGroup]) -> None:
        """Let other groups hold what one holds: they read the same prompt."""
        for other in others:
            for name in self._names:
                other.hold_state(name, group.states[name].clone())

    def _attend(self, group: PolicyGroup, new: Projected, now: BatchStep, params: AttentionParams) -> Tensor:
        """Tokens of one chunk of each sequence."""
        filled = [(end - 1) % self._chunk + 1 if count else 0 for end, count in zip(now.ends, now.counts, strict=True)]
        contents = {}
        for name, x in zip(self._names, new[1:], strict=True):
            self._write(held := self._held(group, name, x, max(filled)), x, now, max(filled))
            contents[name.split(".")[1]] = held[:, :, : max(filled)]
        places = _places(now, filled, self._chunk)
        contents["positions"] = places[:, None].expand(contents["keys"].shape[:3])
        store = DenseStore.of(contents, (), ascending=True, packed=len(set(filled)) == 1)
        fresh = now.aligned and max(filled) == new.keys.shape[2]
        return attend(LayerStep(new.queries, now, params, store, fresh), Needs())

    def _held(self, group: PolicyGroup, name: str, like: Tensor, slots: int) -> Tensor:
        """The buffer [B,H_kv,C,D], with room for so many tokens."""
        held = group.states.get(name)
        if held is None:
            held = like.new_zeros(*like.shape[:2], 0, like.shape[-1])
        if held.shape[2] < slots:
            group.hold_state(name, F.pad(held, (0, 0, 0, slots - held.shape[2])))
        group.free_state(name)
        return group.states[name]

    def _write(self, held: Tensor, new: Tensor, now: BatchStep, filled: int) -> None:
        """Each new token [B,H_kv,M,D] goes to its slot."""
        if now.aligned:
            held[:, :, filled - new.shape[2] : filled] = new
            return
        rows, columns = (now.positions >= 0).nonzero().unbind(1)
        held[rows, :, now.positions[rows, columns] % self._chunk] = new[rows, :, columns]


def in_chunks(step: BatchStep, chunk: int) -> list[BatchStep]:
    """A step in parts, of which each holds tokens of one chunk of every sequence."""
    firsts = [end - count for end, count in zip(step.ends, step.counts, strict=True)]
    begins = [first - first % chunk for first in firsts]
    number = max(-(-(end - begin) // chunk) for end, begin in zip(step.ends, begins, strict=True))
    if number <= 1:
        return [step]
    return [_part(step, firsts, [begin + n * chunk for begin in begins], chunk) for n in range(number)]


def _part(step: BatchStep, firsts: list[int], begins: list[int], chunk: int) -> BatchStep:
    """The tokens of a step from `begins` on, a chunk of each sequence at most; firsts: where the step begins."""
    ends = tuple(
        max(first, min(end, begin + chunk)) for first, begin, end in zip(firsts, begins, step.ends, strict=True)
    )
    counts = tuple(max(0, end - max(a, b)) for end, a, b in zip(ends, firsts, begins, strict=True))
    if step.aligned:
        first = ends[0] - counts[0] - firsts[0]
        here = slice(first, first + counts[0])
        columns = slice(step.columns.start + here.start, step.columns.start + here.stop)
        now = replace(step, columns=columns, positions=step.positions[:, here], newest=ends[0] - 1)
    else:
        begin = step.positions.new_tensor(begins)[:, None]
        inside = (step.positions >= begin) & (step.positions < begin + chunk)
        now = replace(step, positions=torch.where(inside, step.positions, -1))
    return replace(now, ends=ends, counts=counts)


def _places(now: BatchStep, filled: list[int], chunk: int) -> Tensor:
    """The position of the token in each slot, int32 [B,C]; -1 where there is none of the chunk that is read."""
    slots = torch.arange(max(filled), dtype=torch.int32, device=now.positions.device)
    if now.aligned:
        return (slots + (now.ends[0] - filled[0])).expand(len(filled), -1)
    begin = slots.new_tensor([end - count for end, count in zip(now.ends, filled, strict=True)])[:, None]
    return torch.where(slots < slots.new_tensor(filled)[:, None], slots + begin, -1)

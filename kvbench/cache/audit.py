"""The audit: an error if a cache holds more than its policy promised, or tokens at wrong positions.

Shapes: L layers, H_kv KV heads, C slots.
"""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from kvbench.cache.sequence import CachedSequence
from kvbench.policies.allocators.allocator import JointAllocator
from kvbench.policies.policy import read_plan
from kvbench.policies.readers.reader import Reader


class BudgetError(RuntimeError):
    """The cache held more than its policy promised, or held it wrongly: the run would not measure what it claims."""


class ScoreError(FloatingPointError):
    """Scores of tokens are not numbers (NaN), so the tokens to keep are undefined."""

    sequences: Collection[int] = ()
    """The rows of the batch in which this came about."""


def check_call(sequence: CachedSequence) -> None:
    """BudgetError or ScoreError after a call of the model: the part of the audit that costs no look at the device."""
    if sequence.policy.evicts:
        held = torch.tensor([layer.count for layer in sequence.layers], dtype=torch.float)
        _check_sums(sequence, held, torch.tensor(sequence.budgets.promise(sequence.seen)))
    check_scores([sequence])


def check_scores(sequences: Iterable[CachedSequence]) -> None:
    """ScoreError if a sequence had a NaN score."""
    for sequence in sequences:
        if sequence.nan_flags:
            layers, flags = list(sequence.nan_flags), torch.cat(list(sequence.nan_flags.values())).tolist()
            sequence.nan_flags = {}
            broken = [layer for layer, flag in zip(layers, flags, strict=True) if flag]
            if broken and sequence.nan_layer is None:
                sequence.nan_layer = broken[0]
    found = [sequence for sequence in sequences if sequence.nan_layer is not None]
    if found:
        layer = found[0].names[min(one.nan_layer for one in found if one.nan_layer is not None)]
        error = ScoreError(
            f"{found[0].policy.name} gave tokens of layer {layer} scores that are not numbers (NaN): "
            "its scorer divides 0 by 0 or takes infinity from infinity, or the model's numbers overflow in this dtype"
        )
        error.sequences = {sequence.row for sequence in found}
        for sequence in found:
            sequence.nan_layer = None
        raise error


def audit(sequence: CachedSequence) -> None:
    """BudgetError unless all due evictions were decided and layers hold at most what is promised, at valid positions.

    The promise: the layer's budget for every KV head, or for their mean where heads may get different shares; beside
    it, where decoding grows, the decoded tokens.
    """
    policy = sequence.policy
    if policy.reader is not None:
        _check_reads(sequence, policy.reader)
    if not policy.evicts or not sequence.started:
        return
    _check_evictions(sequence)
    kept = [(layer.positions >= 0).sum(-1).cpu().double() for layer in sequence.layers]
    most = torch.cat([heads.mean(-1) if policy.allocator.per_head else heads.amax(-1) for heads in kept])  # [L]
    # An official rounding may be off by up to one token per head in every layer.
    promised = torch.tensor(sequence.budgets.promise(sequence.seen)) + (not policy.allocator.exact)
    _check_sums(sequence, most, promised)
    _check_positions(sequence, sequence.seen)


def _check_reads(sequence: CachedSequence, reader: Reader) -> None:
    """BudgetError where a decoded query read more tokens than the budget in a layer that does not read all."""
    for layer in sequence.layers:
        if layer.pages is None or layer.pages.most is None or reader.reads_all(layer.index):
            continue
        most, promised = int(layer.pages.most.max()), read_plan(sequence.policy, sequence.budgets.prompt).tokens
        if most > promised:
            raise BudgetError(
                f"a decoded query read {most} tokens per KV head of sequence {sequence.row} in layer "
                f"{sequence.names[layer.index]}, {sequence.policy.name} promised at most {promised}"
            )


def _check_evictions(sequence: CachedSequence) -> None:
    """BudgetError if the schedule evicts after the newest token, and the policy did not decide about it.

    Where a budget is never exceeded, or none bounds a threshold, the tokens that are held cannot show it.
    """
    schedule, seen, prompt = sequence.policy.schedule, sequence.seen, sequence.budgets.prompt
    if seen <= prompt or not schedule.steps(seen - 1, 1, prompt)[-1].evicts:
        return
    for layer in sequence.layers:
        if layer.opened and layer.decided < seen:
            raise BudgetError(
                f"{sequence.policy.name} evicts after every decoded token (decode={schedule.decode}), but in layer "
                f"{sequence.names[layer.index]} of sequence {sequence.row} it did so last after token {layer.decided} "
                f"of {seen}"
            )


def _check_sums(sequence: CachedSequence, most: Tensor, promised: Tensor) -> None:
    """Tokens per KV head [L] that are held, and those promised: all layers together, then each by itself."""
    name, row = sequence.policy.name, sequence.row
    if round(float(most.sum()), 6) > int(promised.sum()):
        raise BudgetError(
            f"sequence {row} holds {float(most.sum()):g} tokens per KV head over its {len(most)} layers, "
            f"{name} promised at most {int(promised.sum())}"
        )
    if isinstance(sequence.policy.allocator, JointAllocator):
        return  # what one layer has more, another has less
    over = (most > promised).nonzero().flatten().tolist()
    if over:
        raise BudgetError(
            f"layer {sequence.names[over[0]]} holds {float(most[over[0]]):g} tokens per KV head of sequence {row}, "
            f"{name} promised at most {int(promised[over[0]])} there"
        )


def _check_positions(sequence: CachedSequence, seen: int) -> None:
    for layer in sequence.layers:
        positions = layer.positions.sort(-1).values
        twice = (positions[..., 1:] == positions[..., :-1]) & (positions[..., 1:] >= 0)
        if bool(twice.any()) or bool((positions >= seen).any()):
            raise BudgetError(
                f"layer {sequence.names[layer.index]} holds a token twice or one it never saw, in sequence "
                f"{sequence.row}"
            )

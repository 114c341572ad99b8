"""The audit: what a cache holds is what its policy promised, or there is no result.

Shapes: B batch, L layers, H_kv KV heads, C slots.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from kvbench.cache.group import PolicyGroup
from kvbench.policies.allocators.allocator import JointAllocator
from kvbench.policies.policy import read_plan
from kvbench.policies.readers.reader import Reader


class BudgetError(RuntimeError):
    """The cache held more than its policy promised, or held it wrongly: the run would not measure what it claims."""


class ScoreError(FloatingPointError):
    """Scores of tokens are not numbers (NaN), so the tokens to keep are undefined."""

    sequences: Collection[int] = ()
    """The sequences of the group in which this came about."""


def check_call(group: PolicyGroup) -> None:
    """BudgetError or ScoreError after a call of the model: the part of the audit that costs no look at the device."""
    for row, seen in enumerate(group.progress.seen if group.policy.evicts else ()):
        held = [layer.counts[row] if layer.counts else 0 for layer in group.layers]
        _check_sums(group, row, torch.tensor(held, dtype=torch.float), torch.tensor(group.budgets.promise(row, seen)))
    if group.not_numbers:
        raise _score_error(group)


def audit(group: PolicyGroup) -> None:
    """BudgetError unless every layer holds at most what the policy promises, at valid positions.

    The promise: the layer's budget for every KV head, or for their mean where heads may get different shares; beside
    it, where decoding grows, the decoded tokens.
    """
    if group.nan_flags:
        layers, flags = list(group.nan_flags), torch.stack(list(group.nan_flags.values())).tolist()
        group.nan_flags = {}
        for layer, rows in zip(layers, flags, strict=True):
            for row, broken in enumerate(rows):
                if broken:
                    group.not_numbers.setdefault(row, layer)
    if group.not_numbers:
        raise _score_error(group)
    if group.policy.reader is not None:
        _check_reads(group, group.policy.reader)
    if not group.policy.evicts or not group.progress.seen:
        return
    allocator = group.policy.allocator
    kept = [(layer.positions >= 0).sum(-1).cpu().double() for layer in group.layers]
    most = torch.stack([heads.mean(-1) if allocator.per_head else heads.amax(-1) for heads in kept])  # [L,B]
    for row, seen in enumerate(group.progress.seen):
        # An official rounding may be off by up to one token per head in every layer.
        promised = torch.tensor(group.budgets.promise(row, seen)) + (not allocator.exact)
        _check_sums(group, row, most[:, row], promised)
        _check_positions(group, row, seen)


def _check_reads(group: PolicyGroup, reader: Reader) -> None:
    """BudgetError where a decoded query read more tokens than the budget in a layer that does not read all."""
    for layer in group.layers:
        if layer.pages is None or layer.pages.most is None or reader.reads_all(layer.index):
            continue
        for row, most in enumerate(layer.pages.most.amax(-1).tolist()):
            promised = read_plan(group.policy, group.progress.prompt[row]).tokens
            if most > promised:
                raise BudgetError(
                    f"a decoded query read {most} tokens per KV head of sequence {row} in layer "
                    f"{group.names[layer.index]}, "
                    f"{group.policy.name} promised at most {promised}"
                )


def _check_sums(group: PolicyGroup, row: int, most: Tensor, promised: Tensor) -> None:
    """Tokens per KV head [L] that are held, and those promised: all layers together, then each by itself."""
    name = group.policy.name
    if round(float(most.sum()), 6) > int(promised.sum()):
        raise BudgetError(
            f"sequence {row} holds {float(most.sum()):g} tokens per KV head over its {len(most)} layers, "
            f"{name} promised at most {int(promised.sum())}"
        )
    if isinstance(group.policy.allocator, JointAllocator):
        return  # what one layer has more, another has less
    over = (most > promised).nonzero().flatten().tolist()
    if over:
        raise BudgetError(
            f"layer {group.names[over[0]]} holds {float(most[over[0]]):g} tokens per KV head of sequence {row}, "
            f"{name} promised at most {int(promised[over[0]])} there"
        )


def _check_positions(group: PolicyGroup, row: int, seen: int) -> None:
    for layer in group.layers:
        positions = layer.positions[row].sort(-1).values
        twice = (positions[:, 1:] == positions[:, :-1]) & (positions[:, 1:] >= 0)
        if bool(twice.any()) or bool((positions >= seen).any()):
            raise BudgetError(
                f"layer {group.names[layer.index]} holds a token twice or one it never saw, in sequence {row}"
            )


def _score_error(group: PolicyGroup) -> ScoreError:
    name = group.policy.name
    layer = group.names[min(group.not_numbers.values())]
    error = ScoreError(
        f"{name} gave tokens of layer {layer} scores that are not numbers (NaN): "
        "its scorer divides 0 by 0 or takes infinity from infinity, or the model's numbers overflow in this dtype"
    )
    error.sequences, group.not_numbers = set(group.not_numbers), {}
    return error

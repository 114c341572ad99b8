"""What an example says it held, against what its policy promises: tokens by layer and KV head, and their bytes."""

from __future__ import annotations

from statistics import fmean

from kvbench.cache.budgets import Budgets
from kvbench.cache.layout import layout_of
from kvbench.cache.steps import Progress
from kvbench.identity.cell import Cell
from kvbench.models.prompts import Prompt
from kvbench.policies.allocators.allocator import JointAllocator, StatisticAllocator
from kvbench.policies.layer_budgets import read_budget
from kvbench.policies.press import KVPress
from kvbench.records.sample import Sample

POSITION = 4  # bytes of a token's position, which every store holds


def tokens_refused(cell: Cell, prompt: Prompt, sample: Sample) -> str | None:
    """Why the tokens that an example held cannot be what its policy keeps, in words; None where they can."""
    kept, policy = sample.kept_tokens or [], cell.policy
    if [len(heads) for heads in kept] != [heads for heads, _ in _shapes(cell)]:
        return "its kept tokens are not those of the model's layers and KV heads"
    new, steps = (sample.generated_tokens or 0) + len(prompt.dictated), sample.decode_steps or 0
    if not 0 <= new <= prompt.most_new_tokens or not new - 1 <= steps <= new:
        return f"it has {new} new tokens in {steps} steps, and {prompt.most_new_tokens} were allowed"
    fed = len(prompt.ids) + steps
    if min(map(min, kept)) < 0 or max(map(max, kept)) > fed:
        return f"a KV head holds more tokens than the {fed} that were read, or fewer than none"
    if policy.reader is not None and sample.read_tokens is not None:
        read = [max(heads) for layer, heads in enumerate(sample.read_tokens) if not policy.reader.reads_all(layer)]
        if (most := read_budget(policy, prompt.length)) < max(read, default=0):
            return f"its last token read {max(read)} tokens per KV head, {most} were allowed"
    return _budget_refused(cell, prompt, kept, fed) if policy.evicts and not isinstance(policy, KVPress) else None


def _budget_refused(cell: Cell, prompt: Prompt, kept: list[list[int]], fed: int) -> str | None:
    policy, allocator = cell.policy, cell.policy.allocator
    progress = Progress(policy, prompt.length)
    progress.seen, progress.opened, progress.prompt = [fed], [0], [prompt.length]
    progress.question = [prompt.length if prompt.question is None else prompt.question]
    promised = [n + (not allocator.exact) for n in Budgets(policy, len(kept), progress).promise(0, fed)]
    held = [fmean(heads) if allocator.per_head else max(heads) for heads in kept]
    settled = not isinstance(allocator, JointAllocator | StatisticAllocator)  # each layer's budget by itself
    for layer, (most, budget) in enumerate(zip(held, promised, strict=True)):
        if settled and round(most, 6) > budget:
            return f"layer {layer} holds {most:g} tokens per KV head, its budget is {budget}"
    total = sum(map(fmean, kept))
    exact = allocator.exact and policy.selection is None
    if round(sum(held), 6) > sum(promised) or (exact and round(total, 6) != sum(promised)):
        return f"it holds {total:g} tokens per KV head over its {len(kept)} layers, its budget is {sum(promised)}"
    return None


def bytes_refused(cell: Cell, sample: Sample) -> str | None:
    """Why the bytes of an example cannot be those of the tokens it held, in words; None where they can."""
    fed = sample.prompt_tokens + (sample.decode_steps or 0)
    full = cell.checkpoint.full_cache_bytes(fed), cell.checkpoint.full_position_bytes(fed)
    if (sample.full_cache_bytes, sample.full_position_bytes) != full:
        return f"its full cache is {sample.full_cache_bytes} bytes, {fed} tokens take {full[0]}"
    kept, held = sample.kept_tokens or [], sample.cache_bytes or 0
    width = cell.checkpoint.dtype.itemsize if cell.policy.store.exact else 0
    positions = 0 if isinstance(cell.policy, KVPress) else POSITION
    least = sum(
        sum(heads) * (width * numbers + positions) for heads, (_, numbers) in zip(kept, _shapes(cell), strict=True)
    )
    if held < least or (sample.peak_bytes or 0) < held:
        return f"it holds {held} bytes and {sample.peak_bytes} at its peak, its tokens alone take {least}"
    return None


def _shapes(cell: Cell) -> list[tuple[int, int]]:
    """Heads that hold tokens, and the numbers each stores of a token, of every layer."""
    text = cell.checkpoint.config.get_text_config(decoder=True)
    by_query = cell.policy.granularity == "query_head"
    shapes = [cell.checkpoint.shapes[index] for index in layout_of(text).attention]
    return [(text.num_attention_heads if by_query else heads, key + value) for heads, key, value in shapes]

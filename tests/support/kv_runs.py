"""Runs through kvbench's public names, noting what every head holds after every forward call of the model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from kv_models import CodePoints, generated, left_padded, prompt
from kv_oracle import Kept, Rules
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.cache.views import KVLayer
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.generate import generate, generate_tokens
from kvbench.engine.sequence import LiveSequence, Request, script_of
from kvbench.policies.policy import Policy

QUESTION = 6
"""Tokens of every prompt's question, which are its last."""


@dataclass
class Run:
    """tokens[row]: what was generated; kept[call][row]: what every head held after that call; the cache as it ended."""

    tokens: list[list[int]] = field(default_factory=list)
    kept: list[list[Kept]] = field(default_factory=list)
    cache: KVCache | None = None

    def of_row(self, row: int) -> list[Kept]:
        return [call[row] for call in self.kept if call]  # a call before the first token of some row shows none


def kept_now(cache: KVCache) -> list[Kept]:
    """Positions held, ascending: [row][layer][KV head]."""
    layers = [layer.positions for layer in cache.attention_layers]
    rows = range(layers[0].shape[0])
    return [
        [[tuple(sorted(p for p in head if p >= 0)) for head in positions[row].tolist()] for positions in layers]
        for row in rows
    ]


def tensors_of(thing: object, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor reachable from what a layer holds."""
    if isinstance(thing, KVLayer):
        for state in thing.states:
            yield from tensors_of(state, seen)
        return
    if id(thing) in seen or isinstance(thing, torch.dtype | torch.device):
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_of(value, seen)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from tensors_of(value, seen)
    elif hasattr(thing, "__dict__"):
        yield from tensors_of(vars(thing), seen)


def bytes_held(thing: object) -> int:
    """Bytes of the memory behind the tensors of a layer or a store: a view counts with all it keeps alive."""
    memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors_of(thing, set())}
    return sum(memory.values())


@contextmanager
def noting(model: PreTrainedModel, note: Callable[[KVCache], None]) -> Iterator[None]:
    """Call `note` with the cache after every forward call of the model."""

    def hook(module: nn.Module, args: object, kwargs: dict[str, Any], output: object) -> None:
        note(kwargs["past_key_values"])

    handle = model.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def run_greedy(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], policy: Policy, new_tokens: int, **request: Any
) -> Run:
    """Through kvbench's own loop. request: further fields of every request."""
    model.set_attn_implementation("kvbench")
    run, calls = Run(), list[tuple[list[Kept], list[tuple[int, int]]]]()
    ids, mask = left_padded(prompts)

    def note(cache: KVCache) -> None:
        calls.append((kept_now(cache), [(one.budgets.prompt, one.seen) for one in cache.sequences]))

    with noting(model, note):
        how: dict[str, Any] = {"max_new_tokens": new_tokens, "encoder": CodePoints(), **request}
        question = [max(0, len(p) - QUESTION) for p in prompts]  # for policies that ask
        out = generate_tokens(model, ids, policy, attention_mask=mask, question=question, **how)
    run.tokens, run.cache = out.tokens, out.cache
    run.kept = by_call(calls, [len(p) for p in prompts])
    return run


def by_call(calls: Sequence[tuple[list[Kept], list[tuple[int, int]]]], lengths: Sequence[int]) -> list[list[Kept]]:
    """What every sequence held after its calls, side by side from the last one back: prompts may come one by one.

    calls: what was held in each row, with the row's prompt length and tokens seen.
    """
    own: list[list[Kept]] = [[] for _ in lengths]
    seen = [0] * len(lengths)
    for kept, rows in calls:
        free = list(range(len(lengths)))
        for held, (length, now) in zip(kept, rows, strict=True):
            fits = [i for i in free if lengths[i] == length and seen[i] < now] or free
            own[fits[0]].append(held)
            seen[fits[0]] = now
            free.remove(fits[0])
    most = max(map(len, own))
    return [[held[max(0, call + len(held) - most)] for held in own] for call in range(most)]


def run_generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    policy: Policy,
    new_tokens: int,
    *,
    chunk: int | None = None,
    tell_length: bool = False,
) -> Run:
    """Through `model.generate`, as a user would."""
    model.set_attn_implementation("kvbench")
    cache = KVCache(model.config, policy, prompt_length=[len(p) for p in prompts] if tell_length else None)
    run = Run(cache=cache)
    with noting(model, lambda held: run.kept.append(kept_now(held))):
        run.tokens = generated(model, prompts, new_tokens, past_key_values=cache, prefill_chunk_size=chunk)
    return run


def policy_for(rules: Rules) -> Policy:
    """The public slug and fields which are meant to do what `rules` say."""
    if rules.base == "full":
        return make_policy("full")
    fields: dict[str, Any] = {}
    if rules.base == "snapkv":
        fields = {"window": rules.window, "kernel": rules.kernel, "pool": rules.pool}
    if rules.base == "h2o":
        fields = {"accumulate": rules.accumulate, "by_age": rules.by_age}
    if rules.base == "streamingllm":
        fields = {"sinks": rules.sinks}
    if rules.value is not None:
        fields |= {"gqa": rules.gqa, "norm_domain": rules.norm_domain, "f_norm": rules.f_norm}
    fields |= {"granularity": rules.granularity, "order": rules.order, "decode": rules.decode}
    schedule: dict[str, Any] = {"schedule": "prompt"} if rules.block is None else {"block": rules.block}
    return make_policy(rules.slug, rules.budget, **schedule, **fields)


@torch.inference_mode()
def assert_full_is_eager(model: PreTrainedModel, **how: Any) -> None:
    """60 tokens, the last ten one by one, under the full cache: the logits of one eager call without a cache."""
    ids = torch.tensor([prompt(60)])
    model.set_attn_implementation("eager")
    expected = model(ids, use_cache=False, **how).logits
    cache = KVCache(prepare(model).config, make_policy("full"), prompt_length=50)
    got = [model(call, past_key_values=cache, **how).logits for call in (ids[:, :50], *ids[:, 50:].split(1, dim=1))]
    torch.testing.assert_close(torch.cat(got, dim=1), expected, atol=1e-4, rtol=1e-4)  # eager: softmax in float32


def finish(flight: DecodeBatch) -> None:
    """Decode until every sequence has ended."""
    while flight.in_flight:
        flight.step()


def ended(model: PreTrainedModel, requests: Sequence[Request], policies: Sequence[Policy]) -> list[LiveSequence]:
    """Every request under every policy in one batch, each entering while those before it decode."""
    flight, rows = DecodeBatch(model), list[LiveSequence]()
    for request in requests:
        rows += flight.admit([request], policies)[0]
        flight.step()
    finish(flight)
    return rows


def assert_alone(model: PreTrainedModel, row: LiveSequence) -> None:
    """A sequence that has ended is what its request gives alone: tokens, kept positions, states and bytes."""
    assert row.error is None, f"{row.policy.name}: {row.error!r}"
    alone = generate(model, [row.request], row.policy)
    name = f"{row.policy.name}, budget {row.policy.budget}, {row.request.length} tokens"
    assert (row.tokens, row.decode_steps) == (alone.tokens[0], alone.decode_steps), name
    assert kept_now(row.cache) == kept_now(alone.cache), name
    for mine, its in zip(row.cache.attention_layers, alone.cache.attention_layers, strict=True):
        torch.testing.assert_close(by_position(mine), by_position(its), atol=1e-4, rtol=1e-4, msg=f"{name}: contents")
    for size in ("seen", "nbytes", "peak_nbytes", "spare_nbytes"):
        assert getattr(row.cache, size) == getattr(alone.cache, size), f"{name}: {size}"
    mine, its = row.cache.sequence, alone.cache.sequence
    assert (mine.passed, mine.passes, mine.passed_entries) == (its.passed, its.passes, its.passed_entries), name
    assert mine.states.keys() == its.states.keys(), name
    for state in mine.states:
        torch.testing.assert_close(mine.states[state], its.states[state], atol=1e-4, rtol=1e-4)


def by_position(layer: KVLayer) -> tuple[Tensor, Tensor]:
    """Keys and values [N,D] of a sequence's tokens in a layer, by KV head and position; merging changes them."""
    order = layer.positions[0].argsort(-1)
    held = layer.positions[0].gather(-1, order) >= 0
    keys, values = (x[0].gather(1, order[..., None].expand(-1, -1, x.shape[-1])) for x in (layer.keys, layer.values))
    return keys[held], values[held]


def assert_rows_alone(model: PreTrainedModel, policies: Sequence[Policy], lengths: Sequence[int], new: int) -> None:
    """Prompts of these lengths, continued in one batch by all policies, are each what they are alone."""
    requests = [
        Request(script_of(torch.tensor([prompt(n, n)])), max_new_tokens=new, encoder=CodePoints()) for n in lengths
    ]
    for row in ended(model, requests, policies):
        assert_alone(model, row)

"""The cache itself: bytes counted are bytes held, slots are overwritten in place, and the audit notices."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from kv_models import prompt, tiny
from kv_runs import kept_now, noting, run_greedy, tensors_of
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvbench import BudgetError, KVCache, make_policy
from kvbench.cache.attend import TorchBackend
from kvbench.cache.hook import prepare
from kvbench.cache.views import KVLayer
from kvbench.policies.allocators.uniform import Uniform
from kvbench.policies.policy import Policy
from kvbench.policies.ranking import Ranking

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 8
SLUGS = ["full", "streamingllm", "h2o", "tova", "fastcaote_snapkv"]


@cache
def model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return prepare(tiny(kv_heads=KV_HEADS, layers=LAYERS, dtype=dtype))


def policy(slug: str, budget: int = 16, **fields: Any) -> Any:
    if slug.endswith("snapkv"):
        fields = {"window": 6, "decode": "evict"} | fields
    return make_policy(slug, budget, **fields)


def slot_bytes(itemsize: int) -> int:
    """Keys, values and an int32 position of one slot in all KV heads of a layer."""
    return KV_HEADS * (2 * HEAD_DIM * itemsize + 4)


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_bytes_of_a_full_cache_as_worked_by_hand(dtype: torch.dtype, itemsize: int) -> None:
    held = KVCache(model(dtype).config, make_policy("full"))
    model(dtype)(torch.tensor([prompt(37)]), past_key_values=held)
    assert held.nbytes == LAYERS * 37 * slot_bytes(itemsize)


def test_bytes_at_the_budget_as_worked_by_hand() -> None:
    """Streaming keeps no statistics; one spare slot takes the next token in before another goes."""
    held = KVCache(model().config, policy("streamingllm"))
    model()(torch.tensor([prompt(37)]), past_key_values=held)
    assert held.nbytes == LAYERS * (16 + 1) * slot_bytes(4)


def test_the_peak_is_one_block_beside_the_budget() -> None:
    run = run_greedy(model(), [prompt(61)], policy("streamingllm", block=4), 4)
    assert run.cache.nbytes < run.cache.peak_nbytes == LAYERS * (16 + 4) * slot_bytes(4)


@pytest.mark.parametrize(("fit", "waiting"), [(0, 1), (1.5, 1), (2, 2), (100, LAYERS)])
def test_the_peak_of_a_whole_prompt_is_the_layers_that_fit_the_workspace_and_the_kept_tokens(
    fit: float, waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that waits has its keys and values twice, to evict with others; no score reads queries."""
    layer = 61 * 4 * 8 * 2 * 2 * model().config.num_key_value_heads  # of float32 numbers
    monkeypatch.setattr(TorchBackend, "workspace", int(fit * layer))
    run = run_greedy(model(), [prompt(61)], policy("streamingllm"), 4)
    assert run.cache.peak_nbytes == (waiting * 61 + (LAYERS - waiting) * (16 + 1)) * slot_bytes(4)


@pytest.mark.parametrize("slug", [slug for slug in SLUGS if slug != "full"])
def test_decoding_at_the_budget_overwrites_slots_in_place(slug: str) -> None:
    seen: list[tuple[int, list[int]]] = []

    def note(held: KVCache) -> None:
        buffers = [x for layer in held.layers for x in (layer.keys, layer.values) if x is not None]
        seen.append((held.nbytes, [x.data_ptr() for x in buffers]))

    with noting(model(), note):
        run_greedy(model(), [prompt(37)], policy(slug), 12)
    assert len(seen) == 12
    assert all(call == seen[1] for call in seen[1:])


# the audit


def audited(slug: str, **fields: Any) -> KVCache:
    """A cache after a prompt of 37 and 4 decoded tokens; its own audit has passed."""
    run = run_greedy(model(), [prompt(37)], policy(slug, **fields), 5)
    run.cache.audit()
    return run.cache


@pytest.mark.parametrize("slug", ["streamingllm", "snapkv"])
def test_a_token_too_many_breaks_the_promise(slug: str) -> None:
    held = audited(slug)
    missing = min(set(range(41)) - set(kept_now(held)[0][1][0]))
    with torch.inference_mode():
        positions = positions_behind(held.layers[1])
        positions[0, 0, int((positions[0, 0] < 0).nonzero()[0])] = missing
    with pytest.raises(BudgetError, match=r"sequence 0 holds 33 tokens per KV head.*promised at most 32"):
        held.audit()


def test_a_layer_over_its_share_is_noticed_though_another_makes_up_for_it() -> None:
    held = audited("h2o")
    missing = min(set(range(41)) - set(kept_now(held)[0][1][0]))
    with torch.inference_mode():
        poorer, richer = (positions_behind(layer) for layer in held.layers[:2])
        for head in range(poorer.shape[1]):
            poorer[0, head, int((poorer[0, head] >= 0).nonzero()[0])] = -1
        richer[0, 0, int((richer[0, 0] < 0).nonzero()[0])] = missing
    with pytest.raises(BudgetError, match=r"layer 1 holds 17 tokens per KV head of sequence 0.*promised at most 16"):
        held.audit()


@pytest.mark.parametrize("place", [0, 40])
def test_a_token_held_twice_is_noticed(place: int) -> None:
    held = audited("h2o")
    with torch.inference_mode():
        positions = positions_behind(held.layers[1])
        positions[0, 1, (positions[0, 1] == place).nonzero()] = -2  # wherever it is held: not in the others' way
        empty, others = (positions[0, 1] == -2).nonzero().flatten(), (positions[0, 1] >= 0).nonzero().flatten()
        positions[0, 1, [*empty.tolist(), *others.tolist()][:2]] = place
    with pytest.raises(BudgetError, match="layer 1 holds a token twice"):
        held.audit()


def test_a_token_never_seen_is_noticed() -> None:
    held = audited("h2o")
    with torch.inference_mode():
        positions = positions_behind(held.layers[0])
        positions[0, 0, int((positions[0, 0] >= 0).nonzero()[0])] = 41
    with pytest.raises(BudgetError, match="layer 0 holds a token twice or one it never saw"):
        held.audit()


DUE = [
    ("threshold_random", {"allocator.tau": 0.5, "window": 8, "decode": "threshold"}),
    ("snapkv", {"budget": 64, "window": 8, "decode": "evict"}),  # above what the sequence reaches
    ("h2o", {"budget": 64, "decode": "evict", "every": 50}),
]


@pytest.mark.parametrize(("slug", "fields"), DUE)
def test_decoding_that_should_evict_and_never_did_is_noticed(
    slug: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the number of tokens cannot show it."""
    found = make_policy(slug, **fields)
    run_greedy(tiny(), [prompt(37)], found, 5)  # audits
    monkeypatch.setattr(Policy, "decoding_evicts", property(lambda policy: False))  # a table then takes such sequences
    with pytest.raises(BudgetError, match=rf"{slug} evicts after every decoded token .* last after token 3\d of 41"):
        run_greedy(tiny(), [prompt(37)], found, 5)


def positions_behind(layer: KVLayer) -> Tensor:
    """The int32 buffer of positions, so that tampering with it is tampering with the layer."""
    found = [x for x in tensors_of(layer, set()) if x.dtype == torch.int32 and x.dim() == 3]
    assert len({x.untyped_storage().data_ptr() for x in found}) == 1, "a buffer and views of it"
    return max(found, key=torch.Tensor.numel)


@pytest.mark.parametrize("calls", [[37], [20, 17], [37, 1, 1]])
def test_every_layer_counts_what_was_seen_before_the_call_until_the_call_is_over(calls: list[int]) -> None:
    """As a model's attention asks for it, before it hands its keys over (Llama4's temperature tuning)."""
    held = KVCache(model().config, policy("h2o"), prompt_length=37)
    asked: list[list[int]] = []

    def note(module: nn.Module, args: object) -> None:
        asked[-1] += [layer.get_seq_length() for layer in held.layers]

    hooks = [layer.self_attn.register_forward_pre_hook(note) for layer in model().model.layers]
    ids, start = torch.tensor([prompt(sum(calls))]), 0
    for size in calls:
        asked.append([])
        model()(ids[:, start : start + size], past_key_values=held)
        assert asked[-1] == [start] * LAYERS**2
        start += size
        assert held.get_seq_length() == held.seen == start
    for hook in hooks:
        hook.remove()


class Generous(Uniform):
    """An allocator that deals out one slot more than there are, and says it does not."""

    def heads(self, layer: int, ranking: Ranking, budgets: Sequence[int]) -> Tensor:
        return ranking.seen.new_tensor(budgets)[:, None].expand(ranking.scores.shape[:2]) + 1


@pytest.mark.parametrize("slug", ["h2o", "snapkv"])
def test_generate_stops_where_a_layer_holds_more_than_was_promised(slug: str) -> None:
    """`model.generate` never calls `audit`: each call's end looks at the counts of every layer."""
    broken = replace(policy(slug, decode="grow"), allocator=Generous())
    held = KVCache(model().config, broken)
    with pytest.raises(BudgetError, match=r"layer 0 holds 17 .* at most 16 there|holds 34 tokens .* at most 32"):
        model().generate(torch.tensor([prompt(37)]), past_key_values=held, max_new_tokens=4, do_sample=False)

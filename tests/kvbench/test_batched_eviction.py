"""Layers that evict a decoded token together keep what each would keep by itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from kv_models import prompt, tiny
from kv_runs import Run, run_greedy
from torch import Tensor

from kvbench import KVCache, make_policy
from kvbench.cache.attend import TorchBackend
from kvbench.cache.hook import prepare
from kvbench.cache.layer import RecentQueries
from kvbench.policies.observation import Observation
from kvbench.policies.policy import Policy

SYSTEMS: list[tuple[str, dict[str, object]]] = [
    ("h2o", {}),
    ("tova", {}),
    ("knorm", {}),
    ("roco", {}),
    ("sirllm", {}),
    ("d2o", {}),
    ("d2o_raw", {}),
    ("d2o_sim_k_v_separate", {}),
    ("d2o_released", {}),
    ("attention_matching", {"steps": 20}),
    ("pyramidkv", {"window": 6}),
    ("cake", {"window": 6}),
    ("p2a_snapkv", {"window": 6}),
    ("snapkv", {"window": 6, "decode": "evict"}),
    ("caote_h2o", {"schedule": "prompt"}),
    ("caote_snapkv", {"window": 6, "schedule": "prompt"}),
    ("fastcaote_tova", {"schedule": "prompt", "gqa": "group_l2"}),
    ("caote_snapkv", {"window": 6, "schedule": "prompt", "granularity": "layer"}),
]


def policy(slug: str, budget: int = 40) -> Policy:
    fields = next(fields for name, fields in SYSTEMS if name == slug)
    return make_policy(slug, budget, **fields)


@contextmanager
def apart() -> Iterator[None]:
    """Every layer by itself."""
    with mock.patch.object(TorchBackend, "workspace", 0):
        yield


@contextmanager
def counted(calls: list[int]) -> Iterator[None]:
    """Note how many layers are rows of each ranking."""
    rank = Policy.rank

    def noted(policy: Policy, seen: Observation, state: dict[str, Tensor]) -> object:
        calls.append(len(seen.positions))  # of one sequence
        return rank(policy, seen, state)

    with mock.patch.object(Policy, "rank", noted):
        yield


def assert_same(left: Run, right: Run) -> None:
    assert left.tokens == right.tokens
    assert left.kept == right.kept
    for ours, theirs in zip(left.cache.layers, right.cache.layers, strict=True):
        order, their_order = (layer.positions.argsort(-1)[..., None] for layer in (ours, theirs))
        for name in ("keys", "values"):
            mine, other = getattr(ours, name), getattr(theirs, name)
            mine, other = (x.gather(2, o.expand_as(x)) for x, o in ((mine, order), (other, their_order)))
            torch.testing.assert_close(mine[:, :, 1:], other[:, :, 1:])  # the first slot is the empty one


@pytest.mark.parametrize(("slug", "fields"), SYSTEMS)
def test_layers_evicted_together_equal_layers_evicted_alone(slug: str, fields: dict[str, object]) -> None:
    """Every second layer of Gemma 2 slides, and its logits are capped."""
    model, chosen = tiny("gemma2", layers=4), make_policy(slug, 40, **fields)
    ids = [prompt(70, seed=1), prompt(70, seed=2)]
    together = run_greedy(model, ids, chosen, 5)
    with apart():
        alone = run_greedy(model, ids, chosen, 5)
    assert_same(together, alone)


def test_all_layers_of_a_prompt_and_of_a_decoded_token_are_ranked_at_once() -> None:
    calls: list[int] = []
    with counted(calls):
        run_greedy(tiny(layers=5), [prompt(70)], policy("h2o"), 4)
    assert calls == [5] * 4  # the last token is never fed


@pytest.mark.parametrize("slug", ["d2o", "pyramidkv"])
def test_layers_with_budgets_of_their_own_are_ranked_and_freed_at_once(slug: str) -> None:
    calls: list[int] = []
    with counted(calls):
        run = run_greedy(tiny(layers=5), [prompt(70)], make_policy(slug, 40), 1)
    held = [len(layer[0]) for layer in run.of_row(0)[-1]]
    assert len(set(held)) > 1
    assert calls == [5]
    stores = [layer.store for layer in run.cache.sequence.layers]
    together: dict[int, int] = {}  # bytes of the memory that layers share
    for store in stores:
        memory = store.memory["keys"].untyped_storage()
        together[memory.data_ptr()] = memory.nbytes()
    assert len(together) < len(stores)
    assert sum(together.values()) == sum(store.memory["keys"].nbytes for store in stores)  # no padding is held


def test_the_newest_queries_come_in_order() -> None:
    """In calls of 2, 1, 1 and 1 tokens: the oldest makes room."""
    recent = RecentQueries(3)
    for columns in ([0, 1], [2], [3], [4]):
        positions = torch.tensor([columns])
        found = recent.add(positions[:, None, :, None].float().expand(-1, 2, -1, 4), positions)
    assert found[1].tolist() == [[2, 3, 4]]
    assert found[0][:, 1, :, 3].tolist() == [[2, 3, 4]]
    recent.limit(1)
    assert recent.held[1].tolist() == [[4]]


def test_layers_without_a_cache_at_the_end_do_not_keep_the_others_waiting() -> None:
    model = prepare(tiny(layers=3))
    cache = KVCache(model.config, policy("h2o"), prompt_length=70)
    with torch.inference_mode():
        model(torch.tensor([prompt(70)]), past_key_values=cache)
        with mock.patch.object(KVCache, "end_call"):
            for place, token in enumerate((7, 8), start=70):
                model(torch.tensor([[token]]), position_ids=torch.tensor([[place]]), past_key_values=cache)
        assert cache.kept_tokens().tolist() == [[[41, 41]]] * 3  # the last token's evictions are still to come
        cache.audit()
    assert cache.kept_tokens().tolist() == [[[40, 40]]] * 3

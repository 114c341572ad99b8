"""D2O as released: late eviction, whole layers, clipped shares, one threshold per layer, against a slow version."""

import math
from typing import Any

import numpy as np
import pytest
from kv_mergers import Selecting, contents, cosine, simulate_with
from kv_models import prompt, tiny
from kv_oracle import Glance
from kv_runs import run_greedy
from transformers import PreTrainedModel

from kvbench import make_policy

LAYERS, LENGTH, NEW = 6, 50, 6
WHOLE = {0, 1, LAYERS - 1}


class Released(Selecting):
    """Everything that differs from the paper, layer by layer; only the threshold's reset between prompts is ours."""

    granularity = "query_head"

    def __init__(self, model: PreTrainedModel, share: float, prompt: int) -> None:
        super().__init__(model, share, prompt)
        self.share, self.tau = share, [math.nan] * self.layers

    def _evict(self, layer: int, glance: Glance) -> None:
        if self.seen < LENGTH:
            return
        if self.seen == LENGTH:
            if layer < self.layers - 1:
                return
            self._allocate()
        for each in range(self.layers) if self.seen == LENGTH else [layer]:
            if each not in WHOLE:
                self.shrink(each)

    def _allocate(self) -> None:
        skew = []
        for heads in self.heads:
            variances = [np.var(list(head.sums[0].values()), ddof=1) for head in heads]
            low, high = min(variances), max(variances)
            skew.append(float(np.mean([(v - low) / (high - low + 1e-6) for v in variances])))
        powers = [math.exp(-x) for x in skew]
        stored = LENGTH + 1
        total = round(self.share * stored * self.layers) / stored
        alphas = [min(max(total * power / sum(powers), 0.01), 1.0) for power in powers]
        self.budgets = [int(alpha * stored) for alpha in alphas]

    def shrink(self, layer: int) -> None:
        budget = self.budgets[layer]
        assert budget is not None
        plans = []
        for kv, head in enumerate(self.heads[layer]):
            scores, newest = self.sums(layer, kv), self.seen_after - budget // 2
            safe = {p for p in head.keys if p < 4 or p >= newest}
            order = sorted(head.keys, key=lambda p: (p not in safe, -scores[p], p))
            kept, gone = sorted(order[:budget]), sorted(order[budget:])
            nearest = [max((cosine(head.keys[p], head.keys[j]), -j) for j in kept) for p in gone]
            plans.append((gone, [(u, -j) for u, j in nearest]))
        if not plans[0][0]:
            return
        means = np.mean([[u for u, _ in nearest] for _, nearest in plans], axis=0)  # the r-th tokens of all heads
        before, now = self.tau[layer], float(np.mean(means))
        self.tau[layer] = now if math.isnan(before) else 0.5 * now + 0.5 * before
        for head, (gone, nearest) in zip(self.heads[layer], plans, strict=True):
            merging = [
                (p, u, j) for p, (u, j), mean in zip(gone, nearest, means, strict=True) if mean >= self.tau[layer]
            ]
            for held in (head.keys, head.values):
                old = dict(held)
                for place in {j for _, _, j in merging}:
                    parts = [u * old[p] for p, u, j in merging if j == place]
                    held[place] = (old[place] + np.sum(parts, axis=0)) / (1 + len(parts))
            head.drop(gone)


@pytest.mark.parametrize("share", [0.3, 0.5])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_it_holds_what_a_slow_version_holds(share: float, kv_heads: int) -> None:
    model, ids = tiny(layers=LAYERS, kv_heads=kv_heads), prompt(LENGTH)
    sequence = Released(model, share, LENGTH)
    trace = simulate_with(model, ids, NEW, sequence)
    run = run_greedy(model, [ids], make_policy("d2o_released", share), NEW)
    assert run.of_row(0) == trace.kept
    assert run.tokens[0] == trace.tokens
    for layer, heads in zip(run.cache.layers, contents(sequence.heads), strict=True):
        for kv, held in enumerate(heads):
            slots = {int(p): slot for slot, p in enumerate(layer.positions[0, kv]) if p >= 0}
            for position, (key, value) in held.items():
                np.testing.assert_allclose(layer.keys[0, kv, slots[position]].numpy(), key, rtol=1e-8, atol=1e-10)
                np.testing.assert_allclose(layer.values[0, kv, slots[position]].numpy(), value, rtol=1e-8, atol=1e-10)


def test_two_tokens_are_those_of_the_full_cache_and_some_layers_are_never_compressed() -> None:
    model, ids = tiny(layers=LAYERS), prompt(LENGTH)
    full = run_greedy(model, [ids], make_policy("full"), NEW)
    run = run_greedy(model, [ids], make_policy("d2o_released", 0.3), NEW)
    assert run.tokens[0][:2] == full.tokens[0][:2]
    assert run.tokens[0] != full.tokens[0]
    held = [len(layer[0]) for layer in run.of_row(0)[-1]]
    assert {layer for layer, tokens in enumerate(held) if tokens == LENGTH + NEW - 1} == WHOLE


@pytest.mark.parametrize("slug", ["h2o", "d2o", "d2o_alloc_uniform", "snapkv"])
def test_late_eviction_keeps_rows_of_a_padded_batch_apart(slug: str) -> None:
    model, prompts = tiny(layers=3), [prompt(LENGTH), prompt(33, seed=1), prompt(32, seed=2)]
    fields: dict[str, Any] = {"window": 8} if slug == "snapkv" else {}
    policy = make_policy(slug, 32, late=True, decode="evict", **fields)
    both = run_greedy(model, prompts, policy, NEW)
    for row, ids in enumerate(prompts):
        alone = run_greedy(model, [ids], policy, NEW)
        assert both.of_row(row) == alone.of_row(0)
        assert both.tokens[row] == alone.tokens[0]
        assert [len(head) for head in both.of_row(row)[0][0]] == [len(ids)] * 2
        assert sum(len(layer[0]) for layer in both.of_row(row)[1]) == 32 * 3

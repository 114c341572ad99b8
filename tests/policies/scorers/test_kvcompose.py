"""KVCompose: composite tokens by hand, and the tokens that kvpress keeps."""

import torch
from kv_models import prompt, tiny
from kv_runs import run_greedy
from kvpress_kept import FAMILIES, presses
from transformers import DynamicCache

from kvbench import make_policy
from kvbench.policies.allocators.composite import Composite
from kvbench.policies.ranking import Ranking


def ranked(scores: list[list[float]]) -> Ranking:
    x = torch.tensor([scores])
    positions = torch.arange(x.shape[-1]).expand(x.shape)
    return Ranking(x, None, positions, torch.zeros_like(x, dtype=torch.bool), torch.tensor([x.shape[-1]]))


def test_layers_compete_with_the_mean_of_the_sorted_scores_of_their_heads() -> None:
    """Layer 0: (9+5)/2, (2+4)/2, (1+0)/2 = 7, 3, .5; layer 1: 8, 6, 5; two slots a head on average."""
    layers = [ranked([[9.0, 1, 2], [4, 5, 0]]), ranked([[8.0, 6, 5], [8, 6, 5]])]
    found = Composite().heads_of_all(layers, [[2], [2]])
    assert [x.tolist() for x in found] == [[[1, 1]], [[3, 3]]]
    raised = Composite(official=True).heads_of_all(layers, [[2], [2]])  # layer 0: 8, 6, 5
    assert [x.tolist() for x in raised] == [[[2, 2]], [[2, 2]]]
    one = Composite().heads_of_all([ranked([[0.1, 0]]), ranked([[9.0, 8]])], [[1], [1]])
    assert [x.tolist() for x in one] == [[[1]], [[1]]], "every layer keeps a token"


@torch.inference_mode()
def test_kvpress_keeps_the_same() -> None:
    kvpress = presses()
    ids, budget = prompt(60), 24
    for family in FAMILIES:
        model = tiny(family, query_heads=4, kv_heads=2, layers=3, dtype=torch.float32)
        run = run_greedy(model, [ids], make_policy("kvcompose", budget, official=True), 1)
        model.set_attn_implementation("eager")
        cache, whole = DynamicCache(config=model.config), DynamicCache(config=model.config)
        model.model(input_ids=torch.tensor([ids]), past_key_values=whole)
        with kvpress.KVComposePress(compression_ratio=1 - (budget + 0.01) / len(ids))(model):
            model.model(input_ids=torch.tensor([ids]), past_key_values=cache)
        for layer, left in enumerate(cache.layers):
            same = (left.keys[0, :, :, None] == whole.layers[layer].keys[0, :, None]).all(-1)
            kept = [tuple(head.nonzero()[:, 1].tolist()) for head in same]
            assert kept == [tuple(head) for head in run.of_row(0)[0][layer]], (family, layer)

"""One threshold over the scores of all layers and KV heads: who wins is counted by hand, and over a whole model."""

from dataclasses import replace

import pytest
import torch
from kv_models import left_padded, prompt, tiny
from torch import Tensor

from kvbench import make_policy
from kvbench.cache.hook import prepare
from kvbench.engine.generate import generate_tokens
from kvbench.policies.allocators.global_threshold import GlobalThreshold
from kvbench.policies.policy import Policy
from kvbench.policies.ranking import Ranking
from kvbench.policies.stores.ragged import Ragged

BUDGET = 12


def ranking(scores: list[list[float]], protected: int = 0, positions: list[list[int]] | None = None) -> Ranking:
    """One sequence; scores [H,T]; the first tokens are protected."""
    given = torch.tensor([scores])
    places = torch.arange(given.shape[-1]).expand(given.shape) if positions is None else torch.tensor([positions])
    stays = (places >= 0) & (places < protected)
    return Ranking(given, None, places, stays, torch.tensor([given.shape[-1]]))


def shared(rankings: list[Ranking], budget: int) -> list[list[int]]:
    found = GlobalThreshold().heads_of_all(rankings, [[budget]] * len(rankings))
    return [heads[0].tolist() for heads in found]


def test_heads_of_all_layers_win_slots_by_their_scores() -> None:
    first, second = ranking([[9.0, 8, 1, 0], [7.0, 1, 0, 0]]), ranking([[6.0, 5, 4, 1], [0.0, 0, 0, 0]])
    # 2 layers x 2 heads x 1 slot: 9, 8, 7, 6; with 2 slots also 5, 4 and two of the 1s, of the lower position: head
    # 1's at place 1, then head 0's at place 2.
    assert shared([first, second], 1) == [[2, 1], [1, 0]]
    assert shared([first, second], 2) == [[3, 2], [3, 0]]


def test_protected_tokens_stay_in_every_head_inside_the_budget() -> None:
    first, second = ranking([[0.0, 8, 7, 6], [0.0, 1, 0, 0]], 1), ranking([[0.0, 5, 4, 1], [0.0, 0, 0, 0]], 1)
    assert shared([first, second], 2) == [[4, 1], [2, 1]]


def test_equal_scores_go_to_the_lower_position_then_the_lower_layer_and_head() -> None:
    layers = [ranking([[1.0, 1, 1], [1.0, 1, 1]]) for _ in range(3)]
    assert shared(layers, 1) == [[1, 1], [1, 1], [1, 1]]
    layers = [ranking([[0.0, 1, 1], [0.0, 1, 1]]) for _ in range(2)] + [ranking([[0.0, 0, 2], [0.0, 0, 2]])]
    assert shared(layers, 1) == [[1, 1], [1, 1], [1, 1]]
    layers[1] = ranking([[1.0, 0, 1], [0.0, 1, 1]])
    assert shared(layers, 1) == [[1, 1], [1, 1], [1, 1]]
    layers[2] = ranking([[0.0, 3, 2], [0.0, 0, 2]])
    assert shared(layers, 1) == [[1, 1], [1, 0], [2, 1]]  # of five ones the three first: places 0, 1, 1


def test_layers_of_several_lengths_compete_as_well() -> None:
    short = ranking([[3.0, 9.0]], positions=[[4, -1]])  # an empty slot
    assert shared([ranking([[5.0, 2, 4, 1]]), short], 2) == [[3], [1]]


def joint(slug: str, **fields: object) -> Policy:
    policy = make_policy(slug, BUDGET, schedule="prompt", **fields)
    return replace(policy, allocator=GlobalThreshold(), store=Ragged())


def key_norms(ids: Tensor) -> Tensor:
    """[L,H_kv,T] of every token, as a full cache holds them."""
    model = prepare(tiny(layers=3))
    full = generate_tokens(model, ids, make_policy("full"), max_new_tokens=1).cache
    return torch.stack([layer.keys[0].norm(dim=-1) for layer in full.layers if layer.keys is not None])


def test_layers_share_one_threshold() -> None:
    model, prompts = tiny(layers=3), [prompt(50), prompt(41, seed=1)]
    model.set_attn_implementation("kvbench")
    ids, mask = left_padded(prompts)
    held = generate_tokens(model, ids, joint("knorm", decode="evict"), attention_mask=mask, max_new_tokens=1).cache
    for row, tokens in enumerate(prompts):
        norms = key_norms(torch.tensor([tokens]))
        cut = norms.flatten().sort().values[3 * 2 * BUDGET - 1]
        expected = [[(head <= cut).nonzero().flatten().tolist() for head in layer] for layer in norms]
        got = [[sorted(p for p in head if p >= 0) for head in x.positions[row].tolist()] for x in held.layers]
        assert got == expected
        assert len({len(head) for layer in got for head in layer}) > 1
    held.audit()


@pytest.mark.parametrize("decode", ["evict", "grow"])
def test_the_total_holds_while_decoding(decode: str) -> None:
    model = prepare(tiny(layers=3))
    done = generate_tokens(
        model, torch.tensor([prompt(50)]), joint("snapkv", window=4, decode=decode), max_new_tokens=5
    )
    assert int(done.cache.kept_tokens().sum()) == 3 * 2 * (BUDGET + (4 if decode == "grow" else 0))


def test_slots_of_all_heads_are_refused_where_layers_differ() -> None:
    with pytest.raises(ValueError, match=r"the same number of heads in each layer, but .* have 4 and 16: use an alloc"):
        GlobalThreshold().check_heads([16, 4, 16])

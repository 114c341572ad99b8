"""Random eviction: one draw per token, whatever the batch and the calls."""

import torch
from kv_crafted import Crafted, drawn
from kv_models import prompt, tiny

from kvbench import generate, make_policy
from kvbench.policies.draws import uniform_draws

PLACES = torch.arange(2000).expand(1, 1, -1)


def kept(budget: int, tokens: int, *, block: int | None = None, seed: int = 0) -> list[tuple[int, ...]]:
    """Positions held by each KV head after a prompt of `tokens`."""
    schedule = {"schedule": "prompt"} if block is None else {"schedule": "blocks"}
    policy = make_policy("random", budget, block=block, seed=seed, **schedule)
    layer = Crafted(policy, 2, 2, prompt_length=tokens)
    q, k, v = drawn(tokens, 2, 2)
    for start in range(0, tokens, block or tokens):
        here = slice(start, start + (block or tokens))
        layer.call(q[:, :, here], k[:, :, here], v[:, :, here])
    return layer.kept()


def test_a_token_keeps_its_draw_however_the_prompt_is_split() -> None:
    assert kept(10, 50) == kept(10, 50, block=1) == kept(10, 50, block=7) == kept(10, 50, block=64)


def test_the_newest_tokens_stay_if_asked_for_and_the_draws_of_the_others_are_the_same() -> None:
    policy = make_policy("random", 10, schedule="prompt", recent=4)
    layer = Crafted(policy, 2, 2, prompt_length=50)
    layer.call(*drawn(50, 2, 2))
    for held, plain in zip(layer.kept(), kept(50, 50), strict=True):
        assert [*held[-4:]] == [46, 47, 48, 49]
        assert {*held[:-4]} <= {*plain}
    for held, few in zip(layer.kept(), kept(6, 50), strict=True):
        assert {position for position in few if position < 46} <= {*held}


def test_draws_are_spread_evenly_over_the_text() -> None:
    """Of 4000 tokens 1000 stay; each quarter holds 250 give or take 5 standard deviations (13.7)."""
    held = torch.tensor(kept(1000, 4000)[0])
    counts = torch.histc(held.float(), bins=4, min=0, max=4000)
    assert bool(((counts - 250).abs() < 69).all())


def test_every_example_and_every_run_loses_other_tokens() -> None:
    """Half of 2000 tokens stay: two independent halves share 500 give or take 5 standard deviations (11.2)."""
    policy = make_policy("random", 1000)
    drawn_anew = [policy.for_example(seed, example) for seed, example in ((0, 0), (0, 1), (1, 0), (0, 0))]
    first, example, run, again = (torch.topk(uniform_draws(p.scorer.seed, 0, PLACES), 1000).indices for p in drawn_anew)
    assert torch.equal(first, again)
    for other in (example, run):
        assert abs(len({*first.flatten().tolist()} & {*other.flatten().tolist()}) - 500) < 56


def test_generate_draws_for_every_row_sample_and_seed() -> None:
    """Half of 60 tokens stay, so that two equal sets mean equal draws; CaM draws while it merges."""
    ids, again = torch.tensor([prompt(60)] * 2), {}
    for slug in ("random", "chunkkv_random", "cam"):
        model, policy = tiny(dtype=torch.float32), make_policy(slug, 30)
        for seed in (1, 2, 1):
            how = {"max_new_tokens": 4, "samples": 2, "temperature": 1e-6, "seed": seed}
            layers = generate(model, ids, policy, **how).cache.layers
            read = layers[1].values if slug == "cam" else layers[1].positions.sort(-1).values
            rows = [tuple(row.flatten().tolist()) for row in read]
            assert len({*rows}) == 4
            assert again.setdefault((slug, seed), rows) == rows
        assert not {*again[slug, 1]} & {*again[slug, 2]}

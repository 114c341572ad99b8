"""Random eviction: one draw per token, whatever the batch and the calls."""

import torch
from kv_crafted import Crafted, drawn

from kvbench import make_policy


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


def test_draws_are_spread_evenly_over_the_text() -> None:
    """Of 4000 tokens 1000 stay; each quarter holds 250 give or take 5 standard deviations (13.7)."""
    held = torch.tensor(kept(1000, 4000)[0])
    counts = torch.histc(held.float(), bins=4, min=0, max=4000)
    assert bool(((counts - 250).abs() < 69).all())


def test_neighbouring_tokens_heads_and_seeds_are_independent() -> None:
    """Half of 2000 tokens stay: two independent halves share 500 give or take 5 standard deviations (11.2)."""
    first, second = (set(head) for head in kept(1000, 2000))
    other = set(kept(1000, 2000, seed=1)[0])
    shifted = {p + 1 for p in first}
    for theirs in (second, other, shifted):
        assert abs(len(first & theirs) - 500) < 56

"""The prompt stays, and of generated tokens each KV head keeps a uniform random subset."""

import torch
from kv_crafted import Crafted, drawn

from kvbench import make_policy

PROMPT, BUDGET, EVERY, NEW = 30, 130, 50, 1000


def kept(seed: int = 0) -> list[tuple[int, ...]]:
    """What two KV heads hold after a prompt and as many decoded tokens as bring them back to the budget."""
    made = Crafted(make_policy("random_attention", BUDGET, seed=seed, every=EVERY), 2, 2, prompt_length=PROMPT)
    tensors = drawn(PROMPT + NEW + 100, 2, 2)
    for part in zip(*(x.split([PROMPT, *[1] * (NEW + 100)], dim=2) for x in tensors), strict=True):
        made.call(*part)
    return made.kept()


def test_the_prompt_stays_and_the_rest_is_a_uniform_subset_of_each_heads_own() -> None:
    """A fair subset of 100 of 1100: each half of them has 50, give or take 5 standard deviations (4.8)."""
    heads = kept()
    for head in heads:
        assert head[:PROMPT] == tuple(range(PROMPT))
        assert len(head) == BUDGET
        generated = torch.tensor(head[PROMPT:])
        assert abs(int((generated < PROMPT + (NEW + 100) // 2).sum()) - 50) < 24
    first, second = (set(head[PROMPT:]) for head in heads)
    assert len(first & second) < 9 + 5 * 3, "two independent subsets share 9"
    assert kept(seed=1) != heads
    assert kept() == heads

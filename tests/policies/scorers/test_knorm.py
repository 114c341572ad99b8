"""Key norm: the smallest keys stay, and of equally large ones the oldest."""

import torch
from kv_crafted import Crafted, drawn
from kv_models import rotated

from kvbench import make_policy
from kvbench.policies.ranking import half_the_bits

BUDGET, PROMPT, NEW = 8, 20, 40


def test_of_a_token_that_is_decoded_again_and_again_the_oldest_stays() -> None:
    """In float32 rotated keys differ in their last bits, which must not decide."""
    layer = Crafted(make_policy("knorm", BUDGET), 1, 1, prompt_length=PROMPT)
    q, k, v = (x.float() for x in drawn(PROMPT + NEW, 1, 1))
    k = k / k.norm(dim=-1, keepdim=True) * torch.arange(1.0, PROMPT + NEW + 1)[:, None]  # the first 8 are the smallest
    repeated = k[0, 0, BUDGET - 1].clone()
    for position in range(PROMPT, PROMPT + NEW):
        k[0, 0, position] = rotated(repeated, position)
    layer.call(q[:, :, :PROMPT], k[:, :, :PROMPT], v[:, :, :PROMPT])
    for position in range(PROMPT, PROMPT + NEW):
        here = slice(position, position + 1)
        layer.call(q[:, :, here], k[:, :, here], v[:, :, here])
        assert layer.kept(0) == [tuple(range(BUDGET))]


def test_half_of_the_bits_are_left() -> None:
    """Of the 23 of a float32: the nearest multiple of 2**-11 between 1 and 2."""
    x = torch.tensor([1 + 2**-11, 1 + 2**-13, 1 + 3 * 2**-13, 3.0, -1 - 2**-11])
    assert half_the_bits(x).tolist() == [1 + 2**-11, 1.0, 1 + 2**-11, 3.0, -1 - 2**-11]

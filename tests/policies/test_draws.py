"""The hash behind every draw: SplitMix64, whose first outputs from seed 0 are widely published."""

import torch

from kvbench.policies.draws import GOLDEN, scramble, uniform_draws


def test_the_hash_gives_the_published_numbers_of_splitmix64() -> None:
    steps = torch.tensor([1, 2, 3]) * GOLDEN
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [int(x) % 2**64 for x in scramble(steps)] == expected


def test_draws_of_layers_and_heads_differ_and_stay_below_one() -> None:
    positions = torch.arange(4096).expand(1, 4, -1)
    draws = torch.cat([uniform_draws(3, layer, positions) for layer in range(4)], dim=1)[0]  # 16 streams
    assert float(draws.min()) >= 0
    assert float(draws.max()) < 1
    correlation = torch.corrcoef(draws).fill_diagonal_(0).abs().max()
    assert float(correlation) < 5 / 4096**0.5

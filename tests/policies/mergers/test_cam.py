"""CaM: the worked example of its specification, and values handed on from token to token."""

import pytest
import torch
from torch import Tensor

from kvbench.policies.mergers.cam import CaM, hand_on
from kvbench.policies.mergers.merger import Eviction, OneEviction, Vectors

# Token 0 goes; the next two hold values (1,0) and (0,1) and drew attention 0.5 and 0.3.
VALUES = [(2.0, 4.0), (1.0, 0.0), (0.0, 1.0)]


def merged(attention: list[float], seed: int, m: int = 2) -> Tensor:
    values = torch.tensor(VALUES)[None, None]
    gone = torch.tensor([[[True, False, False]]])
    event = Eviction(
        layer=0,
        phase="decode",
        keys=torch.arange(6.0).view(1, 1, 3, 2),
        values=values,
        positions=torch.arange(3)[None, None],
        state={"attention_sum": torch.tensor(attention)[None, None, :, None]},
        kept=~gone,
        evicted=gone,
    )
    new = CaM(m=m, seed=seed).absorb(event, {})
    if new is None:
        return values[0, 0]
    assert torch.equal(new.keys, event.keys.gather(2, new.slots[..., None].expand(-1, -1, -1, 2)))
    return values.scatter(2, new.slots[..., None].expand(-1, -1, -1, 2), new.values)[0, 0]


def test_a_value_is_handed_on_in_equal_parts_or_not_at_all() -> None:
    outcomes = {tuple(map(tuple, merged([0.2, 0.5, 0.3], seed)[1:].tolist())) for seed in range(40)}
    assert outcomes == {((2.0, 2.0), (1.0, 3.0)), ((1.0, 0.0), (0.0, 1.0))}


@pytest.mark.parametrize(
    ("attention", "taken"),
    [
        ([0.9, 0.5, 0.3], True),  # more than their mean: always
        ([0.0, 0.5, 0.3], False),
        ([0.2, 0.0, 0.0], True),  # infinite ratio
        ([0.0, 0.0, 0.0], False),  # 0 / 0
    ],
)
def test_certain_cases(attention: list[float], taken: bool) -> None:
    for seed in range(20):
        assert (merged(attention, seed)[1].tolist() == [2.0, 2.0]) is taken


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_handing_on_in_pieces_is_handing_on_one_by_one(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    values = torch.randn(2, 3, tokens, 4, generator=generator, dtype=torch.float64)
    handed = torch.rand(2, 3, tokens, generator=generator) < 0.7
    reach = torch.tensor([[1, 5, 32], [70, 2, 7]])
    expected = values.clone()
    for row in range(2):
        for head in range(3):
            m = int(reach[row, head])
            for i in range(tokens):
                if handed[row, head, i]:
                    expected[row, head, i + 1 : i + 1 + m] += expected[row, head, i] / m
    torch.testing.assert_close(hand_on(values, handed, reach), expected)


@pytest.mark.parametrize("m", [1, 3, 32])
@pytest.mark.parametrize("seed", range(6))
def test_a_single_token_takes_a_short_way_to_the_same_end(seed: int, m: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 3, 2, 9, 4, generator=generator, dtype=torch.float64)
    positions = torch.stack([torch.randperm(9, generator=generator) for _ in range(6)]).view(3, 2, 9)
    positions[1, :, 4:6] = -1
    victims = torch.tensor([[[0], [3]], [[2], [7]], [[8], [1]]])
    state = {"attention_sum": torch.rand(3, 2, 9, 1, generator=generator, dtype=torch.float64)}
    going = torch.tensor([True, True, False])[:, None, None]
    one = OneEviction(0, "decode", Vectors([keys]), Vectors([values]), positions, state, victims, going)
    ends = []
    for new in (CaM(m=m).absorb_one(one, {}), CaM(m=m).absorb(one.masks(), {})):
        index = None if new is None else new.slots[..., None].expand(-1, -1, -1, 4)
        ends.append(values if new is None or index is None else values.scatter(2, index, new.values))
        assert new is None or index is None or torch.equal(keys.scatter(2, index, new.keys), keys)
    torch.testing.assert_close(*ends)

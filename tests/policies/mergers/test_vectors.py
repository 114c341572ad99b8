"""Keys and values of several layers, read where they lie."""

import pytest
import torch

from kvbench.policies.mergers.merger import Vectors

FIRST = torch.arange(12.0).view(2, 1, 3, 2)  # two sequences, three slots
SECOND = torch.arange(20.0, 24.0).view(1, 1, 2, 2)  # one sequence, two slots


def test_layers_are_the_rows_of_one_batch_and_the_shorter_one_is_filled_up() -> None:
    whole = Vectors([FIRST, SECOND]).whole()
    assert whole[:, 0].tolist() == [
        [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]],
        [[6.0, 7.0], [8.0, 9.0], [10.0, 11.0]],
        [[20.0, 21.0], [22.0, 23.0], [0.0, 0.0]],
    ]


@pytest.mark.parametrize("slots", [[[2], [0], [1]], [[2, 0], [0, 0], [1, 0]]])
def test_slots_are_taken_out_of_each_layer_as_out_of_the_whole(slots: list[list[int]]) -> None:
    vectors, places = Vectors([FIRST, SECOND]), torch.tensor(slots)[:, None]
    index = places[..., None].expand(-1, -1, -1, 2)
    assert torch.equal(vectors.at(places), vectors.whole().gather(2, index))


def test_a_function_meets_every_layer_with_its_own_rows() -> None:
    factors = torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1, 1)
    first, second = Vectors([FIRST, SECOND]).each(torch.mul, factors)
    assert first[:, 0, 0].tolist() == [[0.0, 1.0], [60.0, 70.0]]
    assert second[:, 0, 0].tolist() == [[2000.0, 2100.0]]

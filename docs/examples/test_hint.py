"""The hint pre-pass against numbers computed by hand."""

import torch
from hint import Hint

from kvbench.policies.observation import AttentionParams
from kvbench.policies.pre_passes.pre_pass import PassStep


class Letters:
    """A token for every character."""

    turn_end = "\n"

    def encode(self, text: str) -> list[int]:
        return [ord(mark) for mark in text]


def test_the_pass_has_the_tokens_of_the_hint_and_refers_to_the_whole_prompt() -> None:
    (one,) = Hint("abc").passes([5, 6, 7, 8], Letters())
    assert (one.tokens, one.about) == ([97, 98, 99], range(4))


def test_a_score_is_the_mean_attention_of_the_hint() -> None:
    hint, keys = Hint("a"), torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])  # two tokens
    queries = torch.tensor([[[[1.0986123, 0.0]], [[0.0, 0.0]]]])  # two heads of one group: 3/4 and 1/4, then 1/2 each
    (one,) = hint.passes([5, 6], Letters())
    positions, own = torch.tensor([[[0, 1]]]), torch.zeros(1, 1, 1, 2)
    step = PassStep(0, queries, own, own, keys, keys, positions, torch.tensor([[2]]), AttentionParams(scaling=1.0))
    state = {"hinted": torch.zeros(1, 1, 2, 1)}
    hint.observe(one, step, state)
    torch.testing.assert_close(state["hinted"][0, 0, :, 0], torch.tensor([0.625, 0.375]))

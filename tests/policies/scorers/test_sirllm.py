"""SirLLM: a token's score is its surprisal under the model, computed from a plain forward pass."""

import pytest
import torch
from kv_models import prompt, tiny
from kv_runs import run_generate, run_greedy

from kvbench import make_policy

LENGTH, BUDGET, SINKS = 47, 16, 4


def test_the_most_surprising_tokens_and_the_sinks_stay() -> None:
    model, ids = tiny(layers=3), prompt(LENGTH)
    with torch.no_grad():
        chances = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    surprisal = [0.0, *(-float(chances[place - 1, ids[place]]) for place in range(1, LENGTH))]
    run = run_greedy(model, [ids], make_policy("sirllm", BUDGET), 2)
    surprisal.append(-float(chances[-1, run.tokens[0][0]]))
    expected: list[int] = list(range(LENGTH))
    for call in range(2):
        candidates = sorted(expected[SINKS:], key=lambda place: -surprisal[place])
        expected = [*range(SINKS), *sorted(candidates[: BUDGET - SINKS])]
        assert run.of_row(0)[-2 + call] == [[tuple(expected)] * 2] * 3
        expected = [*expected, LENGTH]


def test_generate_of_transformers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"look at a prompt again .* which model\.generate does not: use"):
        run_generate(tiny(), [prompt(LENGTH)], make_policy("sirllm", BUDGET), 2)

"""SirLLM: a token's score is its surprisal under the model, computed from a plain forward pass."""

import torch
from kv_models import CodePoints, prompt, tiny
from kv_runs import kept_now, run_greedy

from kvbench import KVCache, make_policy
from kvbench.cache.pre_passes import rate
from kvbench.engine.prefill import next_logits, prefill

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


@torch.inference_mode()
def test_a_decoded_token_stays_if_the_model_found_it_unlikely() -> None:
    model, policy = tiny(), make_policy("sirllm", BUDGET)
    model.set_attn_implementation("kvbench")
    for unlikely in (True, False):
        cache = KVCache(model.config, policy, prompt_length=LENGTH)
        logits = prefill(model, torch.tensor([prompt(LENGTH)]), cache, CodePoints())
        token = logits.argmin(-1, keepdim=True) if unlikely else logits.argmax(-1, keepdim=True)
        rate(cache.sequence, logits, token)
        next_logits(model, token, torch.tensor([[LENGTH]]), cache)
        assert [[LENGTH in head for head in layer] for layer in kept_now(cache)[0]] == [[unlikely] * 2] * 2

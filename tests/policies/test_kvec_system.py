"""K-VEC on tiny random models: the positions that every layer and head keeps, and the paper's steps as plain loops."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from kv_models import FAMILIES, prompt, tiny
from kv_runs import run_greedy
from transformers import PreTrainedModel

from kvbench import make_policy

NEW = 4


@dataclass(frozen=True)
class Rules:
    """The knobs of the method; names as in the paper: observation window O, extended window O', delta, lambda, beta."""

    budget: int = 16
    window: int = 4
    extended: int = 9
    delta: int = 1
    lam: float = 1.0
    beta: float = 0.25
    kernel: int = 3

    def fields(self) -> dict[str, float]:
        """As `make_policy` takes them."""
        return {name: value for name, value in vars(self).items() if name != "budget"}


def attention(model: PreTrainedModel, ids: list[int]) -> list[np.ndarray]:
    """Attention of every layer, averaged over the query heads of a KV head: [H_kv,T,T] each."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        rows = model(torch.tensor([ids]), output_attentions=True).attentions
    heads = model.config.num_key_value_heads
    return [layer[0].unflatten(0, (heads, -1)).mean(1).numpy() for layer in rows]


def best(values: dict[int, float], count: int) -> set[int]:
    """The `count` tokens of highest value, the older first where values are equal."""
    return set(sorted(values, key=lambda token: (-values[token], token))[:count])


def pooled(row: dict[int, float], kernel: int) -> dict[int, float]:
    reach = kernel // 2
    return {t: max(row[n] for n in range(t - reach, t + reach + 1) if n in row) for t in row}


def kept_by_the_paper(layers: list[np.ndarray], rules: Rules) -> list[list[set[int]]]:
    """Equations 8 to 16 and algorithm 1: the tokens each head of each layer keeps of a prompt, by position."""
    length = layers[0].shape[-1]
    everything, window = set(range(length)), set(range(length - rules.window, length))
    if length <= rules.budget:
        return [[everything for _ in layer] for layer in layers]
    times_kept = dict.fromkeys(range(length - rules.window), 0)
    kept = []
    for index, layer in enumerate(layers):
        newest, older = layer[:, -rules.window :], layer[:, -rules.extended :]
        scores = [{t: float(head[:, t].sum()) / rules.window for t in times_kept} for head in newest]
        focus = [float(np.std(list(row.values()))) for row in scores]
        for head in sorted(range(len(focus)), key=lambda h: (focus[h], h))[: rules.delta]:
            scores[head] = {t: float(older[head][:, t].sum()) / older.shape[1] for t in times_kept}
        scores = [pooled(row, rules.kernel) for row in scores]
        of_all = {t: float(newest[:, :, t].max(0).sum()) / rules.window for t in times_kept}
        bonus = {t: rules.lam * of_all[t] * (1 - times_kept[t] / (index + 1)) for t in times_kept}
        sets = []
        for row in scores:
            room = rules.budget - rules.window
            forced = best(row, min(int(rules.beta * rules.budget), room))
            raised = {t: row[t] + bonus[t] for t in row if t not in forced}
            sets.append(forced | best(raised, room - len(forced)) | window)
        for t in times_kept:
            times_kept[t] += any(t in head for head in sets)
        kept.append(sets)
    return kept


@cache
def model_of(family: str, query_heads: int, kv_heads: int) -> PreTrainedModel:
    return tiny(family, query_heads=query_heads, kv_heads=kv_heads, layers=4)


def assert_keeps(model: PreTrainedModel, prompts: list[list[int]], rules: Rules) -> None:
    """After the prompt and every decoded token, which all stay."""
    expected = [kept_by_the_paper(attention(model, ids), rules) for ids in prompts]
    run = run_greedy(model, prompts, make_policy("kvec", rules.budget, **rules.fields()), NEW)
    for row, ids in enumerate(prompts):
        for step, held in enumerate(run.of_row(row)):
            decoded = set(range(len(ids), len(ids) + step))
            assert [[set(head) for head in layer] for layer in held] == [
                [head | decoded for head in layer] for layer in expected[row]
            ]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma2"])
def test_every_family_keeps_what_the_paper_keeps(family: str) -> None:
    assert_keeps(model_of(family, 4, 2), [prompt(47)], Rules())


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(4, 4), (4, 1), (8, 4), (8, 2)])
@pytest.mark.parametrize("delta", [0, 1, 3])
def test_every_head_count_keeps_what_the_paper_keeps(query_heads: int, kv_heads: int, delta: int) -> None:
    assert_keeps(model_of("llama", query_heads, kv_heads), [prompt(53)], Rules(delta=delta))


@pytest.mark.parametrize(
    "rules", [Rules(lam=0.1), Rules(lam=2.0, beta=0.75), Rules(beta=0.0, kernel=7), Rules(budget=5)]
)
def test_every_setting_keeps_what_the_paper_keeps(rules: Rules) -> None:
    assert_keeps(model_of("llama", 8, 4), [prompt(60, seed=2)], rules)


@pytest.mark.parametrize("length", [2, 4, 7, 9, 15, 16, 17, 18])
def test_prompts_around_the_windows_and_the_budget_too(length: int) -> None:
    assert_keeps(model_of("llama", 4, 2), [prompt(length)], Rules())


def test_sequences_of_a_batch_are_kept_as_if_alone() -> None:
    assert_keeps(model_of("llama", 8, 4), [prompt(50), prompt(31, seed=1), prompt(12, seed=2)], Rules(delta=2))

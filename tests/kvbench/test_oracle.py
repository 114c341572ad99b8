"""The slow oracle itself: it must reproduce the worked examples and the models' own attention before it may judge."""

import numpy as np
import pytest
from kv_examples import BLOCKWISE, CALLS, Blockwise, crafted
from kv_models import generated, prompt, tiny
from kv_oracle import Glance, Rules, SlowSequence, caote
from kv_simulate import simulate

PLAIN = Glance(scaling=1.0, softcap=None, sliding=None)


def run_example_c(rules: Rules) -> tuple[SlowSequence, list[np.ndarray]]:
    """The oracle over example C, call by call; also the output of every call."""
    sequence = SlowSequence(rules, layers=1, kv_heads=1, group=1, prompt=6)
    queries, keys, values = (t[0].numpy() for t in crafted())
    outputs = []
    for start, end in CALLS:
        sequence.begin(end - start)
        outputs.append(
            sequence.attend(0, queries[:, start:end], keys[:, start:end], values[:, start:end], PLAIN)[0, :, :2]
        )
        sequence.end()
    return sequence, outputs


@pytest.mark.parametrize("example", BLOCKWISE, ids=lambda e: e.rules.slug)
def test_the_oracle_reproduces_the_blockwise_example(example: Blockwise) -> None:
    sequence, _ = run_example_c(example.rules)
    first, second = sequence.trace.evictions
    assert first.scores == pytest.approx(example.first, abs=5e-7)
    assert tuple(first.kept) == example.first_kept
    assert second.scores == pytest.approx(example.second, abs=5e-7)
    assert tuple(second.kept) == example.second_kept


def test_the_oracles_score_is_the_change_of_the_output() -> None:
    alpha, values = [0.5, 0.25, 0.25], [np.array([1.0, 0.0]), np.array([0.0, 2.0]), np.array([4.0, 4.0])]
    whole = sum(a * v for a, v in zip(alpha, values, strict=True))
    without = (values[1] + values[2]) / 2
    assert caote(alpha, values, fast=False)[0] == pytest.approx(float(np.linalg.norm(whole - without)), rel=1e-12)


@pytest.mark.parametrize("family", ["mistral", "qwen3", "gemma2"])
def test_the_oracle_without_eviction_equals_eager_attention(family: str) -> None:
    model, ids = tiny(family), prompt(40)
    model.set_attn_implementation("eager")
    assert simulate(model, ids, 6, Rules("full", block=16)).tokens == generated(model, [ids], 6)[0]

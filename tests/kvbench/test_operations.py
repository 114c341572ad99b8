"""What a GPU's host launches for a prompt, a block and a further variant of a policy, counted on a CPU."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kvbench import make_policy

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import count_operations as counts


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return counts.tiny_llama()


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for where, name, value in counts.ON_A_GPU:
        monkeypatch.setattr(where, name, value)
    monkeypatch.setattr(counts, "LENGTH", 384)  # tokens: two blocks beyond the budget, as more are
    with torch.inference_mode():
        yield


def test_a_block_at_the_budget_is_the_models_operations_and_a_few_for_all_layers(model: PreTrainedModel) -> None:
    policy = make_policy("caote_snapkv", counts.BUDGET, schedule="blocks", block=counts.BLOCK)
    alone = counts.block(model, policy) / counts.LAYERS
    assert alone <= 45
    assert counts.block(model, policy, 2) / 2 / counts.LAYERS <= 0.6 * alone  # two prompts in one call


def test_all_layers_of_a_prompt_are_measured_and_merged_together(model: PreTrainedModel) -> None:
    """Both sum the attention of all queries; D2O also measures layers, and merges evicted tokens."""
    evicts, merges = (counts.admission(model, [make_policy(slug, counts.BUDGET)])[0] for slug in ("h2o", "d2o"))
    assert merges / counts.LAYERS <= evicts / counts.LAYERS + 12


@pytest.mark.parametrize(
    ("slug", "most"), [("snapkv", 2), pytest.param("cake", 12, marks=pytest.mark.slow("counts a prefill of 32 layers"))]
)
def test_a_further_budget_shares_ranks_and_evicts_layers_together(
    slug: str, most: float, model: PreTrainedModel
) -> None:
    assert counts.variant(model, [slug]) / counts.LAYERS <= most

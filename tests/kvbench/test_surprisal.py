"""Surprisal of a prompt by the model's own head, a few tokens at a time."""

import pytest
import torch
from kv_models import MIXTURES, prompt, tiny, tiny_mixture

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.engine.logits import head_logits
from kvbench.engine.prefill import prefill
from kvbench.policies.pre_passes.surprisal import Surprisal, surprisal


@pytest.mark.parametrize("family", ["gemma2", *MIXTURES])  # gemma2 caps its logits after the head
def test_the_head_gives_the_models_own_logits(family: str) -> None:
    """A mixture of experts reads what its routers chose out of its base's output as well."""
    model = tiny_mixture(family) if family in MIXTURES else tiny(family)
    model.set_attn_implementation("eager")
    ids = torch.tensor([prompt(20)])
    with torch.no_grad():
        output = model.base_model(ids)
        expected = model(ids).logits
        some = type(output)(last_hidden_state=output.last_hidden_state[:, 5:9])
        assert torch.equal(head_logits(model, some), expected[:, 5:9])
        assert torch.equal(model(ids).logits, expected)  # and the model is left as it was


def test_logits_of_a_prompt_never_exist_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def watched(rating: Surprisal, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        sizes.append(logits.shape[1])
        return surprisal(logits, tokens)

    monkeypatch.setattr("kvbench.engine.logits.LOGITS_AT_ONCE", 512 * 4)  # the tiny models know 512 tokens
    monkeypatch.setattr(Surprisal, "rate", watched)
    model = prepare(tiny())
    cache = KVCache(model.config, make_policy("sirllm", 16), prompt_length=30)
    with torch.no_grad():
        prefill(model, torch.tensor([prompt(30)]), cache)
    assert sizes == [4] * 7 + [1]
    assert cache.kept_tokens().unique().tolist() == [16]

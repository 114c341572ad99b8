"""Surprisal of a prompt by the model's own head, a few tokens at a time."""

import pytest
import torch
from kv_models import MIXTURES, left_padded, prompt, tiny, tiny_mixture

from kvbench import KVCache, make_policy
from kvbench.inference.logits import head_logits, prompt_ratings, surprisal
from kvbench.inference.prefill import prefill
from kvbench.policies.pre_passes.surprisal import Surprisal


def test_surprisal_by_hand() -> None:
    logits = torch.tensor([[[0.0, 0.0], [0.0, 1.0986123]]])  # chances (1/2, 1/2) and (1/4, 3/4)
    got = surprisal(logits, torch.tensor([[0, 1]]))
    torch.testing.assert_close(got, torch.tensor([[0.6931472, 0.2876821]]))


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


@pytest.mark.parametrize("at_once", [1, 2**24])
def test_a_padded_prompt_equals_its_rows(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.inference.logits.LOGITS_AT_ONCE", at_once)
    model, prompts = tiny(), [prompt(12), prompt(7, seed=1)]
    model.set_attn_implementation("sdpa")
    ids, mask = left_padded(prompts)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        output = model.base_model(ids, attention_mask=mask, position_ids=positions)
        got = prompt_ratings(model, output, ids, mask.bool(), surprisal)
        for row, tokens in enumerate(prompts):
            chances = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            expected = [0.0] + [-float(chances[i, token]) for i, token in enumerate(tokens[1:])]
            assert got[row, -len(tokens) :].tolist() == pytest.approx(expected, rel=1e-5)
            assert got[row, : -len(tokens)].tolist() == [0.0] * (12 - len(tokens))


def test_logits_of_a_prompt_never_exist_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def watched(rating: Surprisal, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        sizes.append(logits.shape[1])
        return surprisal(logits, tokens)

    monkeypatch.setattr("kvbench.inference.logits.LOGITS_AT_ONCE", 512 * 4)  # the tiny models know 512 tokens
    monkeypatch.setattr(Surprisal, "rate", watched)
    model = tiny()
    model.set_attn_implementation("kvbench")
    cache = KVCache(model.config, make_policy("sirllm", 16), prompt_length=30)
    with torch.no_grad():
        prefill(model, torch.tensor([prompt(30)]), None, cache)
    assert sizes == [4] * 7 + [1]
    assert cache.kept_tokens().unique().tolist() == [16]

"""What a part may ask the model's layer for: its rotation, undone, and its output projection."""

import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from kv_models import prompt, small
from torch import Tensor
from transformers import PreTrainedModel

from kvbench import KVCache
from kvbench.cache.hook import prepare
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.policy import Policy
from kvbench.policies.scorers.expected_attention import unrotated_queries
from kvbench.policies.scorers.leverage import unrotated_keys
from kvbench.policies.scorers.scorer import Scorer

LENGTH = 40
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = YARN | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "qwen3, norms before the rotation": ("qwen3", {}),
    "phi3, one projection": ("phi3", {}),
    "gemma3, two rotations": ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]}),
    "gpt_oss, yarn in halves": ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 24}),
    "cohere, neighbours": ("cohere", {}),
    "cohere2, one layer without": ("cohere2", {"layer_types": ["sliding_attention", "full_attention"]}),
    "smollm3, one layer without": ("smollm3", {"no_rope_layers": [1, 0]}),
    "glm, neighbours in part": ("glm", {}),
    "gpt_neox, in part": ("gpt_neox", {}),
    "stablelm, in part": ("stablelm", {}),
    "qwen3.5, in part beside a gate": ("qwen3_5_text", {"layer_types": ["full_attention"] * 2}),
    "ministral3, sharpened by place": ("ministral3", {}),
}


@dataclass(frozen=True)
class Reads(Scorer):
    """Notes what it is shown of the model."""

    needs = Needs(model=True)

    shown: list[dict[str, Tensor]] = field(default_factory=list)

    def score(self, observation: Observation, state: State) -> Tensor:
        self.shown.append(
            {
                "queries": unrotated_queries(observation),
                "keys": unrotated_keys(observation),
                "rotated": observation.keys.clone(),
                "output": observation.model.output_projection(),
            }
        )
        return -observation.keys.norm(dim=-1)


def of_64(family: str, more: dict[str, Any]) -> PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "pad_token_id": None}
    window = 24 if "sliding_attention" in more.get("layer_types", ()) else None
    return prepare(small(family, torch.float32, **(sizes | {"sliding_window": window} | more)))


@torch.inference_mode()
def read(model: PreTrainedModel, scorer: Reads) -> None:
    cache = KVCache(model.config, Policy(scorer=scorer, budget=20), prompt_length=LENGTH)
    model(torch.tensor([prompt(LENGTH)]), past_key_values=cache)


@pytest.mark.parametrize("case", FAMILIES)
def test_queries_and_keys_are_those_the_model_had_before_it_rotated_them(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by the function that rotates in the model's code; a layer that does not call it has nothing to undo."""
    if "qwen3.5" in case and transformers.__version__ < "5.23":
        pytest.skip("transformers before 5.23 rotates Qwen3.5 by three positions a token, which kvbench refuses")
    model, scorer = of_64(*FAMILIES[case]), Reads()
    code = sys.modules[type(model).__module__]
    rotate, before = code.apply_rotary_pos_emb, []

    def noting(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        if q.shape[2] == LENGTH:
            before.append((q, k))
        return rotate(q, k, *args, **kwargs)

    monkeypatch.setattr(code, "apply_rotary_pos_emb", noting)
    read(model, scorer)
    rotating = [0] if "without" in case else [0, 1]
    assert len(before) == len(rotating)
    for layer, (q, k) in zip(rotating, before, strict=True):
        shown, part = scorer.shown[layer], q.shape[-1]  # some families hand over the rotated part of a head alone
        torch.testing.assert_close(shown["queries"][..., :part], q, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(shown["keys"][..., :part], k, rtol=1e-4, atol=1e-5)
    for layer in {0, 1} - {*rotating}:
        assert torch.equal(scorer.shown[layer]["keys"], scorer.shown[layer]["rotated"])


def test_the_projection_of_the_heads_adds_up_to_the_model_s_own() -> None:
    model, scorer = of_64("qwen3", {}), Reads()
    read(model, scorer)
    heads = torch.randn(4, 16)
    expected = model.model.layers[1].self_attn.o_proj(heads.flatten())
    torch.testing.assert_close(torch.einsum("hd,hdn->n", heads, scorer.shown[1]["output"]), expected)


def test_a_model_without_rotary_embedding_is_refused_in_a_sentence() -> None:
    model = of_64("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4})
    with pytest.raises(ValueError, match=r"^GPT2Attention has no rotary embedding that kvbench knows, and the policy"):
        read(model, Reads())

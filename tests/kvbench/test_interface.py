"""Which models are served and which are refused before a weight is loaded, each in a sentence that is true of it."""

from typing import Any

import pytest
import torch
from kv_models import MIXTURES, prompt, tiny_mixture
from kv_runs import assert_full_is_eager
from transformers import (
    BltConfig,
    DeepseekV32Config,
    DiffLlamaConfig,
    Gemma4TextConfig,
    Llama4TextConfig,
    MambaConfig,
    MiniMaxConfig,
    MoshiConfig,
    PreTrainedConfig,
    RecurrentGemmaConfig,
    RobertaConfig,
    RwkvConfig,
)

from kvbench import make_policy
from kvbench.engine.generate import generate_tokens
from kvbench.models.trial import try_out

MIXED = ["sliding_attention", "full_attention"] * 2


def small(kind: type[PreTrainedConfig], **fields: object) -> Any:
    """A configuration with four layers of hidden size 32 and 4 query heads."""
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    return kind(**(sizes | fields))


@pytest.mark.parametrize(
    ("kind", "fields", "sentence"),
    [
        (RecurrentGemmaConfig, {}, "^RecurrentGemmaForCausalLM stores the states of its recurrent layers"),
        (MiniMaxConfig, {}, "^MiniMaxForCausalLM stores the states of its recurrent layers"),
        (RwkvConfig, {}, "^RwkvForCausalLM stores the states of its recurrent layers"),
        (MambaConfig, {}, "^no layer of MambaForCausalLM stores its own keys and values"),
        (DeepseekV32Config, {"n_routed_experts": 8}, "^DeepseekV32ForCausalLM has layers of type [a-z_]*; supported"),
        (DiffLlamaConfig, {}, "uses keys or values of its cache outside attention .it calls 'chunk'"),
        (Llama4TextConfig, {}, "has layers of type chunked_attention; supported are full_attention"),
        (BltConfig, None, "^BltForCausalLM has several stacks of layers"),
        (
            Gemma4TextConfig,
            {"layer_types": MIXED, "num_kv_shared_layers": 4},
            "^no layer of Gemma4ForCausalLM stores its own keys and values",
        ),
        (RobertaConfig, {"is_decoder": True}, "^RobertaForCausalLM counts positions from 2 "),
        (
            MoshiConfig,
            {"sliding_window": 8},
            "^MoshiAttention has a sliding window that is passed neither to its attention nor",
        ),
    ],
)
def test_unsupported_models_are_refused_before_loading_weights(
    kind: type[PreTrainedConfig], fields: dict[str, Any] | None, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence) as refused:
        try_out(kind() if fields is None else small(kind, **fields))
    assert str(refused.value).count("\n") == 0


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_of_experts_are_exact(family: str) -> None:
    model = tiny_mixture(family)
    assert_full_is_eager(model, output_router_logits=True)
    done = generate_tokens(model, torch.tensor([prompt(44)]), make_policy("snapkv", 16, window=4), max_new_tokens=3)
    assert int(done.cache.kept_tokens().max()) == 16 + 2

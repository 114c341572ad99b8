"""Hugging Face's own ways to run a model, beside our loop: each is right, or refused in one true sentence."""

from typing import Any

import pytest
import torch
from kv_models import generated, prompt, tiny
from transformers import LlavaConfig, LlavaForConditionalGeneration

from kvbench import KVCache, make_policy
from kvbench.cache.hook import prepare
from kvbench.models.given import borrowed


def full(model: Any, **kwargs: Any) -> KVCache:
    return KVCache(model.config, make_policy("full"), **kwargs)


def test_another_model_of_the_same_configuration_is_refused_on_a_used_cache(model: Any) -> None:
    held, ids = full(model), torch.tensor([prompt(5)])
    model(ids, past_key_values=held)
    with pytest.raises(ValueError, match=r"holds what another model computed: make a cache for each model"):
        prepare(tiny(seed=1))(ids, past_key_values=held)
    held.reset()
    assert prepare(tiny(seed=1))(ids, past_key_values=held).logits.shape == (1, 5, 512)


@pytest.mark.parametrize("length", [12, 25])
def test_a_full_cache_accepts_another_prompt_only_after_next_prompt(model: Any, length: int) -> None:
    held = full(model)
    generated(model, [prompt(9)], 4, past_key_values=held)
    ids = prompt(length, seed=1)
    with pytest.raises(ValueError, match=r"but its prompt ends after token 9 .*next_prompt.*cache\.reset\(\)"):
        generated(model, [[*ids, *prompt(7, seed=2)]], 3, past_key_values=held)
    held.reset()
    assert generated(model, [ids], 3, past_key_values=held) == generated(model, [ids], 3, past_key_values=full(model))


def test_prompt_lookup_and_assistants_are_refused(model: Any) -> None:
    ids = prompt(12) * 2
    for speculation in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": tiny(layers=1)}):
        with pytest.raises(ValueError, match=r"cannot be cropped.*assisted and prompt-lookup decoding"):
            generated(model, [ids], 6, past_key_values=full(model), **speculation)


@pytest.mark.slow("compiles a model")
def test_a_compiled_model_generates_the_same_tokens(model: Any) -> None:
    """Attention and cache break the graph, they do not break it off."""
    policy = make_policy("snapkv", 16, window=4)
    expected = generated(model, [prompt(30)], 4, past_key_values=KVCache(model.config, policy, prompt_length=30))
    model.forward = torch.compile(model.forward, backend="eager")
    cache = KVCache(model.config, policy, prompt_length=30)
    assert generated(model, [prompt(30)], 4, past_key_values=cache) == expected
    assert int(cache.kept_tokens().max()) == 16 + 3


def test_a_vision_tower_keeps_its_attention() -> None:
    """Pictures of 4 tokens; afterwards tower and text have the attention functions that they had before."""
    size: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    text = {"model_type": "llama", "vocab_size": 100, "num_attention_heads": 2, **size}
    tower = {"model_type": "clip_vision_model", "num_attention_heads": 2, "image_size": 16, "patch_size": 8, **size}
    config = LlavaConfig(text_config=text, vision_config=tower, image_token_id=99, vision_feature_layer=-1)
    model: Any = LlavaForConditionalGeneration(config).eval()
    model.set_attn_implementation({"vision_config": "eager"})
    seen = {"input_ids": torch.tensor([[1, *[99] * 4, *range(2, 20)]]), "pixel_values": torch.randn(1, 3, 16, 16)}
    expected = model(**seen).logits
    with borrowed(model):
        assert model.config.vision_config._attn_implementation == "eager"
        torch.testing.assert_close(model(**seen, past_key_values=full(model)).logits, expected)
    functions = [model.config.text_config._attn_implementation, model.config.vision_config._attn_implementation]
    assert functions == ["sdpa", "eager"]
    model.set_attn_implementation("kvbench")
    with pytest.raises(ValueError, match=r'a vision or audio tower has none: .*"text_config": "kvbench"'):
        model(**seen, past_key_values=full(model))

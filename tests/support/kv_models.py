"""Tiny random models of five families, with peaked attention, and prompts without a repeated token.

Weights are drawn wide (0.3), so that attention is far from uniform and no two scores are nearly equal; a repeated token
would have the same key norm twice in layer 0.
"""

import random
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from kvbench.policies.model_layer import Rotation

VOCABULARY = 512
PADDING = 0
SLIDING = 24
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2")

Sizes = dict[str, Any]
SIZES: Sizes = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": PADDING,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
}


def small(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A random model of any family of transformers. fields: of its configuration, beside those of SIZES and EXPERTS."""
    kind = CONFIG_MAPPING[family]
    known = signature(kind.__init__).parameters
    own = {name: value for name, value in (SIZES | EXPERTS | {"head_dim": 8}).items() if name in known}
    torch.manual_seed(seed)
    config = kind(**(own | fields))
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager").to(dtype).eval()


def _config(family: str, sizes: Sizes) -> PreTrainedConfig:
    makers: dict[str, Callable[[], PreTrainedConfig]] = {
        "llama": lambda: LlamaConfig(**sizes),
        "mistral": lambda: MistralConfig(**sizes, sliding_window=SLIDING),
        "qwen2": lambda: Qwen2Config(**sizes),
        "qwen3": lambda: Qwen3Config(**sizes, head_dim=8),
        "gemma2": lambda: Gemma2Config(
            **sizes,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=SLIDING,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=30.0,
        ),
        "gemma3n": lambda: Gemma3nTextConfig(
            **sharing(sizes), intermediate_size=[48] * 5, activation_sparsity_pattern=[0.0] * 5, altup_num_inputs=2
        ),
        "gemma4": lambda: Gemma4TextConfig(**sharing(sizes), global_head_dim=16, intermediate_size=48),
        "deepseek_v3": lambda: DeepseekV3Config(
            **sizes,
            q_lora_rank=16,
            kv_lora_rank=12,
            qk_rope_head_dim=4,
            qk_nope_head_dim=6,
            v_head_dim=10,
            first_k_dense_replace=sizes["num_hidden_layers"],  # no experts
        ),
    }
    return makers[family]()


SHARING = ("gemma3n", "gemma4")
"""Five layers, of which 3 reads what 2 stored (both look through a window) and 4 what 0 stored."""


def sharing(sizes: Sizes) -> Sizes:
    """The fields of a Gemma whose last layers read what earlier ones stored."""
    window, full = "sliding_attention", "full_attention"
    own = {
        "num_hidden_layers": 5,
        "layer_types": [full, window, window, window, full],
        "num_kv_shared_layers": 2,
        "head_dim": 8,
        "sliding_window": SLIDING,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
    }
    return {name: value for name, value in sizes.items() if name != "intermediate_size"} | own


def tiny(
    family: str = "llama",
    *,
    query_heads: int = 4,
    kv_heads: int = 2,
    layers: int = 2,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> PreTrainedModel:
    """A random model in evaluation mode; hidden 32, head dim 8 (with 4 query heads), vocabulary 512."""
    sizes = {**SIZES, "num_hidden_layers": layers, "num_attention_heads": query_heads, "num_key_value_heads": kv_heads}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_config(family, sizes)).to(dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():  # norms and biases start constant, which would hide mistakes
            if "norm" in name or name.endswith("bias"):
                weight += 0.3 * torch.randn_like(weight)
    return model


def rotated(x: Tensor, position: float) -> Tensor:
    """A vector [D] rotated as the tiny Llama rotates it at a position, i with i + D / 2; theta is 10000."""
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = torch.tensor(position * 10000.0 ** (-i / half), dtype=torch.float64)
        out[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
        out[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
    return out


class CodePoints:
    """Text for the tiny models, as pre-passes need it: a token for every character."""

    turn_end = "\n"

    def encode(self, text: str) -> list[int]:
        return [PADDING + 1 + ord(mark) % (VOCABULARY - PADDING - 1) for mark in text]


MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "minimax_m2", "phimoe")


def tiny_mixture(family: str, seed: int = 0) -> PreTrainedModel:
    """A random mixture of four experts, two of them chosen for each token.

    Mixtral passes a sliding window to its attention; in Phi-MoE and in Qwen2-MoE's first layer the mask has it.
    """
    slides: Sizes = {"sliding_window": SLIDING}
    windows: Sizes = {"mixtral": slides, "phimoe": slides, "qwen2_moe": slides | {"use_sliding_window": True}}
    return small(family, seed=seed, **windows.get(family, {}))


def prompt(length: int, seed: int = 0) -> list[int]:
    """Distinct token ids, none of them the padding's."""
    return random.Random(seed).sample(range(PADDING + 1, VOCABULARY), length)


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """ids and attention mask [B,T], padding on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PADDING] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def generated(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, **kwargs: Any) -> list[list[int]]:
    """New tokens of `model.generate`, greedily, with whatever attention the model is set to."""
    ids, mask = left_padded(prompts)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **kwargs)
    return out[:, ids.shape[1] :].tolist()


class Projects:
    """A model's layer without rotary embeddings, with an output projection of its own."""

    def __init__(self, matrices: Tensor | None = None) -> None:
        self._matrices = torch.zeros(0) if matrices is None else matrices

    def rotation(self, positions: Tensor) -> Rotation:
        none = torch.zeros(*positions.shape, 0)
        return Rotation(none, none)

    def output_projection(self) -> Tensor:
        return self._matrices

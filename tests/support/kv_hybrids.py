"""Tiny random models with recurrent or convolutional layers beside attention, one of each kind."""

from typing import Any

import torch
from kv_models import SIZES
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

DELTA = {
    "head_dim": 8,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
OWN: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**DELTA, "intermediate_size": 48},
    "qwen3_next": {
        **DELTA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "bamba": {**MAMBA2, "num_hidden_layers": 4, "attn_layer_indices": [1, 2], "intermediate_size": 48},
    "falcon_h1": {**MAMBA2, "num_hidden_layers": 2, "mamba_d_ssm": 64, "intermediate_size": 48},
    "lfm2": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "full_attention", "conv"],
        "intermediate_size": 48,
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "num_experts": 2,
        "intermediate_size": 48,
        "use_mamba_kernels": False,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention", "mamba", "attention"],
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
        "intermediate_size": 48,
    },
    "zaya": {
        "num_hidden_layers": 2,
        "layer_types": ["hybrid", "hybrid_sliding"],
        "sliding_window": 24,
        "head_dim": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
    },
    "zamba": {
        "num_hidden_layers": 4,
        "n_mamba_heads": 2,
        "mamba_d_state": 8,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "intermediate_size": 48,
        "num_key_value_heads": 4,
        "use_mamba_kernels": False,
    },
}
HYBRIDS = tuple(OWN)


def tiny_hybrid(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model in evaluation mode, in float32, with wide weights, so that attention is peaked."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**(SIZES | {"initializer_range": 0.02} | OWN[family]))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=2 * weight.shape[1] ** -0.5)
    return model

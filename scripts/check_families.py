"""Check which model families kvbench supports, with a tiny random model of every causal LM of transformers.

Each family is built from its configuration class with small sizes. Its logits with `full` are compared with its eager
attention, in one call and token by token. Then policies of every kind generate with eviction, and batched sequences are
compared with single sequences.

    python scripts/check_families.py [--only llama,gemma4_text] [--out docs/families.md]
"""

import argparse
import inspect
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvbench import KVCache, make_policy
from kvbench.cache.families import INSTEAD, InterfaceError
from kvbench.cache.hook import prepare
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.generate import generate_tokens
from kvbench.engine.sequence import Request, script_of
from kvbench.models.trial import try_out

log = logging.getLogger(__name__)

VOCABULARY, TOKENS, PROMPT, WINDOW, BUDGET = 128, 48, 40, 16, 24
PARAMETERS = 30_000_000  # families with larger small models are skipped
EXACT = 1e-4  # in standard deviations of the logits; float32 rounding through a few layers is smaller

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim", "emb_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "decoder_ffn_dim", "dff"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "n_head_kv", "swa_num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "global_head_dim", "swa_head_dim", "swa_v_head_dim"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length"), 256),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k"), 2),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size"), WINDOW),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "hidden_size_per_layer_input": 16,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "linear_head_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    "linear_num_key_heads": 2,
}
"""Small values of configuration fields; each family uses the fields that it has."""
MIXED = ["sliding_attention", "full_attention"]
ENCODERS = (
    *("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert"),
    *("roberta", "roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl"),
)
ASSISTANT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
SHARED = {"layer_types": MIXED * 2, "num_kv_shared_layers": 2}
OWN: dict[str, dict[str, Any]] = {
    **{name: {"layer_types": MIXED * 2} for name in ("gemma3_text", "gemma4_text", "gemma4_unified_text")},
    "gemma3n_text": {**SHARED, "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.0] * 4},
    **{name: {"layer_types": ["conv", "full_attention"] * 2} for name in ("lfm2", "lfm2_moe")},
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "falcon_h1": {"mamba_d_ssm": 128},
    "nemotron_h": {"layers_block_type": ["mamba", "mlp", "attention", "mamba", "moe", "attention"], "n_groups": 1},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "num_experts_per_tok": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "recurrent_gemma": {"attention_window_size": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "xlm": {"emb_dim": 64, "n_words": VOCABULARY},
    **{name: {"rotary_dim": 8} for name in ("codegen", "gptj")},
    "longcat_flash": {"head_dim": 8},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
    },
    "marian": {"decoder_vocab_size": VOCABULARY},
    **{name: {"text_config": ASSISTANT} for name in ("gemma4_assistant", "gemma4_unified_assistant")},
    "mimo_v2_flash": {"num_key_value_heads": 1, "head_dim": 24, "layer_types": MIXED * 2},
    **{name: {"is_decoder": True} for name in ENCODERS},
}
"""Additional or different fields of a family, mostly the types of its layers."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_text with shared layers": ("gemma4_text", SHARED),
    "gemma4_text with other heads where attention is full": (
        "gemma4_text",
        {"num_global_key_value_heads": 1, "global_head_dim": 32, "attention_k_eq_v": True},
    ),
    "qwen2 with a sliding window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    "qwen2_moe with a sliding window": ("qwen2_moe", {"use_sliding_window": True}),
    "phimoe without a sliding window": ("phimoe", {"sliding_window": None}),
}
"""Families with releases that need different caches: name in the table, family, fields."""


TRIED: dict[str, tuple[dict[str, Any], int]] = {
    "snapkv": ({"window": 8}, BUDGET + 3),
    "h2o": ({"decode": "evict"}, BUDGET),
    "tova": ({"decode": "evict"}, BUDGET),
    "caote_tova": ({"block": 8}, BUDGET),
    "ada_snapkv": ({"window": 8}, BUDGET + 3),
    "kivi": ({"group": 8, "residual": 8}, PROMPT + 3),
}
"""Policies to test with every family: their fields and the expected tokens per KV head."""
SPECIAL = ("ada_snapkv", "kivi")
"""Policies with additional requirements, such as several KV heads or dimensions that can be quantised."""

KINDS = {
    "exact": "With `full`, the logits equal the family's eager attention; the last column is the largest difference "
    "in standard deviations of the logits. The tested policies ({tried}) keep their budget in its attention layers; "
    "the row lists policies that do not apply. Batched sequences give the same results as single sequences.",
    "refused": "kvbench refuses these models before it loads weights, unless their row says otherwise. "
    f"Each message ends with: {INSTEAD}.",
    "differs": "Logits with `full` differ from eager attention: a bug of kvbench.",
    "crashed": "An unexpected error: a bug of kvbench.",
    "not tried": "The script could not build a small model of the family.",
}
HEAD = """\
# Model families

Generated by `python scripts/check_families.py --out docs/families.md` with transformers {version} and
torch {torch}, from tiny random models of all causal language models of that release and some variants ({total} rows).
Layers, heads and windows are small. The table shows which kinds of attention and cache kvbench supports; no published
checkpoint was run. Encoder models (BERT) are tested as decoders (`is_decoder`),
multimodal models with their text part.
"""


@dataclass(frozen=True)
class Family:
    """One row of the table: a model type and fields that override the family's configuration."""

    name: str
    model_type: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> type[PreTrainedConfig]:
        """The configuration class."""
        return CONFIG_MAPPING[self.model_type]

    @property
    def model(self) -> type[PreTrainedModel]:
        """The causal language model class, imported on demand because importing all of them is slow."""
        return MODEL_FOR_CAUSAL_LM_MAPPING[self.config]


@dataclass(frozen=True)
class Verdict:
    """The result of a family. kind: one of KINDS; why: the reason, or the largest difference of the logits."""

    family: str
    model: str
    kind: str
    why: str


def families() -> list[Family]:
    """All model types with a causal language model in transformers, and the variants."""
    known = [Family(model_type, model_type) for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    more = [Family(name, *variant) for name, variant in VARIANTS.items()]
    return sorted([*known, *more], key=lambda family: family.name)


def tiny_config(kind: type[PreTrainedConfig], **fields: object) -> PreTrainedConfig:
    """The family's configuration and its sub-configurations with small sizes."""
    known = set(inspect.signature(kind.__init__).parameters)
    own = OWN.get(kind.model_type, {})
    small = {name: value for name, value in SIZES.items() if name in known}
    if {"kv_lora_rank", "num_key_value_heads"} <= known:  # latents are expanded to every head
        small["num_key_value_heads"] = small["num_attention_heads"]
    for name in getattr(kind, "sub_configs", {}):
        part = type(getattr(kind(), name)) if name not in own else None
        if part is not None and issubclass(part, PreTrainedConfig):
            small[name] = tiny_config(part)
    return kind(**(small | own | fields))


def config_of(family: Family) -> PreTrainedConfig:
    """The tiny configuration of the family's model; only the text part of multimodal configurations."""
    config = tiny_config(family.config, **family.fields)
    return config if type(config) is family.model.config_class else config.get_text_config(decoder=True)


def tiny_model(family: Family) -> PreTrainedModel:
    """A random float32 model of the family with eager attention. Large weights make the attention peaked."""
    config = config_of(family)
    make: Any = family.model._from_config
    with torch.device("meta"):
        size = sum(weight.numel() for weight in make(config).parameters())
    if size > PARAMETERS:
        raise NotImplementedError(f"the smallest model has {size:,} parameters")
    torch.manual_seed(0)
    model = make(config, attn_implementation="eager", dtype=torch.float32).eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[1] ** -0.5)
    return model


@torch.inference_mode()
def eager_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The logits [1,T,V] of the family's eager attention without a cache."""
    return model(input_ids=ids, use_cache=False).logits


@torch.inference_mode()
def full_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The logits [1,T,V] with `full`: the prompt in one call, then token by token."""
    cache = KVCache(model.config, make_policy("full"), prompt_length=PROMPT)
    logits = []
    for call in (ids[:, :PROMPT], *ids[:, PROMPT:].split(1, dim=1)):
        places = torch.arange(cache.seen, cache.seen + call.shape[1])[None]  # Bamba counts from 0 in every call
        logits.append(model(input_ids=call, position_ids=places, past_key_values=cache).logits)
    return torch.cat(logits, dim=1)


def shrinks(model: PreTrainedModel, ids: Tensor) -> list[str]:
    """Generate with every policy, with its audit, and check the number of kept tokens per layer.

    Returns the SPECIAL policies that do not apply to the model; all other policies must work.
    """
    without = []
    for slug, (fields, held) in TRIED.items():
        try:
            done = generate_tokens(model, ids[:, :PROMPT], make_policy(slug, BUDGET, **fields), max_new_tokens=4)
        except ValueError:
            if slug not in SPECIAL:
                raise
            without.append(slug)
            continue
        for layer in done.cache.attention_layers:  # the kept prompt tokens and, if decoding grows, the decoded tokens
            kept = layer.kept_tokens().double()
            kept = kept.mean(-1) if slug.startswith("ada_") else kept
            assert bool((kept == held).all()), (slug, kept)
    return without


def rows_are_alone(model: PreTrainedModel, ids: Tensor) -> None:
    """Check that batched sequences generate and keep the same tokens as single sequences."""
    flight, rows = DecodeBatch(model), []
    for length in (PROMPT, PROMPT - 7):
        request = Request(script_of(ids[:, :length]), 4)
        if flight.can_admit(request):  # models with length-dependent RoPE cannot batch some prompts
            rows += flight.admit(
                [request], [make_policy(slug, BUDGET, **TRIED[slug][0]) for slug in ("snapkv", "h2o")]
            )[0]
    flight.finish(rows)
    for row in rows:
        alone = generate_tokens(model, row.request.prompt, row.policy, max_new_tokens=4)
        assert row.tokens == alone.tokens[0], row.policy.name
        for own, other in zip(row.cache.attention_layers, alone.cache.attention_layers, strict=True):
            assert torch.equal(own.positions.sort(-1).values, other.positions.sort(-1).values), row.policy.name


def check(family: Family) -> Verdict:
    """Build and test a model of the family and return the result."""
    ids = torch.randint(3, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    verdict = Verdict(family.name, family.model.__name__, "not tried", "")
    for config_for in (
        config_of,
        lambda family: family.config(),
    ):  # the full-size configuration is enough to reject a family
        try:
            try_out(config_for(family))
        except InterfaceError as error:
            return replace(verdict, kind="refused", why=first_line(error))
        except Exception as error:
            log.info("%s: %s", family.name, error)
        else:
            break
    try:
        model = tiny_model(family)
        expected = eager_logits(model, ids)
    except Exception as error:  # the model is too large or needs more inputs than tokens
        return replace(verdict, why=f"no small model runs: {first_line(error)}")
    try:
        prepare(model)
        far = float((full_logits(model, ids) - expected).abs().max() / expected.std())
        without = shrinks(model, ids)
        rows_are_alone(model, ids)
    except ValueError as error:
        return replace(verdict, kind="refused", why=f"{first_line(error)} (found at the first call, after loading)")
    except Exception as error:
        log.exception("%s", family.name)
        return replace(verdict, kind="crashed", why=first_line(error))
    missing = f", without {', '.join(without)}" if without else ""
    return replace(verdict, kind="exact" if far < EXACT else "differs", why=f"{far:.0e}{missing}")


def first_line(error: Exception) -> str:
    """The first line of an error message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines and not isinstance(error, ValueError) else (lines or [""])[0]


def page(verdicts: Sequence[Verdict]) -> str:
    """The table as Markdown, supported families first."""
    count = {kind: sum(v.kind == kind for v in verdicts) for kind in KINDS}
    lines = [HEAD.format(version=transformers.__version__, torch=torch.__version__, total=len(verdicts))]
    for kind, text in KINDS.items():
        rows = [v for v in verdicts if v.kind == kind]
        if rows:
            lines += [
                f"## {kind}: {count[kind]}",
                "",
                text.replace("{tried}", ", ".join(TRIED)),
                "",
                "| family | model | |",
                "|---|---|---|",
            ]
            lines += [f"| {v.family} | {v.model} | {v.why.removesuffix(f'; {INSTEAD}')} |" for v in rows]
            lines.append("")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the selected families and write the page; returns 1 if a family crashed or differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", help="families, separated by commas; default: all")
    parser.add_argument("--out", type=Path, help="write the table there instead of printing it")
    args = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    only = args.only and args.only.split(",")
    verdicts = []
    for family in families():
        if not only or family.name in only:
            verdicts.append(check(family))
            print(f"{family.name}: {verdicts[-1].kind}, {verdicts[-1].why}", file=sys.stderr, flush=True)
    if args.out:
        args.out.parent.mkdir(exist_ok=True)
        args.out.write_text(page(verdicts), encoding="utf-8")
    else:
        print(page(verdicts))
    return int(any(v.kind in ("crashed", "differs") for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())

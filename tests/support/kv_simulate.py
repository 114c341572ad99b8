"""A model running through the slow oracle, which keeps the keys and values of all earlier calls itself.

States of recurrent layers are transformers' own: of its cache nothing else is read.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from kv_layers import SlowLayers
from kv_oracle import Glance, Rules, SlowSequence, Trace
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedConfig, PreTrainedModel

ATTENTION = ("full_attention", "sliding_attention", "hybrid", "hybrid_sliding")

_running: list[Any] = []  # the sequence that attends, here and in the oracles of single papers


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    *,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Dropout has its place, the sixth: kvpress, once imported, hands it over by that."""
    assert attention_mask is None
    assert len(query) == 1
    layer = module.layer_idx
    assert isinstance(layer, int)
    glance = Glance(scaling, kwargs.get("softcap"), kwargs.get("sliding_window"))
    new = query.shape[2]
    q, k, v = (t[0, :, -new:].double().numpy() for t in (query, key, value))
    place = layer if isinstance(_running[-1], SlowLayers) else _places(module.config).get(layer, layer)
    out = _running[-1].attend(place, q, k, v, glance)
    return torch.from_numpy(out).to(query.dtype).transpose(0, 1)[None], None


def _places(config: PreTrainedConfig) -> dict[int, int]:
    """Where the layers with attention stand among themselves, of a model that says which these are."""
    kinds = getattr(config, "layer_types", None) or ()
    return {layer: place for place, layer in enumerate(i for i, kind in enumerate(kinds) if kind in ATTENTION)}


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Causality is decided by positions."""


AttentionInterface.register("slow_oracle", _attention)
AttentionMaskInterface.register("slow_oracle", _no_mask)


@contextmanager
def attending(model: PreTrainedModel, sequence: Any) -> Iterator[None]:
    """The model's attention is `sequence.attend` inside; its setting is put back afterwards."""
    before = model.config._attn_implementation
    model.set_attn_implementation("slow_oracle")
    _running.append(sequence)
    try:
        with torch.no_grad():
            yield
    finally:
        _running.pop()
        model.set_attn_implementation(before)


def simulate(
    model: PreTrainedModel,
    prompt: Sequence[int],
    new_tokens: int,
    rules: Rules,
    owners: Mapping[int, int] | None = None,
) -> Trace:
    """Prefill the prompt and generate greedily under `rules`; owners: see `SlowLayers`."""
    config = model.config
    kv_heads = config.num_key_value_heads
    group = config.num_attention_heads // kv_heads
    layers = len(_places(config)) or config.num_hidden_layers
    sequence = SlowSequence(rules, layers, kv_heads, group, len(prompt))
    states = DynamicCache(config=config) if layers < config.num_hidden_layers else None
    if owners:
        layers, states = config.num_hidden_layers, None
        sequence = SlowLayers(rules, layers, kv_heads, group, len(prompt), owners)
    with attending(model, sequence):
        generate(model, list(prompt), new_tokens, sequence, states)
    return sequence.trace


def generate(
    model: PreTrainedModel,
    prompt: list[int],
    new_tokens: int,
    sequence: SlowSequence,
    states: DynamicCache | None = None,
) -> None:
    size = sequence.rules.block or len(prompt)
    token = 0
    for start in range(0, len(prompt), size):
        token = _forward(model, prompt[start : start + size], sequence, states)
    sequence.trace.tokens.append(token)
    sequence.may_evict = sequence.rules.decode == "evict"
    while len(sequence.trace.tokens) < new_tokens:
        token = _forward(model, [token], sequence, states)
        sequence.trace.tokens.append(token)


def _forward(
    model: PreTrainedModel, tokens: list[int], sequence: SlowSequence, states: DynamicCache | None = None
) -> int:
    """Run one block; returns the most likely next token."""
    sequence.begin(len(tokens))
    positions = torch.arange(sequence.seen, sequence.seen_after)[None]
    ids, kept = torch.tensor([tokens]), {"past_key_values": states} if states is not None else {"use_cache": False}
    logits = model(input_ids=ids, position_ids=positions, **kept).logits
    sequence.end()
    return int(logits[0, -1].argmax())

"""A model running through the slow oracle: its attention function receives new keys only, the oracle keeps the rest."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from kv_layers import SlowLayers
from kv_oracle import Glance, Rules, SlowSequence, Trace
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

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
    q, k, v = (t[0].double().numpy() for t in (query, key, value))
    out = _running[-1].attend(layer, q, k, v, glance)
    return torch.from_numpy(out).to(query.dtype).transpose(0, 1)[None], None


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
    chunks: Mapping[int, int] | None = None,
) -> Trace:
    """Prefill the prompt and generate greedily under `rules`; owners, chunks: see `SlowLayers`."""
    config = model.config
    kv_heads = config.num_key_value_heads
    group = config.num_attention_heads // kv_heads
    layers = config.num_hidden_layers
    sequence = SlowSequence(rules, layers, kv_heads, group, len(prompt))
    if owners or chunks:
        sequence = SlowLayers(rules, layers, kv_heads, group, len(prompt), owners or {}, chunks or {})
    with attending(model, sequence):
        generate(model, list(prompt), new_tokens, sequence)
    return sequence.trace


def generate(model: PreTrainedModel, prompt: list[int], new_tokens: int, sequence: SlowSequence) -> None:
    size = sequence.rules.block or len(prompt)
    token = 0
    for start in range(0, len(prompt), size):
        token = _forward(model, prompt[start : start + size], sequence)
    sequence.trace.tokens.append(token)
    sequence.may_evict = sequence.rules.decode == "evict"
    while len(sequence.trace.tokens) < new_tokens:
        token = _forward(model, [token], sequence)
        sequence.trace.tokens.append(token)


def _forward(model: PreTrainedModel, tokens: list[int], sequence: SlowSequence) -> int:
    """Run one block; returns the most likely next token."""
    sequence.begin(len(tokens))
    positions = torch.arange(sequence.seen, sequence.seen_after)[None]
    logits = model(input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False).logits
    sequence.end()
    return int(logits[0, -1].argmax())

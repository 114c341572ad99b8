"""Trains the gate of KVzap for a model: a linear regression per layer, without stored activations.

Shapes: L layers, H KV heads, T tokens of a text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.engine.generate import generate_tokens
from kvbench.errors import UsageError
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import TextEncoder
from kvbench.policies.pre_passes.repetition import FIRST
from kvbench.policies.scorers.kvzap import PERCENTILES
from kvbench.policies.scorers.kvzap_targets import KVzapTargets, Moments

TEXT = 500  # tokens of a text at most; a pass has them twice


def collect(model: PreTrainedModel, texts: Iterable[Tensor], encoder: TextEncoder) -> dict[int, Moments]:
    """The sums for the regression of every layer over texts [T] of token ids, each followed by its repetition."""
    found: dict[int, Moments] = {}
    middle = torch.tensor([*encoder.encode(FIRST), *encoder.encode(encoder.turn_end)])
    for seed, whole in enumerate(texts):
        text = whole[:TEXT]
        ids = torch.cat([text, middle.to(text), text])
        repeat = len(ids) - len(text), len(ids)
        read_text(model, ids, KVzapTargets((0, len(text)), repeat, seed=seed, found=found))
    return found


def read_text(model: PreTrainedModel, ids: Tensor, targets: KVzapTargets) -> None:
    """Process one prompt [T] and add what its repetition shows."""
    policy = Policy(scorer=targets, budget=len(ids), name="calibration")
    generate_tokens(model, ids[None].to(model.device), policy, max_new_tokens=1)


def fit(found: Mapping[int, Moments]) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """The gate's tensors, R^2 of every layer on the tokens held out, and percentiles 1 to 99 of their predicted scores.

    Raises UsageError without a token held out, or if most layers predict worse than a constant.
    """
    tensors: dict[str, Tensor] = {}
    quality, predicted = [], []
    for layer, moments in sorted(found.items()):
        weight, bias = moments.ridge()
        x, y = (torch.cat(parts).double() for parts in zip(*moments.held_out, strict=True))
        if len(x) < 2:
            raise UsageError("the texts have too few tokens to hold some out: use longer or more texts (limit=)")
        guess = x @ weight.mT + bias
        quality.append(1 - float((y - guess).square().sum() / (y - y.mean(0)).square().sum().clamp(min=1e-12)))
        predicted.append(guess.flatten())
        tensors[f"layers.{layer}.weight"] = weight.float().contiguous()
        tensors[f"layers.{layer}.bias"] = bias.float().contiguous()
    if sum(value < 0 for value in quality) > len(quality) / 2:
        raise UsageError(
            f"the gate predicts worse than a constant in most layers (R^2 {min(quality):.2f} to {max(quality):.2f} on "
            "tokens held out): calibrate on more or longer texts"
        )
    scores = torch.cat(predicted).sort().values
    places = [round(p / 100 * (len(scores) - 1)) for p in range(1, 100)]
    return tensors, quality, [round(float(scores[place]), 4) for place in places]


def write_gate(
    model: PreTrainedModel, texts: Iterable[Tensor], encoder: TextEncoder, output: Path, metadata: dict[str, str]
) -> None:
    """Train a linear gate, save it with the percentiles of its scores, and print R^2 of every layer."""
    tensors, quality, percentiles = fit(collect(model, texts, encoder))
    save_file(tensors, output, metadata | {PERCENTILES: json.dumps(percentiles)})
    lines = (f"layer {layer:3}  R^2 {value:6.3f}\n" for layer, value in enumerate(quality))
    sys.stdout.write("".join(chain(lines, [f"mean       R^2 {sum(quality) / len(quality):6.3f}\n"])))

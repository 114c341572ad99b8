"""Trains the gate of KVzap for a model: a linear regression per layer without stored activations, or a small network.

Shapes: L layers, H KV heads, T tokens of a text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from kvbench.engine.generate import generate_tokens
from kvbench.errors import UsageError
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import TextEncoder
from kvbench.policies.pre_passes.repetition import FIRST
from kvbench.policies.scorers.kvzap import PERCENTILES, Gate, gated
from kvbench.policies.scorers.kvzap_targets import InputMoments, KVzapTargets

FORMS = ("linear", "mlp")
TEXT = 500  # tokens of a text at most; a pass has them twice
WIDTH, EPOCHS, BATCH = 512, 15, 512  # of the network


def collect(
    model: PreTrainedModel, texts: Iterable[Tensor], encoder: TextEncoder, stores: bool = False
) -> dict[int, InputMoments]:
    """The sums for the regression of every layer over texts [T] of token ids, each followed by its repetition.

    stores: the hidden states are stored too.
    """
    found: dict[int, InputMoments] = {}
    middle = torch.tensor([*encoder.encode(FIRST), *encoder.encode(encoder.turn_end)])
    for seed, whole in enumerate(texts):
        text = whole[:TEXT]
        ids = torch.cat([text, middle.to(text), text])
        repeat = len(ids) - len(text), len(ids)
        read_text(model, ids, KVzapTargets((0, len(text)), repeat, seed=seed, found=found, stores=stores))
    return found


def read_text(model: PreTrainedModel, ids: Tensor, targets: KVzapTargets) -> None:
    """Process one prompt [T] and add what its repetition shows."""
    policy = Policy(scorer=targets, budget=len(ids), name="calibration")
    generate_tokens(model, ids[None].to(model.device), policy, max_new_tokens=1)


def fit_linear(found: Mapping[int, InputMoments]) -> list[Gate]:
    """The ridge regression of every layer."""
    gates: list[Gate] = []
    for _, moments in sorted(found.items()):
        weight, bias = moments.ridge()
        gates.append({"weight": weight.float().contiguous(), "bias": bias.float().contiguous()})
    return gates


def fit_mlp(found: Mapping[int, InputMoments], width: int = WIDTH, epochs: int = EPOCHS, seed: int = 0) -> list[Gate]:
    """A network with one hidden layer of `width` for every layer: AdamW on the mean squared error of all layers.

    Source: NVIDIA/kvpress, kvzap/train.py: learning rate 5e-3 with a cosine schedule, batches of 512 tokens, gradients
    clipped to a norm of 1.
    """
    stored = [moments.rows or [] for _, moments in sorted(found.items())]
    rows = [[torch.cat(parts) for parts in zip(*layer, strict=True)] for layer in stored]
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(seed)
        data = [(x.clone(), y.float().clone()) for x, y in rows]
        nets = nn.ModuleList(
            nn.Sequential(nn.Linear(x.shape[1], width), nn.GELU(), nn.Linear(width, y.shape[1])) for x, y in data
        )
        tokens = len(data[0][0])
        steps = epochs * -(-tokens // BATCH)
        optimizer = torch.optim.AdamW(nets.parameters(), lr=5e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(epochs):
            for some in torch.randperm(tokens).split(BATCH):
                losses = [F.mse_loss(net(x[some].float()), y[some]) for net, (x, y) in zip(nets, data, strict=True)]
                optimizer.zero_grad()
                torch.stack(losses).mean().backward()
                nn.utils.clip_grad_norm_(nets.parameters(), 1.0)
                optimizer.step()
                schedule.step()
    return [{name: x.detach().contiguous() for name, x in net.state_dict().items()} for net in nets]


def check_gates(found: Mapping[int, InputMoments], gates: Sequence[Gate]) -> tuple[list[float], list[float]]:
    """R^2 of every layer on the tokens held out, and percentiles 1 to 99 of their predicted scores.

    Raises UsageError without a token held out, or if most layers predict worse than a constant.
    """
    quality, predicted = [], []
    for (_, moments), gate in zip(sorted(found.items()), gates, strict=True):
        x, y = (torch.cat(parts).double() for parts in zip(*moments.held_out, strict=True))
        if len(x) < 2:
            raise UsageError("the texts have too few tokens to hold some out: use longer or more texts (limit=)")
        guess = gated({name: tensor.double() for name, tensor in gate.items()}, x)
        quality.append(1 - float((y - guess).square().sum() / (y - y.mean(0)).square().sum().clamp(min=1e-12)))
        predicted.append(guess.flatten())
    if sum(value < 0 for value in quality) > len(quality) / 2:
        raise UsageError(
            f"the gate predicts worse than a constant in most layers (R^2 {min(quality):.2f} to {max(quality):.2f} on "
            "tokens held out): calibrate on more or longer texts"
        )
    scores = torch.cat(predicted).sort().values
    places = [round(p / 100 * (len(scores) - 1)) for p in range(1, 100)]
    return quality, [round(float(scores[place]), 4) for place in places]


def write_gate(
    model: PreTrainedModel, texts: Iterable[Tensor], encoder: TextEncoder, output: Path, metadata: dict[str, str]
) -> None:
    """Train a gate of metadata["form"], save it with the percentiles of its scores, and print R^2 of every layer."""
    linear = metadata["form"] == "linear"
    found = collect(model, texts, encoder, stores=not linear)
    gates = fit_linear(found) if linear else fit_mlp(found)
    quality, percentiles = check_gates(found, gates)
    tensors = {f"layers.{layer}.{name}": x for layer, gate in enumerate(gates) for name, x in gate.items()}
    save_file(tensors, output, metadata | {PERCENTILES: json.dumps(percentiles)})
    lines = (f"layer {layer:3}  R^2 {value:6.3f}\n" for layer, value in enumerate(quality))
    sys.stdout.write("".join(chain(lines, [f"mean       R^2 {sum(quality) / len(quality):6.3f}\n"])))

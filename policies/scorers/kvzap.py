"""KVzap and Fast KVzip: a small trained gate predicts a token's importance from its hidden state.

Shapes: B batch, M new tokens, H KV heads, G query heads per KV head, T slots, n numbers of a gate's query, S sinks.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F

from kvbench.errors import ConfigError, counted
from kvbench.kernels.references import widen
from kvbench.policies.checks import calibrated_file
from kvbench.policies.describe import FILE
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.pre_passes.pre_pass import columns_of_new
from kvbench.policies.scorers.scorer import Scorer

Gate = Mapping[str, Tensor]
PERCENTILES = "percentiles"
EPSILON = 1e-6  # of the norms of Fast KVzip's gates


@dataclass(frozen=True)
class KVzap(Scorer):
    """Keep the tokens whose hidden state promises a high score of KVzip+, without repeating the prompt.

        s_j = g_l(x_j) "estimates" log max_(h, q in "repeated prompt") A_(h,q,j) * ||W_O^h v_j|| / ||x_q||

    x_j is the input of the layer's attention. g_l is linear or has one hidden layer with GELU (KVzap). A gate of Fast
    KVzip compares a key with S base keys instead, per query of the group:

        s_j = 1 / G sum_g 1 / (1 + sum_i e^(z_(g,i) - z_g)), z_g = q_g k_j / sqrt(n) + b_g, z_(g,i) = q_g k_i / sqrt(n)

    The score of a token is computed once and never changes, in prefill and decoding.

    gate: a safetensors file with `layers.{l}.weight` and `bias`, `layers.{l}.0.weight` ..., as published (KVzap), or
    `layers.{l}.q_proj.weight` ... (Fast KVzip); for your own model: `kvbench calibrate kvzap model=...
    task=... -o gate.safetensors`.
    Source: Jegou et al. 2026, arXiv 2601.07891 (KVzap); Kim et al. 2026, arXiv 2601.17668 (Fast KVzip).
    """

    needs = Needs(statistics=("gate",), hidden=True, layer=True, fixed_scores=True)

    gate: str = field(default="", metadata={"decides": FILE})

    def __post_init__(self) -> None:
        calibrated_file("gate", self.gate, "a safetensors file of a gate", "kvzap")
        _ = self._layers  # read at construction: the file may change later

    @cached_property
    def _file(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors and the metadata of the file."""
        if not Path(self.gate).is_file():
            raise ConfigError("gate", self.gate, why="is not a file")
        try:
            with safe_open(self.gate, framework="pt") as file:
                names = file.keys()
                return {name: file.get_tensor(name).float() for name in names}, file.metadata() or {}
        except (SafetensorError, OSError) as error:
            why = "must be a safetensors file: pickles (.pt, .bin) can run code and are not read"
            raise ConfigError("gate", self.gate, why=why) from error

    @cached_property
    def _layers(self) -> list[Gate]:
        """The tensors of each layer's gate by name."""
        layers: dict[int, dict[str, Tensor]] = {}
        for name, tensor in self._file[0].items():
            prefix, _, rest = name.partition(".")
            index, _, own = rest.partition(".")
            if prefix == "layers" and index.isdigit():
                layers.setdefault(int(index), {})[own] = tensor
        known = any({"weight", "bias"} == {*gate} or "0.weight" in gate or "k_base" in gate for gate in layers.values())
        if sorted(layers) != list(range(len(layers))) or not known:
            raise ConfigError("gate", self.gate, why="must contain layers.0.weight, layers.0.bias, ... of a gate")
        return [layers[index] for index in range(len(layers))]

    def score_at(self, share: float) -> float:
        """The score below which this share of the calibration's tokens was. ConfigError without percentiles."""
        text = self._file[1].get(PERCENTILES)
        if text is None:
            why = f"needs percentiles of scores, which {self.gate} has not: use policy.allocator.tau"
            raise ConfigError("keep", round(1 - share, 6), why=why)
        percentiles = [float(x) for x in json.loads(text)]
        return percentiles[min(99, max(1, round(100 * share))) - 1]

    def observe(self, observation: Observation, state: State) -> None:
        hidden = observation.shared["hidden"]
        found = self.predicted(observation.layer, hidden, observation.keys.shape[1])  # [B,M,H]
        columns, new = columns_of_new(observation, hidden.shape[1])
        scores = found.mT.to(state["gate"].dtype).gather(-1, columns)
        state["gate"].copy_(torch.where(new, scores, state["gate"][..., 0])[..., None])

    def score(self, observation: Observation, state: State) -> Tensor:
        return state["gate"][..., 0]

    def predicted(self, layer: int, hidden: Tensor, heads: int) -> Tensor:
        """The scores of new tokens [B,M,H] from hidden states [B,M,hidden] of a layer. ConfigError for another model's.

        heads: KV heads of the layer; with one token set per query head, each gets the score of its KV head.
        """
        if layer >= len(self._layers):
            raise self._wrong(f"has {counted(len(self._layers), 'layer')}, the model more")
        gate = {name: x.to(hidden.device) for name, x in self._layers[layer].items()}
        x = widen(hidden)
        gate = {name: tensor.to(x.dtype) for name, tensor in gate.items()}
        first = next(gate[name] for name in ("weight", "0.weight", "q_proj.weight") if name in gate)
        if first.shape[1] != x.shape[-1]:
            raise self._wrong(f"reads {first.shape[1]} hidden numbers, the model has {x.shape[-1]}")
        found = gated(gate, x)
        if heads % found.shape[-1]:
            raise self._wrong(f"scores {found.shape[-1]} KV heads, the model has {heads}")
        return found.repeat_interleave(heads // found.shape[-1], dim=-1)

    def _wrong(self, why: str) -> ConfigError:
        return ConfigError("gate", self.gate, why=f"belongs to another model: it {why}")


def gated(gate: Gate, x: Tensor) -> Tensor:
    """The scores [...,H] of a layer's gate for hidden states x [...,hidden] of its dtype; [B,M,·] for Fast KVzip."""
    if "k_base" in gate:
        return _fast_kvzip(gate, x)
    if "weight" in gate:
        return F.linear(x, gate["weight"], gate["bias"])
    inner = F.gelu(F.linear(x, gate["0.weight"], gate["0.bias"]))
    return F.linear(inner, gate["2.weight"], gate["2.bias"])


def _fast_kvzip(gate: Gate, x: Tensor) -> Tensor:
    """The scores [B,M,H] of a gate of Fast KVzip for hidden states [B,M,hidden]."""
    heads, _, _, dim = gate["k_base"].shape  # [H,1,S,n]
    queries, keys = (
        F.rms_norm(
            F.linear(x, gate[f"{name}_proj.weight"], gate.get(f"{name}_proj.bias")).unflatten(-1, (heads, -1, dim)),
            (dim,),
            gate[f"{name}_norm.weight"],
            EPSILON,
        )
        for name in "qk"
    )  # [B,M,H,G,n] and [B,M,H,1,n]
    logit = (queries * keys).sum(-1) * dim**-0.5 + gate["b"][:, 0]  # [B,M,H,G]
    base = torch.einsum("bmhgn,hsn->bmhgs", queries, gate["k_base"][:, 0]) * dim**-0.5
    found: Tensor = (1 / (1 + (base - logit[..., None]).exp().sum(-1))).mean(-1)
    return found

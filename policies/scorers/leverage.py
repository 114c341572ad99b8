"""Leverage: keep the keys that differ from the span of the other keys.

Shapes: B batch, H_kv KV heads, T slots, D head dim, k `sketch`.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvbench.policies.checks import number, whole_number
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.noncausal import standardised
from kvbench.policies.scorers.scorer import Scorer


@lru_cache(maxsize=1024)
def gaussian(seed: int, layer: int, dim: int, sketch: int) -> Tensor:
    """Phi [D,k] of a layer, on the CPU: entries N(0, 1 / k)."""
    generator = torch.Generator().manual_seed((seed << 16) + layer)
    phi: Tensor = torch.randn(dim, sketch, generator=generator, dtype=torch.float64) / sketch**0.5
    return phi


def unrotated_keys(observation: Observation) -> Tensor:
    """The stored keys before their rotation, [B,H_kv,T,D] float32."""
    positions, slots = observation.positions, observation.slots
    if slots.whole:  # all heads hold the same tokens
        positions = positions[:, :1]
    elif slots.moved is not None:
        positions = positions + slots.moved.to(positions.dtype)
    rotation = observation.model.rotation
    return observation.once(
        "unrotated keys", lambda: rotation(positions.clamp(min=0)).inverse().apply(observation.keys)
    )


@dataclass(frozen=True)
class Leverage(Scorer):
    """Keep the tokens of highest leverage: their unrotated keys are least explained by the head's other keys.

        X = (K - 1 / T sum_j k_j) Phi, Phi_(d,i) ~ N(0, 1 / "sketch")
        s_j = z(x_j (X^T X + epsilon I)^(-1) x_j^T)

    z subtracts the mean over all tokens and heads of the layer and divides by the standard deviation. Phi is drawn from
    `seed` and the layer. The scorer reads only stored keys, so it works with any schedule.

    sketch: columns of Phi. epsilon: weight of the ridge, the value of kvpress's first attempt. seed: seed of Phi.
    Source: Chari and Van Durme 2025, arXiv 2507.08143, section 3; the Cholesky factor and the z-score follow its code.
    """

    needs = Needs(model=True)

    sketch: int = 48
    epsilon: float = 1e-2
    seed: int = 0

    def __post_init__(self) -> None:
        whole_number("sketch", self.sketch, 1)
        number("epsilon", self.epsilon, 1e-12)
        whole_number("seed", self.seed, 0, 2**40)

    def score(self, observation: Observation, state: State) -> Tensor:
        return observation.once(self, lambda: self.among(observation, observation.occupied))

    def among(self, observation: Observation, counted: Tensor) -> Tensor:
        """The score of the counted slots, bool [B,H_kv,T], as if there were no others: [B,H_kv,T] float32."""
        keys = unrotated_keys(observation)
        phi = gaussian(self.seed, observation.layer, keys.shape[-1], self.sketch).to(keys.device, keys.dtype)
        tokens = counted.sum(-1).clamp(min=1)[..., None, None]
        mean = keys.masked_fill(~counted[..., None], 0.0).sum(2, keepdim=True) / tokens
        # float64, because float32 rounding may exceed epsilon if the keys do not span the sketch.
        x = ((keys - mean) @ phi).masked_fill(~counted[..., None], 0.0).double()
        ridge = self.epsilon * torch.eye(self.sketch, dtype=x.dtype, device=x.device)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(x.mT @ x + ridge))
        return standardised(((x @ inverse) * x).sum(-1).to(keys.dtype), counted)

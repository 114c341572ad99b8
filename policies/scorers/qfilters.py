"""Q-Filters: score keys by their projection on the main direction of queries, measured once per model.

Shapes: L layers, H KV heads, T slots, D head dim.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.kernels.references import widen
from kvbench.policies.checks import calibrated_file
from kvbench.policies.describe import FILE
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer

FILTERS = "q_filters"


@dataclass(frozen=True)
class QFilters(Scorer):
    """Keep the keys with the largest projection on the direction of their head's queries.

        s_j = - f_g k_j, f_g = - mean_(h in "group") v_h

    v_h is the main right singular vector of the queries of head h over some texts, with the sign of their mean
    projection; queries and keys are rotated. On average, the product of query and k_j is proportional to v_h k_j, so
    the filter represents future queries. The scorer needs no attention and works the same in prefill and decoding.

    filters: a safetensors file with `q_filters` [L,H,D], as published by the authors, or for your own model:
    `kvbench calibrate qfilters model=... task=... -o filters.safetensors`.
    Source: Godey et al. 2025, arXiv 2503.02812, section 3.
    """

    needs = Needs(keys=True, layer=True, fixed_scores=True)

    filters: str = field(default="", metadata={"decides": FILE})

    def __post_init__(self) -> None:
        calibrated_file("filters", self.filters, "a safetensors file with q_filters", "qfilters")
        _ = self._filters  # read at construction: the file may change later

    @cached_property
    def _filters(self) -> Tensor:
        """[L,H,D] float32."""
        if not Path(self.filters).is_file():
            raise ConfigError("filters", self.filters, why="is not a file")
        try:
            found = load_file(self.filters)
        except (SafetensorError, OSError) as error:
            raise ConfigError("filters", self.filters, why="must be a safetensors file") from error
        if FILTERS not in found or found[FILTERS].dim() != 3:
            raise ConfigError("filters", self.filters, why="must contain q_filters [layers, KV heads, head dim]")
        return found[FILTERS].float()

    def score(self, observation: Observation, state: State) -> Tensor:
        heads, _, dim = observation.keys.shape[1:]
        layers, own, own_dim = self._filters.shape
        if observation.layer >= layers or heads % own or own_dim != dim:
            have, want = f"{layers} layers, {own} KV heads of {own_dim}", f"{heads} KV heads of {dim}"
            why = f"has {have} and does not match the model: layer {observation.layer} has {want}"
            raise ConfigError("filters", self.filters, why=why)
        of_layer = self._filters[observation.layer].repeat_interleave(heads // own, dim=0)  # one set per query head
        keys = widen(observation.keys)
        return -(keys @ of_layer.to(keys)[None, :, :, None])[..., 0]

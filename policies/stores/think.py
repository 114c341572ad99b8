"""ThinK: the keys of a prompt without the channels that its newest queries weigh least.

Shapes: H KV heads, N tokens, D head dim, D' held.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.checks import number, whole_number
from kvbench.policies.observation import Memory, Observation, State
from kvbench.policies.stores.codec import Codec
from kvbench.policies.stores.coding import Grouped

SQUARES = "squares"


@dataclass(frozen=True)
class ThinK(Codec):
    """Of each KV head's older keys, the channels of the lowest score are not held; values stay.

        s_d = mean_(q in "window") q_d^2 * mean_j k_(j,d)^2

    The mean over queries is over the window's and the query heads of the group, the one over keys over all that are
    held when the prompt is in (and was evicted). floor(ratio D) channels go. A key takes D' numbers, and a KV head a
    list of its D' channels; the newest `residual` keys and those of later tokens keep all channels.

    ratio: share of the channels that go. query_window: newest queries of the prompt that judge. residual: newest
    tokens of the prompt that keep all channels.
    Source: Xu et al. 2024, arXiv 2407.21018, section 3 (ratio 0.4 and 0.5 are its own).
    """

    slug_letters: ClassVar[Mapping[str, str]] = {"r": "ratio", "w": "query_window"}
    kinds: ClassVar[Mapping[str, str]] = {"x": "pruned keys", "channels": "channels", SQUARES: "statistics"}
    grouped = watches = True

    ratio: float = 0.4
    query_window: int = 32
    residual: int = 32

    def __post_init__(self) -> None:
        number("ratio", self.ratio, 0, below=1)
        whole_number("query_window", self.query_window, 1)
        whole_number("residual", self.residual, 0)

    def observe(self, notes: Memory, state: State, observation: Observation, prompt: int) -> None:
        """Add the squares of the window's queries, summed over them and the group: [1,H,D]."""
        places = observation.query_positions[0]
        window = (places >= max(prompt - self.query_window, 0)) & (places < prompt)
        squares = widen(observation.queries[:, :, window]).square().sum(2)
        squares = squares.unflatten(1, (observation.keys.shape[1], -1)).sum(2)
        notes[SQUARES] = notes[SQUARES] + squares if notes else squares

    def flush(self, held: Grouped, prompt: bool) -> None:
        due, squares = max(held.exact_of(0) - self.residual, 0), held.notes.pop(SQUARES, None)
        if prompt and due:
            x = widen(held.oldest(0, held.used))
            assert squares is not None or x.is_meta, "the prompt was observed"
            scores = x.square().sum(2) if squares is None else x.square().sum(2) * squares
            channels, keys = self._chosen(scores), held.oldest(0, due)
            held.hold(0, due, {"x": keys.gather(-1, _index(channels, due)), "channels": channels})

    def _chosen(self, scores: Tensor) -> Tensor:
        """The channels [1,H,D'] of the highest score [1,H,D], rising; equal scores: the lower channel stays."""
        staying = scores.shape[-1] - int(self.ratio * scores.shape[-1] + 1e-9)
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        return order[..., :staying].sort(-1).values.to(torch.int16)

    def decode(self, codes: Mapping[str, Tensor], side: int, tokens: int, dim: int) -> Tensor:
        x = widen(codes["x"])
        return x.new_zeros(*x.shape[:3], dim).scatter_(-1, _index(codes["channels"], tokens), x)


def _index(channels: Tensor, rows: int) -> Tensor:
    """Channels [1,H,D'] as an index into [1,H,rows,D]."""
    return channels.long()[:, :, None].expand(-1, -1, rows, -1)

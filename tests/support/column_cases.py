"""Inputs for the kernels: every way in which a call can be odd, drawn from a seed."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One call of a column-sum function: slots at random original positions, the last of all tokens seen as queries."""

    batch: int = 1
    heads: int = 2  # KV heads
    group: int = 2
    new: int = 37
    slots: int = 53
    dim: int = 24
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    sliding_window: int | None = None
    shuffled: bool = False  # slots out of order, as after overwriting in place
    empty: int = 0  # slots per head that hold nothing
    padded: int = 0  # queries of the last sequence that are padding
    prompt: bool = False  # slots and queries are the same tokens, from position 0

    def draw(self, seed: int = 0) -> dict[str, object]:
        """Arguments by name: queries and keys are strided views, as models and preallocated stores hand them over."""
        random = torch.Generator().manual_seed(seed)
        seen = self.new if self.prompt else max(self.slots, self.new) + 11
        queries = torch.randn(self.batch, self.new, self.heads * self.group, self.dim, generator=random)
        store = torch.randn(self.batch, self.heads, self.slots + 5, self.dim + 3, generator=random)
        places = [self._places(seen, random) for _ in range(self.batch * self.heads)]
        query_positions = torch.arange(seen - self.new, seen).repeat(self.batch, 1)
        query_positions[-1, : self.padded] = -1
        return {
            "queries": (2 * queries).to(self.dtype).transpose(1, 2),
            "keys": store.to(self.dtype)[:, :, 2 : 2 + self.slots, 1 : 1 + self.dim],
            "query_positions": query_positions,
            "key_positions": torch.stack(places).view(self.batch, self.heads, self.slots),
            "scaling": 1.3 * self.dim**-0.5,
            "softcap": self.softcap,
            "sliding_window": self.sliding_window,
        }

    def _places(self, seen: int, random: torch.Generator) -> Tensor:
        """Positions [T] of one head's slots."""
        places = torch.randperm(seen, generator=random)[: self.slots]
        places = places if self.shuffled else places.sort().values
        holes = torch.randperm(self.slots, generator=random)[: self.empty]
        return places.index_fill(0, holes, -1)


CASES = {
    "grouped-float32": Case(batch=2, heads=1, new=45, slots=70, dim=40),
    "one-query-head-per-kv-head-float16": Case(heads=3, group=1, new=65, slots=130, dim=16, dtype=torch.float16),
    "one-kv-head-bfloat16": Case(heads=1, group=4, new=33, slots=77, dim=80, dtype=torch.bfloat16),
    "softcap-float32": Case(softcap=1.5),
    "softcap-float16": Case(softcap=20.0, dtype=torch.float16),
    "sliding-window-float32": Case(heads=1, new=70, slots=70, sliding_window=19),
    "sliding-window-shuffled-float16": Case(new=90, slots=90, sliding_window=33, shuffled=True, dtype=torch.float16),
    "sliding-window-ending-with-a-tile-float32": Case(heads=1, new=70, slots=70, sliding_window=34, prompt=True),
    "empty-slots-and-padding-float32": Case(batch=2, empty=9, padded=6, shuffled=True),
    "padding-longer-than-a-tile-bfloat16": Case(batch=2, new=80, padded=71, empty=50, dtype=torch.bfloat16),
    "everything-float16": Case(
        group=3, heads=1, new=70, slots=67, softcap=3.0, sliding_window=30, empty=4, padded=3, dtype=torch.float16
    ),
    "widest-head-float32": Case(heads=1, dim=256, new=9, slots=40),
    "one-slot-one-query-float32": Case(new=1, slots=1, dim=1),
}

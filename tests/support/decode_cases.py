"""Inputs for decode attention: every way in which a call can be odd, drawn from a seed."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kvbench.kernels.decode import decode_attention, decode_attention_flat
from kvbench.kernels.references import NewTokens


@dataclass(frozen=True)
class DecodeCase:
    """One call: the newest tokens ask; slots lie at random positions in random order, empty ones are not a number."""

    batch: int = 1
    heads: int = 2  # KV heads
    group: int = 2
    new: int = 1
    slots: int = 40
    dim: int = 24
    value_dim: int = 24
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    sliding_window: int | None = None
    sinks: bool = False
    packed: bool = False
    empty: int = 0  # slots per KV head that hold nothing
    padded: bool = False  # the last sequence has no token in this step
    weights: bool = False
    sums: int = 0  # 0: none are kept; 1: the group's mean; else one per query head
    programs: int | None = None
    flat: bool = False  # segments of random lengths, at most `slots`, the first of none
    appends: bool = False  # new tokens enter flat segments before
    bias: bool = False  # slots have one

    def draw(self, seed: int, device: str = "cpu") -> dict[str, Any]:
        """Arguments by name; every tensor is a strided view of a larger one, as stores and models hand them over."""
        random = torch.Generator().manual_seed(seed)
        newest = self.slots + self.slots // 4 + self.new  # the last query's position
        asked = torch.arange(newest - self.new + 1, newest + 1).repeat(self.batch, 1)
        if self.padded:
            asked[-1] = -1
        rows = torch.randn(self.batch, self.new, self.heads * self.group, self.dim, generator=random)
        call: dict[str, Any] = {
            "queries": (2 * rows).to(self.dtype).transpose(1, 2),
            "query_positions": asked,
            "scaling": 1.3 * self.dim**-0.5,
            "softcap": self.softcap,
            "sliding_window": self.sliding_window,
            "sinks": torch.randn(self.heads * self.group, generator=random) if self.sinks else None,
            "weights": self.weights,
            "programs": self.programs,
        }
        call |= self._segments(newest, random) if self.flat else self._padded(newest, random)
        return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, call)

    def _padded(self, newest: int, random: torch.Generator) -> dict[str, Any]:
        lead = self.batch, self.heads, self.slots
        sums = torch.rand(self.batch, self.heads, self.slots + 3, max(1, self.sums), generator=random)
        stored = {**self._stored(lead, newest, random), "packed": self.packed}
        if self.bias:
            stored["bias"] = torch.randn(*lead[:-1], lead[-1] + 2, 2, generator=random)[..., 1:-1, 0]
        return stored | {"sums": sums[:, :, : self.slots] if self.sums else None}

    def _segments(self, newest: int, random: torch.Generator) -> dict[str, Any]:
        least = int(self.appends)
        counts = torch.randint(least, self.slots + 1 + least, (self.batch, self.heads), generator=random)
        counts.view(-1)[0] = least
        ends = (counts.flatten() + 2).cumsum(0).view_as(counts)  # two slots of each segment are spare
        stored = self._stored((int(ends[-1, -1]),), newest, random)
        sums = torch.rand(int(ends[-1, -1]), max(1, self.sums) + 1, generator=random)[:, 1:] if self.sums else None
        found = {**stored, "starts": ends - counts - 2, "counts": counts, "most": self.slots + least, "sums": sums}
        if self.bias:
            found["bias"] = torch.randn(int(ends[-1, -1]), 2, generator=random)[:, 0]
        if self.appends:
            slots = (torch.rand(counts.shape, generator=random) * counts).long()
            tokens = (
                torch.randn(self.batch, 1, self.heads, dim + 3, generator=random).to(self.dtype)[..., 2 : 2 + dim]
                for dim in (self.dim, self.value_dim)
            )
            found["new_tokens"] = NewTokens(*(x.transpose(1, 2) for x in tokens), slots)
        return found

    def _stored(self, lead: tuple[int, ...], newest: int, random: torch.Generator) -> dict[str, Any]:
        """keys, values and key_positions [*lead,...]."""
        places = torch.rand(*lead[:-1], max(newest + 1, lead[-1]), generator=random).argsort(-1)[..., : lead[-1]]
        places[torch.rand(lead, generator=random).argsort(-1) < self.empty] = -1
        stored: dict[str, Any] = {"key_positions": places.to(torch.int32)}
        for name, dim in {"keys": self.dim, "values": self.value_dim}.items():
            numbers = torch.randn(*lead[:-1], lead[-1] + 5, dim + 8, generator=random).to(self.dtype)
            stored[name] = numbers[..., 2 : 2 + lead[-1], :dim]
            stored[name][places < 0] = torch.nan
        return stored


def decoded(call: dict[str, Any]) -> dict[str, Tensor | None]:
    """Every result of a call by name; `sums`, and keys and values that took new tokens in, as it left them."""
    found = {**(decode_attention_flat if "starts" in call else decode_attention)(**call)._asdict()}
    found["sums"] = call.get("sums")
    return found | {name: call[name].nan_to_num() for name in ("keys", "values") if call.get("new_tokens")}


half, bf16 = torch.float16, torch.bfloat16
DECODE_CASES = {
    "packed": DecodeCase(packed=True),
    "long-and-nothing-asked": DecodeCase(slots=700, dtype=half, empty=100),
    "packed-and-all-that-is-asked": DecodeCase(packed=True, weights=True, sums=2, batch=2, programs=2),
    "one-launch-with-sums-of-the-mean": DecodeCase(packed=True, sums=1, group=4, programs=1),
    "one-split-alone": DecodeCase(programs=1, empty=5, dtype=half),
    "more-programs-than-tiles": DecodeCase(programs=5, slots=33, weights=True),
    "odd-group-odd-heads": DecodeCase(group=7, heads=1, dim=80, value_dim=96, empty=9, programs=3, sums=7),
    "groups-of-eight-and-three-queries": DecodeCase(group=8, new=3, heads=1, weights=True, sums=1, programs=2),
    "sixteen-queries-bfloat16": DecodeCase(new=16, group=1, dtype=bf16, programs=2, empty=3),
    "sliding-window": DecodeCase(sliding_window=9, new=2, empty=6, weights=True, programs=3),
    "softcap-float16": DecodeCase(softcap=3.0, dtype=half, dim=16, value_dim=64, weights=True),
    "sinks-bfloat16": DecodeCase(sinks=True, dtype=bf16, weights=True, programs=3, sums=2),
    "sinks-and-nothing-else-to-see": DecodeCase(sinks=True, empty=40, weights=True, programs=2),
    "nothing-to-see": DecodeCase(empty=40, weights=True, sums=2, programs=3),
    "a-sequence-without-a-token": DecodeCase(batch=2, padded=True, sums=1, weights=True, programs=2),
    "no-slots": DecodeCase(slots=0, weights=True, sums=1),
    "one-slot": DecodeCase(slots=1, dim=1, value_dim=1, heads=1, weights=True),
    "widest-heads": DecodeCase(dim=256, value_dim=256, heads=1, slots=20),
    "everything": DecodeCase(
        batch=2,
        group=3,
        new=2,
        slots=50,
        dim=20,
        value_dim=12,
        dtype=half,
        softcap=2.0,
        sliding_window=30,
        sinks=True,
        empty=8,
        weights=True,
        sums=1,
        programs=2,
    ),
    "a-bias": DecodeCase(bias=True, batch=2, empty=5, weights=True, programs=3),
    "a-bias-packed-softcap-float16": DecodeCase(bias=True, packed=True, softcap=2.0, dtype=half, sinks=True, sums=2),
    "flat-with-new-tokens": DecodeCase(flat=True, appends=True, batch=2, heads=3, slots=70, programs=4, group=20),
    "flat-with-new-tokens-bfloat16": DecodeCase(flat=True, appends=True, dtype=bf16, value_dim=9, sums=1, empty=4),
    "flat": DecodeCase(flat=True, batch=2, heads=2, programs=2),
    "flat-with-a-bias": DecodeCase(flat=True, appends=True, bias=True, batch=2, softcap=2.0, sums=1, weights=True),
    "flat-and-all-that-is-asked": DecodeCase(
        flat=True,
        heads=3,
        group=3,
        sliding_window=31,
        softcap=4.0,
        sinks=True,
        empty=7,
        weights=True,
        programs=2,
        sums=3,
    ),
}

"""GEAR: quantised blocks, the largest and smallest entries stored exactly, and a low-rank copy of the error.

Shapes: H KV heads, T tokens of a block, D head dim, r rank; one sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.kernels.references import widen
from kvbench.policies.checks import check_choices, number, whole_number
from kvbench.policies.stores.coding import Grouped
from kvbench.policies.stores.kivi import GroupCodec
from kvbench.policies.stores.quantiser import joined, parted


def extremes(x: Tensor, each: int) -> Tensor:
    """Places [...,2*each,D] of the `each` largest and smallest along the second last dimension of x [...,n,D]."""
    order = x.argsort(dim=-2, stable=True)
    places = torch.cat([order[..., :each, :], order[..., x.shape[-2] - each :, :]], dim=-2)
    return places.to(torch.int16 if x.shape[-2] <= torch.iinfo(torch.int16).max else torch.int32)


def low_rank(error: Tensor, rank: int, loops: int, seed: int) -> tuple[Tensor, Tensor]:
    """Factors Q [...,T,r] and P [...,D,r] with Q P^T near `error` [...,T,D], by power iteration from a drawn start.

    Source: GEAR's code; the first factor is orthonormal because both are in the last round.
    """
    rank = min(rank, *error.shape[-2:])
    draw = torch.randn(error.shape[-1], rank, generator=torch.Generator().manual_seed(seed))
    right = draw.to(error).expand(*error.shape[:-2], -1, -1)
    for last in (loop == loops - 1 for loop in range(loops)):
        left = error @ (torch.linalg.qr(right).Q if last else right)
        left = torch.linalg.qr(left).Q if last else left
        right = error.transpose(-1, -2) @ left
    return left, right


@dataclass(frozen=True)
class Gear(GroupCodec):
    """KIVI's groups with `outlier_ratio` of the entries set aside exactly and a rank-`rank` copy of what is lost.

        X ~ codes(X - S) + S + Q P^T, S = "entries set aside," Q P^T = "rank-r copy of the error"

    Keys: groups of tokens per channel, tokens beyond the last whole group stay exact; values: groups of a token's
    channels over all heads. A prompt shorter than a group stays exact.

    group: tokens (keys) or channels (values) that share a scale. rank: of the copy of the error. loops: power
    iterations that find it. outlier_ratio: share of the entries set aside, half of them the largest, half the smallest.
    gap: the number of new tokens that stay exact until they are compressed together. gear_prompt: `prefill` compresses
    the prompt at its end, `never` keeps it exact, `gap` compresses the whole cache again whenever its length is a
    multiple of `gap`. official_counts: set aside as many entries of keys as of values, for blocks of any length, as
    GEAR's code does. seed: of the start of the power iteration.
    Source: Kang et al. 2024, arXiv 2403.05527, and its code (opengear-project/GEAR).
    """

    kinds: ClassVar[Mapping[str, str]] = {
        "words": "codes",
        "exact": "full precision",
        "places": "entries set aside",
        "excess": "entries set aside",
        "left": "low-rank factors",
        "right": "low-rank factors",
    }
    slug_letters: ClassVar[Mapping[str, str]] = {"g": "group", "rank": "rank", "int": "bits"}
    apart = "but gear's value groups span all KV heads"

    group: int = 128
    rank: int = 2
    loops: int = 3
    outlier_ratio: float = 0.01
    gap: int = 100
    gear_prompt: Literal["prefill", "gap", "never"] = "prefill"
    official_counts: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("group", 1), ("rank", 1), ("loops", 1), ("gap", 1), ("seed", 0)):
            whole_number(name, getattr(self, name), least)
        number("outlier_ratio", self.outlier_ratio, 0, below=1)
        check_choices(self)

    def check_shape(self, heads: int, dim: int) -> None:
        if heads * dim % min(self.group, heads * dim):
            raise ConfigError(
                "group",
                self.group,
                why=f"does not divide the {heads * dim} channels of a token's values ({heads} KV heads of {dim})",
            )

    # --- a block: codes of its first tokens, the others exact, entries set aside, low-rank factors ------------------
    def encode(self, x: Tensor, side: int) -> dict[str, Tensor]:
        (_, heads, tokens, dim), wide = x.shape, widen(x)
        coded = tokens if side else tokens // self.group * self.group  # all values, and whole groups of keys
        each = int(heads * dim * self.outlier_ratio / 2)
        if side == 0:
            each = min(each, tokens // 2) if self.official_counts else int(tokens * self.outlier_ratio / 2)
        new = {"exact": x[:, :, coded:].clone(memory_format=torch.contiguous_format)}
        if not coded:
            return new
        columns = _columns(wide, side)
        places = extremes(columns, each)
        index = places.long()
        filled = columns.scatter(-2, index, columns.mean(-2, keepdim=True).expand(*index.shape))
        new |= self._codes(_tokens(filled, side, dim)[:, :, :coded], side, x.dtype)
        lost = _columns(wide - torch.cat([self.plain(new, side, dim), wide[:, :, coded:]], dim=2), side)
        if each:
            new |= {"places": places, "excess": lost.gather(-2, index).to(x.dtype)}
            lost = lost.scatter(-2, index, 0.0)
        left, right = low_rank(_tokens(lost, side, dim)[:, :, :coded], self.rank, self.loops, self.seed)
        return new | {"left": left.to(x.dtype), "right": right.to(x.dtype)}

    def _codes(self, x: Tensor, side: int, dtype: torch.dtype) -> dict[str, Tensor]:
        if side == 0:
            return self.by_channel(x, self.group, dtype)
        x = joined(x)
        return self.by_token(x, min(self.group, x.shape[3]), dtype)

    def plain(self, codes: Mapping[str, Tensor], side: int, dim: int) -> Tensor:
        """Tokens [1,H,T',D] from their codes alone, without the other parts."""
        if side == 0:
            return self.of_channels(codes, self.group).flatten(2, 3)
        group = min(self.group, codes["exact"].shape[1] * dim)
        return parted(self.of_tokens(codes, group), dim)

    def decode(self, codes: Mapping[str, Tensor], side: int, tokens: int, dim: int) -> Tensor:
        if "words" not in codes:
            return widen(codes["exact"])
        x = self.plain(codes, side, dim)
        if codes["exact"].shape[2]:
            x = torch.cat([x, widen(codes["exact"])], dim=2)
        left, right = widen(codes["left"]), widen(codes["right"])
        if "places" in codes:
            columns = _columns(x, side).scatter_add_(-2, codes["places"].long(), codes["excess"].to(x.dtype))
            x = _tokens(columns, side, dim)
        x[:, :, : left.shape[2]] += left @ right.mT
        return x

    # --- which tokens are a block -----------------------------------------------------------------------------------
    def flush(self, held: Grouped, prompt: bool) -> None:
        exact = held.exact_of(0)
        if self.gear_prompt == "gap":
            for gaps in range(held.before // self.gap + 1, 0 if prompt else held.used // self.gap + 1):
                for side in range(2):
                    codes = self.encode(held.view(side)[:, :, : gaps * self.gap], side)
                    held.hold(side, gaps * self.gap - held.in_codes[side], codes, again=True)
        elif not prompt:
            while held.exact_of(0) >= self.gap:
                super().flush(held, prompt)
        else:
            coded = self.gear_prompt == "prefill" and exact >= self.group
            for side in range(2):
                x = held.oldest(side, exact)
                held.hold(side, exact, self.encode(x, side) if coded else {"exact": x.clone()})

    def due(self, side: int, exact: int) -> int:
        return min(exact, self.gap)


def _columns(x: Tensor, side: int) -> Tensor:
    """Tokens [1,H,T,D] in columns with entries set aside: a head's channel, or (values) a token [1,1,H*D,T]."""
    return joined(x).mT if side else x


def _tokens(columns: Tensor, side: int, dim: int) -> Tensor:
    """The inverse of `_columns`."""
    return parted(columns.mT, dim) if side else columns

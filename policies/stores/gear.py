"""GEAR: quantised blocks, the largest and smallest entries stored exactly, and a low-rank copy of the error.

Shapes: H KV heads, T tokens of a block, D head dim, r rank; one sequence.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.kernels.references import widen
from kvbench.policies.checks import check_choices, number, whole_number
from kvbench.policies.stores.codes import ChannelCodes, Chunk, Exact, TokenCodes
from kvbench.policies.stores.quantised import QuantisedLayerStore, QuantisedStore
from kvbench.policies.stores.slot_store import SlotStore


class Sparse(NamedTuple):
    """Entries set aside along the second last dimension of [...,n,D]: their places, and the error of their codes."""

    places: Tensor  # int16, or int32 for large n
    excess: Tensor  # in the model's dtype

    def restored(self, x: Tensor) -> Tensor:
        """x with the entries restored."""
        return x.scatter_add(-2, self.places.long(), self.excess.to(x.dtype))


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


class Block(Chunk):
    """Tokens compressed together: codes of the first ones, the others exact, entries set aside, low-rank factors."""

    def __init__(self, x: Tensor, codes: ChannelCodes | TokenCodes, coded: int, each: int, gear: "Gear") -> None:
        """Compress x [1,H,T,D]; its first `coded` tokens are quantised."""
        self._codes, self._exact, self._coded = codes, Exact().append(x[:, :, coded:], x.dtype), coded
        self._sparse: Sparse | None = None
        self._factors: tuple[Tensor, Tensor] | None = None
        if not coded:
            return
        wide = widen(x)
        columns = self._columns(wide)
        places = extremes(columns, each)
        index = places.long()
        filled = columns.scatter(-2, index, columns.mean(-2, keepdim=True).expand(*index.shape))
        codes.append(self._tokens(filled, x.shape[1])[:, :, :coded], x.dtype)
        lost = self._columns(wide - torch.cat([codes.dequantised(), wide[:, :, coded:]], dim=2))
        if each:
            self._sparse = Sparse(places, lost.gather(-2, index).to(x.dtype))
            lost = lost.scatter(-2, index, 0.0)
        error = self._tokens(lost, x.shape[1])[:, :, :coded]
        left, right = low_rank(error, gear.rank, gear.loops, gear.seed)
        self._factors = left.to(x.dtype), right.to(x.dtype)

    @property
    def _keys(self) -> bool:
        return isinstance(self._codes, ChannelCodes)

    def _columns(self, x: Tensor) -> Tensor:
        """[1,H,T,D] in columns, each with entries set aside: a head's channel, or a token [1,1,H*D,T]."""
        return x if self._keys else x.transpose(2, 3).flatten(1, 2)[:, None]

    def _tokens(self, columns: Tensor, heads: int) -> Tensor:
        """The inverse of `_columns`."""
        return columns if self._keys else columns[:, 0].unflatten(1, (heads, -1)).transpose(2, 3)

    @property
    def tokens(self) -> int:
        return self._coded + self._exact.tokens

    def dequantised(self) -> Tensor:
        if not self._coded:
            return self._exact.dequantised()
        x = torch.cat([self._codes.dequantised(), self._exact.dequantised()], dim=2)
        if self._sparse is not None:
            x = self._tokens(self._sparse.restored(self._columns(x)), x.shape[1])
        if self._factors is not None:
            left, right = (widen(f) for f in self._factors)
            x[:, :, : self._coded] += left @ right.mT
        return x

    def scores(self, rows: Tensor) -> Tensor:
        assert self._keys
        chunks = [chunk for chunk in (self._codes, self._exact) if chunk.tokens]
        scores = torch.cat([chunk.scores(rows) for chunk in chunks], dim=-1)
        if self._sparse is not None:
            places, excess = (x[:, :, None].expand(-1, -1, rows.shape[2], -1, -1) for x in self._sparse)
            scores.scatter_add_(-1, places.flatten(3).long(), (excess.to(rows.dtype) * rows[..., None, :]).flatten(3))
        if self._factors is not None:
            left, right = (f.to(rows.dtype) for f in self._factors)
            scores[..., : self._coded] += rows @ right @ left.mT
        return scores

    def weighted(self, weights: Tensor) -> Tensor:
        assert not self._keys, "all values of a block are coded"
        if not self._coded:
            return self._exact.weighted(weights)
        sums = self._codes.weighted(weights)
        heads, dim = sums.shape[1], sums.shape[3]
        if self._sparse is not None:
            places, excess = (x[0, 0] for x in self._sparse)  # [2*each,T], places among the H*D channels
            places = places.long()
            own = weights[0].permute(0, 2, 1)[places // dim, torch.arange(places.shape[1], device=places.device)]
            flat = sums.new_zeros(heads * dim, weights.shape[2])
            flat.index_add_(0, places.flatten(), (own * excess.to(own.dtype)[..., None]).flatten(0, 1))
            sums += flat.view(1, heads, dim, -1).mT
        if self._factors is not None:
            left, right = (f.to(weights.dtype) for f in self._factors)
            sums += weights @ left @ right.mT
        return sums

    def sizes(self) -> dict[str, int]:
        sizes = Counter(self._codes.sizes())
        sizes.update(self._exact.sizes())
        sizes["entries set aside"] = sum(x.nbytes for x in self._sparse or ())
        sizes["low-rank factors"] = sum(x.nbytes for x in self._factors or ())
        return dict(sizes)


class GearLayerStore(QuantisedLayerStore):
    """The prompt as one block, then a block whenever `gap` new tokens are there."""

    store: "Gear"

    def __init__(self, store: "Gear", dense: SlotStore) -> None:
        super().__init__(store, dense)
        _, heads, _, dim = dense.values.shape
        store.check_shape(heads, dim)
        self._flat = heads * dim
        self._length = 0  # tokens at the end of the last step

    def flush(self, prompt: bool) -> None:
        gear, column = self.store, self._columns[0]
        before, self._length = self._length, column.tokens
        if gear.gear_prompt == "gap":
            for gaps in range(before // gear.gap + 1, 0 if prompt else column.tokens // gear.gap + 1):
                self._compress_all(gaps * gear.gap)
        elif not prompt:
            while column.tail.count >= gear.gap:
                self._compress(gear.gap)
        elif gear.gear_prompt == "prefill" and column.tail.count >= gear.group:
            self._compress(column.tail.count)
        else:
            for side in self._columns:
                x = side.tail.view("x")
                side.replace_chunks([Exact().append(x, x.dtype)], side.tail.count)

    def _compress(self, count: int) -> None:
        """A new block of the tails' first `count` tokens."""
        for side, x in enumerate(column.tail.oldest("x", count) for column in self._columns):
            column = self._columns[side]
            column.replace_chunks([*column.chunks, self._block(x, side)], count)

    def _compress_all(self, count: int) -> None:
        """One block of the first `count` tokens, compressed ones again."""
        for side, column in enumerate(self._columns):
            column.replace_chunks([self._block(column.view()[:, :, :count], side)], count - column.coded)

    def _block(self, x: Tensor, side: int) -> Block:
        gear, tokens = self.store, x.shape[2]
        official = int(self._flat * gear.outlier_ratio / 2)
        if side == 0:
            each = min(official, tokens // 2) if gear.official_counts else int(tokens * gear.outlier_ratio / 2)
            return Block(x, ChannelCodes(gear.quantiser, gear.group), tokens // gear.group * gear.group, each, gear)
        codes = TokenCodes(gear.quantiser, min(gear.group, self._flat), heads=x.shape[1])
        return Block(x, codes, tokens, official, gear)


@dataclass(frozen=True)
class Gear(QuantisedStore):
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

    slug_letters: ClassVar[Mapping[str, str]] = {"g": "group", "rank": "rank", "int": "bits"}

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

    apart = "but gear's value groups span all KV heads"
    layer = GearLayerStore

"""ZipCache: salient tokens in more bits than the rest, values quantised per token after scaling every channel.

Shapes: H KV heads, G query heads per KV head, N tokens, T prompt tokens, D head dim; one sequence.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.kernels.references import widen
from kvbench.policies.checks import number, whole_number
from kvbench.policies.observation import Observation
from kvbench.policies.stores.codes import ChannelCodes, Chunk, TokenCodes
from kvbench.policies.stores.quantised import QuantisedLayerStore, QuantisedStore
from kvbench.policies.stores.quantiser import Quantiser, pack, unpack
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.slots import take

SALIENCY = "zipcache_saliency"
PROBES = 0.05  # share of the prompt's newest positions that probe it, and of positions drawn from the rest


def probes(length: int, seed: int) -> Tensor:
    """Positions of queries that probe a prompt of `length` tokens: the newest, then as many drawn with replacement."""
    first = int(length - PROBES * length)
    drawn = int(PROBES * length)
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([torch.arange(first, length), torch.randint(0, max(first, 1), (drawn,), generator=generator)])


def probe_columns(query_positions: Tensor, wanted: Tensor) -> Tensor:
    """Columns of a step, at positions [M] (-1: padding, the others consecutive), at the wanted positions."""
    real = (query_positions >= 0).nonzero()[:, 0]
    offsets = wanted.to(real.device) - query_positions[real[0]]
    return real[offsets[(offsets >= 0) & (offsets < len(real))]]


class Kinds(NamedTuple):
    """The tokens of fewer bits, bool [1,H,N], and their number per head."""

    low: Tensor
    size: int


def lowest(saliency: Tensor, share: float) -> Kinds:
    """floor(share * N) tokens of the lowest saliency [1,H,N] in every head; ties go to the earlier token."""
    count = int(share * saliency.shape[-1] + 1e-9)
    order = saliency.argsort(dim=-1, stable=True)[..., :count]
    return Kinds(torch.zeros_like(saliency, dtype=torch.bool).scatter_(-1, order, True), count)


def split(x: Tensor, kinds: Kinds) -> tuple[Tensor, Tensor]:
    """Tokens x [1,H,N,D] by kind, each in order: of more bits [1,H,N-size,D], of fewer bits [1,H,size,D]."""
    order = kinds.low.to(torch.uint8).argsort(dim=-1, stable=True)
    high, low = take(x, order).split([x.shape[2] - kinds.size, kinds.size], dim=2)
    return high, low


def channel_scales(parts: tuple[Tensor, Tensor]) -> Tensor:
    """Root of the largest number of every channel of tokens [1,H,n,D], in their dtype: [1,H,1,D]."""
    bounds = [bound(part, 2, keepdim=True) for part in parts if part.shape[2] for bound in (torch.amin, torch.amax)]
    largest = torch.stack(bounds).abs().amax(0)
    scales = widen(largest).sqrt().to(largest.dtype)
    return scales.masked_fill(scales == 0, 1)


class Mixed(Chunk):
    """Tokens of two kinds, each with its number of bits; tokens of more bits are first."""

    def __init__(
        self, parts: tuple[Tensor, Tensor], kinds: Kinds, quantisers: tuple[Quantiser, Quantiser], per_channel: bool
    ) -> None:
        """Quantise `split` tokens: per channel, or per token over all heads' channels once each channel is scaled."""
        _, self._heads, _, self._dim = parts[0].shape
        self._count, self._size = kinds.low.shape[-1], kinds.size
        self._words = pack(kinds.low.to(torch.uint8), 1)
        self._scales = None if per_channel else channel_scales(parts)
        self._codes = tuple(self._coded(part, quantiser) for part, quantiser in zip(parts, quantisers, strict=True))

    def _coded(self, x: Tensor, quantiser: Quantiser) -> ChannelCodes | TokenCodes:
        if self._scales is None:
            codes: ChannelCodes | TokenCodes = ChannelCodes(quantiser, x.shape[2])
        else:
            codes = TokenCodes(quantiser, self._heads * self._dim, heads=self._heads)
        if x.shape[2]:
            codes.append(x if self._scales is None else widen(x) / widen(self._scales), x.dtype)
        return codes

    def extended(self, new: tuple[Tensor, Tensor], kinds: Kinds) -> "Mixed":
        """These dequantised tokens and new ones, `split` by their kinds, all quantised again."""
        high, low = (
            x if old is None else torch.cat([old.to(x.dtype), x], dim=2)
            for old, x in zip(self._parts(), new, strict=True)
        )
        quantisers = self._codes[0].quantiser, self._codes[1].quantiser
        both = Kinds(torch.cat([self.kinds.low, kinds.low], dim=-1), self._size + kinds.size)
        return Mixed((high, low), both, quantisers, self._scales is None)

    @property
    def kinds(self) -> Kinds:
        return Kinds(unpack(self._words, 1, self._count).bool(), self._size)

    def _places(self) -> Tensor:
        """[1,H,N] place of each head's i-th token in the order of more bits, then fewer bits."""
        low = unpack(self._words, 1, self._count)
        before = low.cumsum(-1, dtype=torch.int32)
        steps = torch.arange(self._count, dtype=torch.int32, device=low.device)
        return torch.where(low.bool(), before + (self._count - self._size - 1), steps - before).long()

    @property
    def tokens(self) -> int:
        return self._count

    def _parts(self) -> list[Tensor | None]:
        """Dequantised tokens of each kind, None for a kind without tokens."""
        parts = (codes.dequantised() if codes.tokens else None for codes in self._codes)
        return [x if x is None or self._scales is None else x.mul_(self._scales) for x in parts]

    def dequantised(self) -> Tensor:
        x = torch.cat([x for x in self._parts() if x is not None], dim=2)
        return take(x, self._places())

    def scores(self, rows: Tensor) -> Tensor:
        rows = rows if self._scales is None else rows * widen(self._scales)
        scores = torch.cat([codes.scores(rows) for codes in self._codes if codes.tokens], dim=-1)
        return scores.gather(-1, self._places()[:, :, None].expand_as(scores))

    def weighted(self, weights: Tensor) -> Tensor:
        own = torch.empty_like(weights).scatter_(-1, self._places()[:, :, None].expand_as(weights), weights)
        parts = zip(self._codes, own.split([self._count - self._size, self._size], dim=-1), strict=True)
        out = torch.stack([codes.weighted(x) for codes, x in parts if codes.tokens]).sum(0)
        return out if self._scales is None else out * widen(self._scales)

    def sizes(self) -> dict[str, int]:
        sizes = Counter({"token kinds": self._words.nbytes})
        for codes in self._codes:
            sizes.update(codes.sizes())
        if self._scales is not None:
            sizes["scales and minima"] += self._scales.nbytes
        return dict(sizes)


class ZipCacheLayerStore(QuantisedLayerStore):
    """Quantises the prompt by its saliency, then the whole cache again whenever `gap` new tokens were appended."""

    store: "ZipCache"

    def __init__(self, store: "ZipCache", dense: SlotStore) -> None:
        super().__init__(store, dense)
        self._probes: Tensor | None = None
        self._prompt = 0
        self._saliency: list[Tensor] = []  # [1,H,n] of the tokens to be quantised now, in blocks

    def kinds(self) -> dict[str, int]:
        probing = {} if self._probes is None else {"positions": self._probes.nbytes}
        return {**super().kinds(), **probing}  # probes are held during the prompt, which has no other kinds

    @property
    def watching(self) -> bool:
        return self.in_prompt

    def observe(self, observation: Observation, prompt: int) -> None:
        dense = self._dense()
        if self._probes is None:
            self._prompt = prompt
            self._probes = probes(self._prompt, self.store.seed)
        columns = probe_columns(observation.query_positions[0], self._probes)
        if len(columns):
            chosen = replace(
                observation,
                queries=observation.queries[:, :, columns],
                query_positions=observation.query_positions[:, columns],
                known={},
            )
            dense.state[SALIENCY][..., 0] += chosen.column_sums().sum(2)

    def attended(self, weights: Tensor, positions: Tensor) -> None:
        tail, gap = self._columns[0].tail.count, self.store.gap
        if tail < gap:
            return
        newest, paid = positions[0].max(), weights.unflatten(2, (-1, positions.shape[1]))[..., -tail:].sum(2)
        for end in range(gap, tail + 1, gap):  # the last query of each gap ranks its tokens
            query = (positions[0] == newest - (tail - end)).nonzero()[:, 0]
            if len(query):  # else it was part of an earlier call of an incomplete prompt
                self._saliency.append(paid[:, :, query[0], end - gap : end])

    def _to_columns(self) -> None:
        dense = self._dense()
        assert dense.slots.packed, "all KV heads hold equally many tokens"
        assert dense.slots.ascending
        self._saliency = [self._of_prompt(dense.state[SALIENCY][..., 0], dense.positions.long())]
        self._probes = None
        super()._to_columns()

    def _of_prompt(self, drawn: Tensor, positions: Tensor) -> Tensor:
        """Attention from the probes [1,H,N], divided by the number of tokens later than each position."""
        if positions.is_meta:
            return drawn
        assert self._probes is not None, "the prompt was observed"
        later = self._prompt - positions
        if self.store.exact_count:
            own = self._probes.to(positions.device).sort().values
            later = len(own) - torch.searchsorted(own, positions.contiguous())
        return drawn / later

    def flush(self, prompt: bool) -> None:
        for saliency in self._saliency:
            for side, share in enumerate((self.store.k, self.store.v)):
                if side == 1 and prompt and self.store.v_uses_k_ids_in_prefill:
                    share = self.store.k
                self._requantise(side, lowest(saliency, share))
        self._saliency = []

    def _requantise(self, side: int, kinds: Kinds) -> None:
        """Quantise the tail's first tokens by their kinds, and the tokens quantised before once more."""
        column, count = self._columns[side], kinds.low.shape[-1]
        new = split(column.tail.oldest("x", count), kinds)
        if column.chunks:
            before = column.chunks[0]
            assert isinstance(before, Mixed)
            mixed = before.extended(new, kinds)
        else:
            mixed = Mixed(new, kinds, self.store.quantisers, per_channel=side == 0)
        column.replace_chunks([mixed], count)


@dataclass(frozen=True)
class ZipCache(QuantisedStore):
    """The least salient tokens (shares k of the keys, v of the values) in `bits`, the others in twice as many.

        p_j = 1 / (T - j) sum_(q in "probes") sum_(h in "group") A_(h,q,j)

    Saliency p: attention that probe queries pay (the prompt's newest 5% and as many drawn), per KV head, divided by the
    number of later tokens. Keys: one scale per channel for each kind; values: one per token over all heads' channels,
    scaled by the root of their largest. New tokens are exact until there are `gap`; then the last query's attention
    decides which of these are salient, and the whole cache is quantised again.

    k: share of the keys that are not salient. v: share of the values. gap: new tokens that are quantised together.
    exact_count: divide by the number of probes that could see the token. v_uses_k_ids_in_prefill: the prompt's values
    follow its keys' kinds, as in the released code. seed: of the drawn probes.
    Source: He et al. 2024, arXiv 2405.14256, and its code (ThisisBillhe/ZipCache).
    """

    slug_letters: ClassVar[Mapping[str, str]] = {"k": "k", "v": "v", "int": "bits"}
    statistics: ClassVar[tuple[str, ...]] = (SALIENCY,)
    apart = "but zipcache's value scales span all KV heads"
    layer = ZipCacheLayerStore

    k: float = 0.6
    v: float = 0.6
    gap: int = 100
    exact_count: bool = False
    v_uses_k_ids_in_prefill: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits not in (2, 4):
            raise ConfigError("bits", self.bits, "2 or 4 for zipcache (its salient tokens have twice as many)")
        super().__post_init__()
        number("k", self.k, 0, 1)
        number("v", self.v, 0, 1)
        whole_number("gap", self.gap, 1)
        whole_number("seed", self.seed, 0)

    @property
    def quantisers(self) -> tuple[Quantiser, Quantiser]:
        """Of the salient tokens and of the others."""
        return replace(self.quantiser, bits=2 * self.bits), self.quantiser

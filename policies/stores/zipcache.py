"""ZipCache: salient tokens in more bits than the rest, values quantised per token after scaling every channel.

Shapes: H KV heads, G query heads per KV head, N tokens, T prompt tokens, D head dim; one sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.kernels.references import widen
from kvbench.kernels.selection import take
from kvbench.policies.checks import number, whole_number
from kvbench.policies.observation import Memory, Observation, State
from kvbench.policies.stores.coding import Grouped
from kvbench.policies.stores.kivi import GroupCodec
from kvbench.policies.stores.quantiser import Quantiser, joined, pack, parted, unpack

SALIENCY = "zipcache_saliency"
PROBING = "probes"
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


def kinds_of(codes: Mapping[str, Tensor], tokens: int) -> Kinds:
    """The kinds of coded tokens."""
    return Kinds(unpack(codes["marks"], 1, tokens).bool(), codes["low"].shape[2])


def split(x: Tensor, kinds: Kinds) -> tuple[Tensor, Tensor]:
    """Tokens x [1,H,N,D] by kind, each in order: of more bits [1,H,N-size,D], of fewer bits [1,H,size,D]."""
    high, low = (take(x, tokens) for tokens in order(kinds))
    return high, low


def order(kinds: Kinds) -> tuple[Tensor, Tensor]:
    """The tokens [1,H,n] of each kind, in order: of more bits, of fewer bits."""
    tokens = kinds.low.to(torch.uint8).argsort(dim=-1, stable=True)
    high, low = tokens.split([tokens.shape[-1] - kinds.size, kinds.size], dim=-1)
    return high, low


def channel_scales(parts: tuple[Tensor, Tensor]) -> Tensor:
    """Root of the largest number of every channel of tokens [1,H,n,D], in their dtype: [1,H,1,D]."""
    bounds = [bound(part, 2, keepdim=True) for part in parts if part.shape[2] for bound in (torch.amin, torch.amax)]
    largest = torch.stack(bounds).abs().amax(0)
    scales = widen(largest).sqrt().to(largest.dtype)
    return scales.masked_fill(scales == 0, 1)


@dataclass(frozen=True)
class ZipCache(GroupCodec):
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
    kinds: ClassVar[Mapping[str, str]] = {
        "low words": "codes",
        "high words": "codes",
        "marks": "token kinds",
        PROBING: "positions",
    }
    watches = True

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
        return Quantiser(2 * self.bits, self.metadata, self.fp16_arith), self

    # --- the prompt -------------------------------------------------------------------------------------------------
    def observe(self, notes: Memory, state: State, observation: Observation, prompt: int) -> None:
        if not notes:
            notes[PROBING] = probes(prompt, self.seed)
        columns = probe_columns(observation.query_positions[0], notes[PROBING])
        if len(columns):
            chosen = replace(
                observation,
                queries=observation.queries[:, :, columns],
                query_positions=observation.query_positions[:, columns],
                known={},
            )
            state[SALIENCY][..., 0] += chosen.column_sums().sum(2)

    def of_prompt(self, drawn: Tensor, positions: Tensor, prompt: int, probing: Tensor) -> Tensor:
        """Attention from the probes [1,H,N], divided by the number of tokens later than each position."""
        later = prompt - positions
        if self.exact_count:
            own = probing.to(positions.device).sort().values
            later = len(own) - torch.searchsorted(own, positions.contiguous())
        return drawn / later

    # --- while decoding ---------------------------------------------------------------------------------------------
    def attended(self, held: Grouped, weights: Tensor, positions: Tensor) -> None:
        """Store the attention that the last query of each gap pays to its tokens, [1,H,n]; -1: not known."""
        tail = held.exact_of(0)
        if tail < self.gap:
            return
        newest, paid = positions[0].max(), weights.unflatten(2, (-1, positions.shape[1]))[..., -tail:].sum(2)
        gaps = []
        for end in range(self.gap, tail + 1, self.gap):
            query = (positions[0] == newest - (tail - end)).nonzero()[:, 0]
            if len(query):  # else it was part of an earlier call of an incomplete prompt
                gaps.append(paid[:, :, query[0], end - self.gap : end])
        if gaps:
            held.notes[SALIENCY] = torch.cat(gaps, dim=-1)

    def flush(self, held: Grouped, prompt: bool) -> None:
        saliency, probing = (held.notes.pop(name, None) for name in (SALIENCY, PROBING))
        if prompt and saliency is not None:
            saliency = saliency[..., 0]
            assert probing is not None or saliency.is_meta, "the prompt was observed"
            if probing is not None:
                saliency = self.of_prompt(saliency, held.positions.long(), held.prompt, probing)
        for some in () if saliency is None else (saliency,) if prompt else saliency.split(self.gap, dim=-1):
            for side, share in enumerate((self.k, self.v)):
                if side == 1 and prompt and self.v_uses_k_ids_in_prefill:
                    share = self.k
                new, x = lowest(some, share), held.oldest(side, some.shape[-1])
                if coded := held.in_codes[side]:  # the tokens quantised before, once more
                    before = kinds_of(held.codes_of(side), coded)
                    new = Kinds(torch.cat([before.low, new.low], dim=-1), before.size + new.size)
                    x = torch.cat([held.view(side)[:, :, :coded].to(x.dtype), x], dim=2)
                held.hold(side, some.shape[-1], self.mixed(x, new, side), again=True)

    # --- codes ------------------------------------------------------------------------------------------------------
    def mixed(self, x: Tensor, kinds: Kinds, side: int) -> dict[str, Tensor]:
        """Codes of tokens of two kinds, each with its number of bits: keys per channel; values per token, over all
        heads' channels, once each channel is scaled.
        """
        parts = split(x, kinds)
        codes = {"marks": pack(kinds.low.to(torch.uint8), 1)}
        codes["low"] = codes["marks"].new_empty(*x.shape[:2], kinds.size, 0)  # no bytes: the number of such tokens
        if side == 1:
            codes["scales"] = channel_scales(parts)
        for name, part, quantiser in zip(("high", "low"), parts, self.quantisers, strict=True):
            if side == 0 and part.shape[2]:
                new = quantiser.by_channel(part, part.shape[2], x.dtype)
            elif part.shape[2]:
                part = joined(widen(part) / widen(codes["scales"]))
                new = quantiser.by_token(part, part.shape[3], x.dtype)
            else:
                continue
            codes |= {f"{name} {key}": y for key, y in new.items()}
        return codes

    def decode(self, codes: Mapping[str, Tensor], side: int, tokens: int, dim: int) -> Tensor:
        kinds, heads, whole = kinds_of(codes, tokens), codes["marks"].shape[1], None
        for name, chosen, quantiser in zip(("high", "low"), order(kinds), self.quantisers, strict=True):
            count = chosen.shape[2]
            if not count:
                continue
            own = {key: codes[f"{name} {key}"] for key in ("words", "scale", "minimum")}
            if side == 0:
                x = quantiser.of_channels(own, count).flatten(2, 3)
            else:
                x = parted(quantiser.of_tokens(own, heads * dim), dim).mul_(codes["scales"])
            whole = x.new_empty(1, heads, tokens, dim) if whole is None else whole
            rows = chosen + tokens * torch.arange(heads, device=chosen.device)[:, None]
            whole.view(-1, dim).index_copy_(0, rows.flatten(), x.flatten(0, 2))
        assert whole is not None, "a run of codes has tokens"
        return whole

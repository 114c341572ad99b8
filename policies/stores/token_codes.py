"""Layers whose tokens are coded one by one, so that a single token can be evicted while decoding.

Shapes: B batch, H KV heads, C slots, n tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kvbench.kernels.code_formats import Coded, fits
from kvbench.kernels.devices import decodes
from kvbench.kernels.references import NewTokens, append, decode_attention_flat_ref, widen
from kvbench.kernels.selection import take
from kvbench.kernels.token_codes import append_codes, decode_codes
from kvbench.policies.constants import is_checked
from kvbench.policies.observation import AttentionParams
from kvbench.policies.stores.code_attention import Outliers, attend_to_codes, cover, scores_by_block, weighted_by_block
from kvbench.policies.stores.coding import Coding
from kvbench.policies.stores.slot_store import SIDES, SlotStore
from kvbench.policies.stores.store import Sizes

EPSILON = torch.finfo(torch.float32).eps


class TokenCodeLayer(SlotStore):
    """Slots of exact tokens until the first `settle`, then slots of codes: memory["keys codes"] and so on."""

    def __init__(self, codec: Coding, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> None:
        super().__init__(keys, values, statistics, width)
        self.codec = codec
        self._like = (keys[:, :, :0].clone(), values[:, :, :0].clone())  # for dtype and shape
        self._scales: list[Tensor] = []
        self._fresh: tuple[Tensor, ...] = ()  # keys, values and positions of the step that is not over yet
        self.clipped = None if codec.limit(0) is None or keys.is_meta else 0
        """How many coded numbers of keys and values were beyond the codec's limits; None: it has none."""

    @property
    def coded(self) -> bool:
        """Whether the slots hold codes."""
        return "keys" not in self.memory

    @property
    def step_format(self) -> tuple[object, ...] | None:
        """As of a dense layer; scales of layers are part of the store."""
        dims, form = [x.shape[-1] for x in self._like], self.codec.format(0)
        fitting = self.coded and form is not None and all(fits(form, dim) for dim in dims)
        return (self.codec, *dims) if fitting else None

    @property
    def like(self) -> Tensor:
        return self._like[0]

    @property
    def step_nbytes(self) -> int:
        """Bytes of the exact token of a decoding step: key, value and position."""
        return 8 + sum(x.shape[1] * x.shape[-1] * x.itemsize for x in self._like)

    # --- codes ------------------------------------------------------------------------------------------------------
    def _block(self, side: int) -> Callable[[slice], Tensor]:
        """A function of a range of slots: their tokens, rotated, [B,H,1,n,D] float32."""
        dim, start = self._like[side].shape[-1], SIDES[side] + " "
        held = {name.removeprefix(start): self._view(name) for name in self.memory if name.startswith(start)}

        def block(some: slice) -> Tensor:
            part = {name: x[:, :, some] for name, x in held.items()}
            return self.codec.decode(part, side, len(range(self.used)[some]), dim)[:, :, None]

        return block

    def _exact(self) -> Outliers | None:
        """The tokens of this step, which are exact until it is over."""
        if not self._fresh:
            return None
        keys, values, places = self._fresh
        own = self.positions[:, :, None] == places[:, None, :, None]  # [B,H,n,C]
        return Outliers(keys, values, own.to(torch.uint8).argmax(-1).masked_fill(~own.any(-1), -1))

    def _dequantised(self, side: int) -> Tensor:
        x = self._block(side)(slice(None))[:, :, 0].to(widen(self._like[side]).dtype)
        rotation, exact = self.codec.rotation(x), self._exact()
        x = x if rotation is None else x @ rotation.mT
        return (x if exact is None else cover(x, exact[side], exact.slots)).to(self._like[side].dtype)

    @property
    def keys(self) -> Tensor:
        return self._dequantised(0) if self.coded else super().keys

    @property
    def values(self) -> Tensor:
        return self._dequantised(1) if self.coded else super().values

    # --- bytes ------------------------------------------------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        fitted = self.codec.fitted_tensors.values()
        return super().nbytes + sum(x.nbytes for x in (*self._scales, *self._fresh, *fitted))

    def sizes(self) -> Sizes:
        if not self.coded:
            return Sizes({"full precision": self.nbytes}, self._spare_nbytes())
        sizes = {"codes": 0, "scales and minima": 0, "full precision": 0, "positions": 0}
        for name, x in self.memory.items():
            kind = name if name == "positions" else "statistics"
            if name.partition(" ")[0] in SIDES:
                kind = self.codec.kinds.get(name.partition(" ")[2], "scales and minima")
            sizes[kind] = sizes.get(kind, 0) + x.nbytes
        sizes["scales and minima"] += sum(x.nbytes for x in self._scales)
        sizes["full precision"] += sum(x.nbytes for x in self._fresh)
        sizes["positions"] += 0 if self.free is None else self.free.nbytes
        for name, x in self.codec.fitted_tensors.items():
            sizes[name.partition(" ")[2]] = sizes.get(name.partition(" ")[2], 0) + x.nbytes
        return Sizes(sizes, self._spare_nbytes())

    # --- a step -----------------------------------------------------------------------------------------------------
    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        if not self.coded:
            super().append(keys, values, positions)
            return
        self._fresh = (keys, values, positions)
        self._enter(self._encoded(keys, values, positions[:, None].expand(-1, keys.shape[1], -1)), positions)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        """Only what differs from the present contents is coded: coding the others again would change them."""
        assert bias is None, "only exact stores hold a bias"
        if not self.coded:
            super().write(slots, keys, values)
            return
        differs = [(x != take(held, slots)).any(-1) for x, held in ((keys, self.keys), (values, self.values))]
        self._fresh = ()  # a merged token is not exact any more
        codes = self._encoded(keys, values, self.positions.gather(2, slots).masked_fill(~(differs[0] | differs[1]), -1))
        for name, x in codes.items():
            side = differs[SIDES.index(name.partition(" ")[0])]
            codes[name] = torch.where(side if x.dim() == 3 else side[..., None], x, take(self._view(name), slots))
        self._put(slots, codes, all_names=False)

    def settle(self) -> None:
        self._fresh = ()
        if self.coded:
            return
        exact = [self.memory.pop(name)[:, :, : self.used + self.room] for name in SIDES]
        places = self.memory["positions"][:, :, : self.used + self.room]
        if self._whole and self.slots.packed and self.slots.ascending:
            del self.memory["positions"]
        keys, values = (self._to_code(x, side, places) for side, x in enumerate(exact))
        self.codec = self.codec.fitted(keys, values, places >= 0)
        self._count_clipped(keys, values, places)
        self.memory |= encoded(self.codec, keys, 0) | encoded(self.codec, values, 1)
        scales = [scale for scale in map(self.codec.scale, range(2)) if scale is not None]
        self._scales = [torch.full((1,), scale, device=keys.device, dtype=torch.float32) for scale in scales]
        self.lent = False

    def _to_code(self, x: Tensor, side: int, positions: Tensor) -> Tensor:
        """What is coded of keys or values x [B,H,n,D] at positions [B,H,n] (-1: of an empty slot)."""
        return x

    def _count_clipped(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        if self.clipped is not None:
            self.clipped += int(count_clipped(self.codec, keys, values, positions >= 0).sum())

    def _encoded(self, keys: Tensor, values: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """The tensors of tokens [B,H,n,D] at positions [B,H,n], by name."""
        keys, values = (self._to_code(x, side, positions) for side, x in enumerate((keys, values)))
        self._count_clipped(keys, values, positions)
        return encoded(self.codec, keys, 0) | encoded(self.codec, values, 1)

    # --- attention --------------------------------------------------------------------------------------------------
    def attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        if not self.coded:
            return None
        exact = self._exact()
        if exact is not None and exact.slots.shape[2] == 1 and decodes(queries) and self.step_format is not None:
            return self._attend_in_kernel(queries, positions, how, exact)
        rows = self._rotated(widen(queries))
        if exact is not None:
            exact = exact._replace(**{side: self._rotated(getattr(exact, side).to(rows.dtype)) for side in SIDES})
        blocks, count = (self._block(0), self._block(1)), self.positions.shape[2]
        out, _ = attend_to_codes(
            rows, positions, how, lambda x: scores_by_block(x, count, blocks[0]),
            lambda x: weighted_by_block(x, blocks[1]), self.positions, exact,
        )  # fmt: skip
        rotation = self.codec.rotation(out)
        return (out if rotation is None else out @ rotation.mT).to(queries.dtype)

    def _rotated(self, x: Tensor) -> Tensor:
        """x [...,D] as it is coded; keys and values may differ in D."""
        rotation = self.codec.rotation(x)
        return x if rotation is None else x @ rotation

    def attend_newest(
        self, queries: Tensor, positions: Tensor, how: AttentionParams, keys: Tensor, values: Tensor
    ) -> Tensor:
        """`attend` of a token whose codes are stored already, and whose key and value are exact until the step ends."""
        self._fresh = (keys, values, positions)
        out = self.attend(queries, positions, how)
        assert out is not None, "the slots hold codes"
        return out

    def _attend_in_kernel(self, queries: Tensor, positions: Tensor, how: AttentionParams, exact: Outliers) -> Tensor:
        """Attention of one query over the memory as flat segments; its token was encoded by `append`."""
        memory = {name: x.flatten(0, 2) for name, x in self.token_memory.items()}
        new = NewTokens(exact.keys, exact.values, exact.slots[..., 0])
        places = positions, self.slot_positions().flatten() if "positions" in self.memory else None
        return decode_step(self.codec, queries, new, memory, places, self.segments()[:2], self.used, how, write=False)


# --- a decoding step over flat memory ------------------------------------------------------------------------------
def coded(codec: Coding, memory: Mapping[str, Tensor], side: int, dim: int) -> Coded | None:
    """Codes of D = `dim` numbers in flat memory [N,...] by name, as kernels read them; None if they cannot."""
    form = codec.format(side)
    if form is None or not fits(form, dim):
        return None
    codes, *scales = (x for name, x in memory.items() if name.partition(" ")[0] == SIDES[side])
    scale = scales[0].view(len(codes), -1) if scales else None
    factor, table = codec.scale(side), codec.table(side, dim, codes.device)
    return Coded(codes.view(torch.uint8), scale, table, 1.0 if factor is None else factor, dim, form)


def decode_step(
    codec: Coding, queries: Tensor, new: NewTokens, memory: Mapping[str, Tensor], places: tuple[Tensor, Tensor | None],
    segments: tuple[Tensor, Tensor], most: int, how: AttentionParams, write: bool = True,
    clipped: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention [B,H_q,1,D] of the newest queries over segments of codes, which new tokens enter if `write`.

    memory: flat, [N,...] by name. places: positions of the queries [B,1] and of the slots [N] (None: those of the
    i-th slot of a segment are i). segments: starts and counts [B,H]; `most` bounds the counts. clipped [B] int64: the
    count of numbers beyond the codec's limits, which grows. Nothing waits for a GPU, so that the step can be recorded.
    """
    dims, rotation = (new.keys.shape[-1], new.values.shape[-1]), codec.rotation(queries)
    keys, values = (coded(codec, memory, side, dim) for side, dim in enumerate(dims))
    unlike = rotation is not None and dims[0] != dims[1]  # kernels rotate both sides by one matrix
    if keys is None or values is None or unlike or not decodes(queries):
        return decode_step_ref(codec, queries, new, memory, places, segments, most, how, write, clipped)
    wide, back = queries, None if rotation is None else rotation.mT
    if write and not keys.format.encodes:
        _append(codec, memory, new, segments[0], clipped)
    if write and keys.format.encodes:
        counted = None if clipped is None else (clipped, *_limits(codec))
        wide, new = append_codes(keys, values, segments[0], new, queries, rotation, counted)
    elif rotation is not None:
        wide, *tokens = rotated(rotation, queries, new.keys, new.values)
        new = new._replace(keys=tokens[0], values=tokens[1])
    return decode_codes(wide, keys, values, new, places, segments, most, how.for_kernels, queries.dtype, back)


def decode_step_ref(
    codec: Coding, queries: Tensor, new: NewTokens, memory: Mapping[str, Tensor], places: tuple[Tensor, Tensor | None],
    segments: tuple[Tensor, Tensor], most: int, how: AttentionParams, write: bool = True,
    clipped: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The definition of `decode_step`: dequantize all tokens, put the new ones in their places, attend."""
    if write:
        _append(codec, memory, new, segments[0], clipped)
    keys, values = decoded(codec, memory, 0, new.keys), decoded(codec, memory, 1, new.values)
    positions, (starts, counts) = places[1], segments
    if positions is None:
        positions = torch.arange(len(keys), device=starts.device)
        positions = positions - starts.flatten().repeat_interleave(len(positions) // starts.numel())
    stored = keys, values, places[0], positions, starts, counts, most
    return decode_attention_flat_ref(widen(queries), *stored, *how.for_kernels, new_tokens=new).out.to(queries.dtype)


def _append(
    codec: Coding, memory: Mapping[str, Tensor], new: NewTokens, starts: Tensor, clipped: Tensor | None
) -> None:
    """Encode new tokens [B,H,1,D] and write them to their slots of flat memory."""
    if clipped is not None:
        clipped += count_clipped(codec, new.keys, new.values)
    codes = encoded(codec, new.keys, 0) | encoded(codec, new.values, 1)
    append(memory, codes, starts, new.slots)


def count_clipped(codec: Coding, keys: Tensor, values: Tensor, there: Tensor | None = None) -> Tensor:
    """How many numbers of tokens [B,H,n,D] are beyond the codec's limits, [B]; there [B,H,n]: slots with a token."""
    beyond = (x.float().abs() > limit for x, limit in zip((keys, values), _limits(codec), strict=True))
    counts = sum(x.sum(-1) for x in beyond)
    assert isinstance(counts, Tensor)
    return (counts if there is None else counts * there).sum((1, 2))


def _limits(codec: Coding) -> tuple[float, float]:
    """The limits of keys and of values; a number at the limit may exceed it by the rounding of its division."""
    limits = [codec.limit(side) for side in range(2)]
    assert limits[0] is not None, "the codec counts"
    assert limits[1] is not None, "the codec counts"
    return limits[0] * (1 + EPSILON), limits[1] * (1 + EPSILON)


def encoded(codec: Coding, x: Tensor, side: int) -> dict[str, Tensor]:
    """The tensors of `encode`, named by their side."""
    check_finite(x)
    return {f"{SIDES[side]} {name}": part.contiguous() for name, part in codec.encode(x, side).items()}


def decoded(codec: Coding, memory: Mapping[str, Tensor], side: int, like: Tensor) -> Tensor:
    """All numbers [N,D] of flat memory, in float32 (or float64)."""
    start = SIDES[side] + " "
    held = {name.removeprefix(start): x[None, None] for name, x in memory.items() if name.startswith(start)}
    numbers = codec.decode(held, side, len(next(iter(memory.values()))), like.shape[-1])[0, 0].to(
        widen(like.new_empty(0)).dtype
    )
    rotation = codec.rotation(numbers)
    return numbers if rotation is None else numbers @ rotation.mT


def rotated(rotation: Tensor, *heads: Tensor) -> tuple[Tensor, ...]:
    """Vectors [B,H,1,D] of several kinds, multiplied by the rotation in one launch."""
    whole = torch.cat(heads, dim=1).to(rotation.dtype) @ rotation
    return tuple(whole.split([x.shape[1] for x in heads], dim=1))


def check_finite(x: Tensor) -> None:
    """ValueError for NaN and infinity; not on a GPU while decoding, which would synchronise for every token."""
    if is_checked(x) and not bool(x.isfinite().all()):
        raise ValueError("keys or values contain NaN or infinity")

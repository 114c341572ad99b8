"""Stores of quantised groups: dense tokens until the prompt is complete and evicted, then codes and an exact residual.

Shapes: H KV heads, r = G * M query rows per KV head, C tokens of the longest head, D head dim.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.kernels.quantized import Outliers, Packed, Side, quantised_attention
from kvbench.kernels.references import sink_factor
from kvbench.kernels.tiles import use_triton
from kvbench.policies.observation import AttentionParams, SlotInfo, State
from kvbench.policies.stores.code_attention import attend_to_codes
from kvbench.policies.stores.codes import ChannelCodes, Codes, Column, TokenCodes
from kvbench.policies.stores.head_list import HeadList
from kvbench.policies.stores.quantiser import Group, Metadata, Quantiser
from kvbench.policies.stores.queue import Queue
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.slots import GROWTH, take
from kvbench.policies.stores.store import CompressedStore, LayerStore, Sizes, Store


class QuantisedLayerStore(CompressedStore):
    """Keys and values as two columns: slot i of every KV head holds its i-th token.

    Until the first `settle`, and if KV heads then hold different numbers of tokens, another store holds the tokens.
    Positions are stored only if tokens were evicted, else the i-th token is at position i.
    """

    def __init__(self, store: "ColumnStore", dense: SlotStore) -> None:
        self.store = store
        self._held: SlotStore | HeadList | None = dense  # the dense prompt, or a store for each KV head
        self._columns = (Column(), Column())
        self._evicted = False
        self._places = Queue(GROWTH)  # of positions, empty if nothing was evicted

    @property
    def in_prompt(self) -> bool:
        """Whether the prompt is still dense."""
        return isinstance(self._held, SlotStore)

    # --- contents --------------------------------------------------------------------------------------------------
    @property
    def keys(self) -> Tensor:
        return self._view(0) if self._held is None else self._held.keys

    @property
    def values(self) -> Tensor:
        return self._view(1) if self._held is None else self._held.values

    def _view(self, side: int) -> Tensor:
        """The keys (side 0) or values (1) in the model's dtype."""
        return self.dequantised(side).to(self._columns[side].tail.view("x").dtype)

    def dequantised(self, side: int) -> Tensor:
        """The keys (side 0) or values (1), [1,H,C,D] float32, or float64 for a float64 model."""
        return self._columns[side].view()

    @property
    def positions(self) -> Tensor:
        if self._held is not None:
            return self._held.positions
        if self._evicted:
            return self._places.view("positions")
        tail = self._columns[0].tail.view("x")
        return torch.arange(self._columns[0].tokens, dtype=torch.int32, device=tail.device).expand(*tail.shape[:2], -1)

    @property
    def state(self) -> State:
        held = self._held.state if isinstance(self._held, SlotStore) else {}
        return {name: x for name, x in held.items() if name not in self.store.statistics}

    @state.setter
    def state(self, state: State) -> None:
        """Nothing to do: the statistics of `state` are views."""

    @property
    def slots(self) -> SlotInfo:
        if isinstance(self._held, SlotStore):
            return self._held.slots
        return SlotInfo(packed=self._held is None)

    # --- bytes -----------------------------------------------------------------------------------------------------
    def sizes(self) -> Sizes:
        if self._held is not None:
            return Sizes(self.kinds(), self._held.sizes().spare)
        return Sizes(self.kinds(), sum(queue.spare_nbytes for queue in self._queues))

    @property
    def nbytes(self) -> int:
        return sum(self.kinds().values())

    def kinds(self) -> dict[str, int]:
        """The bytes of every tensor, by kind."""
        if isinstance(self._held, SlotStore):
            return {"full precision": self._held.nbytes}
        if self._held is not None:
            return self._held.sizes().kinds
        kinds = {"codes": 0, "scales and minima": 0, "full precision": 0, "positions": self._places.nbytes()}
        for column in self._columns:
            kinds["full precision"] += column.tail.nbytes()
            for kind, size in (item for chunk in column.chunks for item in chunk.sizes().items()):
                kinds[kind] = kinds.get(kind, 0) + size
        return kinds

    def expect(self, tokens: int) -> None:
        if self._held is not None:
            self._held.expect(tokens)
        for growing in (self._places, *self._columns):
            growing.expect(tokens)

    @property
    def _queues(self) -> list[Queue]:
        """All queues that grow while decoding."""
        return [self._places, *(queue for column in self._columns for queue in column.queues)]

    # --- a step ----------------------------------------------------------------------------------------------------
    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        if self._held is not None:
            self._held.append(keys, values, positions)
            return
        self._append(keys, values, positions[:, None].to(torch.int32).expand(-1, keys.shape[1], -1))

    def _append(self, keys: Tensor, values: Tensor, places: Tensor) -> None:
        """Append tokens at places [1,H,n] to the tails."""
        for column, x in zip(self._columns, (keys, values), strict=True):
            column.tail.append({"x": x})
        if self._evicted:
            self._places.append({"positions": places})

    def keep(self, mask: Tensor, spare: int, count: int | None = None) -> Tensor:
        self._evicted = True
        return self._dense().keep(mask, spare, count)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        assert bias is None, "only exact stores hold a bias"
        self._dense().write(slots, keys, values)

    def release(self, slots: Tensor) -> None:
        self._dense().release(slots)

    def _dense(self) -> SlotStore:
        assert isinstance(self._held, SlotStore), "tokens in quantised groups cannot be evicted or changed one by one"
        return self._held

    def settle(self) -> None:
        first = self.in_prompt
        if first:
            self._to_columns()
        if isinstance(self._held, HeadList):
            self._held.settle()
            return
        self.flush(first)
        if first:
            for queue in (*(column.tail for column in self._columns), self._places):
                queue.compact()  # the tail was a view of the whole prompt

    def flush(self, prompt: bool) -> None:
        """Code the tokens that are due; `prompt`: the first call, when the tails hold the whole prompt."""
        for side, column in enumerate(self._columns):
            self.encode(side, self.store.due(side, column.tail.count))

    def encode(self, side: int, count: int, x: Tensor | None = None) -> None:
        """Code the oldest `count` exact tokens of a side, or `x` [1,H,count,D] in their place."""
        if count:
            column, store = self._columns[side], self.store
            x = column.tail.oldest("x", count) if x is None else x
            column.encode(count, x, lambda x: store.codes(side, x), store.one_chunk)

    def _to_columns(self) -> None:
        """Move the dense tokens into the tails in order of position, or each head's into its own store."""
        dense = self._dense()
        contents = {"keys": dense.keys, "values": dense.values, "positions": dense.positions}
        counts = None if dense.slots.packed and dense.slots.ascending else (dense.positions >= 0).sum(-1).flatten()
        if counts is not None:
            late = torch.iinfo(torch.int32).max
            places = contents["positions"].masked_fill(dense.positions < 0, late).argsort(dim=-1, stable=True)
            contents = {name: take(x, places[..., : int(counts.max())]) for name, x in contents.items()}
        if counts is not None and int(counts.min()) < int(counts.max()):
            heads = enumerate(counts.tolist())
            self._held = HeadList([self._of_head(contents, head, count) for head, count in heads])
        else:
            self._held = None
            self._append(*contents.values())

    def _of_head(self, contents: dict[str, Tensor], head: int, count: int) -> "QuantisedLayerStore":
        """A store of the first tokens of one KV head."""
        own = {name: x[:, head : head + 1, :count] for name, x in contents.items()}
        found = self.store.layer(self.store, SlotStore.of(own, (), ascending=True, packed=True))
        found._evicted = self._evicted
        return found

    # --- attention -------------------------------------------------------------------------------------------------
    def attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        if self._held is not None:
            return self._held.attend(queries, positions, how)
        if not any(column.coded for column in self._columns):
            return None  # all in full precision: the views are the stored tensors
        out = self._attend_packed(queries, positions, how)
        if out is None:
            keys, values = self._columns
            stored = keys.scores, values.weighted, self.positions, self.outliers
            out, weights = attend_to_codes(queries, positions, how, *stored)
            self.attended(weights, positions)
        return out.to(queries.dtype)

    def _attend_packed(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        """Attention by the kernel on packed codes; None if it does not apply and PyTorch computes attention.

        The kernel decodes (one query each, no sliding window) over one chunk of plain codes per side: KIVI, OTT, and
        KCVC in groups. GEAR's blocks add low-rank factors; ZipCache reorders its tokens and needs the weights.
        """
        if not use_triton(queries) or queries.shape[2] != 1 or how.sliding_window is not None:
            return None
        keys, values = (side(column) for column in self._columns)
        if keys is None or values is None:
            return None
        call = queries, positions, keys, values, how.scaling, how.softcap, self.outliers
        out, log_sum_exp, _ = quantised_attention(*call)
        if how.sinks is None:
            return out
        return out * sink_factor(log_sum_exp, how.sinks[..., None])[..., None].to(out.dtype)

    @property
    def outliers(self) -> Outliers | None:
        """Exact tokens that replace some of the codes."""
        return None

    def attended(self, weights: Tensor, positions: Tensor) -> None:
        """Observe the attention weights [1,H,r,C] of queries at positions [1,M]."""


class ColumnStore(Store):
    """A store with a dense prompt until it is complete and evicted, and then two columns.

    After every step, the oldest exact tokens that are `due` are coded by `codes`. Sides: 0 for keys, 1 for values.
    """

    reopens: ClassVar[bool] = False
    layer: ClassVar[type[QuantisedLayerStore]] = QuantisedLayerStore
    """What a layer is, if more than `due` and `codes` is special about it."""
    statistics: ClassVar[tuple[str, ...]] = ()
    """Statistics of the prompt's tokens that the store itself keeps."""

    def due(self, side: int, tokens: int) -> int:
        """How many of `tokens` exact tokens to code now, oldest first."""
        raise NotImplementedError(f"{type(self).__name__} codes tokens in another way")

    def codes(self, side: int, x: Tensor) -> Codes:
        """An empty chunk of codes for tokens like x [1,H,n,D]."""
        raise NotImplementedError(f"{type(self).__name__} codes tokens in another way")

    @property
    def one_chunk(self) -> bool:
        """Whether all codes of a side are one growing chunk, instead of one for each time that tokens are due."""
        return True

    @property
    def apart(self) -> str:
        """Why all KV heads must hold equally many tokens; "" if they need not."""
        return ""

    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        return self.layer(self, SlotStore(keys, values, (*statistics, *self.statistics), width))

    def check_policy(self, name: str, evicts_in_decode: bool, per_head: bool) -> None:
        if evicts_in_decode:
            raise ValueError(
                f"{name} would evict single tokens while decoding, but its store holds tokens in a compressed form, "
                "from which no single token can be evicted: use decode=grow"
            )
        if per_head and self.apart:
            raise ValueError(f"{name} gives each KV head its own budget, {self.apart}")


@dataclass(frozen=True)
class QuantisedStore(ColumnStore):
    """bits: 2, 4 or 8 per number. metadata: dtype of scales and minima (auto: float16 for 16-bit models, else the
    model's own). fp16_arith: quantise in the model's own dtype, as KIVI's code does, instead of float32.
    """

    bits: int = 2
    metadata: Metadata = "auto"
    fp16_arith: bool = False

    def __post_init__(self) -> None:
        Quantiser(self.bits, self.metadata, self.fp16_arith)  # it checks them

    @property
    def quantiser(self) -> Quantiser:
        return Quantiser(self.bits, self.metadata, self.fp16_arith)


def side(column: Column) -> Side | None:
    """A column as `quantised_attention` reads it; None in another form (no codes, several chunks, joined heads)."""
    codes = column.chunks[0] if len(column.chunks) == 1 else None
    if not isinstance(codes, ChannelCodes | TokenCodes) or not codes.tokens:
        return None
    if isinstance(codes, TokenCodes) and codes.heads is not None:
        return None
    words, scale, minimum = map(codes.queue.view, Group._fields)
    packed = Packed(words, scale, minimum, codes.quantiser.bits, codes.group, isinstance(codes, TokenCodes))
    return Side(packed, column.tail.view("x"))


def value_group(group: int, dim: int) -> int:
    """Channels of a value that share a scale: min(group, D). ConfigError if that does not divide the head dimension."""
    channels = min(group, dim)
    if dim % channels:
        why = f"does not divide the head dimension {dim} of the values; choose a divisor or {dim} and more"
        raise ConfigError("group", group, why=why)
    return channels

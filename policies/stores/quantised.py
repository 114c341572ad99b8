"""Stores of quantized groups: dense tokens until the prompt is complete and evicted, then codes and an exact residual.

Shapes: B batch, H KV heads, r = G * M query rows per KV head, C tokens of the longest head, D head dim.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.kernels.quantized import Outliers, Packed, Side, quantised_attention
from kvbench.kernels.references import sink_factor
from kvbench.kernels.tiles import use_triton
from kvbench.policies.observation import AttentionParams, State
from kvbench.policies.stores.code_attention import CodeAttention
from kvbench.policies.stores.codes import ChannelCodes, Codes, Cover, TokenCodes
from kvbench.policies.stores.column import Column
from kvbench.policies.stores.packing import words_for
from kvbench.policies.stores.quantiser import Group, Metadata, Quantiser
from kvbench.policies.stores.queue import Queue
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.slots import GROWTH, take
from kvbench.policies.stores.store import LayerStore, Store
from kvbench.policies.stores.store_list import StoreList


class QuantisedLayerStore(CodeAttention):
    """Keys and values as two columns: slot i of a KV head holds its i-th token.

    Positions are stored only if tokens were evicted, else the i-th token is at position i. Subclasses define in
    `flush` which tokens are quantized when.
    """

    def __init__(self, store: "ColumnStore", dense: SlotStore, keys: Column, values: Column) -> None:
        self.store = store
        self._dense: SlotStore | None = dense  # until the first `settle`
        self._columns = (keys, values)
        self._places = Queue(GROWTH)  # of positions, empty if nothing was evicted

    # --- views -----------------------------------------------------------------------------------------------------
    @property
    def keys(self) -> Tensor:
        return self._columns[0].view(self.cover(0)) if self._dense is None else self._dense.keys

    @property
    def values(self) -> Tensor:
        return self._columns[1].view(self.cover(1)) if self._dense is None else self._dense.values

    @property
    def positions(self) -> Tensor:
        if self._dense is not None:
            return self._dense.positions
        keys = self._columns[0]
        lengths = keys.lengths()
        steps = torch.arange(keys.tokens, dtype=torch.int32, device=lengths.device).expand(*lengths.shape, -1)
        places = self._places.view("positions") if self.evicted else steps
        return places if keys.even else places.masked_fill(steps >= lengths[..., None], -1)

    @property
    def state(self) -> State:
        return {} if self._dense is None else self._dense.state

    def parts(self) -> dict[str, int]:
        if self._dense is not None:
            return {"full precision": self._dense.nbytes}
        sizes = Counter({"codes": 0, "scales and minima": 0, "full precision": 0, "positions": self._places.nbytes()})
        for column in self._columns:
            sizes["full precision"] += column.tail.nbytes("x")
            sizes["positions"] += column.tail.lengths_nbytes
            for chunk in column.chunks:
                sizes.update(chunk.sizes())
        return dict(sizes)

    @property
    def nbytes(self) -> int:
        if self._dense is not None:
            return self._dense.nbytes
        return sum(column.nbytes for column in self._columns) + self._places.nbytes()

    @property
    def spare_nbytes(self) -> int:
        if self._dense is not None:
            return self._dense.spare_nbytes
        return sum(queue.spare_nbytes for queue in self._queues())

    def expect(self, tokens: int) -> None:
        if self._dense is not None:
            self._dense.expect(tokens)
        for queue in self._queues():
            queue.expect(tokens)

    def _queues(self) -> Iterator[Queue]:
        """All queues that grow while decoding."""
        yield self._places
        for column in self._columns:
            yield column.tail
            yield from (chunk.queue for chunk in column.chunks if isinstance(chunk, Codes))

    @property
    def packed(self) -> bool:
        return self._columns[0].even if self._dense is None else self._dense.packed

    @property
    def ascending(self) -> bool:
        return self._dense is None or self._dense.ascending

    # --- append and evict ------------------------------------------------------------------------------------------
    def append(self, keys: Tensor, values: Tensor, positions: Tensor, absent: bool) -> None:
        if self._dense is not None:
            self._dense.append(keys, values, positions, absent)
        else:
            places = positions[:, None].to(torch.int32).expand(-1, keys.shape[1], -1)
            self._append(keys, values, places, ordered=not absent)

    def _append(self, keys: Tensor, values: Tensor, places: Tensor, ordered: bool) -> None:
        """Append tokens at places [B,H,n] to the tails; unless `ordered`, sort them first and drop empty slots (-1)."""
        counts = None
        if not ordered:
            late = torch.iinfo(torch.int64).max
            order = places.long().masked_fill(places < 0, late).argsort(dim=-1, stable=True)
            keys, values, places = take(keys, order), take(values, order), places.gather(-1, order)
            counts = (places >= 0).sum(-1)
        for column, x in zip(self._columns, (keys, values), strict=True):
            column.append(x, counts)
        if self.evicted:
            self._places.append({"positions": places}, counts)

    def keep(self, mask: Tensor, spare: int, counts: Sequence[int] | None = None) -> Tensor:
        self.evicted = True
        return self._exact_store().keep(mask, spare, counts)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        assert bias is None, "only exact stores hold a bias"
        self._exact_store().write(slots, keys, values)

    def release(self, slots: Tensor, rows: Sequence[bool] | None) -> None:
        self._exact_store().release(slots, rows)

    def _exact_store(self) -> SlotStore:
        assert self._dense is not None, "tokens in quantised groups cannot be evicted or changed one by one"
        return self._dense

    # --- the end of a step -----------------------------------------------------------------------------------------
    def settle(self) -> None:
        first = self._dense is not None
        if first:
            self._to_columns()
        self.flush(first)
        if first:
            for column in self._columns:
                column.tail.compact()  # the tail was a view of the whole prompt

    @abstractmethod
    def flush(self, prompt: bool) -> None:
        """Quantize the tokens that are due; `prompt`: the first call, when the tails hold the whole prompt."""

    def _to_columns(self) -> None:
        """Move the dense tokens into the columns' tails, each head's in order of position."""
        dense, self._dense = self._exact_store(), None
        self._append(dense.keys, dense.values, dense.positions, ordered=dense.packed and dense.ascending)
        if self.evicted:
            self._places.compact()

    # --- attention -------------------------------------------------------------------------------------------------
    def attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        if self._dense is not None or not any(column.coded for column in self._columns):
            return None  # all in full precision: the views are the stored tensors
        own = self._attend_packed(queries, positions, how)
        heads = self._columns[0].tail.view("x").shape[1]
        return self.attend_codes(queries, positions, how, heads) if own is None else own

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

    def cover(self, side: int) -> Cover | None:
        """Writes the exact tokens over their codes; side 0: keys, 1: values. None: there are no exact tokens."""
        return None

    def logits(self, rows: Tensor) -> Tensor:
        return self._columns[0].logits(rows, self.cover(0))

    def mix(self, weights: Tensor) -> Tensor:
        return self._columns[1].mix(weights, self.cover(1))


class ColumnStore(Store):
    """A store whose prompt is dense until it is complete and evicted, and then two columns."""

    reopens: ClassVar[bool] = False
    statistics: ClassVar[tuple[str, ...]] = ()
    """Statistics of the prompt's tokens that the store itself keeps."""

    @property
    def apart(self) -> str:
        """Why each sequence needs its own store, in which all KV heads hold equally many tokens; "" if it does not."""
        return ""

    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        if self.apart and len(keys) > 1:
            rows = zip(keys.split(1), values.split(1), strict=True)
            return StoreList([self._open(*row, statistics, width) for row in rows])
        return self._open(keys, values, statistics, width)

    def _open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        return self.empty(SlotStore(keys, values, (*statistics, *self.statistics), width), values)

    @abstractmethod
    def empty(self, dense: SlotStore, values: Tensor) -> QuantisedLayerStore:
        """An empty layer around the dense store of a prompt; values [B,H,*,D] give its shape."""

    def check_policy(self, name: str, evicts_in_decode: bool, per_head: bool) -> None:
        if evicts_in_decode:
            raise ValueError(
                f"{name} would evict single tokens while decoding, but its store holds tokens in a compressed form, "
                "from which no single token can be evicted: use decode=grow"
            )
        if per_head and self.apart:
            raise ValueError(f"{name} gives KV heads budgets of their own, {self.apart}")


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
    """A column as `quantised_attention` reads it; None in another form (several chunks, joined heads)."""
    codes, tail = column.chunks[0] if len(column.chunks) == 1 else None, column.tail
    if not isinstance(codes, ChannelCodes | TokenCodes) or (isinstance(codes, TokenCodes) and codes.heads is not None):
        return None
    return Side(_packed(codes, tail.view("x")), tail.view("x"), tail.counts)


def _packed(codes: ChannelCodes | TokenCodes, tail: Tensor) -> Packed:
    per_token = isinstance(codes, TokenCodes)
    unit = codes.group if isinstance(codes, TokenCodes) else codes.unit
    bits, queue = codes.quantiser.bits, codes.queue
    if queue.most:
        words, scale, minimum = map(queue.view, Group._fields)
        counts = None if queue.counts is None else queue.counts * codes.unit
        return Packed(words, scale, minimum, bits, unit, per_token, counts)
    batch, heads, _, dim = tail.shape
    entry = (batch, heads, 0, dim // unit if per_token else dim)
    words = tail.new_empty(*entry, words_for(unit, bits), dtype=torch.int32)
    scale = tail.new_empty(entry, dtype=codes.quantiser.held_in(tail.dtype))
    return Packed(words, scale, scale, bits, unit, per_token)


def value_group(group: int, dim: int) -> int:
    """Channels of a value that share a scale: min(group, D). ConfigError if that does not divide the head dimension."""
    channels = min(group, dim)
    if dim % channels:
        why = f"does not divide the head dimension {dim} of the values; choose a divisor or {dim} and more"
        raise ConfigError("group", group, why=why)
    return channels

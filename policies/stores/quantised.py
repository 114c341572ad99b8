"""What quantised stores share: dense tokens until the prompt is complete and evicted, then codes and an exact residual.

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
from kvbench.kernels.references import sink_factor, visible, widen
from kvbench.kernels.tiles import use_triton
from kvbench.policies.observation import AttentionParams, State
from kvbench.policies.stores.codes import ChannelCodes, Codes, TokenCodes
from kvbench.policies.stores.column import Column
from kvbench.policies.stores.packing import words_for
from kvbench.policies.stores.quantiser import Group, Metadata, Quantiser
from kvbench.policies.stores.queue import Queue
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.slots import GROWTH, take
from kvbench.policies.stores.store import LayerStore, Store
from kvbench.policies.stores.store_list import open_per_sequence


class QuantisedLayerStore(LayerStore):
    """Keys and values as two columns: slot i of a KV head holds its i-th token.

    Positions are stored only where tokens were evicted, else the i-th token is at position i. Subclasses say in
    `flush` which tokens are quantised when.
    """

    def __init__(self, store: "ColumnStore", dense: SlotStore, keys: Column, values: Column) -> None:
        self.store = store
        self._dense: SlotStore | None = dense  # until the first `settle`
        self._columns = (keys, values)
        self._places = Queue(GROWTH)  # of positions, empty where nothing was evicted

    # --- views -----------------------------------------------------------------------------------------------------
    @property
    def keys(self) -> Tensor:
        return self._columns[0].view() if self._dense is None else self._dense.keys

    @property
    def values(self) -> Tensor:
        return self._columns[1].view() if self._dense is None else self._dense.values

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
        sizes = Counter({"codes": 0, "scales and minima": 0, "full precision": 0, "positions": 0})
        for column in self._columns:
            sizes["full precision"] += column.tail.nbytes("x")
            sizes["positions"] += column.tail.lengths_nbytes
            for run in column.runs:
                sizes.update(run.sizes())
        sizes["positions"] += self._places.nbytes()
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
        """Everything that grows while decoding."""
        yield self._places
        for column in self._columns:
            yield column.tail
            yield from (run.queue for run in column.runs if isinstance(run, Codes))

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
            return
        places = positions[:, None].to(torch.int32).expand(-1, keys.shape[1], -1)
        counts = None
        if absent:
            order = (places < 0).to(torch.uint8).argsort(dim=-1, stable=True)
            keys, values, places = take(keys, order), take(values, order), places.gather(-1, order)
            counts = (places >= 0).sum(-1)
        for column, x in zip(self._columns, (keys, values), strict=True):
            column.append(x, counts)
        if self.evicted:
            self._places.append({"positions": places}, counts)

    def keep(self, mask: Tensor, spare: int, counts: Sequence[int] | None = None) -> Tensor:
        self.evicted = True
        return self._unquantised().keep(mask, spare, counts)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        assert bias is None, "only exact stores hold a bias"
        self._unquantised().write(slots, keys, values)

    def release(self, slots: Tensor, rows: Sequence[bool] | None) -> None:
        self._unquantised().release(slots, rows)

    def _unquantised(self) -> SlotStore:
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
        """Quantise the tokens that are due; `prompt`: the first call, when the tails hold the whole prompt."""

    def _to_columns(self) -> None:
        """Move the dense tokens into the columns' tails, each head's in order of position."""
        dense = self._unquantised()
        keys, values, positions, counts = dense.keys, dense.values, dense.positions, None
        if not (dense.packed and dense.ascending):
            late = torch.iinfo(torch.int64).max
            order = positions.long().masked_fill(positions < 0, late).argsort(dim=-1, stable=True)
            keys, values, positions = take(keys, order), take(values, order), positions.gather(-1, order)
            counts = (positions >= 0).sum(-1)
        for column, x in zip(self._columns, (keys, values), strict=True):
            column.append(x, counts)
        if self.evicted:
            self._places.append({"positions": positions}, counts)
            self._places.compact()
        self._dense = None

    # --- attention -------------------------------------------------------------------------------------------------
    def attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        if self._dense is not None or not any(column.coded for column in self._columns):
            return None  # all in full precision: the views are the stored tensors
        own = self._attend_packed(queries, positions, how)
        if own is not None:
            return own
        batch, query_heads, new, dim = queries.shape
        heads = self._columns[0].tail.view("x").shape[1]
        rows = (widen(queries) * how.scaling).reshape(batch, heads, query_heads // heads * new, dim)
        newest = new == 1 and self.packed and how.sliding_window is None  # it sees every slot
        ordered = not (newest and self.alike)
        logits = self.logits(rows, ordered)
        if how.softcap is not None:
            logits = how.softcap * torch.tanh(logits / how.softcap)
        if newest:
            weights = logits.softmax(-1)
        else:
            seen = visible(positions, self.positions, how.sliding_window).repeat(1, 1, query_heads // heads, 1)
            nothing = ~seen.any(-1, keepdim=True)
            weights = logits.masked_fill_(~(seen | nothing), -torch.inf).softmax(-1).masked_fill_(nothing, 0.0)
        if how.sinks is not None:
            sinks = how.sinks.view(1, heads, -1).repeat_interleave(new, dim=-1)  # a group's rows are [G,M]
            weights *= sink_factor(logits.logsumexp(-1), sinks)[..., None]
        self.attended(weights, positions)
        return self.mix(weights, ordered).view(batch, query_heads, new, -1).to(queries.dtype)

    def _attend_packed(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        """Attention by the kernel on packed codes; None where PyTorch has to attend, on GPUs too.

        The kernel decodes (one query each, no sliding window) over one run of plain codes per side: KIVI, OTT, KCVC in
        groups. GEAR's blocks add low-rank factors; ZipCache's kinds have an order of their own and need the weights.
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
        """Observe the attention weights [B,H,G*M,C] of queries at positions [B,M]; the tail's tokens are last."""

    @property
    def alike(self) -> bool:
        """Whether a token has the same place among the keys' runs as among the values'."""
        return False

    def logits(self, rows: Tensor, ordered: bool = True) -> Tensor:
        """Scaled queries [B,H,r,D] times the keys: [B,H,r,C]; unless `ordered`, in the order of their runs."""
        return self._columns[0].logits(rows, ordered)

    def mix(self, weights: Tensor, ordered: bool = True) -> Tensor:
        """Weights [B,H,r,C] times the values: [B,H,r,D]; unless `ordered`, in the order of their runs."""
        return self._columns[1].mix(weights, ordered)


class ColumnStore(Store):
    """A store whose prompt is dense until it is in and evicted, and then two columns."""

    reopens: ClassVar[bool] = False
    statistics: ClassVar[tuple[str, ...]] = ()
    """Statistics that the store itself keeps of the prompt's tokens."""

    @property
    def apart(self) -> str:
        """Why each sequence needs a store of its own, in which all KV heads hold equally many; "" if it needs none."""
        return ""

    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        if self.apart:
            return open_per_sequence(self._open, keys, values, statistics, width)
        return self._open(keys, values, statistics, width)

    def _open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        return self.empty(SlotStore(keys, values, (*statistics, *self.statistics), width), values)

    @abstractmethod
    def empty(self, dense: SlotStore, values: Tensor) -> QuantisedLayerStore:
        """A layer that starts with the dense store of a prompt; values [B,H,*,D] show their shape."""

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
    """A column as `quantised_attention` reads it; None in another form (several runs, joined heads)."""
    codes, tail = column.runs[0] if len(column.runs) == 1 else None, column.tail
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
    """Channels of a value that share a scale: min(group, D). ValueError if that does not divide the head dimension."""
    channels = min(group, dim)
    if dim % channels:
        raise ConfigError(
            "group",
            group,
            why=f"does not divide the head dimension {dim} of the values; choose a divisor or {dim} and more",
        )
    return channels

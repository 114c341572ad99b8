"""What quantised stores share: tokens are held densely until the prompt is in and evicted, then as codes and a tail.

Shapes: B batch, H KV heads, r = G * M query rows per KV head, C tokens of the longest head, D head dim.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.kernels.attention_rows import beside_sinks, visible, widen
from kvbench.kernels.jit import use_triton
from kvbench.kernels.quantised_attention import Outliers, quantised_attention_triton
from kvbench.policies.observation import AttentionParams, State
from kvbench.policies.stores.column import Column
from kvbench.policies.stores.dense import GROWTH, DenseStore
from kvbench.policies.stores.packed import side
from kvbench.policies.stores.quantiser import Metadata, Quantiser
from kvbench.policies.stores.queue import Queue
from kvbench.policies.stores.slots import take
from kvbench.policies.stores.store import LayerStore, Store


class QuantisedLayerStore(LayerStore):
    """Keys and values as two columns; the tokens of every KV head in order, slot i holding the i-th of them.

    Positions are held where tokens were evicted; without that the i-th token is at position i. Subclasses say in
    `flush` what becomes codes when.
    """

    def __init__(self, dense: DenseStore, keys: Column, values: Column) -> None:
        self._dense: DenseStore | None = dense  # until the first `settle`
        self._columns = (keys, values)
        self._places: Queue | None = None

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
        places = steps if self._places is None else self._places.view("positions")
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
        if self._places is not None:
            sizes["positions"] += self._places.nbytes()
        return dict(sizes)

    @property
    def nbytes(self) -> int:
        if self._dense is not None:
            return self._dense.nbytes
        return sum(column.nbytes for column in self._columns) + (0 if self._places is None else self._places.nbytes())

    @property
    def spare_nbytes(self) -> int:
        if self._dense is not None:
            return self._dense.spare_nbytes
        places = 0 if self._places is None else self._places.spare_nbytes
        return places + sum(column.spare_nbytes for column in self._columns)

    def expect(self, tokens: int) -> None:
        if self._dense is not None:
            self._dense.expect(tokens)
        for column in self._columns:
            column.expect(tokens)
        if self._places is not None:
            self._places.expect(tokens)

    @property
    def packed(self) -> bool:
        return self._columns[0].even if self._dense is None else self._dense.packed

    @property
    def ascending(self) -> bool:
        return self._dense is None or self._dense.ascending

    # --- what comes and goes ---------------------------------------------------------------------------------------
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
        if self._places is not None:
            self._places.append({"positions": places}, counts)

    def keep(self, mask: Tensor, spare: int, counts: Sequence[int] | None = None) -> Tensor:
        self.evicted = True
        return self._before_settling().keep(mask, spare, counts)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self._before_settling().write(slots, keys, values)

    def release(self, slots: Tensor, rows: Sequence[bool] | None) -> None:
        self._before_settling().release(slots, rows)

    def _before_settling(self) -> DenseStore:
        assert self._dense is not None, "tokens in quantised groups cannot be given up or changed one by one"
        return self._dense

    # --- the end of a step -----------------------------------------------------------------------------------------
    def settle(self) -> None:
        first = self._dense is not None
        if first:
            self._take_over()
        self.flush(first)
        if first:
            for column in self._columns:
                column.tail.compact()  # what was handed over were views of the whole prompt

    @abstractmethod
    def flush(self, prompt: bool) -> None:
        """Turn into codes what is due; `prompt`: for the first time, the whole prompt being in the tails."""

    def _take_over(self) -> None:
        """Move from the dense form to columns, each head's tokens in order of position."""
        dense = self._before_settling()
        keys, values, positions, counts = dense.keys, dense.values, dense.positions, None
        if not (dense.packed and dense.ascending):
            order = (
                positions.long().masked_fill(positions < 0, torch.iinfo(torch.int64).max).argsort(dim=-1, stable=True)
            )
            keys, values, positions = take(keys, order), take(values, order), positions.gather(-1, order)
            counts = (positions >= 0).sum(-1)
        for column, x in zip(self._columns, (keys, values), strict=True):
            column.append(x, counts)
        if self.evicted:
            self._places = Queue(GROWTH)
            self._places.append({"positions": positions}, counts)
            self._places.compact()
        self._dense = None

    # --- attention -------------------------------------------------------------------------------------------------
    def attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        if self._dense is not None or not any(column.coded for column in self._columns):
            return None  # all in full precision: the views are the tensors themselves
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
            weights *= beside_sinks(logits.logsumexp(-1), sinks)[..., None]
        self.attended(weights, positions)
        return self.mix(weights, ordered).view(batch, query_heads, new, -1).to(queries.dtype)

    def _attend_packed(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        """Attention by the kernel on packed codes, where it serves; None where PyTorch attends, on GPUs too.

        It serves decoding (one query each, no sliding window) of one run of plain codes per side: KIVI, OTT, KCVC in
        groups. GEAR's blocks add low-rank factors, ZipCache's kinds an order of their own and asks for weights.
        """
        if not use_triton(queries) or queries.shape[2] != 1 or how.sliding_window is not None:
            return None
        keys, values = (side(column) for column in self._columns)
        if keys is None or values is None:
            return None
        call = queries, positions, keys, values, how.scaling, how.softcap, self.outliers
        out, log_sum_exp = quantised_attention_triton(*call)
        if how.sinks is None:
            return out
        return out * beside_sinks(log_sum_exp, how.sinks[..., None])[..., None].to(out.dtype)

    @property
    def outliers(self) -> Outliers | None:
        """Exact tokens that stand in for some of the codes."""
        return None

    def attended(self, weights: Tensor, positions: Tensor) -> None:
        """See the weights [B,H,G*M,C] that queries at positions [B,M] pay; the tail's tokens stand last."""

    @property
    def alike(self) -> bool:
        """Whether a token lies at the same place among the keys' runs as among the values'."""
        return False

    def logits(self, rows: Tensor, ordered: bool = True) -> Tensor:
        """Scaled queries [B,H,r,D] on what is held: [B,H,r,C], unless `ordered` as the keys lie in their runs."""
        return self._columns[0].logits(rows, ordered)

    def mix(self, weights: Tensor, ordered: bool = True) -> Tensor:
        """Weights [B,H,r,C] of what is held: [B,H,r,D]; unless `ordered`, as the values lie in their runs."""
        return self._columns[1].mix(weights, ordered)


@dataclass(frozen=True)
class QuantisedStore(Store):
    """bits: 2, 4 or 8 per number. metadata: dtype of scales and minima (auto: float16 for 16-bit models, else the
    model's own). fp16_arith: quantise in the model's own dtype, as KIVI's code does, instead of float32.
    """

    reopens: ClassVar[bool] = False

    bits: int = 2
    metadata: Metadata = "auto"
    fp16_arith: bool = False

    def __post_init__(self) -> None:
        Quantiser(self.bits, self.metadata, self.fp16_arith)  # it checks them

    @property
    def quantiser(self) -> Quantiser:
        return Quantiser(self.bits, self.metadata, self.fp16_arith)

    def check_policy(self, name: str, evicts_in_decode: bool, per_head: bool) -> None:
        if evicts_in_decode:
            raise ValueError(
                f"{name} would evict single tokens while decoding, but its store holds tokens in quantised groups, "
                "which cannot give one up: use decode=grow"
            )


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

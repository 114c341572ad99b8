"""The layer of a codec of groups: dense tokens until the prompt is complete and evicted, then codes and an exact tail.

Shapes: H KV heads, r = G * M query rows per KV head, C tokens of the longest head, D head dim.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from kvbench.policies.observation import AttentionParams, Observation, SlotInfo, State
from kvbench.policies.stores.code_attention import attend_to_codes, cover
from kvbench.policies.stores.coding import Coding
from kvbench.policies.stores.columns import CodedLayer, Column, Decoder, Queue
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.slots import GROWTH, padded, take
from kvbench.policies.stores.store import CompressedStore, Sizes


class ColumnLayer(CodedLayer, CompressedStore):
    """Keys and values as two columns: slot i of every KV head holds its i-th token.

    Until the first `settle`, a dense store holds the tokens. If KV heads then hold different numbers of them, every
    head gets a layer of its own (`heads`), and the views are copies, in which shorter heads end in empty slots.
    Positions are stored only if tokens were evicted, else the i-th token is at position i. reserved: slots that a batch
    on a GPU has for the codes.
    """

    reserved = 0

    def __init__(
        self, codec: Coding, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int
    ) -> None:  # fmt: skip
        self.codec = codec
        self.dense = SlotStore(keys, values, (*statistics, *codec.statistics), width)
        self.heads: list[ColumnLayer] = []
        self.memory = {}
        growing = codec.growing if codec.one_run else (None, None)
        self.dims = keys.shape[-1], values.shape[-1]
        decoders = (_decoder(codec, side, dim) for side, dim in enumerate(self.dims))
        first, second = map(Column, decoders, growing)
        self.columns = first, second
        self.evicted = False
        self.places = Queue(GROWTH)  # of positions, empty if nothing was evicted

    # --- contents --------------------------------------------------------------------------------------------------
    @property
    def keys(self) -> Tensor:
        return self._view(0)

    @property
    def values(self) -> Tensor:
        return self._view(1)

    def _view(self, side: int) -> Tensor:
        """The keys (side 0) or values (1) in the model's dtype."""
        if self.dense is not None:
            return self.dense.values if side else self.dense.keys
        if self.heads:
            return padded([head._view(side) for head in self.heads]).transpose(0, 1)
        x, exact = self.columns[side].view(), self.codec.traced(self)
        x = x if exact is None else cover(x, exact[side], exact.slots)
        return x.to(self.columns[side].dtype)

    @property
    def positions(self) -> Tensor:
        if self.dense is not None:
            return self.dense.positions
        if self.heads:
            return padded([head.positions for head in self.heads], fill=-1).transpose(0, 1)
        if self.evicted:
            return self.places.view("positions")
        tail = self.columns[0].tail.view("x")
        return torch.arange(self.columns[0].tokens, dtype=torch.int32, device=tail.device).expand(*tail.shape[:2], -1)

    @property
    def state(self) -> State:
        held = {} if self.dense is None else self.dense.state
        return {name: x for name, x in held.items() if name not in self.codec.statistics}

    @state.setter
    def state(self, state: State) -> None:
        """Nothing to do: the statistics of `state` are views."""

    @property
    def slots(self) -> SlotInfo:
        return SlotInfo(packed=not self.heads) if self.dense is None else self.dense.slots

    @property
    def step_format(self) -> tuple[object, ...] | None:
        """Layers of equal formats take their decoding steps in one batch on a GPU; None: this one cannot."""
        coded = self.dense is None and not self.heads and all(column.coded for column in self.columns)
        return (self.codec, *self.dims) if coded and self.codec.most_exact else None

    # --- bytes -----------------------------------------------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        if self.heads:
            return sum(head.nbytes for head in self.heads)
        held = sum(queue.nbytes for queue in self._queues) if self.dense is None else self.dense.nbytes
        return held + sum(x.nbytes for x in self.memory.values())

    def sizes(self) -> Sizes:
        kinds, spare = Counter[str](), sum(queue.spare_nbytes for queue in self._queues)
        for name in ("codes", "scales and minima", "full precision", "positions") if self.dense is None else ():
            kinds[name] = 0
        for head in self.heads:
            own = head.sizes()
            kinds.update(own.kinds)
            spare += own.spare
        if self.dense is not None:
            kinds["full precision"], spare = self.dense.nbytes, self.dense.sizes().spare
        kinds["positions"] += self.places.nbytes
        for column in self.columns:
            kinds["full precision"] += column.tail.nbytes
        named = [item for column in self.columns for run in column.runs for item in run.codes.tensors.items()]
        for name, x in (*named, *self.memory.items()):
            kinds[self.codec.kinds.get(name, "scales and minima")] += x.nbytes
        return Sizes(dict(kinds), spare)

    def expect(self, tokens: int) -> None:
        if self.dense is not None:
            self.dense.expect(tokens)
        self.places.expect(tokens)
        for column in self.columns:
            column.expect(tokens)
        for head in self.heads:
            head.expect(tokens)

    @property
    def _queues(self) -> list[Queue]:
        return [self.places, *(queue for column in self.columns for queue in column.queues)]

    # --- a step ----------------------------------------------------------------------------------------------------
    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        if self.dense is not None:
            self.dense.append(keys, values, positions)
        elif self.heads:
            for head, x, y in zip(self.heads, keys.split(1, dim=1), values.split(1, dim=1), strict=True):
                head.append(x, y, positions)
        else:
            self._append(keys, values, positions[:, None].to(torch.int32).expand(-1, keys.shape[1], -1))

    def _append(self, keys: Tensor, values: Tensor, places: Tensor) -> None:
        """Append tokens at places [1,H,n] to the tails."""
        for column, x in zip(self.columns, (keys, values), strict=True):
            column.append(x)
        if self.evicted:
            self.places.append({"positions": places})

    def keep(self, mask: Tensor, spare: int, count: int | None = None) -> Tensor:
        self.evicted = True
        return self._exact().keep(mask, spare, count)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        assert bias is None, "only exact stores hold a bias"
        self._exact().write(slots, keys, values)

    def release(self, slots: Tensor) -> None:
        self._exact().release(slots)

    def _exact(self) -> SlotStore:
        assert self.dense is not None, "tokens in quantised groups cannot be evicted or changed one by one"
        return self.dense

    @property
    def watching(self) -> bool:
        return self.codec.watches and self.dense is not None

    def observe(self, observation: Observation, prompt: int) -> None:
        self.prompt = prompt
        self.codec.observe(self, observation)

    def settle(self) -> None:
        first = self.dense is not None
        if self.dense is not None:
            self._to_columns(self.dense)
        for head in self.heads:
            head.settle()
        if self.heads:
            return
        self.codec.flush(self, first)
        self.before = self.columns[0].tokens
        if first:
            for queue in (*(column.tail for column in self.columns), self.places):
                queue.compact()  # the tail was a view of the whole prompt

    def _to_columns(self, dense: SlotStore) -> None:
        """Move the dense tokens into the tails in order of position, or each head's into its own layer."""
        self.codec.complete(self)
        contents = {"keys": dense.keys, "values": dense.values, "positions": dense.positions}
        counts = None if dense.slots.packed and dense.slots.ascending else (dense.positions >= 0).sum(-1).flatten()
        if counts is not None:
            late = torch.iinfo(torch.int32).max
            places = contents["positions"].masked_fill(dense.positions < 0, late).argsort(dim=-1, stable=True)
            contents = {name: take(x, places[..., : int(counts.max())]) for name, x in contents.items()}
        self.dense = None
        if counts is not None and int(counts.min()) < int(counts.max()):
            self.heads = [self._of_head(contents, head, count) for head, count in enumerate(counts.tolist())]
            self.memory = {}
        else:
            self._append(*contents.values())

    def _of_head(self, contents: dict[str, Tensor], head: int, count: int) -> ColumnLayer:
        """A layer of the first tokens of one KV head."""
        own = {name: x[:, head : head + 1, :count] for name, x in contents.items()}
        layer = ColumnLayer(self.codec, own["keys"], own["values"], (), 1)
        layer.dense = SlotStore.of(own, (), ascending=True, packed=True)
        layer.memory = {name: x[:, head : head + 1].clone() for name, x in self.memory.items()}
        layer.evicted = self.evicted
        return layer

    # --- attention -------------------------------------------------------------------------------------------------
    def attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        if self.heads:
            return self._attend_by_head(queries, positions, how)
        if not any(column.coded for column in self.columns):
            return None  # all in full precision: the views are the stored tensors
        keys, values = self.columns
        stored = keys.scores, values.weighted, self.positions, self.codec.traced(self)
        out, weights = attend_to_codes(queries, positions, how, *stored)
        self.codec.attended(self, weights, positions)
        return out.to(queries.dtype)

    def _attend_by_head(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        count, own = len(self.heads), [how] * len(self.heads)
        if how.sinks is not None:
            own = [how._replace(sinks=sinks) for sinks in how.sinks.chunk(count, dim=1)]
        groups = zip(self.heads, queries.chunk(count, dim=1), own, strict=True)
        outputs = [head.attend(rows, positions, params) for head, rows, params in groups]
        found = [output for output in outputs if output is not None]
        return torch.cat(found, dim=1) if len(found) == count else None


def _decoder(codec: Coding, side: int, dim: int) -> Decoder:
    """Decodes a side; it knows no layer, so that a layer without references is freed at once."""
    return lambda codes, tokens: codec.decode(codes, side, tokens, dim)

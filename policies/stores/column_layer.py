"""The layer of a codec of groups: dense tokens until the prompt is complete and evicted, then codes and an exact tail.

Shapes: H KV heads, C tokens of the longest head, D head dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from kvbench.policies.observation import AttentionParams, Memory, Observation, SlotInfo, State
from kvbench.policies.stores.code_attention import attend_to_codes
from kvbench.policies.stores.coding import Coding
from kvbench.policies.stores.columns import Column, Columns, Decoder
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.slots import padded, take
from kvbench.policies.stores.store import LayerStore, Sizes

LAST = torch.iinfo(torch.int32).max


class ColumnLayer(LayerStore):
    """A dense store of the tokens until the first `settle`, then `parts`: the columns of all KV heads, or of one each.

    KV heads are apart if they hold different numbers of tokens; the views are then copies, in which shorter heads end
    in empty slots. memory: data of the codec, [1,H,...] by name, until the parts have it. reserved: slots that a batch
    on a GPU has for the codes.
    """

    prompt = reserved = 0

    def __init__(
        self, codec: Coding, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int
    ) -> None:  # fmt: skip
        self.codec, self.dims = codec, (keys.shape[-1], values.shape[-1])
        self.dense: SlotStore | None = SlotStore(keys, values, (*statistics, *codec.statistics), width)
        self.parts: list[Columns] = []
        self.memory: Memory = {}
        self._evicted, self._expected = False, LAST

    # --- contents --------------------------------------------------------------------------------------------------
    @property
    def keys(self) -> Tensor:
        return self.dense.keys if self.dense is not None else self._view(0)

    @property
    def values(self) -> Tensor:
        return self.dense.values if self.dense is not None else self._view(1)

    def _view(self, side: int) -> Tensor:
        return _joined([part.view(side, self.codec.traced(part)) for part in self.parts])

    @property
    def positions(self) -> Tensor:
        if self.dense is not None:
            return self.dense.positions
        return _joined([part.positions for part in self.parts], fill=-1)

    @property
    def state(self) -> State:
        held = {} if self.dense is None else self.dense.state
        return {name: x for name, x in held.items() if name not in self.codec.statistics}

    @state.setter
    def state(self, state: State) -> None:
        """Nothing to do: the statistics of `state` are views."""

    @property
    def slots(self) -> SlotInfo:
        return SlotInfo(packed=len(self.parts) == 1) if self.dense is None else self.dense.slots

    @property
    def step_format(self) -> tuple[object, ...] | None:
        """Layers of equal formats take their decoding steps in one table; None: this one cannot."""
        coded = len(self.parts) == 1 and all(column.coded for column in self.parts[0].columns)
        return (self.codec, *self.dims) if coded and self.codec.most_exact else None

    # --- bytes -----------------------------------------------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        held = sum(queue.nbytes for part in self.parts for queue in part.queues)
        held += 0 if self.dense is None else self.dense.nbytes
        return held + sum(x.nbytes for memory in self._memories for x in memory.values())

    def sizes(self) -> Sizes:
        kinds, spare = Counter[str](), sum(queue.spare_nbytes for part in self.parts for queue in part.queues)
        if self.dense is not None:
            kinds.update({"full precision": self.dense.nbytes, "positions": 0})
            spare = self.dense.sizes().spare
        for name in ("codes", "scales and minima", "full precision", "positions") if self.dense is None else ():
            kinds[name] = 0
        named = [item for memory in self._memories for item in memory.items()]
        for part in self.parts:
            kinds["positions"] += part.places.nbytes
            for column in part.columns:
                kinds["full precision"] += column.tail.nbytes
                named += [item for run in column.runs for item in run.codes.tensors.items()]
        for name, x in named:
            kinds[self.codec.kinds.get(name, "scales and minima")] += x.nbytes
        return Sizes(dict(kinds), spare)

    @property
    def _memories(self) -> list[Memory]:
        return [self.memory, *(part.memory for part in self.parts)]

    def expect(self, tokens: int) -> None:
        self._expected = tokens
        if self.dense is not None:
            self.dense.expect(tokens)
        for part in self.parts:
            part.expect(tokens)

    # --- a step ----------------------------------------------------------------------------------------------------
    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        if self.dense is not None:
            self.dense.append(keys, values, positions)
        count = len(self.parts)
        for part, x, y in zip(self.parts, *(z.chunk(max(count, 1), dim=1) for z in (keys, values)), strict=False):
            part.append(x, y, positions[:, None])

    def keep(self, mask: Tensor, spare: int, count: int | None = None) -> Tensor:
        self._evicted = True
        return self._exact().keep(mask, spare, count)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
        assert bias is None, "only exact stores hold a bias"
        self._exact().write(slots, keys, values)

    def _exact(self) -> SlotStore:
        assert self.dense is not None, "tokens in quantised groups cannot be evicted or changed one by one"
        return self.dense

    @property
    def watching(self) -> bool:
        return self.codec.watches and self.dense is not None

    def observe(self, observation: Observation, prompt: int) -> None:
        self.prompt = prompt
        self.codec.observe(self.memory, self._exact().state, observation, prompt)

    def settle(self) -> None:
        first = self.dense is not None
        if self.dense is not None:
            self.parts, self.memory, self.dense = self._divided(self.dense), {}, None
        for part in self.parts:
            self.codec.flush(part, first)
            part.before = part.columns[0].tokens
            if first:
                part.compact()

    def _divided(self, dense: SlotStore) -> list[Columns]:
        """The tokens in order of position, of all KV heads or of each head."""
        own = {name: dense.state[name] for name in self.codec.statistics}
        contents = {"keys": dense.keys, "values": dense.values, "positions": dense.positions, **own}
        if dense.slots.packed and dense.slots.ascending:
            return [self._part(contents, self.memory)]
        counts = (dense.positions >= 0).sum(-1).flatten()
        order = dense.positions.masked_fill(dense.positions < 0, LAST).argsort(dim=-1, stable=True)
        contents = {name: take(x, order[..., : int(counts.max())]) for name, x in contents.items()}
        if int(counts.min()) == int(counts.max()):
            return [self._part(contents, self.memory)]
        parts = []
        for head, count in enumerate(counts.tolist()):
            memory = {name: x[:, head : head + 1].clone() for name, x in self.memory.items()}
            parts.append(self._part({name: x[:, head : head + 1, :count] for name, x in contents.items()}, memory))
        return parts

    def _part(self, tokens: State, memory: Memory) -> Columns:
        decoders = (_decoder(self.codec, side, dim) for side, dim in enumerate(self.dims))
        keys, values = map(Column, decoders, self.codec.growing)
        part = Columns((keys, values), memory | {name: tokens[name] for name in self.codec.statistics}, self.prompt)
        part.expect(self._expected)
        part.append(tokens["keys"], tokens["values"], tokens["positions"])
        if self._evicted:
            part.places.append({"positions": tokens["positions"]})
        return part

    # --- attention -------------------------------------------------------------------------------------------------
    def attend(self, queries: Tensor, positions: Tensor, how: AttentionParams) -> Tensor | None:
        if self.dense is not None or not all(part.coded for part in self.parts):
            return None  # all in full precision: the views are the stored tensors
        outputs, count = [], len(self.parts)
        for index, (part, rows) in enumerate(zip(self.parts, queries.chunk(count, dim=1), strict=True)):
            own = how if how.sinks is None else how._replace(sinks=how.sinks.chunk(count, dim=1)[index])
            keys, values = part.columns
            stored = keys.scores, values.weighted, part.positions, self.codec.traced(part)
            out, weights = attend_to_codes(rows, positions, own, *stored)
            self.codec.attended(part, weights, positions)
            outputs.append(out)
        return torch.cat(outputs, dim=1).to(queries.dtype)


def _joined(heads: list[Tensor], fill: int = 0) -> Tensor:
    """Views of some KV heads each as one of all, [1,H,C,...]; shorter ones end with `fill`."""
    return heads[0] if len(heads) == 1 else padded(heads, fill).transpose(0, 1)


def _decoder(codec: Coding, side: int, dim: int) -> Decoder:
    """Decodes a side; it knows no layer, so that a layer without references is freed at once."""

    def decode(codes: Mapping[str, Tensor], tokens: int) -> Tensor:
        x = codec.decode(codes, side, tokens, dim)
        return x if x.dim() == 5 else x[:, :, None]

    return decode

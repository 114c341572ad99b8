"""Steps of a table in PyTorch: each row reads views of its own slots, whose numbers the host knows.

Shapes: L layers, P rows of a step, k layers and b rows of a group, n = k * b, H_q query heads, H KV heads, T slots of
the longest row, D head dim.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvbench.cache.attend.backend import Backend, GroupSlots, LayerStep, Segments
from kvbench.cache.layer import Layer
from kvbench.cache.memory import FlatMemory, slot_store
from kvbench.kernels.prompt import attention_behind, masked_attention
from kvbench.kernels.references import append, attention_logits, grouped_attention, weigh
from kvbench.policies.latents import expanded
from kvbench.policies.mergers.merger import Vectors
from kvbench.policies.observation import AttentionParams, known_weights
from kvbench.policies.stores.coding import Coding
from kvbench.policies.stores.ring_layout import RingLayer
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.slots import padded
from kvbench.policies.stores.store import LayerStore
from kvbench.policies.stores.token_codes import TokenCodeLayer, count_clipped, encoded


class TorchBackend(Backend):
    """Attention of each row by itself: rows differ in length, and their slots are used where they are."""

    workspace = 2**23  # 8 MiB
    growth = 1.0
    reserved = 0
    reads_at_once = True
    evicts_codes = True

    def __init__(self) -> None:
        self._layers: Sequence[Sequence[Layer]] = []  # of every row
        self._positions: list[int] = []  # of the next token of every row
        self._weights: dict[tuple[int, int], Tensor] = {}  # [1,H,G,1,T] by layer and row

    def attend_slots(
        self, queries: Tensor, positions: Tensor, held: LayerStore, params: AttentionParams, fresh: bool, in_order: bool
    ) -> Tensor:
        return attend_slots(queries, positions, held, params, fresh, in_order)

    def begin(self, memory: FlatMemory, lengths: Mapping[str, Tensor], layers: Sequence[Sequence[Layer]]) -> None:
        self._layers, self._weights = layers, {}
        counts, self._positions = lengths["counts"].tolist(), lengths["next"].flatten().tolist()  # [L][P][H]
        for row, own in enumerate(layers):
            for index, layer in enumerate(own):
                store = slot_store(layer)
                if not isinstance(store, RingLayer):  # which counts its tokens itself
                    store.used = max(counts[index][row])
                if store.counts is not None:
                    store.counts = lengths["counts"][index, row][None]

    def attend(
        self, step: LayerStep, memory: FlatMemory, lengths: Mapping[str, Tensor], codec: Coding | None
    ) -> Tensor:
        index, outs, new = step.index, [], dict[str, Tensor]()
        if codec is None:
            new = {"keys": step.new.keys, "values": step.new.values}
        elif not codec.grouped:
            new = encoded(codec, step.new.keys, 0) | encoded(codec, step.new.values, 1)
            if "clipped" in lengths:
                lengths["clipped"][index] += count_clipped(codec, step.new.keys, step.new.values)
        if not step.appended:
            append(memory.tensors[index], new, lengths["starts"][index], step.new.slots)
        for row, layers in enumerate(self._layers):
            store, here = slot_store(layers[index]), slice(row, row + 1)
            call = step.queries[here], step.positions[here], step.params
            token = step.new.keys[here], step.new.values[here]
            if isinstance(store, RingLayer):
                store.append(*token, step.positions[here])
            out = store.attend_newest(*call, *token) if isinstance(store, TokenCodeLayer) else store.attend(*call)
            outs.append(self._attend_row(step, row, store) if out is None else out)
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_row(self, step: LayerStep, row: int, store: SlotStore) -> Tensor:
        """Attention of the newest query of a row over its slots, as many in every head, none of which is empty."""
        index, params, here = step.index, step.params, slice(row, row + 1)
        queries, at = step.queries[here], step.positions[here]
        scores = self._layers[row][index].policy.needs.newest_row and not step.appended
        if params.latents is not None:
            store, params, scores = expanded(store, params.latents, {}), params._replace(latents=None), False
        window = params.sliding_window
        if window is not None and self._positions[row] < window:  # it hides no token
            params = params._replace(sliding_window=None)
        if not is_plain(params) or "bias" in store.memory:
            return attend_slots(queries, at, store, params)
        if window is not None or not scores:
            return grouped_attention(queries, store.keys, store.values, None, params.scaling)
        weights = attention_logits(queries, store.keys, params.scaling).softmax(-1)
        self._weights[index, row] = weights
        return weigh(weights, store.values)

    def end(self) -> None:
        self._weights = {}

    def collect_weights(self, memory: FlatMemory, heads: int) -> None:
        """Nothing to do: the attention of rows whose policies need it is kept until the step ends."""

    def slots(self, memory: FlatMemory, segments: Segments, statistics: tuple[str, ...], width: int) -> GroupSlots:
        places = [(layer, row) for layer in segments.layers for row in range(segments.rows.start, segments.rows.stop)]
        stores = [slot_store(self._layers[row][layer]) for layer, row in places]
        weights = [self._weights[place] for place in places if place in self._weights]
        return _Viewed(stores, statistics, weights if len(weights) == len(places) else [])


def is_plain(params: AttentionParams) -> bool:
    """Whether attention is a softmax over all slots, without a window, a soft cap or sinks."""
    return params.sliding_window is None and params.softcap is None and params.sinks is None


def attend_slots(
    queries: Tensor,
    positions: Tensor,
    held: LayerStore,
    params: AttentionParams,
    fresh: bool = False,
    in_order: bool = False,
) -> Tensor:
    """See `Backend.attend_slots`."""
    slots = held.slots
    if not fresh and is_plain(params) and slots.bias is None:
        if queries.shape[2] == 1 and slots.packed:
            return grouped_attention(queries, held.keys, held.values, None, params.scaling)
        if in_order:
            return attention_behind(queries, held.keys, held.values, params.scaling)
    call = queries, held.keys, held.values, positions, held.positions, *params[:3]
    return masked_attention(*call, params.sinks, columns=fresh, bias=slots.bias)


class _Viewed(GroupSlots):
    """Slots that are views of the stores; shorter ones are padded with empty slots."""

    def __init__(self, stores: Sequence[SlotStore], statistics: tuple[str, ...], weights: Sequence[Tensor]) -> None:
        self._stores = stores
        self.positions = padded([store.positions for store in stores], -1)
        states = [store.state for store in stores]
        self.state = {name: padded([state[name] for state in states]) for name in statistics}
        self.known = known_weights(padded(weights, dim=-1)) if weights else {}
        biases = [bias for store in stores if "bias" in store.memory and (bias := store.slots.bias) is not None]
        self.bias = padded(biases) if biases else None
        self.packed = len({store.used for store in stores}) == 1 and all(store.starts is None for store in stores)

    def vectors(self, name: str) -> Vectors:
        return Vectors([getattr(store, name) for store in self._stores])

    def store_state(self) -> None:
        for name, x in self.state.items():
            for store, part in zip(self._stores, x.split(1), strict=True):
                state = store.state
                state[name].copy_(part[:, :, : store.used])
                store.state = state

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        for store, *new in zip(self._stores, *(x.split(1) for x in (slots, keys, values)), strict=True):
            store.write(*new)

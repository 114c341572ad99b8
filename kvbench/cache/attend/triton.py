"""Steps of a table by kernels: slots are gathered by index, and no number is read by the host.

Shapes: L layers, P rows of a step, k layers and b rows of a group, n = k * b, H_q query heads, H KV heads, T slots of
the longest row, D head dim.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvbench.cache.attend.backend import Backend, GroupSlots, LayerStep, Segments
from kvbench.cache.attend.torch import attend_slots
from kvbench.cache.device_groups import ring_of
from kvbench.cache.layer import Layer
from kvbench.cache.memory import EMPTY, RESERVED, FlatMemory
from kvbench.kernels.decode import decode_attention, decode_attention_flat
from kvbench.kernels.devices import decodes, use_triton
from kvbench.kernels.prompt import prompt_attention
from kvbench.kernels.references import append
from kvbench.policies.mergers.merger import Vectors
from kvbench.policies.model_layer import Latents
from kvbench.policies.observation import AttentionParams, Observation, known_weights
from kvbench.policies.stores.coding import Coding
from kvbench.policies.stores.group_step import CODED, group_step
from kvbench.policies.stores.store import LayerStore
from kvbench.policies.stores.token_codes import decode_step


class TritonBackend(Backend):
    """One launch for the attention of a layer, whatever the rows are."""

    workspace = 2**29  # 512 MiB
    growth = 1.5
    reserved = RESERVED
    reads_at_once = False
    evicts_codes = False

    def attend_slots(
        self, queries: Tensor, positions: Tensor, held: LayerStore, params: AttentionParams, fresh: bool, in_order: bool
    ) -> Tensor:
        bias, packed = held.slots.bias, held.slots.packed and params.sliding_window is None
        if not fresh and decodes(queries):
            places: tuple[Tensor | None, Tensor | None] = (None, None) if packed else (positions, held.positions)
            newest = queries, held.keys, held.values, *places, *params.for_kernels
            return decode_attention(*newest, packed=packed, bias=bias).out
        gradients = torch.is_grad_enabled() and queries.requires_grad
        if bias is not None or gradients or not use_triton(held.values):
            return attend_slots(queries, positions, held, params, fresh, in_order)
        call = queries, held.keys, held.values, positions, held.positions, *params.for_kernels
        return prompt_attention(*call, aligned=in_order).out

    def attend_newest(self, seen: Observation) -> tuple[Tensor, Tensor] | None:
        if not decodes(seen.queries):
            return None
        packed = seen.sees_all
        places: tuple[Tensor | None, Tensor | None] = (seen.query_positions, seen.positions)
        places = (None, None) if packed else places
        call = seen.queries, seen.keys, seen.values, *places, *seen.params.for_kernels
        attention = decode_attention(*call, packed=packed, weights=True, bias=seen.slots.bias)
        assert attention.weights is not None
        return attention.out, attention.weights

    def attend_prompt(self, seen: Observation, in_order: bool) -> tuple[Tensor, Tensor] | None:
        if not use_triton(seen.values):
            return None
        call = seen.queries, seen.keys, seen.values, seen.query_positions, seen.positions, *seen.params.for_kernels
        out, log_sum_exp, _ = prompt_attention(*call, in_order)
        return out, log_sum_exp

    def begin(self, memory: FlatMemory, lengths: Mapping[str, Tensor], layers: Sequence[Sequence[Layer]]) -> None:
        """Nothing to do: kernels read starts and counts on the device."""

    def attend(
        self, step: LayerStep, memory: FlatMemory, lengths: Mapping[str, Tensor], codec: Coding | None
    ) -> Tensor:
        index, queries, params = step.index, step.queries, step.params
        places, tensors = (step.positions, memory.positions[index]), memory.tensors[index]
        segments = lengths["starts"][index], lengths.get(CODED, lengths["counts"])[index]
        if params.latents is not None:
            return _attend_latents(step, memory, segments, params.latents)
        if codec is not None and codec.grouped:
            ring = ring_of(lengths, index)
            return group_step(
                codec, queries, step.new, step.gone, tensors, ring, places, segments, step.longest, params
            )
        if codec is not None:
            clipped = lengths["clipped"][index] if "clipped" in lengths else None
            call = queries, step.new, tensors, places, segments, step.longest, params
            return decode_step(codec, *call, clipped=clipped)
        stored = tensors["keys"], tensors["values"], *places, *segments, step.longest
        sums = None if memory.weights is None or step.appended else memory.weights[index]
        new = None if step.appended else step.new
        bias = None if memory.bias is None else memory.bias[index]
        return decode_attention_flat(queries, *stored, *params.for_kernels, sums=sums, new_tokens=new, bias=bias).out

    def collect_weights(self, memory: FlatMemory, heads: int) -> None:
        memory.collect_weights(heads)

    def slots(self, memory: FlatMemory, segments: Segments, statistics: tuple[str, ...], width: int) -> GroupSlots:
        return _Gathered(memory, segments, statistics, width)


def _attend_latents(step: LayerStep, memory: FlatMemory, segments: tuple[Tensor, Tensor], latents: Latents) -> Tensor:
    """Append the latents of a layer, and attend to the keys and values of all heads, which the model expands."""
    tensors, (starts, counts), queries = memory.tensors[step.index], segments, step.queries
    append(tensors, {"keys": step.new.keys, "values": step.new.values}, starts, step.new.slots)
    columns = torch.arange(step.longest, device=queries.device)
    inside = torch.where(columns < counts[..., None], starts[..., None] + columns, EMPTY)  # [P,1,T]
    keys, values = latents.expand(tensors["keys"][inside], tensors["values"][inside])
    positions = memory.positions[step.index][inside].expand(-1, keys.shape[1], -1).contiguous()
    call = queries, keys, values, step.positions, positions, *step.params.for_kernels
    return decode_attention(*call).out


class _Gathered(GroupSlots):
    """Slots that are gathered from flat memory by their index."""

    def __init__(self, memory: FlatMemory, segments: Segments, statistics: tuple[str, ...], width: int) -> None:
        there = segments.columns < segments.counts[..., None]
        self._inside = torch.where(there, segments.starts[..., None] + segments.columns, EMPTY)  # [k,b,H,T]
        self._tensors = [memory.tensors[layer] for layer in segments.layers]
        where = (self._inside + memory.offsets[segments.which][..., None]).flatten(0, 1)  # in all layers, [n,H,T]
        self._where, self._stored = where, {name: memory.statistics[name, width].flatten(0, 1) for name in statistics}
        self.positions = memory.positions.view(-1)[where]
        self.state = {name: x[where] for name, x in self._stored.items()}
        self.known = {}
        self.bias = None if memory.bias is None else memory.bias.flatten()[where]
        if memory.weights is not None:
            self.known = known_weights(memory.weights.flatten(0, 1)[where].transpose(-1, -2)[:, :, :, None])

    def vectors(self, name: str) -> Vectors:
        each = zip(self._tensors, self._inside, strict=True)
        return Vectors([torch.cat([tensors[name][own] for tensors, own in each])])

    def store_state(self) -> None:
        for name, x in self.state.items():
            self._stored[name][self._where] = x

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        count = len(self._tensors)
        into = self._inside.flatten(0, 1).gather(-1, slots).view(count, -1)
        for name, new in (("keys", keys), ("values", values)):
            each = zip(self._tensors, into, new.reshape(count, -1, new.shape[-1]), strict=True)
            for tensors, own, x in each:
                tensors[name].index_copy_(0, own, x.to(tensors[name].dtype))

"""A cache for tokens that attend to a prompt stored in another cache, which they do not change.

Shapes: H_q query heads, H_kv KV heads, n tokens of a call, T stored tokens, D head dim.
"""

from abc import abstractmethod
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from kvbench.cache.attention import attend
from kvbench.cache.cache import KVCache
from kvbench.cache.calls import Columns
from kvbench.cache.hook import LayerCall
from kvbench.cache.sequence import CachedSequence
from kvbench.cache.step import Step
from kvbench.policies.needs import Needs
from kvbench.policies.observation import AttentionParams, State
from kvbench.policies.policy import Policy
from kvbench.policies.schedule import Span
from kvbench.policies.stores.slot_store import SlotStore


class PassCache(KVCache):
    """Lets new tokens attend to a sequence stored in another cache, and to the tokens of earlier calls.

    stored: that sequence. span: the tokens of the running call, which follow it. own: keys, values and positions of the
    tokens of all calls so far, by layer.
    """

    stored: CachedSequence
    span: Span
    own: dict[int, State]

    @classmethod
    def over(cls, config: PreTrainedConfig, stored: CachedSequence) -> Self:
        """A cache over a stored sequence, with a copy of its recurrent states."""
        found = cls(config, Policy(name="full"))
        found.sequence.states = {name: state.clone() for name, state in stored.states.items()}
        found.stored, found.own, found.sequence.started = stored, {}, True
        found.span = Span(stored.seen, stored.seen, opens=True, evicts=False, phase="prompt")
        return found

    def follow(self, tokens: int, device: torch.device) -> Tensor:
        """Begin a call of `tokens` tokens, which follow all others; returns their positions [1,tokens]."""
        begin = self.sequence.seen = self.span.end
        self.span = self.span._replace(start=begin, end=begin + tokens)
        for extra in self.extras:
            extra.begin_call(self.sequences, None)
        return torch.arange(begin, begin + tokens, device=device)[None]

    @property
    def own_nbytes(self) -> int:
        """Bytes of the tokens of all calls."""
        return sum(x.nbytes for contents in self.own.values() for x in contents.values())

    def places(self, index: int) -> Tensor:
        """The positions [1,H_kv,T] of a layer's stored tokens, -1 for slots that are not attended to."""
        return self.stored.layers[index].store.positions

    @abstractmethod
    def observe(self, index: int, step: Step) -> None:
        """Use a layer's step after its attention. The slots of its store are the stored ones, then those of `own`."""

    def attend(
        self, call: LayerCall, module: nn.Module, queries: Tensor, columns: Columns, params: AttentionParams
    ) -> Tensor:
        index, keys, values = self._places[call.index], call.new_keys, call.new_values
        store = self.stored.layers[index].store
        if self.stored.policy.granularity == "query_head":
            group = queries.shape[1] // keys.shape[1]
            keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        at = torch.arange(self.span.start, self.span.end, device=keys.device)[None]
        new = {"keys": keys, "values": values, "positions": at.to(torch.int32)[:, None].expand(keys.shape[:3])}
        stored = {"keys": store.keys, "values": store.values, "positions": self.places(index)}
        if store.slots.bias is not None:
            stored["bias"], new["bias"] = store.slots.bias, torch.zeros(keys.shape[:3], device=keys.device)
        if index in self.own:
            new = {name: torch.cat([x, new[name]], dim=2) for name, x in self.own[index].items()}
        self.own[index] = new
        both = {name: torch.cat([x, new[name]], dim=2) for name, x in stored.items()}
        held = SlotStore.of(both, (), store.slots.ascending)
        whose: dict[str, Any] = {"policy": self.policy, "sequence": self.sequence, "layer": self.sequence.layers[index]}
        step = Step(queries, keys, values, at, self.span, params, held, **whose)
        out = attend(step, Needs())
        for extra in self.extras:
            extra.attended(step)
        self.observe(index, step)
        return out

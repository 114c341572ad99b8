"""The cache: it takes each layer's new tokens, attends, and evicts what the policies of its sequences do not keep.

A token's way: `update` hands a `LayerCall` to the attention function, which leads to `attend`. There the layer's new
keys and values are appended to its store (`kvbench.cache.state`), attention is computed over what is held
(`kvbench.cache.attention`), and the eviction is due (`kvbench.cache.eviction`).

Shapes: B batch, L layers, H_q query heads, H_kv KV heads, M new tokens, C slots, D head dim.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from kvbench.cache import NAME
from kvbench.cache.attention import QKV
from kvbench.cache.audit import BudgetError, ScoreError, audit, check_call
from kvbench.cache.caller import Caller, check_heads, check_policy
from kvbench.cache.device_batch import DeviceBatch, can_join
from kvbench.cache.eviction import Evictions
from kvbench.cache.group import PolicyGroup, in_order
from kvbench.cache.group_attention import GroupAttention
from kvbench.cache.hook import LayerCall, SharedCall, expect
from kvbench.cache.interface import check_interface
from kvbench.cache.layer import EmptyLayer, KVLayer, stacked
from kvbench.cache.layout import layout_of
from kvbench.cache.model_layer import model_layer
from kvbench.cache.recurrent import RecurrentKVLayer, RecurrentLayer, check_padding
from kvbench.cache.saving import load, save
from kvbench.cache.shared import SharedReads
from kvbench.cache.uncompiled import uncompiled
from kvbench.policies.latents import check_latents
from kvbench.policies.observation import AttentionParams
from kvbench.policies.policy import Policy
from kvbench.policies.policy_checks import check_next_prompt

__all__ = ["BudgetError", "KVCache", "ScoreError"]


class KVCache(Cache):
    """A cache that holds what its policy keeps; pass it to `model.generate` or to the model itself.

    prompt_length: tokens of the prompt, one number or one per sequence. Without it the first call is the whole prompt:
    where it comes in several (`generate(..., prefill_chunk_size=...)`), nothing else tells the cache.
    question: at which position of its prompt the question begins, one number or one per sequence, for policies that ask
    (FINCH); for a later prompt `next_prompt` takes it, counted from that prompt's first token.
    Tokens after the prompt come one by one: several at once are refused until `next_prompt` opened another prompt
    (except by `full` outside of `generate`, to which it makes no difference).
    Raises ValueError for a model that does not follow transformers' attention interface.

    With `next_prompt` all that was seen before counts as part of the new prompt, which is read by the policy's
    schedule:
    - Its end (every block of it, counted from its own first token) brings the whole cache to the budget: kept tokens,
      generated ones and new ones compete. What was evicted does not come back, so that a layer or a KV head may hold
      less than its share.
    - A budget that is a share, and every allocator, counts all tokens seen until the new prompt's end; statistics over
      layers are measured anew, on what is stored.
    - Observation windows hold the newest queries at hand: of this prompt, and, where the policy holds its window while
      decoding, of before. Running statistics (H2O, RoCo, D2O, ...) and a merger's thresholds go on; queries of tokens
      that decoding took in without evicting (`grow`) are in no statistic.
    - Sinks are the first tokens of all, recent windows the newest. SirLLM gives a prompt's first token surprisal 0.
    - A policy that keeps every token in a quantised store takes the new prompt in exactly and then quantises it as it
      does generated tokens; one that evicts has to be refused: quantised groups give no token up.

    A long document is compressed once and asked about later, in another process or on another machine:

        cache = KVCache(model.config, policy)
        with torch.inference_mode():
            model(document, past_key_values=cache)          # ids [1,T]
        cache.save("document.safetensors")

        cache = KVCache.load("document.safetensors", model.config, policy, device=model.device)
        ids = torch.cat([document, question], dim=1)        # `generate` takes the ids of the whole conversation
        cache.next_prompt(question.shape[1])
        answer = model.generate(ids, past_key_values=cache, max_new_tokens=64, do_sample=False)
    """

    _teacher_forced: ClassVar[bool] = False
    """Whether tokens after the prompt are given and may come several at once, each a decoded one all the same."""

    def __init__(
        self,
        config: PreTrainedConfig,
        policy: Policy,
        prompt_length: int | Sequence[int] | None = None,
        question: int | Sequence[int] | None = None,
    ) -> None:
        self.config = config.get_text_config(decoder=True)
        check_interface(self.config)
        self._prompt_length, self._question = prompt_length, question
        self._layout = layout_of(self.config)
        self.groups = [self._new_group(policy)]
        self.one_prompt = False  # all groups read one and the same sequence
        self._batch: DeviceBatch | None = None  # see `on_device`
        self._evictions = Evictions()
        self._caller = Caller(self.config)
        self._shared = SharedReads(self._layout)
        self._attention = GroupAttention(self._evictions, self._shared)
        self._places = self._layout.places
        layers: list[Any] = [self._new_layer(index) for index in range(self._layout.layers)]
        self.attention_layers: list[KVLayer] = [layers[index] for index in self._layout.attention]
        super().__init__(layers=layers)
        self._is_user_defined = False  # transformers sets it where `model.generate` is given the cache

    def _new_group(self, policy: Policy) -> PolicyGroup:
        """Sequences to come, under a policy. ValueError where only our own generation can drive it."""
        check_policy(policy)
        if self._layout.latent:
            check_latents(policy)
        # Where every token stays as it came, nothing depends on where a prompt ends.
        several = self._teacher_forced or (policy.store.exact and not policy.evicts)
        return PolicyGroup(self.config, policy, self._prompt_length, several, self._question)

    def _new_layer(self, index: int) -> KVLayer | RecurrentLayer | EmptyLayer:
        """A layer of the model, by its index there."""
        place = self._places.get(index)
        if index not in self._layout.states:
            return EmptyLayer() if place is None else KVLayer(self.groups, place)
        if place is None:
            return RecurrentLayer(self.groups, index, self._layout)
        return RecurrentKVLayer(self.groups, place, index, self._layout)

    # --- one call of the model, layer by layer ---------------------------------------------------------------------
    @uncompiled  # transformers hands on to attention what this returns, keys and values or not
    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[LayerCall | Tensor, LayerCall | Tensor]:
        """Hand the new keys and values [B,H_kv,M,D] of a layer, or its latents, on to its attention, which appends."""
        place = self._places[layer_idx]
        if place == 0 and (self.config._attn_implementation != NAME or "kvpress" in sys.modules):
            self._caller.check_attention()
        call = LayerCall(layer_idx, partial(self._called, place, key_states, value_states))
        if self._layout.latent:  # the model expands them on the way, to keys and values of all heads
            expect(call)
            return key_states, value_states
        if place in self._layout.owned:
            call = SharedCall(call, partial(self._read, place, key_states.shape[2]))
        return call, call

    def _read(self, owner: int, columns: int, queries: Tensor, params: AttentionParams) -> Tensor:
        """Attention of a layer that reads another's keys and values, for the last queries of a call of `columns`."""
        out = self._shared.attend(owner, columns, queries, params, dict(self._rows()))
        if self._shared.all_read:
            self._end_call()
        return out

    def _called(self, index: int, keys: Tensor, values: Tensor, reader: nn.Module, *args: Any) -> Tensor:  # noqa: ANN401
        """What the attention function calls. reader: the module that attends; args: queries, mask, parameters."""
        queries, mask, params = args
        if index == 0 and (self._caller.reader is None or self._caller.reader() is not reader):
            self._caller.check(reader)
        if any(group.policy.needs.model for group in self.groups):
            params = params._replace(model=model_layer(reader, queries))
        return self.attend(index, QKV(queries, keys, values), mask, params)

    def attend(self, index: int, new: QKV, mask: Tensor | None, params: AttentionParams) -> Tensor:
        """One layer of a call: append, attend, evict as scheduled. Returns the attention output [B,H_q,M,D].

        mask [B,M] bool marks the real tokens of this call, None if all are.
        """
        self._begin(index, new, mask)
        if not self.groups[0].layers[index].opened:
            check_heads(self.groups, index, new.keys)
        if self._batch is not None:
            out = self._attention.on_device(self._batch, dict(self._rows()), index, new, params)
        elif self.one_prompt:
            out = self._attention.once(self.groups, index, new, params)
        else:
            out = self._attention.each(self._rows(), index, new, params)
        self._end(index)
        return out

    def _begin(self, layer: int, new: QKV, mask: Tensor | None) -> None:
        if layer == 0:
            self._begin_call(new, mask)

    def _end(self, layer: int) -> None:
        if layer == len(self.attention_layers) - 1 and not self._layout.owners:
            self._end_call()

    def _begin_call(self, new: QKV, mask: Tensor | None) -> None:
        self._evictions.end_call()  # of a model whose last layers hold no cache of their own
        if self._layout.owners:
            self._shared.begin()
        assert mask is None or len(self.groups) == 1, "sequences of several policies are never padded"
        if mask is not None and self._layout.states:
            check_padding(self.group.progress.seen, mask)
        if self._batch is not None:
            if new.queries.shape[2] == 1 and mask is None and self._batch.room > 0:
                self._batch.begin()
            else:
                self.on_device(False)
        apart = [] if self._batch is None else self._batch.groups
        for group, rows in self._rows():
            if group.error is None and group not in apart:
                try:
                    group.begin_call(new.queries[rows], mask, self._is_user_defined)
                except Exception as error:
                    group.fail(error)

    def _rows(self) -> Iterator[tuple[PolicyGroup, slice]]:
        """Every group, and which rows of a call are its sequences."""
        return ((group, slice(None)) for group in self.groups) if self.one_prompt else in_order(self.groups)

    def _end_call(self) -> None:
        if self._batch is not None:
            self._batch.end()
            self._batch.count(1)
        for group in self.groups:
            group.layers_done()
        self._evictions.end_call()
        for group in self.groups:
            if group.error is None and not group.waits_for_pre_pass:
                self._finish(group)

    def _finish(self, group: PolicyGroup) -> None:
        """A call is over, its evictions are done."""
        group.end_call()
        try:
            check_call(group)
        except Exception as error:
            group.fail(error)

    # --- steps of all policies at once -----------------------------------------------------------------------------
    @property
    def batch(self) -> DeviceBatch | None:
        """What takes decoding steps of all groups that can at once, if anything does now."""
        return self._batch

    def on_device(self, wanted: bool = True) -> DeviceBatch | None:
        """Take decoding steps of all groups that can at once, whose lengths then stand on the device, or end that.

        None where no group can, and where layers read what others store, or latents. What changes the groups ends it,
        as does a step for which a store has to grow.
        """
        layout = self._layout
        if wanted and self._batch is None and not (layout.owners or layout.latent):
            groups = [group for group in self.groups if can_join(group)]
            self._batch = DeviceBatch(groups) if groups else None
        elif not wanted and self._batch is not None:
            self._batch.close()
            self._batch = None
        return self._batch

    # --- prompts ---------------------------------------------------------------------------------------------------
    def reset(self) -> None:
        """Forget everything: the cache is as it was made."""
        self.__init__(self.config, self.policy, self._prompt_length, self._question)  # type: ignore[misc]

    def next_prompt(self, length: int | Sequence[int], question: int | Sequence[int] | None = None) -> None:
        """Let the next `length` tokens, one number or one per sequence, be another prompt (a turn of a conversation).

        `model.generate` feeds what the cache has not seen, the last answer's last token included: for the ids of the
        whole conversation [1,T] that is T - cache.seen tokens. Raises ValueError while a prompt is still coming in,
        and for policies that could not keep their promise then.
        """
        self.on_device(False)
        for group in self.groups:
            policy = group.policy
            if policy.evicts:
                check_next_prompt(policy.name, policy.store, policy.allocator)
        self._evictions.end_call()
        for group in self.groups:
            promised = group.budgets.promised() if group.policy.evicts else {}
            group.progress.open(length, question)
            group.budgets.reopen(promised)
            for layer in group.layers:
                layer.reopen()

    def pre_pass_done(self) -> None:
        """Pre-passes found what they look for in the prompt just read: what waits for them is evicted now."""
        self._evictions.pre_pass_done()
        for group in self.groups:
            if group.waits_for_pre_pass:
                group.waits_for_pre_pass = False
                if group.error is None:
                    self._finish(group)

    def expect(self, tokens: int) -> None:
        """The prompt is in, and at most so many tokens follow it: no more capacity is reserved."""
        for group in self.groups:
            for layer in group.layers:
                layer.expect(tokens)

    def save(self, path: str | Path) -> None:
        """Write all it holds and knows to one safetensors file, about as large as `nbytes`; see `kvbench.cache.saving`.

        Works between any two calls of the model once a prompt is in, between replays of a CUDA graph too. Raises
        ValueError while a prompt is coming in, and for parts from elsewhere that are no plain data; OSError where
        nothing can be written.
        """
        self.on_device(False)
        save(self.config, self.group, Path(path))

    @classmethod
    def load(
        cls, path: str | Path, config: PreTrainedConfig, policy: Policy, device: torch.device | str = "cpu"
    ) -> Self:
        """The cache that `save` wrote, on `device`: what follows comes out as it would have from the saved one.

        config, policy: those it was made with. Raises ValueError where the file is missing, damaged or another's, and
        where it was saved under another policy or from a model of another shape (a configuration does not tell the
        weights apart: load it for the very model that read the document).
        """
        cache = cls(config, policy)
        load(cache.config, cache.group, Path(path), device)
        return cache

    # --- what it holds ---------------------------------------------------------------------------------------------
    @property
    def group(self) -> PolicyGroup:
        """The only group, of a cache whose sequences are under one policy."""
        (group,) = self.groups
        return group

    @property
    def policy(self) -> Policy:
        """The policy all sequences are under."""
        return self.group.policy

    @property
    def seen(self) -> int:
        """Tokens seen, padding columns included: where the next token of an unpadded sequence stands."""
        return max((group.progress.columns for group in self.groups), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held, over all layers."""
        return sum(layer.nbytes for layer in self.attention_layers) + self.state_nbytes

    @property
    def state_nbytes(self) -> int:
        """Bytes of recurrent layers' states, which no policy makes smaller."""
        return sum(group.state_nbytes for group in self.groups)

    @property
    def spare_nbytes(self) -> int:
        """Bytes reserved but unused: capacity for new tokens, and the slots of evicted ones."""
        return sum(layer.spare_nbytes for layer in self.attention_layers)

    @property
    def held_nbytes(self) -> int:
        """Bytes in use, `nbytes` less the spare ones: what tables, dashboards and pictures call bytes held."""
        return self.nbytes - self.spare_nbytes

    @property
    def peak_nbytes(self) -> int:
        """The most bytes held at any time."""
        return sum(group.peak_nbytes for group in self.groups)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen before the call that is running, by every layer; between calls all that were seen."""
        return max((group.seen_before for group in self.groups), default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Tokens seen by the end of the call, by every layer, and where they begin."""
        return self.get_seq_length() + query_length, 0

    def kept_tokens(self) -> Tensor:
        """[L,B,H_kv] tokens held by the attention layers. ValueError where these differ in their number of KV heads."""
        first = self.attention_layers[0].positions.device  # of a model on several devices
        return stacked([layer.kept_tokens().to(first) for layer in self.attention_layers])

    def audit(self) -> None:
        """Raise BudgetError unless every layer holds at most what its policy promises, at valid positions."""
        self._evictions.end_call()
        for group in self.groups:
            audit(group)

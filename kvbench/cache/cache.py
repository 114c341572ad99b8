"""The cache: in every layer it appends new tokens, computes attention, and evicts by the policies of its sequences.

One token in one layer: `update` returns a `LayerCall`, which the attention function of transformers calls
(`kvbench.cache.hook`). For each group of sequences, `KVCache.attend` appends the key and value to the layer's store
(`kvbench.cache.group`), attends (`kvbench.cache.attention`) and evicts (`kvbench.cache.eviction`).

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
from kvbench.cache.eviction import Evictions
from kvbench.cache.group import PolicyGroup, in_order
from kvbench.cache.group_attention import GroupAttention
from kvbench.cache.hook import LayerCall, SharedCall, expect
from kvbench.cache.interface import check_interface, uncompiled
from kvbench.cache.layer import EmptyLayer, KVLayer, stacked
from kvbench.cache.layout import layout_of
from kvbench.cache.model_layer import model_layer
from kvbench.cache.recurrent import RecurrentKVLayer, RecurrentLayer, check_padding
from kvbench.cache.saving import load, save
from kvbench.cache.shared import SharedReads
from kvbench.policies.latents import check_latents
from kvbench.policies.observation import AttentionParams
from kvbench.policies.policy import Policy
from kvbench.policies.policy_checks import check_next_prompt

__all__ = ["BudgetError", "KVCache", "ScoreError"]


class KVCache(Cache):
    """A cache that keeps the tokens that its policy selects. Pass it to `model.generate` or to the model itself.

    prompt_length: tokens of the prompt, one number or one per sequence. Without it the first call is the whole prompt;
    pass it if a prompt is split into several calls (`generate(..., prefill_chunk_size=...)`).
    question: position of the question in the prompt, one number or one per sequence, for policies that use it (FINCH);
    a later prompt has its own (`next_prompt`), counted from the first token of that prompt.
    Tokens after the prompt come one by one. Several tokens in one call are an error until `next_prompt` begins another
    prompt (except with `full` outside of `generate`).
    Raises ValueError for a model that does not follow transformers' attention interface.

    After `next_prompt`, all earlier tokens count as part of the new prompt:
    - The end of the prompt, or of every block of it, brings the cache back to its budget: kept, generated and new
      tokens compete. Evicted tokens do not return, so a layer or a KV head may hold less than its share.
    - A budget that is a share, and every allocator, counts all tokens until the end of the new prompt. Statistics over
      layers are measured again on the stored tokens.
    - Observation windows have the newest queries: of this prompt, and of earlier tokens if the policy keeps its window
      while decoding. Running statistics (H2O, RoCo, D2O) and the thresholds of mergers continue. Queries of generated
      tokens are in no statistic if the policy does not evict while decoding (`grow`).
    - Sinks are the first tokens of all, recent windows the newest. In SirLLM, a prompt's first token has surprisal 0.
    - A policy that keeps every token in a quantized store quantizes the new prompt as it does generated tokens. A
      policy that evicts from a quantized store cannot take another prompt.

    Compress a long document once and query it later, in another process or on another machine:

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
    """Whether a call may bring several tokens after the prompt, each of which counts as a decoded token."""

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
        self.one_prompt = False  # all groups process one and the same sequence
        self._evictions = Evictions()
        self._caller = Caller(self.config)
        self._shared = SharedReads(self._layout)
        self._attention = GroupAttention(self._evictions, self._shared)
        self._places = self._layout.places
        layers: list[Any] = [self._new_layer(index) for index in range(self._layout.layers)]
        self.attention_layers: list[KVLayer] = [layers[index] for index in self._layout.attention]
        super().__init__(layers=layers)
        self._is_user_defined = False  # transformers sets it if `model.generate` receives the cache

    def _new_group(self, policy: Policy) -> PolicyGroup:
        check_policy(policy)
        if self._layout.latent:
            check_latents(policy)
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
    @uncompiled  # transformers passes the result on to the attention function
    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[LayerCall | Tensor, LayerCall | Tensor]:
        """Pass the new keys and values [B,H_kv,M,D] of a layer, or its latents, to the attention that appends them."""
        place = self._places[layer_idx]
        if place == 0 and (self.config._attn_implementation != NAME or "kvpress" in sys.modules):
            self._caller.check_attention()
        call = LayerCall(layer_idx, partial(self._called, place, key_states, value_states))
        if self._layout.latent:  # the model expands latents to keys and values of all heads before its attention
            expect(call)
            return key_states, value_states
        if place in self._layout.owned:
            call = SharedCall(call, partial(self._read, place, key_states.shape[2]))
        return call, call

    def _read(self, owner: int, columns: int, queries: Tensor, params: AttentionParams) -> Tensor:
        """Attention of a layer that shares the keys and values of `owner`, for the last queries of a call."""
        out = self._shared.attend(owner, columns, queries, params, dict(self._rows()))
        if self._shared.all_read:
            self._end_call()
        return out

    def _called(self, index: int, keys: Tensor, values: Tensor, module: nn.Module, *args: Any) -> Tensor:  # noqa: ANN401
        """Called by the attention function. module: the attention module; args: queries, mask, parameters."""
        queries, mask, params = args
        if index == 0:
            self._caller.check(module)
        if any(group.policy.needs.model for group in self.groups):
            params = params._replace(model=model_layer(module, queries))
        return self.attend(index, QKV(queries, keys, values), mask, params)

    def attend(self, index: int, new: QKV, mask: Tensor | None, params: AttentionParams) -> Tensor:
        """One layer of a call: append, attend, evict as scheduled. Returns the attention output [B,H_q,M,D].

        mask [B,M] bool marks the real tokens of this call, None if all are.
        """
        self._begin(index, new, mask)
        if not self.groups[0].layers[index].opened:
            check_heads(self.groups, index, new.keys)
        if self.one_prompt:
            out = self._attention.once(self.groups, index, new, params)
        else:
            outs = [self._attention.attend(group, index, new.rows(here), params) for group, here in self._rows()]
            out = outs[0] if len(outs) == 1 else torch.cat(outs)
        self._end(index)
        return out

    def _begin(self, layer: int, new: QKV, mask: Tensor | None) -> None:
        """Begin a call in its first layer: split it into steps."""
        if layer != 0:
            return
        self._evictions.end_call()  # of a model with layers without a cache at its end
        if self._layout.owners:
            self._shared.begin()
        assert mask is None or len(self.groups) == 1, "sequences of several policies are never padded"
        if mask is not None and self._layout.states:
            check_padding(self.group.progress.seen, mask)
        for group, rows in self._rows():
            if group.error is None:
                try:
                    group.begin_call(new.queries[rows], mask, self._is_user_defined)
                except Exception as error:
                    group.fail(error)

    def _end(self, layer: int) -> None:
        if layer == len(self.attention_layers) - 1 and not self._layout.owners:
            self._end_call()

    def _rows(self) -> Iterator[tuple[PolicyGroup, slice]]:
        """Every group, and the rows of its sequences in a call."""
        return ((group, slice(None)) for group in self.groups) if self.one_prompt else in_order(self.groups)

    def _end_call(self) -> None:
        """End a call after its last layer: carry out the evictions and check the budgets."""
        for group in self.groups:
            group.layers_done()
        self._evictions.end_call()
        for group in self.groups:
            if group.error is None and not group.waits_for_pre_pass:
                self._finish(group)

    def _finish(self, group: PolicyGroup) -> None:
        group.end_call()
        try:
            check_call(group)
        except Exception as error:
            group.fail(error)

    # --- prompts ---------------------------------------------------------------------------------------------------
    def reset(self) -> None:
        """Remove everything, as in a new cache."""
        self.__init__(self.config, self.policy, self._prompt_length, self._question)  # type: ignore[misc]

    def next_prompt(self, length: int | Sequence[int], question: int | Sequence[int] | None = None) -> None:
        """Begin another prompt of `length` tokens, one number or one per sequence (a turn of a conversation).

        `model.generate` feeds the tokens that the cache has not seen, including the last token of the last answer: with
        the ids of the whole conversation [1,T] these are T - cache.seen tokens. Raises ValueError before the last
        prompt is complete, and for policies that cannot take another prompt.
        """
        for group in self.groups:
            policy = group.policy
            if policy.evicts:
                check_next_prompt(policy.name, policy.store, policy.allocator)
        self._evictions.end_call()
        for group in self.groups:
            promised = group.budgets.promised()
            group.progress.open(length, question)
            group.budgets.reopen(promised)
            for layer in group.layers:
                layer.recent.reopen(group.policy.needs.window)

    def pre_pass_done(self) -> None:
        """Carry out the evictions that waited for a pre-pass."""
        self._evictions.pre_pass_done()
        for group in self.groups:
            if group.waits_for_pre_pass:
                group.waits_for_pre_pass = False
                if group.error is None:
                    self._finish(group)

    def expect(self, tokens: int) -> None:
        """Reserve no capacity for more than this number of tokens after the prompt."""
        for group in self.groups:
            for layer in group.layers:
                layer.expect(tokens)

    def save(self, path: str | Path) -> None:
        """Write the cache to one safetensors file, about as large as `nbytes`; see `kvbench.cache.saving`.

        Raises ValueError within a call or a prompt, and for parts of other packages that are not plain data; OSError if
        the file cannot be written.
        """
        save(self.config, self.group, Path(path))

    @classmethod
    def load(
        cls, path: str | Path, config: PreTrainedConfig, policy: Policy, device: torch.device | str = "cpu"
    ) -> Self:
        """The cache that `save` wrote, on `device`. It continues exactly as the saved one.

        config, policy: those of the saved cache. Raises ValueError if the file is missing or damaged, or was saved with
        another policy or model shape. The weights of the model are not compared.
        """
        cache = cls(config, policy)
        load(cache.config, cache.group, Path(path), device)
        return cache

    # --- contents --------------------------------------------------------------------------------------------------
    @property
    def group(self) -> PolicyGroup:
        """The only group of a cache with one policy."""
        (group,) = self.groups
        return group

    @property
    def policy(self) -> Policy:
        """The policy of all sequences."""
        return self.group.policy

    @property
    def seen(self) -> int:
        """Tokens seen, padding included: the position of the next token of a sequence without padding."""
        return max((group.progress.columns for group in self.groups), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held, over all layers."""
        return sum(layer.nbytes for layer in self.attention_layers) + self.state_nbytes

    @property
    def state_nbytes(self) -> int:
        """Bytes of recurrent layers' states, which no policy reduces."""
        return sum(group.state_nbytes for group in self.groups)

    @property
    def spare_nbytes(self) -> int:
        """Bytes reserved but unused: capacity for new tokens, and the slots of evicted ones."""
        return sum(layer.spare_nbytes for layer in self.attention_layers)

    @property
    def held_nbytes(self) -> int:
        """Bytes in use: `nbytes` without the spare ones. Tables and figures call them bytes held."""
        return self.nbytes - self.spare_nbytes

    @property
    def peak_nbytes(self) -> int:
        """The most bytes held at any time."""
        return sum(group.peak_nbytes for group in self.groups)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen before the running call; between calls, all tokens seen."""
        return max((group.seen_before for group in self.groups), default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Tokens seen by the end of the call, and the first of them."""
        return self.get_seq_length() + query_length, 0

    def kept_tokens(self) -> Tensor:
        """[L,B,H_kv] tokens held by the attention layers. ValueError if layers differ in their number of KV heads."""
        first = self.attention_layers[0].positions.device  # layers may be on several devices
        return stacked([layer.kept_tokens().to(first) for layer in self.attention_layers])

    def audit(self) -> None:
        """Raise BudgetError unless every layer holds at most what its policy promises, at valid positions.

        Raises ScoreError for NaN scores of decoding steps on a GPU.
        """
        self._evictions.end_call()
        for group in self.groups:
            audit(group)

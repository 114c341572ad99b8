"""The cache: in every layer it appends new tokens, computes attention, and evicts by the policies of its sequences.

One token in one layer: `update` returns a `LayerCall`, which the attention function of transformers calls
(`kvbench.cache.hook`). For each group of sequences, `KVCache.attend` appends the key and value to the layer's store
(`kvbench.cache.group`), attends (`kvbench.cache.attention`) and evicts (`kvbench.cache.eviction`).

Shapes: B batch, L layers, H_q query heads, H_kv KV heads, M new tokens, C slots, D head dim.
"""

import copy
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from kvbench.cache import NAME
from kvbench.cache.attention import QKV, attend, attend_to_survivors
from kvbench.cache.audit import BudgetError, ScoreError, audit, check_call
from kvbench.cache.columns import Columns, real_columns
from kvbench.cache.eviction import Evictions
from kvbench.cache.group import PolicyGroup, in_order
from kvbench.cache.hook import LayerCall, SharedCall, expect
from kvbench.cache.inputs import ReadsHidden
from kvbench.cache.interface import check_attention, check_interface, check_model, check_policy, uncompiled
from kvbench.cache.layer import EmptyLayer, KVLayer, stacked
from kvbench.cache.layout import layout_of
from kvbench.cache.model_layer import model_layer
from kvbench.cache.recurrent import RecurrentKVLayer, RecurrentLayer, check_padding
from kvbench.cache.shared import SharedReads
from kvbench.errors import ConfigError, as_python
from kvbench.policies.latents import check_latents
from kvbench.policies.observation import AttentionParams, StepCache
from kvbench.policies.policy import Policy
from kvbench.policies.policy_checks import check_layers, check_next_prompt
from kvbench.policies.stores.slots import owned

__all__ = ["BudgetError", "KVCache", "ScoreError"]


class KVCache(ReadsHidden, Cache):
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
        if not isinstance(config, PreTrainedConfig):
            raise ConfigError("config", type(config), "a model's configuration, as in KVCache(model.config, policy)")
        prompt_length, question = as_python((prompt_length, question))
        self.config = config.get_text_config(decoder=True)
        check_interface(self.config)
        self._prompt_length, self._question = prompt_length, question
        self._layout = layout_of(self.config)
        check_policy(policy)
        if self._layout.latent:
            check_latents(policy)
        check_layers(len(self._layout.attention), policy.store, policy.pre_pass)
        several = self._teacher_forced or (policy.store.exact and not policy.evicts)
        self.groups = [PolicyGroup(self.config, policy, prompt_length, several, question)]
        self.one_prompt = False  # all groups process one and the same sequence
        self._evictions = Evictions()
        self._shared = SharedReads(self._layout) if self._layout.owners else None
        self._reader: ReferenceType[nn.Module] | None = None  # the model's first attention module
        self._rows = [(group, slice(None)) for group in self.groups]  # of the sequences of every group in a call
        self._places = self._layout.places
        self._dtype: torch.dtype | None = None
        self._shifts: dict[int, int] = {}  # positions in the model minus those of the cache, see `real_columns`
        layers: list[Any] = [self._new_layer(index) for index in range(self._layout.layers)]
        self.attention_layers: list[KVLayer] = [layers[index] for index in self._layout.attention]
        super().__init__(layers=layers)
        self._is_user_defined = False  # transformers sets it if `model.generate` receives the cache

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
            check_attention(self.config)
        attend = partial(self._called, place, key_states, value_states)
        call = LayerCall(layer_idx, attend)
        if self._shared is not None and place in self._layout.owned:
            call = SharedCall(layer_idx, attend, partial(self._read, self._shared, place, key_states.shape[2]))
        if self._layout.latent:  # the model expands latents to keys and values of all heads before its attention
            expect(call)
            return key_states, value_states
        return call, call

    def _read(self, shared: SharedReads, owner: int, columns: int, queries: Tensor, params: AttentionParams) -> Tensor:
        """Attention of a layer that shares the keys and values of `owner`, for the last queries of a call."""
        out = shared.attend(owner, columns, queries, params, dict(self._rows))
        if shared.all_read:
            self._end_call()
        return out

    def _called(self, index: int, keys: Tensor, values: Tensor, module: nn.Module, *args: Any) -> Tensor:  # noqa: ANN401
        """Called by the attention function. module: the attention module; args: queries, columns, parameters."""
        queries, columns, params = args
        if index == 0 and (self._reader is None or self._reader() is not module):
            self._reader = check_model(self.config, self._reader, module)
        if any(group.policy.needs.model for group in self.groups):
            params = params._replace(model=model_layer(module, queries))
        mask = self._real(columns, queries) if index == 0 else None
        return self.attend(index, QKV(queries, keys, values), mask, params)

    def _real(self, columns: Columns, queries: Tensor) -> Tensor | None:
        """The new tokens of a call that are no padding; sequences of the engine are checked and have none."""
        if not self.groups or self.groups[0].isolated:
            return None
        if self._dtype not in (None, queries.dtype):
            raise ValueError(
                f"this KVCache holds numbers in {self._dtype}, but the model computes in {queries.dtype} now: make a "
                "new cache after the model was converted"
            )
        self._dtype = queries.dtype
        batch, _, new, _ = queries.shape
        return real_columns(columns, self.groups[0].progress.seen, batch, new, self._shifts)

    def attend(self, index: int, new: QKV, mask: Tensor | None, params: AttentionParams) -> Tensor:
        """One layer of a call: append, attend, evict as scheduled. Returns the attention output [B,H_q,M,D].

        The call begins with its first layer and ends with its last. mask [B,M] bool marks the real tokens of this call,
        None if all are.
        """
        if index == 0:
            self._begin_call(new.queries, mask)
        self._evictions.share()
        if len(self.groups) == 1:
            out = self._attend_group(self.groups[0], index, new, params)
        else:
            out = self._attend_groups(index, new, params)
        if index == len(self.attention_layers) - 1 and self._shared is None:
            self._end_call()
        return new.no_attention(params) if out is None else out

    def _attend_groups(self, index: int, new: QKV, params: AttentionParams) -> Tensor | None:
        """Attention of several groups: once for all if they process one prompt; else one after another."""
        if self.one_prompt:
            new, out = QKV(new.queries, owned(new.keys), owned(new.values)), None  # copied once if they are views
            known: defaultdict[str, StepCache] = defaultdict(dict)
            for group in sorted(self.groups, key=lambda group: group.cost):
                out = self._attend_group(group, index, new, params, known[group.policy.granularity], out)
            return out
        outs = []
        for group, rows in self._rows:
            own = QKV(*(x[rows] for x in new))
            out = self._attend_group(group, index, own, params)
            outs.append(own.no_attention(params) if out is None else out)
        return torch.cat(outs)

    def _attend_group(
        self,
        group: PolicyGroup,
        index: int,
        new: QKV,
        params: AttentionParams,
        known: StepCache | None = None,
        found: Tensor | None = None,
    ) -> Tensor | None:
        """Attention [B,H_q,M,D] of a group in the steps of a call, with the evictions in between; None after an error.

        known, found: values and attention that were computed for another policy of the same prompt.
        """
        layer, policy, shared, out = group.layers[index], group.policy, self._shared, found
        attends_first = policy.schedule.order == "attend_then_evict"
        try:
            for now in group.steps if group.error is None else ():
                if policy.needs.hidden:
                    group.shared["hidden"] = self._inputs(group)[:, now.columns]
                whole = now.columns == slice(0, new.queries.shape[2])
                some = new if whole else QKV(*(x[:, :, now.columns] for x in new))
                step = group.append(layer, some, now, params, len(group.steps) == 1, known)
                if not attends_first:
                    self._evictions.add(group, layer, step)
                if found is None:
                    if attends_first:
                        part = attend(step, policy.needs)
                    else:
                        part = attend_to_survivors(step, some.values_of_heads(params))
                    if step.alone and whole:
                        out = part
                    else:
                        out = new.no_attention(params) if out is None else out
                        out[:, :, now.columns] += part
                    if shared is not None:
                        shared.add(group, layer, step, some.values)
                if attends_first:
                    self._evictions.add(group, layer, step, shared is not None and shared.delays(layer, step))
        except Exception as error:
            group.fail(error)
        return out

    @property
    def reads_hidden(self) -> bool:
        """Whether a policy scores tokens by the input of attention."""
        return any(group.policy.needs.hidden for group in self.groups)

    def _inputs(self, group: PolicyGroup) -> Tensor:
        """The input [B,M,hidden] of the attention layer that runs, for the sequences of a group."""
        if self.hidden is None:
            raise ValueError(
                f"{group.policy.name} scores tokens by the input of attention, which model.generate does not pass to "
                "its cache: use kvbench.generate"
            )
        return self.hidden[dict(self._rows)[group]]

    def _begin_call(self, queries: Tensor, mask: Tensor | None) -> None:
        """Split a call of queries [B,H_q,M,D] into steps."""
        self._evictions.end_call()  # of a model with layers without a cache at its end
        if self._shared is not None:
            self._shared.begin()
        assert mask is None or len(self.groups) == 1, "sequences of several policies are never padded"
        if mask is not None and self._layout.states:
            check_padding(self.group.progress.seen, mask)
        together = self.one_prompt or len(self.groups) == 1
        self._rows = [(group, slice(None)) for group in self.groups] if together else list(in_order(self.groups))
        for group, rows in self._rows:
            if group.error is None:
                try:
                    group.begin_call(queries[rows], mask, self._is_user_defined)
                except Exception as error:
                    group.fail(error)

    def _end_call(self) -> None:
        """End a call after its last layer: carry out the evictions and check the budgets."""
        for group in self.groups:
            group.progress.before = group.progress.columns
        self._evictions.end_call()
        self._finish(group for group in self.groups if not group.waits_for_pre_pass)

    def _finish(self, groups: Iterable[PolicyGroup]) -> None:
        """The evictions of a call are done: check the budgets."""
        for group in groups:
            if group.error is None and group.end_call():
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
        for policy in (group.policy for group in self.groups if group.policy.evicts):
            check_next_prompt(policy.name, policy.store, policy.allocator)
        self._evictions.end_call()
        for group in self.groups:
            group.next_prompt(*as_python((length, question)))

    def pre_pass_done(self) -> None:
        """Carry out the evictions that waited for a pre-pass."""
        self._evictions.pre_pass_done()
        waiting = [group for group in self.groups if group.waits_for_pre_pass]
        for group in waiting:
            group.waits_for_pre_pass = False
        self._finish(waiting)

    def expect(self, tokens: int) -> None:
        """Reserve no capacity for more than this number of tokens after the prompt."""
        for group in self.groups:
            for layer in group.layers:
                if layer.opened:
                    layer.store.expect(tokens)

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
        return max((group.progress.before for group in self.groups), default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Tokens seen by the end of the call, and the first of them."""
        return self.get_seq_length() + query_length, 0

    def kept_by_layer(self) -> list[Tensor]:
        """[B,H_kv] tokens held by each attention layer, on the CPU."""
        return [layer.kept_tokens().cpu() for layer in self.attention_layers]

    def kept_tokens(self) -> Tensor:
        """[L,B,H_kv] tokens held by the attention layers. ValueError if layers differ in their number of KV heads."""
        return stacked(self.kept_by_layer())

    def __repr__(self) -> str:
        kept = self.kept_by_layer()
        tokens = sum(float(layer.sum()) for layer in kept) / max(1, sum(layer.numel() for layer in kept))
        held = f"{tokens:,.1f} of {self.seen:,} tokens per KV head, {self.held_nbytes / 2**20:,.2f} MiB"
        budget = "" if self.policy.budget is None else f", budget {self.policy.budget:g}"
        return f"<KVCache {self.policy.name or 'policy'}{budget}: {held} in {len(kept)} layers>"

    def audit(self) -> None:
        """Raise BudgetError unless every layer holds at most what its policy promises, at valid positions.

        Raises ScoreError for NaN scores of decoding steps on a GPU.
        """
        self._evictions.end_call()
        for group in self.groups:
            audit(group)


# --- several caches as one, and copies ------------------------------------------------------------------------------
# The engine has one sequence per group, so that sequences are added and removed without a copy.
def empty_like(cache: KVCache) -> KVCache:
    """A cache of the same kind for the same model, without sequences."""
    found = type(cache)(cache.config, Policy(name="full"))
    found.groups.clear()
    return found


def fork(cache: KVCache) -> KVCache:
    """A copy of a cache with its own tensors, so that each can continue with another question."""
    shared = [cache.config, *chain.from_iterable((group.policy, group.error) for group in cache.groups)]
    return copy.deepcopy(cache, {id(part): part for part in shared})


def together(caches: Sequence[KVCache], one_prompt: bool = False) -> KVCache:
    """One cache with the sequences of several, which it does not copy.

    one_prompt: all groups process one and the same sequence, a whole prompt as one step that attends before it evicts.
    """
    found = empty_like(caches[0])
    found.groups += [group for cache in caches for group in cache.groups]
    found.one_prompt = one_prompt
    return found

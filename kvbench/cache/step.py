"""One step of one layer: its new tokens, and the slots that they attend to.

Shapes: H_q query heads, H_kv KV heads, m tokens of a step, C slots, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvbench.cache.footprint import fed
from kvbench.cache.layer import Layer
from kvbench.cache.reading import PageReads
from kvbench.cache.sequence import CachedSequence
from kvbench.policies.latents import LatentObservation, expanded
from kvbench.policies.observation import (
    MOVED,
    AttentionParams,
    Observation,
    Phase,
    QueryWindow,
    SequenceInfo,
    StepCache,
)
from kvbench.policies.policy import Policy
from kvbench.policies.schedule import Span
from kvbench.policies.selections.fair import Fair
from kvbench.policies.stores.store import LayerStore

NOTHING = torch.empty(1, 0, 0, 0)


@dataclass(eq=False)  # not frozen, because a frozen dataclass is slower to create, and every layer and token has one
class Step:
    """The tokens `span` of one sequence in one layer, after they were appended to its store.

    queries [1,H_q,m,D], keys and values [1,H_kv,m,D] of these tokens at positions [1,m], rotated as attention receives
    them. A layer that stores latents has latents [1,1,m,R] as keys, and the rotated part of the keys as values. params:
    parameters of the attention. store: the slots that the queries attend to. fresh: the store holds exactly the tokens
    of this step, in order, for every head. alone: the step is the whole call of the model. row, first: the row of the
    call with these tokens, and the column of the first of them. observed: the policy observes it, with the queries and
    positions of `window`. known: values that were computed for another policy in the same step. pages: for sparse
    attention.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    span: Span
    params: AttentionParams
    store: LayerStore
    fresh: bool = False
    alone: bool = True
    row: int = 0
    first: int = 0
    observed: bool = False
    window: tuple[Tensor, Tensor] | None = None
    known: StepCache | None = None
    pages: PageReads | None = None
    policy: Policy = field(kw_only=True, repr=False)
    sequence: CachedSequence = field(kw_only=True, repr=False)
    layer: Layer = field(kw_only=True, repr=False)
    _observation: Observation | None = field(default=None, repr=False)
    _attended: LayerStore | None = field(default=None, init=False, repr=False)

    @property
    def phase(self) -> Phase:
        """Whether the tokens are a prompt, a block of it, or decoded."""
        return self.span.phase

    @property
    def prompt_done(self) -> bool:
        """Whether the prompt is complete after the step."""
        return self.span.phase == "decode" or self.span.end >= self.sequence.budgets.prompt

    @property
    def budget(self) -> int:
        """Slots per KV head that the layer may keep after the step's eviction; 0 without eviction."""
        span, index, budgets = self.span, self.layer.index, self.sequence.budgets
        if not span.evicts or self.policy.scorer is None:
            return 0
        return (budgets.decoding if span.phase == "decode" else budgets.within)(index, span.end)

    @property
    def spare(self) -> int:
        """Slots per KV head to reserve at the step's eviction: for the next block, or while decoding."""
        if self.prompt_done:
            return self.policy.schedule.spare
        return min(self.span.end - self.span.start, self.sequence.budgets.prompt - self.span.end)

    # --- latents -----------------------------------------------------------------------------------------------------
    @property
    def attended(self) -> LayerStore:
        """The store, or keys and values of all heads that were expanded from its latents."""
        if self.params.latents is None:
            return self.store
        if self._attended is None:
            self._attended = expanded(self.store, self.params.latents, {} if self.known is None else self.known)
        return self._attended

    @property
    def of_all_heads(self) -> Step:
        """The step of a layer with latents as the step of a layer with keys and values of every head."""
        heads = None
        if self.observed:
            assert isinstance(self.observation, LatentObservation)
            heads = self.observation.heads
        return replace(self, store=self.attended, params=self.params._replace(latents=None), _observation=heads)

    # --- the policy's view -------------------------------------------------------------------------------------------
    @property
    def observation(self) -> Observation:
        """The policy's observation of this step, made on first use."""
        if self._observation is None:  # `cached_property` takes a lock before Python 3.12
            assert self.observed, "the policy does not observe this step"
            self._observation = self.seen(self.window)
        return self._observation

    def seen(self, recent: tuple[Tensor, Tensor] | None) -> Observation:
        """An observation of this step; recent: the queries and positions of the window."""
        span, held, policy, budgets = self.span, self.store, self.policy, self.sequence.budgets
        budget, window = self.budget, None
        if recent is not None:
            window = QueryWindow(*recent, see_own=keeps_window(policy, (budget,)))
        attended = self.attended
        return (Observation if self.params.latents is None else LatentObservation)(
            layer=self.layer.index,
            queries=self.queries,
            query_positions=self.positions,
            keys=attended.keys,
            values=attended.values,
            positions=held.positions,
            seen=self.sequence.place(span, self.positions.device)[1],
            phase=span.phase,
            params=self.params,
            window=window,
            slots=held.slots._replace(
                whole=self.layer.count == span.end,
                moved=held.state[MOVED][..., 0] if MOVED in policy.needs.statistics else None,
            ),
            sequences=SequenceInfo(
                last=span.end - 1 if self.sequence.clock is None else None,
                opens=(span.opens,),
                budgets=() if policy.scorer is None else (budget,),
                **{name: (number,) for name, number in budgets.numbers.items()},
            ),
            memory=dict(self.layer.memory) if policy.needs.memory else {},
            shared=self.sequence.shared,
            known={} if self.known is None else self.known,
        )

    # --- the end of a step -------------------------------------------------------------------------------------------
    def settle(self) -> None:
        """End the step, which has attended and evicted: drop queries that later steps do not use.

        After a complete prompt the store takes its final form, such as quantized codes.
        """
        layer = self.layer
        if self.span.phase != "decode":
            if self.prompt_done and (self.span.evicts or not self.policy.schedule.decoding_evicts):
                layer.recent.limit(self.policy.needs.window_decoding or 0)
                if self.policy.scorer is not None and not self.policy.decoding_evicts:
                    self.policy.scorer.forget(layer.memory)
            layer.recent.copy()
        if self.prompt_done and not layer.unsettled:
            layer.store.settle()
        self.sequence.note_bytes(layer.index)

    def of_layer(self, layer: Layer) -> Step:
        """The same step in a layer, for an eviction of all layers at the end of a prompt; it cannot be observed."""
        other = replace(self, span=self.span._replace(phase="prompt"), layer=layer, store=layer.store)
        other.queries = other.keys = other.values = NOTHING
        other.observed, other.window, other.known, other._observation = False, None, None, None
        return other

    def without_queries(self) -> Step:
        """This step as it waits for a pre-pass: without its queries, which take more memory than the cache."""
        seen = replace(self.observation, queries=self.queries[:, :, :0].clone(), known={})
        return replace(self, queries=seen.queries, _observation=seen)

    def drop_queries(self) -> None:
        """Free the queries of a step that waits, which no score reads any more."""
        self.queries = self.observation.queries = self.keys[:, :1, :0].expand(-1, self.queries.shape[1], -1, -1)

    def observe_with(self, window: QueryWindow) -> None:
        """Replace the observation window."""
        self._observation = replace(self.observation, window=window, known={})


def append(
    sequence: CachedSequence,
    index: int,
    span: Span,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    params: AttentionParams,
    known: StepCache | None = None,
) -> Step:
    """Append keys and values [1,H_kv,m,D] of a step to a layer, and let its queries enter the window.

    known: values that were computed for another policy in the same step.
    """
    policy, layer, prompt = sequence.policy, sequence.layers[index], sequence.budgets.prompt
    if policy.granularity == "query_head":  # each query head keeps its own tokens
        group = queries.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    if not layer.opened:
        if sequence.layers[0].opened and policy.granularity != "query_head":
            heads = sequence.layers[0].store.keys.shape[1]
            policy.allocator.check_heads([*[heads] * (len(sequence.layers) - 1), keys.shape[1]])
        layer.open(queries, keys, values)
    positions, fresh, held = sequence.place(span, queries.device)[0], not layer.count, layer.store
    held.append(keys, values, positions)
    layer.footprint += fed(layer.count - layer.short, span.end - span.start)
    layer.count += span.end - span.start
    new = queries, keys, values, positions, span, params, held, fresh, len(sequence.spans) == 1
    step = Step(*new, known=known, policy=policy, sequence=sequence, layer=layer)
    decodes = span.phase == "decode"
    if layer.pages is not None:
        layer.pages.update(held, decodes, layer.count, prompt)
        step.pages = layer.pages if decodes else None
    if held.watching:
        held.observe(step.seen(None), prompt)
    if policy.scorer is not None and (not decodes or span.evicts):
        if policy.needs.question and not decodes:
            layer.recent.reopen(max(policy.needs.window, prompt - sequence.budgets.question))
        step.window, step.observed = layer.recent.add(queries, positions), True
    sequence.note_bytes(index)
    return step


def keeps_window(policy: Policy, budgets: tuple[int, ...]) -> bool:
    """Whether the tokens of the window's queries are always kept, so that each query sees at least its own."""
    assert policy.scorer is not None
    if policy.needs.question or isinstance(policy.selection, Fair):  # which keeps a part's share, whatever is protected
        return False
    return all(policy.scorer.protects(budget).newest >= policy.needs.window for budget in budgets)


def no_attention(queries: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
    """The attention output [B,H_q,m,D] of queries that see no token: 0."""
    dim = values.shape[-1] if params.latents is None else params.latents.value_dim
    return torch.zeros(*queries.shape[:3], dim, dtype=values.dtype, device=values.device)

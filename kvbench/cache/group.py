"""The sequences of a cache that share one policy: their progress, budgets and layers.

Shapes: B batch, H_q query heads, H_kv KV heads, M new tokens of a call, m tokens of a step, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from operator import gt

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvbench.cache.attention import QKV, LayerStep
from kvbench.cache.layout import layout_of
from kvbench.cache.progress import BatchStep, Budgets, Progress
from kvbench.cache.state import LayerState
from kvbench.policies.latents import LatentObservation
from kvbench.policies.observation import (
    MOVED,
    AttentionParams,
    Observation,
    QueryWindow,
    SequenceInfo,
    StepCache,
)
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import TokenRating
from kvbench.policies.ranking import Ranking
from kvbench.policies.stores.store import CompressedStore
from kvbench.policies.stores.token_codes import TokenCodeLayerStore

_RULES: dict[object, object] = {}


class PolicyGroup:
    """Sequences under one policy. The engine has one sequence per group; `model.generate` has a batch in one group.

    names: the model's indices of the layers. steps: those of the running call. shared: data that scorers of several
    layers exchange within a call. states: of recurrent layers, [B,...] by name. isolated: an error is stored in `error`
    instead of raised, so that other groups continue. peak_nbytes: the most bytes held at any time. on_change: called
    with a layer's index after every change of its contents. on_evict: called with a layer, its scores and the kept
    slots, bool [B,H_kv,T], before several tokens are evicted. not_numbers: sequences with a NaN score, and the first
    layer that had one.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        policy: Policy,
        prompt_length: int | Sequence[int] | None,
        several_tokens: bool = False,
        question: int | Sequence[int] | None = None,
    ) -> None:
        """several_tokens: a call may bring several tokens after the prompt."""
        layout = layout_of(config)
        self.names = layout.attention
        layers = len(self.names)
        self.policy = policy
        self.progress = Progress(policy, prompt_length, several_tokens, layout.uniform_length, question)
        self.budgets = Budgets(policy, layers, self.progress)
        self.layers = [LayerState(policy, index) for index in range(layers)]
        self.shared: dict[str, Tensor] = {}
        self.states: dict[str, Tensor] = {}
        self.error: Exception | None = None
        self.isolated = False
        self.on_change: Callable[[int], None] | None = None
        self.on_evict: Callable[[LayerState, Ranking, Tensor], None] | None = None
        self.peak_nbytes = 0
        self.waits_for_pre_pass = False
        self.not_numbers: dict[int, int] = {}
        self.nan_flags: dict[int, Tensor] = {}  # [B] bool by layer: NaN scores of decoding steps on a GPU
        self._expected_size = len(prompt_length) if isinstance(prompt_length, Sequence) else 1
        self._ratings: Tensor | None = None  # of the token of the next call
        self.steps: list[BatchStep] = []
        self._bytes = [0] * layers
        self._total_bytes = 0

    @cached_property
    def rule(self) -> object:
        """One object for all policies that select the evicted token in the same way, at any budget."""
        policy = self.policy
        parts = policy.scorer, policy.value, policy.selection, policy.merger, policy.granularity, policy.needs
        try:
            return _RULES.setdefault(parts, object())
        except TypeError:  # a part with an unhashable field
            return object()

    @property
    def cost(self) -> tuple[bool, bool]:
        """Of several policies of one prompt, the one with the lowest cost computes the attention for all.

        That is one with KV heads as they are, and with sums over the attention of the prompt.
        """
        return self.policy.granularity == "query_head", self.policy.needs.sums is None

    @property
    def size(self) -> int:
        """Number of sequences."""
        return len(self.progress.seen) or self._expected_size

    @property
    def within_call(self) -> bool:
        """Whether a call of the model is running, or its evictions wait for a pre-pass."""
        return self.progress.before != self.progress.columns or self.waits_for_pre_pass

    @property
    def at_budget(self) -> bool:
        """Whether every layer holds exactly its budget in every sequence."""
        rows = [True] * self.size
        return all(layer.counts and tuple(layer.counts) == self.budgets.of(layer.index, rows) for layer in self.layers)

    def fail(self, error: Exception) -> None:
        """Raise an error, or store it if other groups of the cache continue."""
        if not self.isolated:
            raise error
        self.error = error

    def next_prompt(self, length: int | Sequence[int], question: int | Sequence[int] | None) -> None:
        """Begin another prompt, see `KVCache.next_prompt`."""
        self.budgets.reopen(length, question)
        for layer in self.layers:
            layer.recent.reopen(self.policy.needs.window)

    # --- one call of the model -------------------------------------------------------------------------------------
    def begin_call(self, queries: Tensor, mask: Tensor | None, generating: bool = False) -> None:
        """Split a call of queries [B,H_q,M,D] into the steps of the schedule; mask [B,M] bool marks real tokens.

        generating: the caller is `model.generate`.
        """
        if self.policy.pre_pass is not None and not self.waits_for_pre_pass:
            self._check_pre_pass()
        self.steps = self.progress.split(queries.shape[0], queries.shape[2], mask, queries.device, generating)

    def _check_pre_pass(self) -> None:
        """Take the ratings of the next token. ValueError without what a pre-pass gives: `model.generate` runs none."""
        if self.progress.in_prompt:
            raise ValueError(
                f"{self.policy.name} needs an extra forward pass over the prompt before it evicts, but model.generate "
                "runs none: use kvbench.generate"
            )
        if self.policy.rates:
            if self._ratings is None:
                raise ValueError(
                    f"{self.policy.name} scores tokens by the model's own probabilities, which model.generate does not "
                    "pass to its cache: use kvbench.generate"
                )
            self.shared["ratings"], self._ratings = self._ratings, None

    def append(
        self,
        layer: LayerState,
        new: QKV,
        now: BatchStep,
        params: AttentionParams,
        alone: bool,
        known: StepCache | None = None,
    ) -> LayerStep:
        """Append keys and values [B,H_kv,m,D] of a step to a layer.

        known: values that were computed for another policy in the same step.
        """
        policy, decodes = self.policy, now.phase == "decode"
        if policy.granularity == "query_head":
            new = new.for_query_heads()
        if not layer.counts:
            if self.layers[0].opened and policy.granularity != "query_head":
                heads = self.layers[0].store.keys.shape[1]
                policy.allocator.check_heads([*[heads] * (len(self.layers) - 1), new.keys.shape[1]])
            layer.open(new)
        if now.positions.device != new.queries.device:
            now = now.to(new.queries.device)
        held, fresh = layer.store, not any(layer.counts)
        held.append(new.keys, new.values, now.positions, absent=not now.aligned)
        layer.count_entries(now.counts)
        layer.counts = [n + more for n, more in zip(layer.counts, now.counts, strict=True)]
        step = LayerStep(new.queries, now, params, held, fresh, alone=alone)
        if layer.pages is not None:
            layer.pages.update(step, layer.counts, self.progress.prompt)
            if decodes:
                step.read = partial(layer.pages.attend, self.progress.prompt)
        if isinstance(held, CompressedStore) and held.watching:
            held.observe(self._observe(layer, None, step), self.progress.prompt)
        if policy.scorer is not None and (not decodes or any(now.evicts)):
            if policy.needs.question and not decodes:
                spans = zip(self.progress.question, self.progress.prompt, strict=True)
                layer.recent.reopen(max(policy.needs.window, *(end - begin for begin, end in spans)))
            window = layer.recent.add(new.queries, now.positions, now.aligned)
            step.observe, step.known = partial(self._observe, layer, window), known
        self.note_bytes(layer.index)
        return step

    def _observe(self, layer: LayerState, recent: tuple[Tensor, Tensor] | None, step: LayerStep) -> Observation:
        """The observation of a step; recent: the queries and positions of the window."""
        now, held, policy, progress = step.now, step.store, self.policy, self.progress
        kind, seen = Observation, held
        if step.params.latents is not None:
            kind, seen = LatentObservation, step.attended
        budgets: tuple[int, ...] = ()
        if policy.scorer is not None:
            budgets = self.budgets.of(layer.index, now.evicts, None if now.phase == "decode" else now.ends)
        window = None
        if recent is not None:
            window = QueryWindow(*recent, see_own=layer.recent.real and keeps_window(policy, budgets))
        return kind(
            layer=layer.index,
            queries=step.queries,
            query_positions=now.positions,
            keys=seen.keys,
            values=seen.values,
            positions=held.positions,
            seen=now.seen,
            phase=now.phase,
            params=step.params,
            window=window,
            slots=held.slots._replace(
                whole=layer.counts == list(now.ends),
                moved=held.state[MOVED][..., 0] if policy.schedule.rerotate else None,
            ),
            sequences=SequenceInfo(
                aligned=now.aligned,
                last=now.newest,
                opens=now.opens,
                budgets=budgets,
                prompts=tuple(progress.prompt),
                questions=tuple(progress.question),
            ),
            memory=dict(layer.memory) if policy.needs.memory else {},
            shared=self.shared,
            known={} if step.known is None else step.known,
        )

    def end_call(self) -> bool:
        """The evictions of a call are done. Returns whether the audit has to look at it.

        It has to if a layer holds more tokens than its policy promised, or if a score was NaN.
        """
        self.shared.clear()
        self.steps = []
        if self.policy.scorer is not None:
            for row, seen in enumerate(self.progress.seen):
                held = (layer.counts[row] if layer.counts else 0 for layer in self.layers)
                if any(map(gt, held, self.budgets.promise(row, seen))):
                    return True
        return bool(self.not_numbers)

    def finish_step(self, layer: LayerState, now: BatchStep) -> None:
        """A step and its eviction are done: drop queries that later steps do not use."""
        if now.phase != "decode":
            if now.prompt_done and (any(now.evicts) or self.policy.schedule.decode == "grow"):
                layer.recent.limit(self.policy.needs.window_decoding or 0)
            layer.recent.copy()

    def settle(self, layer: LayerState, now: BatchStep) -> None:
        """After a complete prompt the store takes its final form, such as quantized codes."""
        if now.prompt_done and not layer.unsettled and isinstance(layer.store, CompressedStore):
            layer.store.settle()
        self.note_bytes(layer.index)

    def note_bytes(self, index: int) -> None:
        """Update the total number of bytes and its peak after a layer changed."""
        now = self.layers[index].nbytes
        self._total_bytes += now - self._bytes[index]
        self._bytes[index] = now
        self.peak_nbytes = max(self.peak_nbytes, self._total_bytes)
        if self.on_change is not None:
            self.on_change(index)

    def note_step(self) -> None:
        """Update the peak for decoding steps of a `DeviceBatch`, where codes have the newest token twice."""
        held = self.layers[-1].store
        twice = held.step_nbytes if isinstance(held, TokenCodeLayerStore) else 0
        self.peak_nbytes = max(self.peak_nbytes, self._total_bytes + twice)

    def footprint(self, kept: Sequence[Sequence[int]], decode_steps: int) -> float:
        """Entries held, summed over the fed tokens and those of pre-passes: mean over layers and KV heads.

        kept [L][H_kv]: tokens held at the end of the only sequence. The host counts the mean budget of a layer; where
        its heads hold another number (official roundings), the difference at the end counts for every decoding step.
        """
        heads = [len(layer) for layer in kept]
        counted = sum(h * layer.footprint[0] for h, layer in zip(heads, self.layers, strict=True))
        held = sum(h * layer.counts[0] for h, layer in zip(heads, self.layers, strict=True))
        entries = counted + (sum(map(sum, kept)) - held) * decode_steps
        return entries / sum(heads) + self.progress.passed_entries[0]

    # --- recurrent states ------------------------------------------------------------------------------------------
    @property
    def state_nbytes(self) -> int:
        """Bytes of the recurrent layers' states."""
        return sum(state.nbytes for state in self.states.values())

    def hold_state(self, name: str, state: Tensor) -> None:
        """Replace a state [B,...] of a recurrent layer."""
        before = self.states.get(name)
        self.states[name] = state
        self._total_bytes += state.nbytes - (0 if before is None else before.nbytes)
        self.peak_nbytes = max(self.peak_nbytes, self._total_bytes)

    def free_state(self, name: str) -> None:
        """Copy a state that was made in inference mode, so that it can be changed outside of it."""
        if name in self.states and self.states[name].is_inference() and not torch.is_inference_mode_enabled():
            self.states[name] = self.states[name].clone()

    # --- pre-passes ------------------------------------------------------------------------------------------------
    def rate_next(self, logits: Tensor, tokens: Tensor) -> None:
        """Rate the tokens [B,1] of the next call with the logits [B,V] before them, if the policy rates tokens."""
        if isinstance(self.policy.pre_pass, TokenRating):
            self._ratings = self.policy.pre_pass.rate(logits[:, None], tokens)

    def rated(self, ratings: Tensor) -> None:
        """Store the ratings [B,T] of the prompt in the running call."""
        (prompt,) = self.steps
        self.shared["ratings"] = ratings[:, prompt.columns]


def keeps_window(policy: Policy, budgets: Sequence[int]) -> bool:
    """Whether the tokens of the window's queries are always kept, so that each query sees at least its own."""
    assert policy.scorer is not None
    window = policy.needs.window
    return not policy.needs.question and all(policy.scorer.protects(budget).newest >= window for budget in budgets)


def in_order(groups: Sequence[PolicyGroup]) -> Iterator[tuple[PolicyGroup, slice]]:
    """Every group, and the rows of its sequences in a batch."""
    first = 0
    for group in groups:
        yield group, slice(None) if len(groups) == 1 else slice(first, first + group.size)
        first += group.size

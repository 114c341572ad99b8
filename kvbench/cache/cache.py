"""The cache: in every layer it appends new tokens, computes attention, and evicts by the policies of its sequences.

One token in one layer: `update` returns a `LayerCall`, which the attention function of transformers calls
(`kvbench.cache.hook`). For each sequence, `KVCache.attend` appends the key and value to the layer's store
(`kvbench.cache.sequence`), attends (`kvbench.cache.attention`) and evicts (`kvbench.cache.eviction`). Sequences that
decode alike are in a table (`kvbench.cache.table`), which does this for all of them at once.

Shapes: B batch, L layers, H_q query heads, H_kv KV heads, M new tokens, C slots, D head dim.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from kvbench.cache.attention import attend, attend_to_survivors
from kvbench.cache.audit import BudgetError, ScoreError, audit, check_call, check_scores
from kvbench.cache.calls import CallingModel, Columns
from kvbench.cache.eviction import Evictions
from kvbench.cache.extra import Passed
from kvbench.cache.extras import extras_of, layers_of
from kvbench.cache.families import check_interface, layout_of
from kvbench.cache.hook import LayerCall, check_attention
from kvbench.cache.interface import check_policy, uncompiled
from kvbench.cache.model_layer import model_layer
from kvbench.cache.sequence import CachedSequence, spread
from kvbench.cache.step import Step, append, no_attention
from kvbench.cache.tables import Tables, leave_tables
from kvbench.cache.views import KVLayer, stacked
from kvbench.errors import ConfigError, as_python, counted
from kvbench.policies.observation import AttentionParams, StepCache
from kvbench.policies.policy import Policy
from kvbench.policies.policy_checks import check_layers, check_next_prompt
from kvbench.policies.stores.slots import owned

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
    """

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
        self.extras = extras_of(self._layout, [policy])
        for extra in self.extras:
            extra.check(policy)
        check_layers(len(self._layout.attention), policy.store, policy.pre_pass)
        self.sequences: list[CachedSequence] = []
        named = [len(x) for x in (prompt_length, question) if isinstance(x, Sequence)]
        self._add_sequences(named[0] if named else 1, policy)
        self.one_prompt = False  # all sequences process one and the same prompt
        self._evictions = Evictions(self.extras)
        self._model = CallingModel(self.config)
        self._counts: list[int] = []  # tokens of each sequence in the running call
        self._places = self._layout.places
        self.tables = Tables(self.sequences)
        layers = layers_of(self.sequences, self._layout)
        self.attention_layers: list[KVLayer] = [layers[index] for index in self._layout.attention]
        super().__init__(layers=layers)
        self._is_user_defined = False  # transformers sets it if `model.generate` receives the cache

    def _add_sequences(self, count: int, policy: Policy) -> None:
        """Begin `count` sequences in place of those of the cache. ValueError if lengths or questions name others."""
        lengths = spread(self._prompt_length, count, "prompt_length")
        questions = spread(self._question, count, "question")
        each = enumerate(zip(lengths, questions, strict=True))
        self.sequences[:] = [CachedSequence(self.config, policy, n, begin, row) for row, (n, begin) in each]

    def join(self, sequences: Iterable[CachedSequence]) -> None:
        """Add sequences of other caches of this model, which are not copied."""
        sequences = list(sequences)
        leave_tables(sequences)
        self.sequences += sequences
        self.extras[:] = extras_of(self._layout, [sequence.policy for sequence in self.sequences])

    def begin_step(self, pads: bool) -> list[CachedSequence | None]:
        """Before a call with one token of every sequence: the sequence of each row of the call; None: padding.

        pads: rows may be padding, so that the call may be recorded.
        """
        return self.tables.arrange(pads and not self._layout.states)

    def release(self, sequences: Iterable[CachedSequence]) -> None:
        """Remove sequences from the cache; each can be used by another cache then."""
        leaving = list(sequences)
        leave_tables(leaving)
        for sequence in leaving:
            self.sequences.remove(sequence)

    def _begin_rows(self, rows: int) -> None:
        """Begin a sequence for each row of the first call. ValueError for another number of rows later."""
        if rows != (len(self.tables.rows) or len(self.sequences)):
            if len(self.sequences) > 1 or self.sequences[0].started:
                raise ValueError(
                    f"the cache has {counted(len(self.sequences), 'sequence')}, the model was called with {rows}"
                )
            self._add_sequences(rows, self.policy)

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        """Append the inputs [B,D,M] of a convolution, whose layer may come before the first one with attention."""
        if not self.one_prompt:
            self._begin_rows(len(conv_states))
        found: Tensor = super().update_conv_state(conv_states, *args, **kwargs)
        return found

    # --- one call of the model, layer by layer -----------------------------------------------------------------------
    @uncompiled  # transformers passes the result on to the attention function
    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> Passed:
        """Pass the new keys and values [B,H_kv,M,D] of a layer, or its latents, to the attention that appends them."""
        place, new = self._places[layer_idx], (key_states, value_states)
        if place == 0:
            check_attention(self.config)
        for extra in self.extras:
            passed = extra.new_call(self, layer_idx, place, *new)
            if passed is not None:
                return passed
        call = LayerCall(self, layer_idx, *new)
        return call, call

    def attend(
        self, call: LayerCall, module: nn.Module, queries: Tensor, columns: Columns, params: AttentionParams
    ) -> Tensor:
        """One layer of a call: append, attend, evict as scheduled. Returns the attention output [B,H_q,M,D].

        The call begins with its first layer and ends with its last.
        """
        index = self._places[call.index]
        if index == 0:
            self._begin_call(module, queries, columns)
        if any(sequence.policy.needs.model for sequence in self.sequences):
            params = params._replace(model=model_layer(module, queries))
        for extra in self.extras:
            extra.between_layers()
        attend = self._attend_prompt if self.one_prompt else self._attend_rows
        if self.tables.running:
            attend = self._attend_tables
        out = attend(index, queries, call.new_keys, call.new_values, params)
        self._evictions.end_layer()
        if index == len(self.attention_layers) - 1 and all(extra.call_is_over for extra in self.extras):
            self.end_call()
        return out

    def _attend_prompt(
        self, index: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        """Attention of one prompt, which is computed once for the policies of all sequences."""
        keys, values, out = owned(keys), owned(values), None  # copied once if they are views
        known: defaultdict[str, StepCache] = defaultdict(dict)
        for sequence in sorted(self.sequences, key=lambda sequence: sequence.cost):
            try:
                for span in sequence.spans if sequence.error is None else ():
                    shared = known[sequence.policy.granularity]
                    step = append(sequence, index, span, queries, keys, values, params, shared)
                    if out is None:
                        out = self._attend_step(step)
                    else:
                        self._evictions.add(step)
            except Exception as error:
                sequence.fail(error)
        return no_attention(queries, values, params) if out is None else out

    def _attend_tables(
        self, index: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        """Attention of decoded tokens: the rows of every table at once, and each of the others by itself."""
        new = queries, keys, values, params
        out = self.tables.attend(index, *new)
        for row, sequence in self.tables.alone:
            out[row : row + 1] = self._attend_row(row, sequence, 1, index, *new)
        return out

    def read(self, place: int, queries: Tensor, params: AttentionParams) -> Tensor | None:
        """Attention of another layer's queries to the tokens of an attention layer; see `extra.Caller`."""
        return self.tables.read(place, queries, params) if self.tables.running else None

    def _attend_rows(
        self, index: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        """Attention of a sequence in each row, whose tokens are the last columns of the call."""
        rows = enumerate(zip(self.sequences, self._counts, strict=True))
        new = queries, keys, values, params
        outs = [self._attend_row(row, sequence, count, index, *new) for row, (sequence, count) in rows]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_row(
        self, row: int, sequence: CachedSequence, count: int, index: int, queries: Tensor, keys: Tensor, values: Tensor,
        params: AttentionParams,
    ) -> Tensor:  # fmt: skip
        """Attention [1,H_q,M,D] of the last `count` columns of a row."""
        out, columns, own = None, queries.shape[2], (queries, keys, values)
        if len(queries) > 1:
            own = queries[row : row + 1], keys[row : row + 1], values[row : row + 1]
        try:
            for span in sequence.spans if sequence.error is None else ():
                first = columns - count + span.start - sequence.spans[0].start
                here = slice(first, first + span.end - span.start)
                whole = here == slice(0, columns)
                some = own if whole else (own[0][:, :, here], own[1][:, :, here], own[2][:, :, here])
                step = append(sequence, index, span, *some, params)
                step.row, step.first = row, first
                if whole:
                    out = self._attend_step(step)
                    continue
                out = no_attention(own[0], own[2], params) if out is None else out
                out[:, :, here] = self._attend_step(step)
        except Exception as error:
            sequence.fail(error)
        return no_attention(own[0], own[2], params) if out is None else out

    def _attend_step(self, step: Step) -> Tensor:
        """Attend and evict, in the order of the schedule."""
        attends_first = step.policy.schedule.order == "attend_then_evict"
        evicted = not attends_first and self._evictions.add(step, attended=False)
        out = attend(step, step.policy.needs) if attends_first else attend_to_survivors(step)
        for extra in self.extras:
            extra.attended(step)
        if attends_first:
            self._evictions.add(step)
        elif evicted:
            step.settle()
        return out

    def _begin_call(self, module: nn.Module, queries: Tensor, columns: Columns) -> None:
        """Check a call of queries [B,H_q,M,D], and split it into the steps of every sequence."""
        self._model.check(module)
        self.tables.end_steps()  # of a model with layers without a cache at its end
        mask = None  # [B,M] bool: the tokens that are no padding
        if self.sequences and not self.sequences[0].isolated:  # those of the engine are checked and have no padding
            seen = [one.seen for one in self.sequences] if self.sequences[0].started else []
            mask = self._model.real(columns, queries, seen)
        self._evictions.end_call()  # of a model with layers without a cache at its end
        rows, new = (len(self.sequences) if self.one_prompt else len(queries)), queries.shape[2]
        if self._is_user_defined and new == 1 and self.seen == self._layout.restart_length:
            raise ValueError(
                f"the answer reaches token {self.seen + 1} of the text, where transformers computes texts of this "
                "model again from their beginning, with other rotary factors (longrope): use kvbench.generate, which "
                f"does the same, or a prompt of more than {self.seen} tokens"
            )
        self._begin_rows(rows)
        for extra in self.extras:
            extra.begin_call(self.sequences, mask)
        if new > 1 or mask is not None or self.one_prompt:
            leave_tables(self.sequences)
        elif not self.tables.rows:
            self.tables.enter()
        self._counts = [new] * rows if mask is None else mask.sum(-1).tolist()
        for sequence, count in zip(self.tables.rows or self.sequences, self._counts, strict=True):
            if sequence is not None and sequence.error is None and sequence.table is None:
                try:
                    sequence.begin_call(count, new, self._is_user_defined)
                except Exception as error:
                    sequence.fail(error)
        self.tables.begin(queries.device)

    def forget_call(self) -> None:
        """Forget a call that was recorded instead of computed."""
        self._evictions = Evictions(self.extras)
        for sequence in self.sequences:
            sequence.spans = []
            sequence.shared.clear()

    def end_call(self) -> None:
        """End a call after its last layer: carry out the evictions and check the budgets."""
        self.tables.end()
        for sequence in self.sequences:
            sequence.before = sequence.columns
        self._evictions.end_call()
        self._finish([sequence for sequence in self.sequences if not sequence.waits])

    def _finish(self, sequences: Sequence[CachedSequence]) -> None:
        """The evictions of a call are done: show them, and check the budgets."""
        for sequence in sequences:
            sequence.show_evicted()
        for sequence in [one for one in sequences if one.error is None and one.needs_check()]:
            try:
                check_call(sequence)
            except Exception as error:
                sequence.fail(error)

    # --- prompts -----------------------------------------------------------------------------------------------------
    def reset(self) -> None:
        """Remove everything, as in a new cache."""
        self.__init__(self.config, self.policy, self._prompt_length, self._question)  # type: ignore[misc]

    def next_prompt(self, length: int | Sequence[int], question: int | Sequence[int] | None = None) -> None:
        """Begin another prompt of `length` tokens, one number or one per sequence (a turn of a conversation).

        `model.generate` feeds the tokens that the cache has not seen, including the last token of the last answer: with
        the ids of the whole conversation [1,T] these are T - cache.seen tokens. Raises ValueError before the last
        prompt is complete, and for policies that cannot take another prompt.
        """
        for policy in (sequence.policy for sequence in self.sequences if sequence.policy.evicts):
            check_next_prompt(policy.name, policy.store, policy.allocator)
        self._evictions.end_call()
        leave_tables(self.sequences)
        if not any(sequence.started for sequence in self.sequences) and self._prompt_length is None:
            self._prompt_length, self._question = length, question  # of as many sequences as the first call brings
            count = len(length) if isinstance(length, Sequence) else len(self.sequences)
            self._add_sequences(count, self.policy)
            return
        lengths = spread(length, len(self.sequences), "prompt_length")
        questions = spread(question, len(self.sequences), "question")
        for sequence, own in zip(self.sequences, lengths, strict=True):
            sequence.check_next_prompt(own)
        for sequence, own, begin in zip(self.sequences, lengths, questions, strict=True):
            sequence.next_prompt(own, begin)

    def resume(self, due: Sequence[Step]) -> None:
        """Carry out evictions that an extra held back, and end the call of the sequences that wait."""
        waiting = [sequence for sequence in self.sequences if sequence.waits]
        for sequence in waiting:
            sequence.waits = False
        self._evictions.resume(due)
        self._finish(waiting)

    def expect(self, tokens: int) -> None:
        """Reserve no capacity for more than this number of tokens after the prompt."""
        for layer in (layer for sequence in self.sequences for layer in sequence.layers):
            if layer.opened:
                layer.store.expect(tokens)

    def __bool__(self) -> bool:
        """False for models of which `model.generate` would discard a cache that is true (`families.AGAIN`)."""
        return self._layout.restart_length is None

    # --- contents ----------------------------------------------------------------------------------------------------
    @property
    def sequence(self) -> CachedSequence:
        """The only sequence of a cache with one."""
        (sequence,) = self.sequences
        return sequence

    @property
    def policy(self) -> Policy:
        """The policy of all sequences."""
        return self.sequences[0].policy

    @property
    def seen(self) -> int:
        """Tokens seen, padding included: the position of the next token of a sequence without padding."""
        return max((sequence.columns for sequence in self.sequences), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held, over all layers."""
        return sum(layer.nbytes for layer in self.attention_layers) + self.state_nbytes

    @property
    def state_nbytes(self) -> int:
        """Bytes of the states of layers without keys and values, which no policy reduces."""
        return sum(sequence.state_nbytes for sequence in self.sequences)

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
        return sum(sequence.peak_nbytes for sequence in self.sequences)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen before the running call; between calls, all tokens seen."""
        return max((sequence.before for sequence in self.sequences), default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Tokens seen by the end of the call, and the first of them."""
        return self.get_seq_length() + query_length, 0

    def kept_by_layer(self) -> list[Tensor]:
        """[B,H_kv] tokens held by each attention layer, on the CPU."""
        return [layer.kept_tokens().cpu() for layer in self.attention_layers]

    def footprint(self, decode_steps: int) -> float:
        """Entries held by the only sequence, summed over all fed tokens (`CachedSequence.footprint`)."""
        return self.sequence.footprint([layer[0].tolist() for layer in self.kept_by_layer()], decode_steps)

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
        self.tables.end()
        self._evictions.end_call()
        leave_tables(self.sequences)
        check_scores(self.sequences)
        for sequence in self.sequences:
            audit(sequence)

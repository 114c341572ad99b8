"""Extra forward passes over a prompt before a policy evicts; `kvbench.policies.pre_passes.pre_pass` has the interface.

`open_cache` selects the tokens to prefill (`PromptChoice`). `pre_pass` runs while the model processes the prompt: it
rates the prompt's tokens (`TokenRating`), runs additional tokens over the stored prompt (`ExtraPasses`) or generates
some (`Lookahead`).

Shapes: B batch, T prompt tokens, H_q query heads, H_kv KV heads, n tokens of a pass, V vocabulary, D head dim.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from kvbench.cache.cache import KVCache
from kvbench.cache.calls import Columns
from kvbench.cache.families import InterfaceError, layout_of
from kvbench.cache.footprint import fed
from kvbench.cache.hook import LayerCall
from kvbench.cache.inputs import HiddenInputs, watch_inputs
from kvbench.cache.model_layer import model_layer
from kvbench.cache.pre_passes import PrePasses
from kvbench.cache.sequence import CachedSequence
from kvbench.cache.step import Step
from kvbench.engine.logits import base_of, prompt_ratings
from kvbench.engine.lookahead import look_ahead
from kvbench.engine.pass_cache import PassCache
from kvbench.policies.observation import AttentionParams
from kvbench.policies.policy import Policy, total_slots
from kvbench.policies.pre_passes.lookahead import Lookahead
from kvbench.policies.pre_passes.pre_pass import (
    BlockPasses,
    ExtraPasses,
    Pass,
    PassStep,
    PromptChoice,
    TextEncoder,
    TokenRating,
)


def open_cache(model: PreTrainedModel, ids: Tensor, policy: Policy, question: int | None) -> tuple[Tensor, KVCache]:
    """The tokens [1,T] of a prompt that the policy prefills, and a new cache for them.

    question: its position in the prompt, for policies that use it. Raises ValueError if the policy selects tokens and
    the model has no such layer.
    """
    whole, passed = ids, 0
    if isinstance(policy.pre_pass, PromptChoice):
        ids = _selected(model, whole, policy, policy.pre_pass)
        passed = 0 if ids is whole else whole.shape[1]
        policy = replace(policy, pre_pass=None)
    if policy.needs.hidden:
        watch_inputs(model)
    cache = KVCache(model.config, policy, prompt_length=ids.shape[1], question=question)
    cache.sequence.passed, cache.sequence.passed_entries = passed, float(fed(0, passed))
    cache.sequence.passes = int(passed > 0)
    return ids, cache


@contextmanager
def pre_pass(model: PreTrainedModel, cache: KVCache, ids: Tensor, encoder: TextEncoder | None = None) -> Iterator[None]:
    """Run the pre-passes of a cache's policies after the call of the model inside, which processes prompts ids [B,T].

    Policies with equal pre-passes share one. Without pre-passes it does nothing. encoder: tokenizer for passes that
    contain text. Raises ValueError if the model does not call its base model as a whole, or the encoder is missing.
    """
    for sequence in cache.sequences:
        _check_continues(model, cache, sequence)
    sequences = [one for one in cache.sequences if one.policy.pre_pass is not None and one.error is None]
    if not sequences:
        yield
        return
    done, held = False, next(extra for extra in cache.extras if isinstance(extra, PrePasses))

    def run(base: nn.Module, args: object, output: Any) -> None:  # noqa: ANN401 - a ModelOutput
        nonlocal done
        done = True
        hook.remove()
        for row, equal in _by_pre_pass(cache):
            rows = slice(row, row + 1)
            try:
                last = type(output)(last_hidden_state=output.last_hidden_state[rows])
                if isinstance(equal[0].policy.pre_pass, Lookahead):
                    look_ahead(model, equal, [held.of(sequence) for sequence in equal], last)
                else:
                    _run(model, equal, last, ids[rows], encoder)
            except Exception as error:
                for sequence in equal:
                    sequence.fail(error)
        cache.resume(held.release())

    for sequence in sequences:
        sequence.waits = True
    hook = base_of(model).register_forward_hook(run)
    before = base_of(model).register_forward_pre_hook(_keep_all_states, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
        before.remove()
    if not done:
        raise ValueError(
            f"{sequences[0].policy.name} needs an extra forward pass before it evicts, which kvbench cannot run with "
            f"{type(model).__name__}: it calls a part of its {type(base_of(model)).__name__} instead of the whole"
        )


def _check_continues(model: PreTrainedModel, cache: KVCache, sequence: CachedSequence) -> None:
    """Fail a sequence that needs several tokens in a later call, if the model resets its recurrent layers there."""
    wanted, continues = sequence.policy.pre_pass, layout_of(model.config).continues
    if (isinstance(wanted, ExtraPasses) or (wanted is not None and cache.seen)) and not continues:
        sequence.fail(
            InterfaceError(
                f"{sequence.policy.name} needs calls of several tokens after the first, but {type(model).__name__} "
                "resets its recurrent layers at every such call: use another policy, such as snapkv"
            )
        )


def _keep_all_states(base: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401
    """Make the base return the hidden states of the whole prompt, if it would drop those that need no logits."""
    return args, kwargs | ({"logits_to_keep": 0} if "logits_to_keep" in kwargs else {})


def _by_pre_pass(cache: KVCache) -> list[tuple[int, list[CachedSequence]]]:
    """Sequences with the same pre-pass over the same keys and values, whose results are equal; and their row."""
    found: dict[object, tuple[int, list[CachedSequence]]] = {}
    for index, sequence in enumerate(cache.sequences):
        if sequence.policy.pre_pass is not None and sequence.error is None:
            row = 0 if cache.one_prompt else index
            wanted, granularity = sequence.policy.pre_pass, sequence.policy.granularity
            budget = sequence.policy.budget if isinstance(wanted, Lookahead) and wanted.drafter else None
            kind = row, repr(wanted), granularity, budget
            found.setdefault(kind, (row, []))[1].append(sequence)
    return list(found.values())


def _run(
    model: PreTrainedModel,
    sequences: Sequence[CachedSequence],
    output: BaseModelOutputWithPast,
    ids: Tensor,
    encoder: TextEncoder | None,
) -> None:
    """Run one pre-pass for sequences that share it. output: of the model's base for the prompt ids [1,T]."""
    first, wanted = sequences[0], sequences[0].policy.pre_pass
    if isinstance(wanted, TokenRating):
        ratings = prompt_ratings(model, output, ids, wanted.rate)
        for sequence in sequences:
            (span,) = sequence.spans
            sequence.shared["ratings"] = ratings[:, : span.end - span.start]
    if isinstance(wanted, ExtraPasses):
        for one in _passes(first, wanted, ids[0].tolist(), encoder):
            _run_pass(model, first, wanted, one)
        for sequence in sequences[1:]:
            _copy_statistics(first, sequence, wanted)


def _passes(
    sequence: CachedSequence, wanted: ExtraPasses, prompt: list[int], encoder: TextEncoder | None
) -> list[Pass]:
    """The passes over a sequence's prompt, or over the blocks of it that were processed."""
    if not isinstance(wanted, BlockPasses):
        return wanted.passes(prompt, encoder or _NoEncoder(sequence.policy.name))
    budgets, seen = sequence.budgets, sequence.seen
    if seen == budgets.prompt:
        return []
    return wanted.passes_after(prompt, seen - budgets.opened, budgets.question - budgets.opened)


class _NoEncoder:
    """Raises an error if a pass contains text and no tokenizer was given."""

    def __init__(self, name: str) -> None:
        self._error = ValueError(f"{name} runs a text over the prompt, so it needs the model's tokenizer")

    def encode(self, text: str) -> list[int]:
        raise self._error

    @property
    def turn_end(self) -> str:
        raise self._error


def _copy_statistics(first: CachedSequence, sequence: CachedSequence, wanted: ExtraPasses) -> None:
    """Copy the results of the passes for one sequence to another with the same tokens."""
    sequence.passed, sequence.passes, sequence.passed_entries = first.passed, first.passes, first.passed_entries
    for target, source in zip(sequence.layers, first.layers, strict=True):
        state, computed = target.store.state, source.store.state
        for name in wanted.statistics:
            state[name].copy_(computed[name])
        target.store.state = state


# --- extra passes ----------------------------------------------------------------------------------------------------
def _run_pass(model: PreTrainedModel, sequence: CachedSequence, wanted: ExtraPasses, one: Pass) -> None:
    """Run the tokens of a pass over a stored sequence, as if they followed it. The stored tokens do not change."""
    over = _ObservedPass.over(model.config, sequence)
    over.wanted, over.one, over.inputs = wanted, one, HiddenInputs()
    if wanted.reads_layer:
        watch_inputs(model)
        over.extras.append(over.inputs)
    positions = over.follow(len(one.tokens), model.device)
    ids = torch.tensor([one.tokens], device=model.device)
    base_of(model)(input_ids=ids, position_ids=positions, past_key_values=over, use_cache=True)
    sequence.passed += len(one.tokens)
    sequence.passes += 1
    sequence.passed_entries += fmean(fed(layer.count, len(one.tokens)) for layer in sequence.layers)


class _ObservedPass(PassCache):
    """A pass that a pre-pass observes in every layer."""

    wanted: ExtraPasses
    one: Pass
    inputs: HiddenInputs

    def attend(
        self, call: LayerCall, module: nn.Module, queries: Tensor, columns: Columns, params: AttentionParams
    ) -> Tensor:
        if self.wanted.reads_layer:
            if self.inputs.of is not module:
                raise InterfaceError(f"{type(module).__name__} has no layer_idx, and the policy uses its hidden states")
            params = params._replace(model=model_layer(module, queries))
        return super().attend(call, module, queries, columns, params)

    def observe(self, index: int, step: Step) -> None:
        store, own = self.stored.layers[index].store, self.own[index]
        state = store.state
        observed = PassStep(
            layer=index,
            queries=step.queries,
            own_keys=own["keys"],
            own_values=own["values"],
            keys=store.keys,
            values=store.values,
            positions=store.positions,
            query_positions=step.positions,
            params=step.params,
            hidden=self.inputs.hidden,
        )
        self.wanted.observe(self.one, observed, {name: state[name] for name in self.wanted.statistics})
        store.state = state


# --- selection of the prompt's tokens --------------------------------------------------------------------------------
class _Reached(Exception):  # noqa: N818 - a signal, not an error: later layers do not run
    def __init__(self, queries: Tensor, keys: Tensor) -> None:
        super().__init__("the layer that selects was reached")
        self.queries, self.keys = queries, keys


class _Probe(KVCache):
    """Raises `_Reached` with the queries and keys of layer `reached`, which ends the forward pass."""

    reached = 0

    def attend(
        self, call: LayerCall, module: nn.Module, queries: Tensor, columns: Columns, params: AttentionParams
    ) -> Tensor:
        if self._places[call.index] == self.reached:
            keys, latents = call.new_keys, params.latents
            raise _Reached(queries, keys if latents is None else latents.expand(keys, call.new_values)[0])
        return super().attend(call, module, queries, columns, params)


def _selected(model: PreTrainedModel, ids: Tensor, policy: Policy, choice: PromptChoice) -> Tensor:
    """The tokens [1,k] that a pre-pass selects from a prompt [1,T]; the same tensor if the prompt fits the budget."""
    layers = len(layout_of(model.config).attention)
    if choice.layer >= layers:
        last = layers - 1
        raise ValueError(f"{policy.name} filters at layer {choice.layer}, the model has attention layers 0 to {last}")
    budget = total_slots(policy, 1, ids.shape[1])
    if ids.shape[1] <= budget:
        return ids
    cache = _Probe(model.config, Policy(name="full"))
    cache.reached = choice.layer
    try:
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    except _Reached as reached:
        kept = choice.choose(reached.queries[0], reached.keys[0], budget)
        return ids[:, kept.to(ids.device)]
    raise AssertionError("the layer that selects never ran")

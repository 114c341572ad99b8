"""Extra forward passes over a prompt before a policy evicts; `kvbench.policies.pre_passes.pre_pass` has the interface.

`open_cache` selects the tokens to prefill (`PromptChoice`). `pre_pass` runs while the model processes the prompt: it
rates the prompt's tokens (`TokenRating`) or runs additional tokens over the stored prompt (`ExtraPasses`).

Shapes: B batch, T prompt tokens, H_q query heads, H_kv KV heads, n tokens of a pass, V vocabulary, D head dim.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from kvbench.cache.attention import QKV, LayerStep, attend
from kvbench.cache.cache import KVCache
from kvbench.cache.footprint import fed
from kvbench.cache.group import PolicyGroup, in_order
from kvbench.cache.inputs import watch_inputs
from kvbench.cache.interface import InterfaceError
from kvbench.cache.layout import layout_of
from kvbench.cache.model_layer import model_layer
from kvbench.cache.progress import BatchStep
from kvbench.engine.logits import base_of, prompt_ratings
from kvbench.policies.needs import Needs
from kvbench.policies.observation import AttentionParams
from kvbench.policies.policy import Policy, total_slots
from kvbench.policies.pre_passes.pre_pass import (
    BlockPasses,
    ExtraPasses,
    Pass,
    PassStep,
    PromptChoice,
    TextEncoder,
    TokenRating,
)
from kvbench.policies.stores.slot_store import SlotStore

Kind = TypeVar("Kind", bound=KVCache)


def open_cache(
    model: PreTrainedModel, ids: Tensor, policy: Policy, kind: type[Kind], question: int | None = None
) -> tuple[Tensor, Kind]:
    """The tokens [1,T] of a prompt that the policy prefills, and a new cache for them.

    question: its position in the prompt, for policies that use it. Raises ValueError if the policy selects tokens and
    the model has no such layer.
    """
    passed = None
    if isinstance(policy.pre_pass, PromptChoice):
        whole = ids
        ids = _selected(model, whole, policy, policy.pre_pass)
        passed = 0 if ids is whole else whole.shape[1]
        policy = replace(policy, pre_pass=None)
    if policy.needs.hidden:
        watch_inputs(model)
    cache = kind(model.config, policy, prompt_length=[ids.shape[1]], question=question)
    if passed is not None:
        cache.group.progress.passed = [passed]
        cache.group.progress.passed_entries = [float(fed(0, passed))]
    return ids, cache


@contextmanager
def pre_pass(model: PreTrainedModel, cache: KVCache, ids: Tensor, encoder: TextEncoder | None = None) -> Iterator[None]:
    """Run the pre-passes of a cache's policies after the call of the model inside, which processes prompts ids [B,T].

    Policies with equal pre-passes share one. Without pre-passes it does nothing. encoder: tokenizer for passes that
    contain text. Raises ValueError if the model does not call its base model as a whole, or the encoder is missing.
    """
    for group in cache.groups:
        _check_continues(model, cache, group)
    groups = [group for group in cache.groups if group.policy.pre_pass is not None and group.error is None]
    if not groups:
        yield
        return
    assert cache.one_prompt or len(cache.groups) == 1, "a pre-pass is about one prompt"
    done = False

    def run(base: nn.Module, args: object, output: Any) -> None:  # noqa: ANN401 - a ModelOutput
        nonlocal done
        done = True
        hook.remove()
        for equal in _by_pre_pass(groups):
            try:
                _run(model, equal, output, ids, encoder)
            except Exception as error:
                for group in equal:
                    group.fail(error)
        cache.pre_pass_done()

    for group in groups:
        group.waits_for_pre_pass = True
    hook = base_of(model).register_forward_hook(run)
    before = base_of(model).register_forward_pre_hook(_keep_all_states, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
        before.remove()
    if not done:
        raise ValueError(
            f"{groups[0].policy.name} needs an extra forward pass before it evicts, which kvbench cannot run with "
            f"{type(model).__name__}: it calls a part of its {type(base_of(model)).__name__} instead of the whole"
        )


def rate_next(cache: KVCache, logits: Tensor, tokens: Tensor) -> None:
    """Rate the tokens [B,1] of the next call with the logits [B,V] before them, for policies that need ratings."""
    for group, rows in in_order(cache.groups):
        if group.policy.rates:
            group.rate_next(logits[rows], tokens[rows])


def _check_continues(model: PreTrainedModel, cache: KVCache, group: PolicyGroup) -> None:
    """Fail a group that needs several tokens in a later call, if the model resets its recurrent layers there."""
    wanted, continues = group.policy.pre_pass, layout_of(model.config).continues
    if (isinstance(wanted, ExtraPasses) or (wanted is not None and cache.seen)) and not continues:
        group.fail(
            InterfaceError(
                f"{group.policy.name} needs calls of several tokens after the first, but {type(model).__name__} "
                "resets its recurrent layers at every such call: use another policy, such as snapkv"
            )
        )


def _keep_all_states(base: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401
    """Make the base return the hidden states of the whole prompt, if it would drop those that need no logits."""
    return args, kwargs | ({"logits_to_keep": 0} if "logits_to_keep" in kwargs else {})


def _by_pre_pass(groups: Sequence[PolicyGroup]) -> list[list[PolicyGroup]]:
    """Groups with the same pre-pass over the same keys and values, whose results are equal."""
    found: list[list[PolicyGroup]] = []
    for group in groups:
        kind = group.policy.pre_pass, group.policy.granularity
        equal = [some for some in found if (some[0].policy.pre_pass, some[0].policy.granularity) == kind]
        if equal:
            equal[0].append(group)
        else:
            found.append([group])
    return found


def _run(
    model: PreTrainedModel,
    groups: Sequence[PolicyGroup],
    output: BaseModelOutputWithPast,
    ids: Tensor,
    encoder: TextEncoder | None,
) -> None:
    """Run one pre-pass for groups that share it. output: of the model's base for the prompts ids [B,T]."""
    first, wanted = groups[0], groups[0].policy.pre_pass
    if isinstance(wanted, TokenRating):
        ratings = prompt_ratings(model, output, ids, wanted.rate)
        for group in groups:
            group.rated(ratings)
    if isinstance(wanted, ExtraPasses):
        for row, prompt in enumerate(ids.tolist()):
            for one in _passes(first, wanted, row, prompt, encoder):
                _run_pass(model, first, wanted, row, one)
        for group in groups[1:]:
            _copy_statistics(first, group, wanted)


def _passes(
    group: PolicyGroup, wanted: ExtraPasses, row: int, prompt: list[int], encoder: TextEncoder | None
) -> list[Pass]:
    """The passes over a sequence's prompt, or over the blocks of it that were processed."""
    if not isinstance(wanted, BlockPasses):
        return wanted.passes(prompt, encoder or _NoEncoder(group.policy.name))
    progress = group.progress
    if progress.seen[row] == progress.prompt[row]:
        return []
    begin = progress.opened[row]
    return wanted.passes_after(prompt, progress.seen[row] - begin, progress.question[row] - begin)


class _NoEncoder:
    """Raises an error if a pass contains text and no tokenizer was given."""

    def __init__(self, name: str) -> None:
        self._error = ValueError(f"{name} runs a text over the prompt, so it needs the model's tokenizer")

    def encode(self, text: str) -> list[int]:
        raise self._error

    @property
    def turn_end(self) -> str:
        raise self._error


def _copy_statistics(first: PolicyGroup, group: PolicyGroup, wanted: ExtraPasses) -> None:
    """Copy the results of the passes for one group to another with the same tokens."""
    group.progress.passed = list(first.progress.passed)
    group.progress.passed_entries = list(first.progress.passed_entries)
    for target, source in zip(group.layers, first.layers, strict=True):
        state, computed = target.store.state, source.store.state
        for name in wanted.statistics:
            state[name].copy_(computed[name])
        target.store.state = state


# --- extra passes ----------------------------------------------------------------------------------------------------
def _run_pass(model: PreTrainedModel, group: PolicyGroup, wanted: ExtraPasses, row: int, one: Pass) -> None:
    """Run the tokens of a pass over one stored sequence, as if they followed it. The stored tokens do not change."""
    begin, new = group.progress.seen[row], len(one.tokens)
    positions = torch.arange(begin, begin + new, device=model.device)[None]
    over = _PassCache(model.config, Policy(name="full"))
    over.group.states = {name: state[row : row + 1].clone() for name, state in group.states.items()}
    over.wanted, over.stored, over.row, over.one = wanted, group, row, one
    over.now = BatchStep(
        columns=slice(0, new),
        positions=positions,
        opens=(True,),
        evicts=(False,),
        seen=positions[:, -1] + 1,
        ends=(begin + new,),
        counts=(new,),
        phase="prompt",
        prompt_done=True,
        aligned=True,
        newest=begin + new - 1,
    )
    with over.recording_inputs(model) if wanted.reads_layer else nullcontext():
        ids = torch.tensor([one.tokens], device=model.device)
        base_of(model)(input_ids=ids, position_ids=positions, past_key_values=over, use_cache=True)
    group.progress.passed[row] += new
    group.progress.passed_entries[row] += fmean(fed(layer.counts[row], new) for layer in group.layers)


class _PassCache(KVCache):
    """Lets the tokens of a pass attend to a sequence stored in another cache and to themselves; stores nothing."""

    wanted: ExtraPasses
    stored: PolicyGroup
    row: int
    one: Pass
    now: BatchStep
    inputs: dict[nn.Module, Tensor]
    hidden: Tensor | None = None

    @contextmanager
    def recording_inputs(self, model: PreTrainedModel) -> Iterator[None]:
        """Record the hidden states that every attention module receives."""
        self.inputs = {}

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.inputs[module] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

        layers = [module for module in base_of(model).modules() if hasattr(module, "layer_idx")]
        hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _called(self, index: int, keys: Tensor, values: Tensor, reader: nn.Module, *args: Any) -> Tensor:  # noqa: ANN401
        queries, _, params = args
        if self.wanted.reads_layer:
            if reader not in self.inputs:
                raise InterfaceError(f"{type(reader).__name__} has no layer_idx, and the policy uses its hidden states")
            self.hidden = self.inputs[reader]
            self.inputs.clear()
            params = params._replace(model=model_layer(reader, queries))
        return self.attend(index, QKV(queries, keys, values), None, params)

    def attend(self, index: int, new: QKV, mask: Tensor | None, params: AttentionParams) -> Tensor:
        layer = self.stored.layers[index]
        if self.stored.policy.granularity == "query_head":
            new = new.for_query_heads()
        store, now = layer.store, self.now.to(new.keys.device)
        places = now.positions.to(torch.int32)[:, None].expand(new.keys.shape[:3])
        own = {"keys": new.keys, "values": new.values, "positions": places}
        stored = {"keys": store.keys, "values": store.values, "positions": store.positions}
        if store.slots.bias is not None:
            stored["bias"], own["bias"] = store.slots.bias, torch.zeros(new.keys.shape[:3], device=new.keys.device)
        here = slice(self.row, self.row + 1)
        used = int((store.positions[here] >= 0).sum(-1).amax()) if store.slots.ascending else store.positions.shape[2]
        stored = {name: x[here, :, :used] for name, x in stored.items()}
        both = {name: torch.cat([x, own[name]], dim=2) for name, x in stored.items()}
        step = LayerStep(new.queries, now, params, SlotStore.of(both, (), store.slots.ascending), fresh=False)
        out = attend(step, Needs())
        if self._shared is not None:
            self._shared.add(self.group, layer, step, new.values)
        observed = PassStep(
            layer=index,
            queries=new.queries,
            own_keys=new.keys,
            own_values=new.values,
            keys=stored["keys"],
            values=stored["values"],
            positions=stored["positions"],
            query_positions=now.positions,
            params=params,
            hidden=self.hidden,
        )
        state = store.state
        statistics = {name: state[name][here, :, :used] for name in self.wanted.statistics}
        self.wanted.observe(self.one, observed, statistics)
        store.state = state
        return out


# --- selection of the prompt's tokens --------------------------------------------------------------------------------
class _Reached(Exception):  # noqa: N818 - a signal, not an error: later layers do not run
    def __init__(self, queries: Tensor, keys: Tensor) -> None:
        super().__init__("the layer that selects was reached")
        self.queries, self.keys = queries, keys


class _Probe(KVCache):
    """Raises `_Reached` with the queries and keys of layer `reached`, which ends the forward pass."""

    reached = 0

    def attend(self, index: int, new: QKV, mask: Tensor | None, params: AttentionParams) -> Tensor:
        if index == self.reached:
            keys = new.keys if params.latents is None else params.latents.expand(new.keys, new.values)[0]
            raise _Reached(new.queries, keys)
        return super().attend(index, new, mask, params)


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

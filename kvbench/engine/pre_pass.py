"""Pre-passes: what the model computes of a prompt for a policy before anything of it is evicted.

`read_prompt` chooses what is read, `pre_pass` goes on while it is read; the contract stands in
`kvbench.policies.pre_passes.pre_pass`.

Shapes: B batch, T prompt columns (padding included), H_q query heads, H_kv KV heads, n tokens of a pass, D head dim.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from kvbench.cache.attention import QKV, LayerStep, attend
from kvbench.cache.cache import KVCache
from kvbench.cache.group import PolicyGroup, in_order
from kvbench.cache.interface import InterfaceError
from kvbench.cache.layout import attention_layers, continues
from kvbench.cache.model_layer import model_layer
from kvbench.cache.steps import BatchStep
from kvbench.engine.logits import base_of, prompt_ratings
from kvbench.policies.layer_budgets import total_slots
from kvbench.policies.needs import Needs
from kvbench.policies.observation import AttentionParams
from kvbench.policies.policy import Policy
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


def read_prompt(
    model: PreTrainedModel,
    input_ids: Tensor,
    policy: Policy,
    kind: type[Kind],
    question: int | Sequence[int] | None = None,
) -> tuple[Tensor, Kind]:
    """The prompt [B,T] as a policy has it read, and a new cache for it.

    question: where the question begins, for policies that ask.
    ValueError where the policy chooses the prompt's tokens and the model has no such layer, or several sequences are
    given.
    """
    passed = None
    if isinstance(policy.pre_pass, PromptChoice):
        whole = input_ids
        input_ids = _chosen(model, whole, policy, policy.pre_pass)
        passed = 0 if input_ids is whole else whole.shape[1]
        policy = dataclasses.replace(policy, pre_pass=None)
    cache = kind(model.config, policy, prompt_length=[input_ids.shape[1]] * len(input_ids), question=question)
    if passed is not None:
        cache.group.progress.passed = [passed]
    return input_ids, cache


@contextmanager
def pre_pass(
    model: PreTrainedModel,
    cache: KVCache,
    input_ids: Tensor,
    mask: Tensor | None,
    encoder: TextEncoder | None = None,
) -> Iterator[None]:
    """While the model reads a prompt [B,T] in one call: once its layers are done, find what policies wait for.

    mask [B,T] bool marks real tokens, None: all are. encoder: for passes that are made of text. Policies with the same
    pre-pass share it. ValueError where the model calls a part of its base model alone, or an encoder is missing.
    """
    for group in cache.groups:
        _check_continues(model, cache, group)
    groups = [group for group in cache.groups if group.policy.pre_pass is not None and group.error is None]
    if not groups:
        yield
        return
    assert cache.one_prompt or len(cache.groups) == 1, "a pre-pass reads one prompt"
    done = False

    def find(base: nn.Module, args: object, output: Any) -> None:  # noqa: ANN401 - a ModelOutput
        nonlocal done
        done = True
        hook.remove()
        for alike in _alike(groups):
            try:
                _find(model, alike, output, input_ids, mask, encoder)
            except Exception as error:
                for group in alike:
                    group.fail(error)
        cache.pre_pass_done()

    for group in groups:
        group.waits_for_pre_pass = True
    hook = base_of(model).register_forward_hook(find)
    before = base_of(model).register_forward_pre_hook(_whole, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
        before.remove()
    if not done:
        raise ValueError(
            f"{groups[0].policy.name} has the model look at a prompt again before it evicts, which kvbench cannot have "
            f"{type(model).__name__} do: it calls a part of its {type(base_of(model)).__name__} and not the whole"
        )


def _check_continues(model: PreTrainedModel, cache: KVCache, group: PolicyGroup) -> None:
    """The group fails where it needs several tokens in one call, after others, of a model that begins anew at each."""
    asked = group.policy.pre_pass
    if (isinstance(asked, ExtraPasses) or (asked is not None and cache.seen)) and not continues(model.config):
        group.fail(
            InterfaceError(
                f"{group.policy.name} has {type(model).__name__} read several tokens in one call after others, but "
                "this model begins its recurrent layers anew at every such call: use another policy, such as snapkv"
            )
        )


def _whole(base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The last hidden states of the whole prompt, where a base would leave out those that no logit is asked of."""
    return args, kwargs | ({"logits_to_keep": 0} if "logits_to_keep" in kwargs else {})


def _alike(groups: list[PolicyGroup]) -> list[list[PolicyGroup]]:
    """Groups with one pre-pass over the same keys and values: they find the same."""
    found: list[tuple[object, list[PolicyGroup]]] = []
    for group in groups:
        kind = group.policy.pre_pass, group.policy.granularity
        some = next((some for other, some in found if other == kind), None)
        if some is None:
            found.append((kind, [group]))
        else:
            some.append(group)
    return [some for _, some in found]


def _find(
    model: PreTrainedModel,
    alike: list[PolicyGroup],
    output: BaseModelOutputWithPast,
    input_ids: Tensor,
    mask: Tensor | None,
    encoder: TextEncoder | None,
) -> None:
    """What the pre-pass of some groups looks for in the prompt that is held; output: what the model's base gave."""
    first, asked = alike[0], alike[0].policy.pre_pass
    if isinstance(asked, TokenRating):
        ratings = prompt_ratings(model, output, input_ids, mask, asked.rate)
        for group in alike:
            group.rated(ratings)
    if isinstance(asked, ExtraPasses):
        for row, ids in enumerate(input_ids):
            prompt = (ids if mask is None else ids[mask[row]]).tolist()
            for one in _passes(first, asked, row, prompt, encoder):
                _pass_over(model, first, asked, row, one)
        for group in alike[1:]:
            _copy_findings(first, group, asked)


def _passes(
    group: PolicyGroup, asked: ExtraPasses, row: int, prompt: list[int], encoder: TextEncoder | None
) -> list[Pass]:
    """The passes over a sequence's prompt, or over the block of it that was read."""
    if not isinstance(asked, BlockPasses):
        return asked.passes(prompt, encoder or _NoEncoder(group.policy.name))
    progress = group.progress
    if progress.seen[row] == progress.prompt[row]:
        return []
    begin = progress.opened[row]
    return asked.passes_after(prompt, progress.seen[row] - begin, progress.question[row] - begin)


class _NoEncoder:
    """Refuses to encode a text, where no tokenizer was given."""

    def __init__(self, name: str) -> None:
        self._error = ValueError(f"{name} gives the model a text beside the prompt, so it needs the model's tokenizer")

    def encode(self, text: str) -> list[int]:
        raise self._error

    @property
    def turn_end(self) -> str:
        raise self._error


def _pass_over(model: PreTrainedModel, group: PolicyGroup, asked: ExtraPasses, row: int, one: Pass) -> None:
    """Let the tokens of a pass look at all that is held of a sequence, as if they followed it. It stays as it is."""
    begin = group.progress.seen[row]
    ids = torch.tensor([one.tokens], device=model.device)
    now = _step(torch.arange(begin, begin + len(one.tokens), device=model.device)[None])
    over = _PassCache(model.config, Policy(name="full"))
    over.group.states = {name: state[row : row + 1].clone() for name, state in group.states.items()}
    over.asked, over.held, over.row, over.one, over.now, over.hidden = asked, group, row, one, now, None
    with over.noting_hidden(model) if asked.reads_layer else nullcontext():
        base_of(model)(input_ids=ids, position_ids=now.positions, past_key_values=over, use_cache=True)
    group.progress.passed[row] += len(one.tokens)


def _step(positions: Tensor) -> BatchStep:
    """The tokens of a pass at positions [1,n], as a part of a prompt."""
    first, new = int(positions[0, 0]), positions.shape[1]
    return BatchStep(
        columns=slice(0, new),
        positions=positions,
        opens=(True,),
        evicts=(False,),
        seen=positions[:, -1] + 1,
        ends=(first + new,),
        counts=(new,),
        phase="prompt",
        prompt_done=True,
        aligned=True,
        newest=first + new - 1,
    )


class _PassCache(KVCache):
    """Shows the tokens of a pass what another cache holds of a sequence, and themselves; it holds nothing."""

    asked: ExtraPasses
    held: PolicyGroup
    row: int
    one: Pass
    now: BatchStep
    hidden: Tensor | None
    noted: dict[nn.Module, Tensor]

    @contextmanager
    def noting_hidden(self, model: PreTrainedModel) -> Iterator[None]:
        """Note what every attention is given."""
        self.noted = {}

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.noted[module] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

        layers = [module for module in base_of(model).modules() if hasattr(module, "layer_idx")]
        hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _called(self, index: int, keys: Tensor, values: Tensor, reader: nn.Module, *args: Any) -> Tensor:  # noqa: ANN401
        queries, mask, params = args
        if self.asked.reads_layer:
            if reader not in self.noted:
                raise InterfaceError(f"{type(reader).__name__} does not say which layer it is, and the policy reads it")
            self.hidden = self.noted[reader]
            self.noted.clear()
            params = params._replace(model=model_layer(reader, queries))
        return self.attend(index, QKV(queries, keys, values), mask, params)

    def _begin(self, layer: int, new: QKV, mask: Tensor | None) -> None:
        """No call of its own begins."""

    def _end(self, layer: int) -> None:
        """None ends."""

    def _steps(self, group: PolicyGroup, like: Tensor) -> list[BatchStep]:
        return [self.now.to(like.device)]

    def attend(self, index: int, new: QKV, mask: Tensor | None, params: AttentionParams) -> Tensor:
        layer = self.held.layers[index]
        new, store = layer.prepare(new), layer.store
        now = self.now.to(new.keys.device)
        own = {"keys": new.keys, "values": new.values, "positions": now.places[:, None].expand(new.keys.shape[:3])}
        stored = {"keys": store.keys, "values": store.values, "positions": store.positions}
        if store.bias is not None:
            stored["bias"], own["bias"] = store.bias, torch.zeros(new.keys.shape[:3], device=new.keys.device)
        here = slice(self.row, self.row + 1)
        used = int((store.positions[here] >= 0).sum(-1).amax()) if store.ascending else store.positions.shape[2]
        stored = {name: x[here, :, :used] for name, x in stored.items()}
        both = {name: torch.cat([x, own[name]], dim=2) for name, x in stored.items()}
        over = SlotStore.of(both, (), store.ascending)
        looks = LayerStep(new.queries, now, params, over, fresh=False)
        out = attend(looks, Needs())
        self._shared.add(self.group, layer, looks, new.values)
        step = PassStep(
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
        self.asked.observe(self.one, step, {name: state[name][here, :, :used] for name in self.asked.statistics})
        store.remember(state)
        return out


def _copy_findings(first: PolicyGroup, group: PolicyGroup, asked: ExtraPasses) -> None:
    """What the passes found for one group holds for another with the same tokens."""
    group.progress.passed = list(first.progress.passed)
    for own, found in zip(group.layers, first.layers, strict=True):
        state, known = own.store.state, found.store.state
        for name in asked.statistics:
            state[name].copy_(known[name])
        own.store.remember(state)


def rate_next(cache: KVCache, logits: Tensor, tokens: Tensor) -> None:
    """Rate the tokens [B,1] of the next call by the logits [B,V] before them, for policies that ask for it."""
    for group, rows in in_order(cache.groups):
        if group.policy.rates:
            group.rate_next(logits[rows], tokens[rows])


# --- the tokens that are read at all ---------------------------------------------------------------------------------
class _Reached(Exception):  # noqa: N818 - a signal, not an error: the layers after this one need not run
    def __init__(self, queries: Tensor, keys: Tensor) -> None:
        super().__init__("the layer that chooses was reached")
        self.queries = queries
        self.keys = keys


class _Probe(KVCache):
    """Hands out what the attention of layer `reached` would have read and ends the forward pass."""

    reached = 0

    def attend(self, index: int, new: QKV, mask: Tensor | None, params: AttentionParams) -> Tensor:
        if index == self.reached:
            keys = new.keys if params.latents is None else params.latents.expand(new.keys, new.values)[0]
            raise _Reached(new.queries, keys)
        return super().attend(index, new, mask, params)


def _chosen(model: PreTrainedModel, input_ids: Tensor, policy: Policy, choice: PromptChoice) -> Tensor:
    """The prompt [1,T] as a pre-pass leaves it, [1,k]; the same tensor where all of it fits the budget."""
    layers = attention_layers(model.config)
    if choice.layer >= layers:
        last = layers - 1
        raise ValueError(f"{policy.name} filters at layer {choice.layer}, the model has attention layers 0 to {last}")
    if len(input_ids) != 1:
        raise ValueError(f"{policy.name} rewrites each prompt to its own, so it takes one sequence at a time")
    budget = total_slots(policy, 1, input_ids.shape[1])
    if input_ids.shape[1] <= budget:
        return input_ids
    cache = _Probe(model.config, Policy(name="full"))
    cache.reached = choice.layer
    try:
        model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    except _Reached as reached:
        kept = choice.choose(reached.queries[0], reached.keys[0], budget)
        return input_ids[:, kept.to(input_ids.device)]
    raise AssertionError("the layer that chooses never ran")

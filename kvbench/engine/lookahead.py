"""The pre-pass `Lookahead`: generates tokens over a stored prompt, and passes their queries to the scorer.

Shapes: T prompt tokens, n generated tokens, H_q query heads, H_kv KV heads, D head dim.
"""

from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from kvbench.cache.footprint import fed
from kvbench.cache.sequence import CachedSequence
from kvbench.cache.step import Step
from kvbench.engine.logits import base_of, head_logits
from kvbench.engine.pass_cache import PassCache
from kvbench.kernels.references import attention_logits, visible
from kvbench.models.answers import end_tokens
from kvbench.policies.observation import QueryWindow
from kvbench.policies.policy import Policy, total_slots
from kvbench.policies.policy_checks import check_draft
from kvbench.policies.pre_passes.lookahead import Lookahead


class _DraftCache(PassCache):
    """Lets generated tokens attend to the visible tokens of a stored prompt; stores their queries."""

    visible: dict[int, Tensor]  # positions [1,H_kv,T] by layer, -1 for tokens that are not attended to
    queries: dict[int, list[Tensor]]

    def places(self, index: int) -> Tensor:
        return self.visible[index]

    def observe(self, index: int, step: Step) -> None:
        self.queries.setdefault(index, []).append(step.queries)


def look_ahead(
    model: PreTrainedModel,
    sequences: Sequence[CachedSequence],
    waiting: Sequence[Sequence[Step]],
    output: BaseModelOutputWithPast,
) -> None:
    """Run one lookahead for sequences of equal prompts, and add its queries to their observation windows.

    waiting: the steps of each sequence's layers, whose evictions wait. output: of the model's base for the prompt.
    """
    first, wanted = sequences[0], sequences[0].policy.pre_pass
    assert isinstance(wanted, Lookahead)
    cache = _DraftCache.over(model.config, first)
    cache.visible, cache.queries = _visible(first, wanted, waiting[0]), {}
    tokens = _generate(model, cache, wanted.tokens, output)
    places = torch.arange(first.seen, first.seen + tokens, device=model.device)[None]
    visible = [int((cache.visible[index][0] >= 0).sum(-1).max()) for index in cache.visible]
    for sequence, steps in zip(sequences, waiting, strict=True):
        sequence.passed += tokens
        sequence.passes += tokens
        sequence.passed_entries += fmean(fed(held, tokens) for held in visible)
        sequence.note(beside=cache.own_nbytes)
        for step in steps:
            queries = torch.cat(cache.queries[step.layer.index], dim=2)
            own = cache.own[step.layer.index]["keys"] if wanted.softmax == "all" else None
            add_to_window(step, queries, places.to(queries.device), wanted.official, own)


def add_to_window(step: Step, queries: Tensor, places: Tensor, as_prompt: bool, keys: Tensor | None = None) -> None:
    """Add queries [1,H_q,n,D] of generated tokens, at places [1,n], to the observation window of a step.

    as_prompt: the window moves back by n positions, so that its queries mask tokens as the last ones of the prompt.
    keys [1,H_kv,n,D] of these tokens, if the softmax includes them.
    """
    before, ahead = step.observation.window, queries.shape[2]
    own = None if keys is None else _among_themselves(step, queries, keys, places)
    if before is not None:
        queries, places = torch.cat([before.queries, queries], dim=2), torch.cat([before.positions, places], dim=1)
    step.observe_with(QueryWindow(queries, places - ahead if as_prompt else places, ahead=ahead, own=own))


def _among_themselves(step: Step, queries: Tensor, keys: Tensor, places: Tensor) -> Tensor:
    """The log-sum-exp [1,H_q,n] of the logits of queries for the keys [1,H_kv,n,D] of the same tokens."""
    logits = attention_logits(queries, keys, step.params.scaling, step.params.softcap)  # [1,H_kv,G,n,n]
    seen = visible(places, places[:, None], step.params.sliding_window)
    return logits.masked_fill(~seen[:, :, None], -torch.inf).logsumexp(-1).flatten(1, 2)


def _visible(sequence: CachedSequence, wanted: Lookahead, steps: Sequence[Step]) -> dict[int, Tensor]:
    """The positions [1,H_kv,T] of each layer's stored tokens, -1 for those that the generated tokens do not see."""
    stored = {layer.index: layer.store.positions for layer in sequence.layers}
    if wanted.drafter is None:
        return stored
    layers = len(sequence.layers)
    budget = total_slots(sequence.policy, layers, sequence.budgets.prompt) // layers
    check_draft(sequence.policy.name, wanted, budget)
    drafter = Policy(scorer=wanted.drafter, budget=budget, granularity=sequence.policy.granularity)
    for step in steps:
        kept = drafter.rank(step.without_queries().observation, {}).select(budget)
        stored[step.layer.index] = stored[step.layer.index].masked_fill(~kept, -1)
    return stored


def _generate(model: PreTrainedModel, cache: PassCache, tokens: int, output: BaseModelOutputWithPast) -> int:
    """Generate up to `tokens` tokens greedily over a stored prompt; returns their number."""
    base, ends = base_of(model), end_tokens(model.generation_config, None)
    last = output.last_hidden_state
    assert last is not None
    output = type(output)(last_hidden_state=last[:, -1:])
    for count in range(tokens):
        token = head_logits(model, output)[:, -1:].argmax(-1).to(model.device)  # [1,1]
        if count and int(token) in ends:
            return count
        at = cache.follow(1, model.device)
        output = base(input_ids=token, position_ids=at, past_key_values=cache, use_cache=True)
    return tokens

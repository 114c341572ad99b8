"""Divergence from the full cache: all sequences of an example are fed one answer and compared token by token.

The sequences take their steps together. The full cache is one of them, the reference: its most likely token, or the
next given one, is fed to all. Each is compared with it after every step, so that no logits are stored.

Shapes: S sequences, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.config.presets import make_policy
from kvbench.engine.logits import NOT_A_NUMBER
from kvbench.engine.sequence import LiveSequence
from kvbench.errors import ConfigError
from kvbench.models.prompt import Prompt
from kvbench.policies.policy import Policy
from kvbench.results.samples import Divergence
from kvbench.run.run import Run
from kvbench.tasks.task import Reading

AT_ONCE = 2**22
"""Numbers of one comparison: 32 MiB of float64."""


class TokenDivergence(NamedTuple):
    """The divergence of one token, see `kvbench.results.samples.Divergence`."""

    kl: float
    delta_logprob: float
    delta_p: float
    same_top: float
    agrees: float


def token_divergence(
    full: Tensor, policies: Tensor, token: int, forbidden: Sequence[int] = ()
) -> list[TokenDivergence]:
    """Compare the raw logits of policies [S,V] with those of the full cache [V], before `token`.

    In float64 over all columns, temperature 1:

        KL = sum_v P(v) (log P(v) - log Q(v)) in nats, P = softmax(full), Q = softmax(policy)

    Terms with P = 0 are 0; rounding below 0 is cut. forbidden: tokens that greedy decoding may not choose. A KL is NaN
    if logits are. Raises ValueError if the numbers of columns differ.
    """
    if full.shape[-1] != policies.shape[-1]:
        raise ValueError(
            f"the vocabularies differ: {full.shape[-1]} logits of the full cache, {policies.shape[-1]} of the policy"
        )
    found = []
    log_p = full.double()[None].log_softmax(-1)
    p, top = log_p.exp(), full.argmax()
    for rows in policies.split(max(1, AT_ONCE // full.shape[-1])):
        log_q = rows.double().log_softmax(-1)
        kl = torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(-1).clamp(min=0)
        at = log_q[:, token]
        best = rows.argmax(-1)
        choice = best if not forbidden else rows.index_fill(1, _indices(forbidden, rows), -torch.inf).argmax(-1)
        columns = kl, at - log_p[:, token], at.exp() - p[:, token], (best == top).double(), (choice == token).double()
        found += [TokenDivergence(*row) for row in torch.stack(columns, dim=1).tolist()]
    return found


def _indices(tokens: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(tokens, device=like.device)


def compare(reference: LiveSequence, others: Iterable[LiveSequence]) -> None:
    """Compare sequences that took a step with the full cache, choose the next token, and append it to all of them.

    All have the same request. Dictated tokens at the beginning of an answer are not compared, unless all are given.
    """
    logits, live = reference.waiting, [one for one in others if not one.done]
    if reference.error is None and logits is not None and bool(logits.isnan().any()):
        reference.error = FloatingPointError(NOT_A_NUMBER)
    for one in live:
        if reference.error is not None:
            one.error = reference.error
        elif logits is not None and one.waiting is None:
            one.error = ValueError("it cannot be compared with the full cache, whose text was computed again")
    if reference.error is not None or logits is None:
        return
    live = [one for one in live if one.error is None]
    rows = [one.waiting for one in live if one.waiting is not None]
    token, forbidden = _next_token(reference, logits[0])
    if rows and (reference.dictated is None or reference.request.is_dictated):
        for one, found in zip(live, token_divergence(logits[0], torch.cat(rows), token, forbidden), strict=True):
            if math.isnan(found.kl):
                one.error = FloatingPointError(NOT_A_NUMBER)
            one.divergences.append(found)
    reference.append(token)
    for one in live:
        one.tokens, one.complete = list(reference.tokens), reference.complete
        one.logits = one.waiting if one.policy.rates else None
    for one in (reference, *live):
        one.waiting = None


def divergence_of(answer: str, tokens: Sequence[Sequence[float]]) -> Divergence:
    """The divergence of a finished sequence, from those of its tokens. answer: the text that it was fed."""
    kl, logprob, p, top, agrees = ([one[i] for one in tokens] for i in range(len(TokenDivergence._fields)))
    return Divergence(
        answer=answer,
        kl=[None if math.isinf(x) else _digits(x) for x in kl],
        delta_logprob=[None if not math.isfinite(x) else _digits(x) for x in logprob],
        delta_p=[_digits(x) for x in p],
        same_top=[int(x) for x in top],
        agrees=[int(x) for x in agrees],
    )


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


def _next_token(reference: LiveSequence, logits: Tensor) -> tuple[int, list[int]]:
    """The token that all sequences are fed, and the tokens that greedy decoding may not choose."""
    if reference.dictated is not None:
        return reference.dictated, []
    forbidden = reference.forbidden
    allowed = logits if not forbidden else logits.index_fill(0, _indices(forbidden, logits), -torch.inf)
    return int(allowed.argmax()), forbidden


# --- runs ------------------------------------------------------------------------------------------------------------
@cache
def full_cache() -> Policy:
    """The policy of the reference."""
    return make_policy("full")


def given_answer(prompt: Prompt) -> Prompt:
    """A prompt whose continuation is fed as its answer, if it has one."""
    tokens = prompt.continuation
    if tokens is None or prompt.is_whole_text:
        return prompt
    old = prompt.example.reading
    reading = Reading(prompt_tokens=prompt.length, block=None if old is None else old.block)
    example = replace(prompt.example, target=None, reading=reading, max_new_tokens=len(tokens))
    return replace(prompt, example=example, ids=prompt.ids[: prompt.length], target=None, given=tuple(tokens.tolist()))


def check_divergence(run: Run, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError if the answers of a run cannot be compared with those of the full cache."""
    why = None
    if any(prompt.pairs or prompt.is_whole_text for prompt in prompts):
        why = (
            f"compares answers, and task {run.task.name} only scores given texts: use a task that generates, or score "
            "what follows a prompt (task.prompt_tokens)"
        )
    elif run.policy.generator is not None:
        why = f"feeds every policy the same answer, and {run.policy_name} has a cache of its own"
    elif run.sampling is not None and not run.sampling.greedy:
        why = (
            "compares with the greedy answer of the full cache, so sampling has no effect: leave out "
            f"generation.temperature={run.sampling.temperature}"
        )
    elif any(prompt.own for prompt in prompts):
        why = "compares with the answers of the full cache, so history=own is not possible: use history=golden"
    if why is not None:
        raise ConfigError("task.divergence", True, why=why)

"""Teacher forcing: the likelihood of given tokens, while the cache holds what a policy keeps.

`continuation_scores` compresses a prompt and scores the tokens after it; `text_scores` scores a whole text, whose
policy evicts block by block. `score_prompt` chooses between them for an example of a task.

Shapes: T tokens of a prompt or text, M of a continuation, n scored tokens, V vocabulary, L layers, H_kv KV heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.families import layout_of
from kvbench.engine.logits import LOGITS_AT_ONCE, now
from kvbench.engine.pre_pass import open_cache
from kvbench.engine.prefill import GIVEN_TOKENS, append_given, given_size, prefill
from kvbench.engine.sequence import NOT_A_NUMBER
from kvbench.models.prompts import Prompt
from kvbench.models.tokens import Pair
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import PromptChoice, TextEncoder
from kvbench.policies.pre_passes.surprisal import surprisal
from kvbench.policies.schedule import Blocks
from kvbench.results.samples import Likelihood

Report = Callable[[int], None]


def _ignore(tokens: int) -> None:
    """The default report of progress: none."""


@dataclass(frozen=True)
class Scores:
    """The likelihood of given tokens.

    logprobs [n] float32: log p of each token, in nats. greedy [n] bool: whether greedy decoding would choose it. cache:
    at the end; the last token was not appended to it after a prompt. prefill_seconds: until the first token can be
    scored; for a text, the whole time. decode_seconds: the rest. block: tokens between two evictions of a text.
    """

    logprobs: Tensor
    greedy: Tensor
    cache: WatchedCache
    prefill_seconds: float
    decode_seconds: float | None = None
    block: int | None = None

    @property
    def nll(self) -> Tensor:
        """-log p of each token, [n] float32."""
        return -self.logprobs

    @property
    def logprob(self) -> float:
        """Sum of log p of all tokens, in nats."""
        return float(self.logprobs.double().sum())


class WatchedCache(KVCache):
    """A cache that records the most tokens that each layer and KV head kept since `watch` was called."""

    _teacher_forced = True
    _most: dict[int, Tensor] | None = None

    def watch(self) -> None:
        """Start to record, with the tokens kept now."""
        self._most = {}
        self.sequence.on_change = self._record
        for index, layer in enumerate(self.attention_layers):
            if layer.is_initialized:
                self._record(index)

    @property
    def most_kept(self) -> list[Tensor]:
        """[H_kv] of each layer: the most tokens kept at any time, over all sequences."""
        assert self._most, "nothing was recorded"
        return [self._most[index].cpu() for index in range(len(self.attention_layers))]

    def _record(self, index: int) -> None:
        """Called whenever a layer has appended or evicted tokens."""
        assert self._most is not None
        kept = self.attention_layers[index].kept_tokens().amax(0)
        self._most[index] = torch.maximum(self._most.get(index, kept), kept)


@torch.inference_mode()
def continuation_scores(
    model: PreTrainedModel,
    prompt: Tensor,
    continuation: Tensor,
    policy: Policy,
    *,
    report: Report = _ignore,
    encoder: TextEncoder | None = None,
) -> Scores:
    """Compress the prompt [1,T] as generation does, then score the continuation [1,M] with decoding steps.

    A call has several tokens of the continuation only if the result is that of single tokens: a cache that evicts while
    decoding evicts after each of them. report: called with the number of tokens so far after every call. encoder:
    tokenizer for pre-passes that contain text.
    Raises BudgetError if the cache holds more than the policy allows, ValueError for an empty prompt or continuation.
    """
    if len(prompt) != 1 or len(continuation) != 1 or not prompt.shape[1] or not continuation.shape[1]:
        raise ValueError(
            "one prompt and one continuation are scored at a time, each with at least one token; got "
            f"{list(prompt.shape)} and {list(continuation.shape)} tokens"
        )
    began = now(model)
    prompt, cache = open_cache(model, prompt, policy, WatchedCache)
    logits = prefill(model, prompt, cache, encoder)
    scored = [_score(logits, continuation[0, :1])]
    fed, done = continuation[:, :-1], prompt.shape[1]
    cache.expect(fed.shape[1])
    cache.watch()
    prefilled = now(model)
    report(done)
    size = min(given_size(model, [policy], done + fed.shape[1]), _fitting(model))
    for out in append_given(model, cache, fed, size, logits) if fed.shape[1] else ():
        following = continuation[0, done - prompt.shape[1] + 1 :][: out.shape[1]]
        scored.append(_score(out[0], following))
        done += out.shape[1]
        report(done)
    logprobs, greedy = _joined(scored)
    decoded = now(model)
    cache.audit()
    return Scores(logprobs, greedy, cache, prefilled - began, decoded - prefilled)


@torch.inference_mode()
def text_scores(model: PreTrainedModel, ids: Tensor, policy: Policy, *, report: Report = _ignore) -> Scores:
    """Score every token of a text [1,T] except the first, while the policy evicts after every block of its schedule.

    A block is scored before its eviction, so that its tokens attend to the budget and to up to m - 1 tokens of the
    block. The last logits of a block score the first token of the next, so that each token is scored once. report:
    called with the number of tokens so far after every call.
    Raises BudgetError if the cache holds more than the policy allows, ValueError if the policy evicts nothing before
    the end of the text.
    """
    if len(ids) != 1 or ids.shape[1] < 2:
        raise ValueError(f"one text of at least two tokens is scored at a time, got {list(ids.shape)} tokens")
    check_blocks(policy)
    began = now(model)
    total = ids.shape[1]
    cache = WatchedCache(model.config, policy, prompt_length=total)
    cache.watch()
    block = int(policy.schedule.size) if policy.evicts and isinstance(policy.schedule, Blocks) else None
    size = min(GIVEN_TOKENS, _fitting(model)) if layout_of(model.config).continues else 1
    size -= size % (block or 1) if (block or 1) <= size else 0
    scored, done = [], 0
    for out in append_given(model, cache, ids, size, None):
        done += out.shape[1]
        following = ids[0, done - out.shape[1] + 1 : done + 1]
        scored.append(_score(out[0, : len(following)], following))
        if block is None or done % block == 0 or done == total:
            cache.audit()
        report(done)
    logprobs, greedy = _joined(scored)
    return Scores(logprobs, greedy, cache, now(model) - began, block=block)


def _fitting(model: PreTrainedModel) -> int:
    """Tokens of one call whose logits fit into `LOGITS_AT_ONCE`."""
    return max(1, LOGITS_AT_ONCE // int(model.config.get_text_config(decoder=True).vocab_size))


def _score(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """log p of tokens [N] under logits [N,V], [N] float32, and whether each is the most likely token, [N] bool."""
    tokens = tokens.to(logits.device)
    return -surprisal(logits, tokens), logits.argmax(-1) == tokens


def _joined(scored: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The scores of all calls. Raises FloatingPointError if logits were NaN."""
    logprobs, greedy = (torch.cat(parts) for parts in zip(*scored, strict=True))
    if bool(logprobs.isnan().any()):
        raise FloatingPointError(NOT_A_NUMBER)
    return logprobs, greedy


# --- examples of a task ----------------------------------------------------------------------------------------------
def score_pair(model: PreTrainedModel, pair: Pair, policy: Policy, encoder: TextEncoder | None = None) -> Scores:
    """Compress a context as a prompt and score its continuation."""
    context, continuation = (
        torch.tensor([ids], dtype=torch.long, device=model.device) for ids in (pair.context, pair.continuation)
    )
    return continuation_scores(model, context, continuation, policy, encoder=encoder)


def score_prompt(
    model: PreTrainedModel,
    prompt: Prompt,
    policy: Policy,
    *,
    report: Report = _ignore,
    encoder: TextEncoder | None = None,
) -> tuple[Scores, Likelihood, int]:
    """Score the given tokens of an example: scores, their summary, and the number of tokens that the model processed.

    report: called with the number of tokens so far. Raises BudgetError if the cache holds more than the policy allows.
    """
    ids = prompt.ids[None].to(model.device, torch.long)
    policy = policy_for(policy, prompt)
    if prompt.is_whole_text:
        scores = text_scores(model, ids, policy, report=report)
        return scores, summary(scores.nll, 1, scores.block, scores.cache.most_kept), ids.shape[1]
    if prompt.target is None:
        ids, target = ids[:, : prompt.length], ids[:, prompt.length :]
    else:
        target = prompt.target[None].to(model.device, torch.long)
    scores = continuation_scores(model, ids, target, policy, report=report, encoder=encoder)
    block = (policy.schedule.spare or None) if policy.evicts else None
    likelihood = summary(scores.nll, ids.shape[1], block, scores.cache.most_kept)
    return scores, likelihood, ids.shape[1] + target.shape[1] - 1


def summary(nll: Tensor, first: int, block: int | None, most_kept: Iterable[Tensor]) -> Likelihood:
    """The likelihood of tokens with -log p nll [n] that begin at position `first`; most_kept: [H_kv] per layer."""
    sums = nll.double().cumsum(0).tolist()
    end = first + len(sums)
    lengths = sorted({*(2**k for k in range(1, end.bit_length()) if first < 2**k <= end), end})
    return Likelihood(
        nll=sums[-1] / len(sums),
        tokens=len(sums),
        lengths=lengths,
        cumulative=[sums[length - first - 1] / (length - first) for length in lengths],
        block=block,
        max_kept_tokens=[heads.tolist() for heads in most_kept],
    )


def policy_for(policy: Policy, prompt: Prompt) -> Policy:
    """The policy with the block size of the example's task.

    Raises ValueError if it cannot evict that way, or would evict nothing while tokens are scored.
    """
    block = None if prompt.example.reading is None else prompt.example.reading.block
    if block is not None and policy.evicts:
        try:
            policy = replace(policy, schedule=Blocks(**{**vars(policy.schedule), "size": block}))
        except ValueError as error:
            instead = " and score what follows a prompt (prompt_tokens)" if prompt.is_whole_text else ""
            raise ValueError(f"block={block}: {error}; leave block out (null){instead}") from error
    if prompt.is_whole_text:
        check_blocks(policy)
    return policy


def check_blocks(policy: Policy) -> None:
    """Raise ValueError unless the policy evicts in blocks that are scored first, or keeps all tokens of a text."""
    instead = "score what follows a prompt instead (prompt_tokens)"
    if not policy.store.exact:
        raise ValueError(f"{policy.name} stores a text in its final form only once it is a whole prompt: {instead}")
    if isinstance(policy.pre_pass, PromptChoice):
        raise ValueError(f"{policy.name} rewrites a whole prompt, so no text can be scored while it is read: {instead}")
    if policy.reader is not None:
        raise ValueError(f"{policy.name} reads less than it holds only while decoding: {instead}")
    if not policy.evicts:
        return
    schedule = policy.schedule
    if not isinstance(schedule, Blocks) or schedule.size == math.inf:
        raise ValueError(
            f"{policy.name} evicts only once the whole text is in (schedule=prompt), so every token would be scored "
            f"with nothing evicted: evict in blocks (block, schedule=blocks), or {instead}"
        )
    if schedule.order != "attend_then_evict" and schedule.size > 1:
        raise ValueError(
            f"{policy.name} evicts a block before it is scored (order=evict_then_attend), which lets later tokens of "
            f"the block decide what earlier ones see: use block=1 or order=attend_then_evict"
        )

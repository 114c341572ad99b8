"""Teacher forcing: how likely a model finds tokens that are given, while its cache holds what a policy keeps.

Shapes: T tokens of a prompt or text, M of a continuation, N of a call, V vocabulary, L layers, H_kv KV heads.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.layer import stacked
from kvbench.cache.layout import continues, in_one_call
from kvbench.engine.answer import NOT_A_NUMBER
from kvbench.engine.logits import LOGITS_AT_ONCE, surprisal
from kvbench.engine.pre_pass import rate_next, read_prompt
from kvbench.engine.prompt_pass import now, padding, prefill
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import PromptChoice, TextEncoder
from kvbench.policies.schedule import Blocks

CALL = 512  # tokens a call of the model takes at most: more would gain little, and progress could not be seen


@dataclass(frozen=True)
class Continuation:
    """How a model rates the tokens of a continuation.

    logprobs [M] float32, in nats. greedy [M] bool: whether greedy decoding would have chosen the token. cache: as it
    ended, with the most tokens held at any time after the prompt was in; the last token was not fed. prefill_seconds:
    until the first token could be rated, evictions of the prompt included; decode_seconds: the rest.
    """

    logprobs: Tensor
    greedy: Tensor
    cache: "WatchedCache"
    prefill_seconds: float
    decode_seconds: float

    @property
    def most_kept(self) -> Tensor:
        """[L,H_kv] the most tokens held meanwhile. ValueError where layers differ in their number of KV heads."""
        return stacked(self.cache.most_kept)


@dataclass(frozen=True)
class TextScores:
    """How a model rates every token of a text but its first.

    nll [T-1] float32: -log p of each token given all before it, in nats. cache: as it ended, with the most tokens held
    at any time, those of the block that is being rated included. block: tokens rated between two evictions (None:
    nothing is ever evicted).
    """

    nll: Tensor
    cache: "WatchedCache"
    block: int | None
    seconds: float

    @property
    def most_kept(self) -> Tensor:
        """[L,H_kv] the most tokens held meanwhile. ValueError where layers differ in their number of KV heads."""
        return stacked(self.cache.most_kept)


class WatchedCache(KVCache):
    """A cache that remembers the most tokens each layer and KV head held since `watch` was called."""

    _teacher_forced = True
    _most: dict[int, Tensor] | None = None

    def watch(self) -> None:
        """Start to remember, from what is held now."""
        self._most = {}
        self.group.on_change = self._note
        for index, layer in enumerate(self.attention_layers):
            if layer.is_initialized:
                self._note(index)

    @property
    def most_kept(self) -> list[Tensor]:
        """[H_kv] of each layer: the most tokens held at any time, over all sequences."""
        assert self._most, "nothing was watched"
        return [self._most[index].cpu() for index in range(len(self.attention_layers))]

    def _note(self, index: int) -> None:
        """Called whenever a layer appended or evicted tokens."""
        assert self._most is not None
        held = self.attention_layers[index].kept_tokens().amax(0)
        before = self._most.get(index, held)
        self._most[index] = torch.maximum(before, held)


@torch.inference_mode()
def continuation_scores(
    model: PreTrainedModel,
    prompt: Tensor,
    continuation: Tensor,
    policy: Policy,
    *,
    block: int | None = None,
    report: Callable[[int], None] | None = None,
    encoder: TextEncoder | None = None,
) -> Continuation:
    """Compress the prompt [1,T] as generation does, then rate the continuation [1,M], which decoding steps append.

    block: at most so many tokens of the continuation go into one call of the model. More than one do only where that
    gives what single tokens give: the cache evicts after every one of them all the same, if decoding evicts. report:
    called with the number of tokens read, of prompt and continuation together, after every call. encoder: for policies
    with a pre-pass that is made of text.
    Raises BudgetError if the promise is broken, ValueError for an empty prompt or continuation, or for several.
    """
    if len(prompt) != 1 or len(continuation) != 1:
        raise ValueError(f"continuations are scored one by one, got {len(prompt)} prompts and {len(continuation)} more")
    if continuation.shape[1] == 0:
        raise ValueError("a continuation without a token has no score")
    if block is not None and block < 1:
        raise ValueError(f"block={block} is not allowed, it must be a number of tokens of at least 1")
    padding(prompt, None)
    began = now(model)
    prompt, cache = read_prompt(model, prompt, policy, WatchedCache)
    logits = prefill(model, prompt, None, cache, encoder)
    rated = [_rate(logits, continuation[0, :1])]
    cache.expect(continuation.shape[1] - 1)
    cache.watch()
    prefilled = now(model)
    if report is not None:
        report(prompt.shape[1])
    last = continuation.shape[1] - 1
    size = min(_call_size(model, policy), block or CALL)
    if in_one_call(model.config, prompt.shape[1] + last):
        size = 1  # a call of several would rotate them all by the length of the last, or begin anew
    for start in range(0, last, size):
        end = min(start + size, last)
        rate_next(cache, logits[-1:], continuation[:, start:end])
        logits = _call(model, cache, continuation[:, start:end], prompt.shape[1] + start)
        rated.append(_rate(logits, continuation[0, start + 1 : end + 1]))
        if report is not None:
            report(prompt.shape[1] + end)
    logprobs, greedy = (torch.cat(parts) for parts in zip(*rated, strict=True))
    _check_numbers(logprobs)
    decoded = now(model)
    cache.audit()
    return Continuation(logprobs, greedy, cache, prefilled - began, decoded - prefilled)


@torch.inference_mode()
def text_scores(
    model: PreTrainedModel, ids: Tensor, policy: Policy, *, report: Callable[[int], None] | None = None
) -> TextScores:
    """Rate every token of a text [1,T] but the first, while the policy evicts after every block of its schedule.

    A block is rated before its eviction, so that its tokens see the budget and up to m - 1 tokens of the block itself.
    The last logit of a block rates the first token of the next: no token is left out, none is rated twice. No more than
    LOGITS_AT_ONCE logits exist at once. report: called with the number of tokens read after every call.
    Raises BudgetError if the promise is broken, ValueError where the policy would evict nothing before the text's end.
    """
    if len(ids) != 1 or ids.shape[1] < 2:
        raise ValueError(f"a text is scored from its second token on, one text at a time, got {list(ids.shape)} tokens")
    check_blocks(policy)
    began = now(model)
    total = ids.shape[1]
    cache = WatchedCache(model.config, policy, prompt_length=total)
    cache.watch()
    block = int(policy.schedule.size) if policy.evicts and isinstance(policy.schedule, Blocks) else None
    size = _call_size(model, policy, block or 1)
    rated = []
    for start in range(0, total, size):
        end = min(start + size, total)
        logits = _call(model, cache, ids[:, start:end], start)
        following = ids[0, start + 1 : end + 1]  # of the text's last token none
        rated.append(-_rate(logits[: len(following)], following)[0])
        if block is None or end % block == 0 or end == total:
            cache.audit()
        if report is not None:
            report(end)
    nll = torch.cat(rated)
    _check_numbers(nll)
    return TextScores(nll, cache, block, now(model) - began)


def check_blocks(policy: Policy) -> None:
    """ValueError unless a whole text can be rated while the policy does what it does: in blocks, or keeping all."""
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


def in_blocks(policy: Policy, block: int) -> Policy:
    """The policy, evicting after every `block` tokens of a prompt or text.

    Raises ValueError where it is defined on whole prompts only.
    """
    schedule = policy.schedule
    return replace(
        policy, schedule=Blocks(decode=schedule.decode, order=schedule.order, late=schedule.late, size=block)
    )


def _call_size(model: PreTrainedModel, policy: Policy, block: int = 1) -> int:
    """Tokens a call of the model takes: whole blocks, where more than one fits.

    One, where the next token must be known first (surprisal), where a store compresses between two calls, and where the
    model would begin its recurrent layers anew.
    """
    if policy.rates or not policy.store.exact or not continues(model.config):
        return 1
    vocabulary: int = model.config.get_text_config(decoder=True).vocab_size
    most = max(1, min(CALL, LOGITS_AT_ONCE // vocabulary))
    return most - most % block if block <= most else most


def _call(model: PreTrainedModel, cache: KVCache, ids: Tensor, first: int) -> Tensor:
    """The logits [N,V] after each of the tokens ids [1,N], the first of which stands at position `first`."""
    positions = torch.arange(first, first + ids.shape[1], device=ids.device)[None]
    logits: Tensor = model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True).logits[0]
    return logits


def _check_numbers(rated: Tensor) -> None:
    """FloatingPointError where tokens were rated by logits that are no numbers."""
    if bool(rated.isnan().any()):
        raise FloatingPointError(NOT_A_NUMBER)


def _rate(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """log p of tokens [N] under logits [N,V], [N] float32, and whether each is the likeliest, [N] bool."""
    tokens = tokens.to(logits.device)
    return -surprisal(logits, tokens), logits.argmax(-1) == tokens

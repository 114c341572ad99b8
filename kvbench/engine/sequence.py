"""Requests, the sequences that answer them, and the choice of their next tokens.

Every sampled token uses one number of a random stream that depends only on seed, example and answer. A sequence gives
the same tokens in a run of its own, in a batch, and after it was interrupted and computed again.

Shapes: S sequences, T prompt tokens, M tokens of a question, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import torch
from torch import Tensor

from kvbench.cache.cache import KVCache
from kvbench.cache.sequence import CachedSequence
from kvbench.cache.watcher import Watcher
from kvbench.engine.logits import NOT_A_NUMBER
from kvbench.engine.scores import Scores
from kvbench.errors import counted
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import TextEncoder
from kvbench.run.run_config import Sampling


class TokenSampler:
    """The random numbers in [0, 1) with which one answer samples its tokens."""

    def __init__(self, sampling: Sampling, seed: int, example: int, sample: int) -> None:
        self.sampling = sampling
        self._random = Random(f"{seed} {example} {sample}")

    def next(self) -> float:
        """The number for the next token."""
        return self._random.random()


@dataclass(frozen=True, eq=False)
class Feed:
    """Tokens [1,M] of a script.

    kind: after a "prompt", the policy compresses all tokens so far. A "question" follows a compressed context, and
    "scored" tokens follow a prompt; each of their tokens counts as decoded. ValueError for no tokens.
    """

    tokens: Tensor
    kind: Literal["prompt", "question", "scored"] = "prompt"

    def __post_init__(self) -> None:
        if self.tokens.shape[1] == 0:
            raise ValueError(f"a {self.kind} needs at least one token")


def script_of(
    ids: Tensor, context: int | None = None, turns: Sequence[int] = (), scored: Tensor | None = None
) -> tuple[Feed, ...]:
    """The script of a text ids [1,T] and of the tokens [1,M] after it that are scored.

    context: length of the context that policies compress; the other tokens are a question about it. turns: number of
    prompt tokens of each turn of a conversation. Raises ValueError if context or question is empty.
    """
    if context is not None and not 0 < context < ids.shape[1]:
        raise ValueError(
            "compress=context needs at least one token of context and one of the question, got "
            f"{counted(context, 'token')} of context in a prompt of {ids.shape[1]}"
        )
    script = [Feed(part) for part in (ids.split(list(turns), dim=1) if turns else [ids[:, :context]])]
    script += [] if context is None else [Feed(ids[:, context:], "question")]
    return *script, *([] if scored is None else [Feed(scored, "scored")])


@dataclass(frozen=True)
class Request:
    """One example to answer: everything that all policies have in common.

    script: what is fed, in order, before the answer: a prompt, or one for each turn of a conversation; then perhaps a
    question, or tokens that are scored, after which no answer follows. question: position of the question in the
    prompt, for policies that use it (FINCH). encoder: tokenizer for policies whose pre-pass contains text (KVzip).
    stop: ends the answer when it is true for the tokens generated so far. sampler: makes the random numbers of one
    answer; None: greedy decoding. dictated: tokens with which the answer begins; they count towards max_new_tokens and
    min_new_tokens. example: seed of the run and index of the example, for policies
    that use random numbers; None: their own seed. parts: positions of the first tokens of the parts of the prompt that
    the task names. protected: positions [first, end) of the parts that protect=span keeps. report: called with the
    number of tokens, over all sequences, after the prompt and after every call that scores some. watch: watchers of
    evictions, of which each sequence has a copy. next_turn: what the next turn continues from: "golden": a copy of the
    cache before the answer; "own": the cache after the answer; None: no turn follows.
    """

    script: tuple[Feed, ...]
    max_new_tokens: int
    min_new_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop: Callable[[list[int]], bool] | None = None
    question: int | None = None
    encoder: TextEncoder | None = None
    sampler: Callable[[], TokenSampler] | None = None
    dictated: tuple[int, ...] = ()
    example: tuple[int, int] | None = None
    parts: tuple[int, ...] = ()
    protected: tuple[tuple[int, int], ...] = ()
    report: Callable[[int], object] | None = None
    watch: tuple[Watcher, ...] = ()
    next_turn: Literal["golden", "own"] | None = None

    @property
    def prompt(self) -> Tensor:
        """The tokens that policies compress first, [1,T]."""
        return self.script[0].tokens

    @property
    def length(self) -> int:
        """Tokens before the answer, or before those that are scored."""
        return sum(feed.tokens.shape[1] for feed in self.script if feed.kind != "scored")

    @property
    def is_dictated(self) -> bool:
        """Whether the whole answer is dictated."""
        return len(self.dictated) == self.max_new_tokens

    @property
    def is_turn(self) -> bool:
        """Whether it is a turn of a conversation."""
        return self.next_turn is not None or sum(feed.kind == "prompt" for feed in self.script) > 1

    def asks(self, kind: str) -> bool:
        """Whether a feed of this kind is in the script."""
        return any(feed.kind == kind for feed in self.script)


@dataclass
class Played:
    """A cache with the first `feeds` feeds of a script, from which the rest continues.

    pending: tokens of the last answer that are not in the cache. recomputed: prompt tokens that an earlier process had
    computed too.
    """

    cache: KVCache
    feeds: int = 1
    pending: Sequence[int] = ()
    recomputed: int = 0


@dataclass(eq=False)
class LiveSequence:
    """One request under one policy, and its answer so far.

    cache: None if it could not be created; up to date when the sequence has finished. position: of the next token.
    sharing: number of sequences that used the same prefill. decode_steps: tokens fed after the prompt. tokens: the
    answer without EOS. complete: the answer has ended. error: the exception that ended it early; the other fields are
    then undefined. logits: [1,V] after the last token, for policies that rate tokens. played: of a conversation: what
    of the script is in a cache already; after the prefill, what the next turn continues from. scores: of scored tokens.
    reference: the sequence of the full cache with which it is compared, itself for that sequence. waiting: logits [1,V]
    until all compared sequences have taken a step. divergences: of every token (`engine.divergence.TokenDivergence`).
    """

    request: Request
    policy: Policy
    cache: KVCache | None = None
    position: int = 0
    sharing: int = 1
    decode_steps: int = 0
    tokens: list[int] = field(default_factory=list)
    complete: bool = False
    error: Exception | None = None
    logits: Tensor | None = field(default=None, repr=False)
    played: Played | None = None
    scores: Scores | None = None
    reference: "LiveSequence | None" = None
    waiting: Tensor | None = field(default=None, repr=False)
    divergences: list[tuple[float, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sampler = None if self.request.sampler is None else self.request.sampler()

    @property
    def held(self) -> CachedSequence:
        """The contents of its cache."""
        assert self.cache is not None
        return self.cache.sequence

    @property
    def is_reference(self) -> bool:
        """Whether other sequences are compared with it, so that its own sample is of no use."""
        return self.reference is self

    @property
    def done(self) -> bool:
        """Whether no token follows."""
        return self.error is not None or self.complete

    @property
    def forbidden(self) -> list[int]:
        """Tokens that may not come next: EOS while the answer is shorter than min_new_tokens."""
        short = len(self.tokens) < self.request.min_new_tokens
        return sorted(set(self.request.eos_token_ids)) if short else []

    @property
    def dictated(self) -> int | None:
        """The next token, if it is dictated."""
        written, dictated = len(self.tokens), self.request.dictated
        return dictated[written] if written < len(dictated) else None

    def append(self, token: int) -> None:
        """Add the next token to the answer, or end the answer."""
        request = self.request
        if self.dictated is not None:
            self.tokens.append(token)
            self.complete = len(self.tokens) == request.max_new_tokens
        elif token in request.eos_token_ids:
            self.complete = True
        else:
            self.tokens.append(token)
            generated = self.tokens[len(request.dictated) :]
            self.complete = len(self.tokens) >= request.max_new_tokens or bool(request.stop and request.stop(generated))


def choose_next(sequences: Sequence[LiveSequence], logits: Tensor) -> None:
    """Append the next token to every sequence; logits [S,V], or [1,V] if they are the same for all.

    A sequence that is compared with another waits with its logits for `divergence.compare`. A sequence whose logits are
    not numbers ends with a FloatingPointError. Reading the tokens is the only point of a step at which the host waits
    for the device.
    """
    if len(logits) < len(sequences):
        logits = logits.repeat(len(sequences), 1)
    if any(sequence.reference is not None for sequence in sequences):
        for sequence, row in zip(sequences, logits.split(1), strict=True):
            assert sequence.reference is not None, "a batch compares all of its sequences, or none"
            sequence.waiting = row.clone()  # a recorded step overwrites its logits
        return
    tokens, broken = next_tokens(logits, sequences)
    for index, (sequence, token, is_broken) in enumerate(zip(sequences, tokens.tolist(), broken, strict=True)):
        if sequence.error is None and is_broken:
            sequence.error = FloatingPointError(NOT_A_NUMBER)
        if sequence.error is None:
            sequence.append(token)
            sequence.logits = logits[index : index + 1].clone() if sequence.policy.rates else None


def next_tokens(logits: Tensor, sequences: Sequence[LiveSequence]) -> tuple[Tensor, list[bool]]:
    """The next token of each sequence [S], dictated, sampled or most likely; and whether its logits are broken.

    All sequences that sample use the same `Sampling`.
    """
    for index, sequence in enumerate(sequences):
        if sequence.forbidden:
            logits[index, sequence.forbidden] = -torch.inf
    best = logits.max(-1)  # NaN counts as the largest number; see NOT_A_NUMBER
    tokens = best.indices
    dictated = {index: token for index, one in enumerate(sequences) if (token := one.dictated) is not None}
    samplers = {index: one.sampler for index, one in enumerate(sequences) if one.sampler and index not in dictated}
    if samplers:
        rows = list(samplers)
        tokens[rows] = sampled(logits if len(rows) == len(logits) else logits[rows], list(samplers.values()))
    if dictated:
        tokens[list(dictated)] = torch.tensor(list(dictated.values()), device=tokens.device)
    return tokens, best.values.isfinite().logical_not().tolist()


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [S,V] divided by the temperature, float32; -inf for tokens outside of top_k and top_p."""
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampling.top_p < 1:
        rising, order = scores.sort(stable=True)  # stable: ties have the same order alone and in a batch
        outside = rising.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        outside[:, -1] = False
        scores = scores.masked_fill(outside.scatter(1, order, outside), -torch.inf)
    return scores


def sampled(logits: Tensor, samplers: Sequence[TokenSampler]) -> Tensor:
    """The next token of each sequence, logits [S,V] -> [S]: the cumulative probability exceeds its random number.

    All samplers have the same `Sampling`.
    """
    sums = filtered(logits, samplers[0].sampling).softmax(-1).cumsum(-1, dtype=torch.float64)
    numbers = torch.tensor([[sampler.next()] for sampler in samplers], dtype=torch.float64, device=sums.device)
    return torch.searchsorted(sums, numbers * sums[:, -1:], right=True)[:, 0].clamp_(max=sums.shape[-1] - 1)

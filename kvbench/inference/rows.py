"""Rows, one example under one policy each: a prompt is read once for all its policies, all rows decode as one batch.

Every row gives what `greedy` gives for it alone: the same tokens, kept positions, bytes and audit.

Shapes: R rows, T prompt tokens, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.kv_cache import KVCache
from kvbench.cache.rotary import beyond, forget_lengths, uniform_length
from kvbench.cache.rows import RowsCache
from kvbench.inference.answer import NOT_A_NUMBER, Answer, likeliest
from kvbench.inference.context import ContextCache, check_context, forked, parted, take_question
from kvbench.inference.generate import next_logits, padding
from kvbench.inference.prompt_filter import filtered
from kvbench.inference.surprisal import surprisal, telling_surprisal
from kvbench.policies.policy import Policy

_THEIRS = (RuntimeError, ValueError, ArithmeticError)
TOKENS_AT_ONCE = 8192  # prompt tokens in one call, over all variants that read their blocks side by side


@dataclass(frozen=True)
class Request:
    """One example to be answered, input_ids [1,T]: what all of its variants have in common.

    context_tokens: so many of them are the policies' prompt, the others a question about it; None: all are the prompt.
    """

    input_ids: Tensor
    max_new_tokens: int
    min_new_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop: Callable[[list[int]], bool] | None = None
    context_tokens: int | None = None

    @property
    def prompt(self) -> Tensor:
        """What policies compress, [1,T]. Raises ValueError where context or question would be empty."""
        return self.input_ids if self.context_tokens is None else parted(self.input_ids, None, self.context_tokens)[0]


@dataclass(eq=False)
class Row:
    """A request under one policy.

    cache: None only where the policy could not even open one. sharing: how many rows the reading of its prompt
    served. error: why it ended early, if it did; nothing else is to be read off it then. decode_steps: tokens fed
    after the prompt.
    """

    request: Request
    policy: Policy
    answer: Answer
    cache: KVCache | None = None
    sharing: int = 1
    decode_steps: int = 0
    error: Exception | None = None
    position: int = field(default=0, repr=False)  # where its next token stands
    logits: Tensor | None = field(default=None, repr=False)  # [1,V] after its last token, where its policy reads them

    @property
    def tokens(self) -> list[int]:
        """The new tokens, EOS left out."""
        return self.answer.tokens

    @property
    def done(self) -> bool:
        """Whether no token follows."""
        return self.error is not None or self.answer.done


class Rows:
    """The rows in flight on one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._config = model.config.get_text_config(decoder=True)
        self._alike = uniform_length(self._config)
        self._rows: list[Row] = []
        self._next: Tensor | None = None  # [R,1] the tokens to be fed

    @property
    def in_flight(self) -> int:
        """Rows being decoded."""
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes their caches hold."""
        return sum(row.cache.nbytes for row in self._rows if row.cache is not None)

    def takes(self, request: Request) -> bool:
        """Whether the request may join those in flight.

        A model that rotates keys by the length each call reaches (longrope, dynamic NTK) takes requests beyond the
        length up to which all are rotated alike one after the other: else one row would be rotated by another's.
        """
        return not self._rows or not any(map(self._stretches, [request, *(row.request for row in self._rows)]))

    def _stretches(self, request: Request) -> bool:
        return beyond(self._alike, request.input_ids.shape[1] + request.max_new_tokens)

    # --- prompts ---------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def admit(self, request: Request, policies: Sequence[Policy]) -> list[Row]:
        """Read a prompt for all of its policies and choose their first tokens; rows in the order of the policies.

        One that fails (its budget, its numbers, the memory) comes back with its error and ends no other.
        """
        return self.admit_questions([request], policies)[0]

    @torch.inference_mode()
    def admit_questions(self, requests: Sequence[Request], policies: Sequence[Policy]) -> list[list[Row]]:
        """The same for several questions about one context (`joins`), which is read once: the rows of each request."""
        assert all(map(self.takes, requests))
        assert all(self.joins(requests[0], request) for request in requests[1:])
        for request in requests:
            padding(request.input_ids, None)
        rows = [[Row(request, policy, self._answer(request)) for policy in policies] for request in requests]
        forget_lengths(self._model)
        for some in self._readings(rows[0]):
            places = [index for index, row in enumerate(rows[0]) if row in some]
            self._read([[asked[index] for index in places] for asked in rows])
        self._begin([row for asked in rows for row in asked])
        return rows

    def joins(self, first: Request, second: Request) -> bool:
        """Whether two requests ask about the same context, so that one reading of it serves both."""
        if first.context_tokens is None or first.context_tokens != second.context_tokens:
            return False
        return torch.equal(first.prompt, second.prompt) and not any(map(self._stretches, (first, second)))

    def _begin(self, rows: Sequence[Row]) -> None:
        """Rows whose first token is known join those in flight; those that have ended already are looked at."""
        begun = [row for row in rows if not row.done]
        if begun:
            tokens = torch.tensor([[row.tokens[-1]] for row in begun], device=begun[0].request.input_ids.device)
            self._rows += begun
            self._next = tokens if self._next is None else torch.cat([self._next, tokens])
        for row in rows:
            if row.done:
                self._close(row)

    def _answer(self, request: Request) -> Answer:
        return Answer(request.eos_token_ids, request.stop, request.max_new_tokens, request.min_new_tokens)

    def _readings(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """The rows that can read the prompt together: whole, or block by block, as many as a call may hold."""
        total = rows[0].request.prompt.shape[1]
        whole, blocks, alone = [], dict[int, list[Row]](), []
        for row in rows:
            schedule = row.policy.schedule
            size = schedule.call_size(total)
            if row.policy.filter is not None or row.policy.needs_surprisal:
                alone.append(row)
            elif size < total and not beyond(self._alike, total):
                blocks.setdefault(size, []).append(row)
            elif schedule.order == "attend_then_evict" and len(schedule.steps(0, total, total)) == 1:
                whole.append(row)
            else:
                alone.append(row)
        yield from ([row] for row in alone)
        for size, some in blocks.items():
            at_once = max(1, TOKENS_AT_ONCE // size)
            yield from (some[i : i + at_once] for i in range(0, len(some), at_once))
        if whole:
            yield whole

    def _read(self, questions: Sequence[Sequence[Row]]) -> None:
        """Take the prompt in for the rows of the first question, hand it to those of the others, and let all ask."""
        first, *others = questions
        try:
            ids = self._open(first)
            opened = [row for row in first if row.cache is not None]
            logits = self._prefill(opened, ids) if opened else ids
            for asked in others:
                for row, read in zip(asked, first, strict=True):
                    row.cache, row.error = None if read.cache is None else forked(read.cache), read.error
        except _THEIRS as error:  # the model's own, the memory's: all of them
            for row in chain(*questions):
                row.error = row.error or error
            return
        for asked in questions:
            self._ask([row for row in asked if row.cache is not None], logits, len(opened) * len(questions))

    def _ask(self, rows: Sequence[Row], logits: Tensor, sharing: int) -> None:
        """Let a question follow and choose the token after it; logits [1 or R,V] are those after the prompt."""
        if not rows:
            return
        try:
            logits = self._follow(rows, logits)
        except _THEIRS as error:
            for row in rows:
                row.error = row.error or error
            return
        for row in rows:
            assert row.cache is not None
            row.sharing, row.position = sharing, row.cache.seen
        self._choose(rows, logits)

    def _open(self, rows: Sequence[Row]) -> Tensor:
        """A cache for each row, and the prompt [1,T] as they read it."""
        ids, context = rows[0].request.prompt, rows[0].request.context_tokens
        for row in rows:
            try:
                policy = row.policy
                if context is not None:
                    check_context(policy)
                if policy.filter is not None:
                    ids, policy = filtered(self._model, ids, policy)
                kind = KVCache if context is None else ContextCache
                row.cache = kind(self._model.config, policy, prompt_length=ids.shape[1])
            except ValueError as error:
                row.error = error
        return ids

    def _prefill(self, rows: Sequence[Row], ids: Tensor) -> Tensor:
        """The logits after the prompt [1,T]: [1,V] where all rows read it whole, a row each where they read blocks."""
        caches = [row.cache for row in rows if row.cache is not None]
        total = ids.shape[1]
        policy = caches[0].policy
        size = total if beyond(self._alike, total) else policy.schedule.call_size(total)
        batch = 1 if size >= total else len(rows)
        together = RowsCache(self._model.config)
        together.seat(caches, [0] * len(caches) if batch == 1 else None)
        logits = None
        for start in range(0, total, size):
            end = min(start + size, total)
            places = torch.arange(start, end).expand(batch, -1)
            told = telling_surprisal(self._model, caches[0], ids, None) if policy.needs_surprisal else nullcontext()
            with told:
                logits = next_logits(self._model, ids[:, start:end].expand(batch, -1), None, places, together)
        assert logits is not None
        return logits

    def _follow(self, rows: Sequence[Row], logits: Tensor) -> Tensor:
        """Let the question follow, if there is one: the logits after it [R,V], from those after the context [1 or R,V].

        Rows take it in as one batch; where one has to take token by token, the others need not.
        """
        request = rows[0].request
        question = request.input_ids[:, request.prompt.shape[1] :]
        for row in rows:
            assert row.cache is not None
            row.cache.expect(question.shape[1] + request.max_new_tokens - 1)  # the last one is never stored
        if question.shape[1] == 0:
            return logits
        logits = logits.expand(len(rows), -1).clone()
        for exact in {row.policy.store.exact for row in rows}:
            some = [index for index, row in enumerate(rows) if row.policy.store.exact == exact]
            together = RowsCache(self._model.config)
            together.seat([cache for index in some if (cache := rows[index].cache) is not None])
            asked, at_once = question.expand(len(some), -1), max(1, TOKENS_AT_ONCE // len(some))
            logits[some] = take_question(self._model, together, asked, logits[some], at_once)
        return logits

    # --- tokens after them -----------------------------------------------------------------------------------------
    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Feed every row its token and choose the next: one call of the model. Returns the rows that ended."""
        assert self._next is not None
        rows, tokens = self._rows, self._next
        self._tell_surprisal(rows, tokens)
        together = RowsCache(self._model.config)
        together.seat([row.cache for row in rows if row.cache is not None])
        places = torch.tensor([[row.position] for row in rows])
        try:
            logits = next_logits(self._model, tokens, None, places, together)
        except (RuntimeError, ValueError) as error:
            for row in rows:
                row.error = error
            return self._leave(tokens)
        for row in rows:
            row.position += 1
            row.decode_steps += 1
        return self._leave(self._choose(rows, logits))

    def _tell_surprisal(self, rows: Iterable[Row], tokens: Tensor) -> None:
        for row, token in zip(rows, tokens, strict=True):
            if row.logits is not None and row.cache is not None:
                row.cache.tell_surprisal(surprisal(row.logits[:, None], token[None]))

    def _choose(self, rows: Sequence[Row], logits: Tensor) -> Tensor:
        """Let every row take its next token, [R,1]; logits [R,V], or [1,V] where all rows have the same."""
        if len(logits) < len(rows):
            logits = logits.repeat(len(rows), 1)
        tokens, broken = likeliest(logits, [row.answer for row in rows])
        for index, (row, token, wrong) in enumerate(zip(rows, tokens.tolist(), broken, strict=True)):
            assert row.cache is not None
            row.error = row.error or row.cache.error or (FloatingPointError(NOT_A_NUMBER) if wrong else None)
            if row.error is None:
                row.answer.take(token)
                row.logits = logits[index : index + 1].clone() if row.policy.needs_surprisal else None
        return tokens[:, None]

    def _leave(self, tokens: Tensor) -> list[Row]:
        """Rows that ended leave the batch, whose next tokens are [R,1]."""
        ended = [row for row in self._rows if row.done]
        if ended:
            going_on = [index for index, row in enumerate(self._rows) if not row.done]
            self._rows = [self._rows[index] for index in going_on]
            tokens = tokens[going_on]
        self._next = tokens if self._rows else None
        for row in ended:
            self._close(row)
        return ended

    def _close(self, row: Row) -> None:
        """The last look at a row: its promise."""
        if row.error is None and row.cache is not None:
            try:
                row.cache.audit()
            except RuntimeError as error:  # BudgetError
                row.error = error

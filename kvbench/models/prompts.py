"""Converts examples to prompt tokens.

A prompt is cut to length, wrapped in the chat template, followed by the answer prefix, and tokenized with exactly one
BOS. compress=context does not change the tokens: the question begins at the first token that differs from the tokens of
the context alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvbench.errors import UsageError, counted, refusing
from kvbench.models.answers import decoded
from kvbench.models.prompt import Prompt
from kvbench.models.shared import shared_texts
from kvbench.models.spans import Spans, common, moved, token_spans, without
from kvbench.models.tokens import encode, encode_pair
from kvbench.tasks.task import Example, Shared, Task, check_references

log = logging.getLogger(__name__)

COMPRESS = ("prompt", "context")
"""What a policy compresses: the whole prompt, or the part before the question."""
MARK = "\x00"  # occurs in no text
SEAM = 16  # spare tokens: a prompt cut in the middle may have more tokens when it is tokenized again


@dataclass(frozen=True)
class PromptMaker:
    """Builds prompts for one task and one tokenizer.

    max_prompt_tokens: the length to which tasks with truncation="middle" cut. max_positions: the model's limit for
    prompt and answer. compress: "context" separates the tokens before the question. needs_question: a policy needs the
    position of the question in a prompt that is compressed as a whole. system_prompt: a system message in the
    chat template. Raises UsageError if the template has none.
    """

    tokenizer: PreTrainedTokenizerBase
    task: Task
    max_positions: int | None
    max_prompt_tokens: int | None = None
    compress: str = "prompt"
    needs_question: bool = False
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        if self.system_prompt is None or not self.tokenizer.chat_template:
            return
        try:
            shown, why = self._chat("-", {}), ""
        except Exception as error:  # templates raise errors of their own
            shown, why = "", f" ({error})"
        if self.system_prompt.strip() not in shown:
            raise self._no_system(f"the model's chat template has no system message{why}")

    def _no_system(self, why: str) -> UsageError:
        return UsageError(f"model.system_prompt cannot be used: {why}")

    @property
    def _system(self) -> list[dict[str, str]]:
        return [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]

    def make(self, example: Example) -> Prompt:
        """The prompt of an example.

        Raises UsageError if it does not fit the model's positions and the task does not allow cutting, if
        compress=context and its context cannot be separated from the question, or if a reference is empty.
        """
        with refusing():
            check_references(example.references, f"example {example.index}: reference")
        if self.system_prompt is not None and not self._uses_template(example):
            raise self._no_system(f"task {self.task.task_of(example).name} has prompts without chat template")
        if example.shared is not None:
            return self._in_shared_cache(example, example.shared)
        if self.compress == "context":
            self._check_question(example)
        example = self._limited(example)
        if example.rated:
            return self._rated(example)
        prompt = self._fit(example)
        text = self._wrap(prompt, example) + example.answer_prefix
        whole = self._encode(text) if example.reading is None else self._read(text, example)
        ids = self._cut_left(whole, example)
        context = question = None
        if self.compress == "context":
            context = self._context(prompt, text, whole, ids, example)
        elif self.needs_question and example.question.strip() and example.generates:
            with suppress(UsageError):
                question = self._context(prompt, text, whole, ids, example)
        dictated = tuple(self.tokenizer.encode(example.dictated, add_special_tokens=False, verbose=False))
        self._check_positions(example, len(ids), len(dictated) + example.max_new_tokens)
        digest = hashlib.sha256((text + example.dictated + (example.target or "")).encode()).hexdigest()
        target = None if example.target is None else self._target(example)
        bare, tokens = replace(example, prompt="", question="", dictated=""), torch.tensor(ids, dtype=torch.int32)
        spans = self._spans(example, prompt, text, whole, ids)
        whole_prompt = Prompt(bare, tokens, digest, target, spans=spans, dictated=dictated)
        opened = self._opened(example, text + example.dictated, example.answer_prefix + example.dictated)
        return replace(whole_prompt, context_tokens=context, question=question, opened=opened)

    def _spans(self, example: Example, prompt: str, text: str, whole: list[int], ids: list[int]) -> Spans:
        """The token positions of the parts that an example names, of what remains of them after cutting.

        prompt: the prompt after cutting in the middle; text: the same with the chat template; whole: its tokens; ids:
        the tokens that remain after cutting on the left.
        """
        spans = example.spans
        if prompt != example.prompt:
            head = common(prompt, example.prompt)
            spans = without(spans, head, head + len(example.prompt) - len(prompt))
        found = self._placed(spans, example, prompt, text, whole)
        head = common(ids, whole) if len(ids) < len(whole) else 0
        return without(found, head, head + len(whole) - len(ids))

    def _placed(self, spans: Spans, example: Example, prompt: str, text: str, whole: list[int]) -> Spans:
        """The token positions of parts of a prompt in a text that begins with it, after the opening of a template.

        A template may strip the white space around the prompt. {} if it changes the prompt otherwise.
        """
        if not spans:
            return {}
        start = len(self._wrap(f"{MARK}{prompt}", example).partition(MARK)[0])
        for lead in dict.fromkeys((0, len(prompt) - len(prompt.lstrip()))):
            shown = prompt[lead:].rstrip()[: len(text) - start]
            if text.startswith(shown, start):
                return token_spans(self._encode, text, whole, moved(spans, start - lead))
        log.warning("task %s: the chat template changes the prompt, so its evidence is unknown", self.task.name)
        return {}

    def _limited(self, example: Example) -> Example:
        """The example with the limit of new tokens that the task allows and that fits the model's positions.

        A limit above half of the model's positions is reduced to the positions after the prompt, or to that half.
        """
        limit = self.task.max_new_tokens
        if not example.generates:
            if limit is not None:
                raise UsageError(f"task {self.task.name} generates no tokens: max_new_tokens={limit} has no effect")
            return example
        most = example.max_new_tokens if limit is None else limit
        if self.max_positions is not None and most > self.max_positions // 2:
            used = len(self._encode(self._wrap(example.prompt, example) + example.answer_prefix + example.dictated))
            most = min(most, max(self.max_positions - used, self.max_positions // 2))
            _log_cut_limit(self.task.name, example.max_new_tokens if limit is None else limit, self.max_positions)
        return replace(example, max_new_tokens=most)

    def _check_positions(self, example: Example, prompt: int, answer: int) -> None:
        """Raise UsageError if prompt and answer do not fit the model's positions."""
        if self.max_positions is not None and prompt + answer > self.max_positions:
            raise UsageError(
                f"task {self.task.name}: example {example.index} needs {prompt + answer} positions ({prompt} tokens of "
                f"prompt and {answer} of answer), the model's maximum is {self.max_positions}: choose a shorter length"
            )

    def _in_shared_cache(self, example: Example, shared: Shared) -> Prompt:
        """A question with a shared context, or the turns of a conversation; every text is tokenized separately.

        If the first text is too long, its middle is removed, as in SCBench's code: the same for all questions.
        """
        chat = self._uses_template(example)
        arguments = self.task.task_of(example).chat_template_args
        texts = shared_texts(self.tokenizer, example, shared, chat, arguments, self._system)
        first, *later = (encode(self.tokenizer, text, special=not n) for n, text in enumerate(texts))
        spans = self._placed(example.spans, example, example.prompt, texts[0], first)
        spare = shared.spare if self.max_positions is None else min(shared.spare, self.max_positions // 2)
        if shared.follow_ups is not None:
            spare, later = spare + sum(map(len, later)), later[: shared.turn]
        cut = self._cut_middle(first, example, spare)
        spans = without(spans, len(cut) // 2, len(cut) // 2 + len(first) - len(cut))
        return replace(self._of_parts(example, shared, texts, [cut, *later]), spans=spans)

    def _of_parts(self, example: Example, shared: Shared, texts: list[str], parts: list[list[int]]) -> Prompt:
        """The prompt with these tokens. texts: the texts of all parts and of later turns."""
        ids = torch.tensor([token for part in parts for token in part], dtype=torch.int32)
        digest = hashlib.sha256(json.dumps(texts[: len(parts)]).encode()).hexdigest()
        if shared.follow_ups is None:
            self._check_positions(example, len(ids), example.max_new_tokens)
            opened = self._opened(example, texts[-1], example.answer_prefix)
            bare = replace(example, prompt="", question="")
            return Prompt(bare, ids, digest, context_tokens=len(parts[0]), opened=opened)
        before = tuple(replace(turn, answer="", message="", plain="") for turn in shared.follow_ups[: shared.turn])
        written = sum(turn.most for turn in before) if shared.own else 0
        self._check_positions(example, len(ids), written + example.max_new_tokens)
        bare = replace(example, prompt="", question="", shared=replace(shared, follow_ups=before))
        begun = shared.follow_ups[shared.turn - 1].begins if shared.turn else example.answer_prefix
        opened = self._opened(example, texts[len(parts) - 1], begun)
        return Prompt(bare, ids, digest, turns=tuple(map(len, parts)), opened=opened)

    def _opened(self, example: Example, text: str, begun: str) -> bool:
        """Whether an answer begins inside a thought; text: the prompt; begun: the given beginning of the answer."""
        thoughts = self.task.task_of(example).thoughts
        return thoughts is not None and thoughts.opened(text.removesuffix(begun), begun)

    def _cut_middle(self, ids: list[int], example: Example, spare: int) -> list[int]:
        """The first and last tokens of a prompt, if it would leave fewer than `spare` positions and may be cut."""
        most = self.max_prompt_tokens
        if most is None and self.max_positions is not None:
            most = self.max_positions - spare
        if most is None or len(ids) <= most or self.task.task_of(example).truncation != "middle":
            return ids
        half = most // 2
        if half < 1:
            raise self._no_room(f"{spare} tokens of questions and answers")
        return ids[:half] + ids[-half:]

    def _no_room(self, taken: str) -> UsageError:
        return UsageError(f"task {self.task.name}: {taken} leave no positions for a prompt")

    def _check_question(self, example: Example) -> None:
        """Raise UsageError for an example without a separate question."""
        if not example.generates:
            raise UsageError(
                f"compress=context compresses the text before a question, but task {self.task.name} has none (it "
                "scores given tokens): use compress=prompt"
            )
        if not example.question.strip():
            raise UsageError(
                f"compress=context compresses the text before the question, but example {example.index} of task "
                f"{self.task.name} has no separate question: use compress=prompt"
            )

    def _context(self, prompt: str, text: str, whole: list[int], ids: list[int], example: Example) -> int:
        """The number of context tokens: the common prefix with the tokens of the context alone.

        A token with text of both belongs to the question. prompt: the prompt after cutting; text: the same with chat
        template and answer prefix; whole: its tokens; ids: the tokens that remain after cutting on the left.
        """
        before = prompt.removesuffix(example.question)
        marked = self._wrap(f"{before}{MARK}{example.question}", example) + example.answer_prefix
        context, _, rest = marked.partition(MARK)  # templates may strip both ends, but nothing inside
        if before == prompt or context + rest != text:
            cause = "it was cut to fit" if before == prompt else "the chat template changes the text"
            raise UsageError(
                f"task {self.task.name}: the beginning of the question of example {example.index} is unknown "
                f"({cause}): use compress=prompt"
            )
        tokens = common(self._encode(context), whole) - (len(whole) - len(ids))
        if not before or tokens < 1:
            raise UsageError(
                f"task {self.task.name}: there is no text before the question of example {example.index}, so that "
                "compress=context has nothing to compress: use compress=prompt"
            )
        return tokens

    def _rated(self, example: Example) -> Prompt:
        """The pairs of an example as tokens, contexts cut on the left. Raises UsageError if one has no token."""
        with refusing(f"task {self.task.name}: example {example.index}: "):
            pairs = tuple(encode_pair(self.tokenizer, first, then, self.max_positions) for first, then in example.rated)
        longest = max(pairs, key=lambda pair: len(pair.context) + len(pair.continuation))
        digest = hashlib.sha256(json.dumps(example.rated).encode()).hexdigest()
        return Prompt(replace(example, rated=()), torch.tensor(longest.context, dtype=torch.int32), digest, None, pairs)

    def _cut_left(self, ids: list[int], example: Example) -> list[int]:
        """A prompt that is too long without the beginning of its text, if it may be cut.

        BOS and the opening of the chat template stay, except for tasks of lm-eval, which cuts them too.
        """
        most = self.max_prompt_tokens
        if self.max_positions is not None:
            most = min(self.max_positions - example.max_new_tokens, most or self.max_positions)
        if most is None or len(ids) <= most or self.task.task_of(example).truncation != "left":
            return ids
        opening = "" if example.reading else self._wrap(f"{MARK}{example.prompt}", example).partition(MARK)[0]
        head = 0 if self.task.task_of(example).cuts_bos else common(self._encode(opening), ids)
        if most <= head:
            raise self._no_room(f"{example.max_new_tokens} new tokens")
        log.warning(
            "task %s: example %d is cut on the left from %d tokens to %d", self.task.name, example.index, len(ids), most
        )
        return ids[:head] + ids[head - most :]

    def _read(self, text: str, example: Example) -> list[int]:
        """The first `tokens` tokens of a text to be scored. Raises UsageError if there are too few."""
        reading = example.reading
        assert reading is not None
        ids = self._encode(text)[: reading.tokens]
        least = (reading.prompt_tokens or 1) + 1
        if example.target is None and len(ids) < least:
            raise UsageError(
                f"task {self.task.name}: {example.metadata.get('text', example.index)} has "
                f"{counted(len(ids), 'token')}, "
                f"including BOS, but scoring needs at least {least} (min_tokens skips short texts)"
            )
        return ids

    def _target(self, example: Example) -> Tensor:
        """The tokens of the target. Raises UsageError if there are none."""
        ids = self.tokenizer.encode(example.target, add_special_tokens=False, verbose=False)
        if not ids:
            raise UsageError(f"task {self.task.name}: example {example.index} has an empty target, nothing to score")
        return torch.tensor(ids, dtype=torch.int32)

    def _wrap(self, prompt: str, example: Example) -> str:
        """`prompt` as one user turn of the model's chat template, if the task uses it and the model has one."""
        if not self._uses_template(example):
            return prompt
        return self._chat(prompt, self.task.task_of(example).chat_template_args or {})

    def _uses_template(self, example: Example) -> bool:
        return bool(self.task.task_of(example).chat and self.tokenizer.chat_template)

    def _chat(self, prompt: str, given: Mapping[str, Any]) -> str:
        turns = [*self._system, {"role": "user", "content": prompt}]
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **given))

    def _fit(self, example: Example) -> str:
        """The prompt; if it is too long without the template and may be cut, without its middle.

        First and last half are decoded separately and joined as strings, as in LongBench's code.
        """
        limit = self._limit(example) if self.task.task_of(example).truncation == "middle" else None
        if limit is None:
            return example.prompt
        ids = self._encode(example.prompt)
        if len(ids) <= limit:
            return example.prompt
        half = limit // 2
        if half == 0:
            raise self._no_room(f"{example.max_new_tokens} new tokens")
        return decoded(self.tokenizer, ids[:half]) + decoded(self.tokenizer, ids[-half:])

    def _limit(self, example: Example) -> int | None:
        if self.max_prompt_tokens is not None or self.max_positions is None:
            return self.max_prompt_tokens
        around = len(self._encode(self._wrap("", example) + example.answer_prefix))
        return self.max_positions - example.max_new_tokens - around - SEAM

    def _encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text)


@lru_cache  # once for each task, not for each example
def _log_cut_limit(task: str, limit: int, positions: int) -> None:
    log.warning(
        "task %s: up to %d new tokens do not fit the model's %d positions, so answers end at the last position "
        "(set task.max_new_tokens for a lower limit)",
        *(task, limit, positions),
    )

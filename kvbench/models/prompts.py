"""From an example to the tokens a model reads, and from its tokens back to text.

The order of the strings is fixed here and nowhere else: the task's prompt is cut to length, wrapped in the chat
template, followed by the answer prefix, and tokenised with exactly one BOS. Where a context is to be compressed by
itself, that changes no token: the question begins with the first token that the context alone does not begin with.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, takewhile

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from kvbench.models.shared import shared_texts
from kvbench.models.tokens import Pair, encode, encode_pair, special_ends
from kvbench.tasks.task import Example, Shared, Task
from kvbench.terminal.errors import UsageError, refusing

log = logging.getLogger(__name__)

COMPRESS = ("prompt", "context")
"""What a policy compresses: all that stands before the answer, or what stands before the question."""
SEAM = 16  # tokens of slack: a prompt cut in the middle may grow a little when it is tokenised again


@dataclass(frozen=True)
class Prompt:
    """What the model reads for one example: token ids [T] int32, and the sha256 of the text they come from.

    The example comes without its text: all prompts of a run are held at once, and the ids say the same in less.
    target [M] int32: tokens to be scored as its continuation, where the example gives one. pairs: contexts to be
    compressed and continuations to be rated, where it gives those; ids is then the context of the longest.
    context_tokens: so many of ids are a context that is compressed by itself; None: the whole prompt is compressed.
    dictated: token ids with which its answer begins, whatever the model would write.
    sample: the number of the answer, from 0, where several are sampled; example.index then counts answers.
    question: where the question begins in a prompt that is compressed with it, where a policy asks and it can be told.
    turns: of a conversation the tokens of each turn's prompt, which are ids together; () elsewhere.
    """

    example: Example
    ids: Tensor
    hash: str
    target: Tensor | None = None
    pairs: tuple[Pair, ...] = ()
    context_tokens: int | None = None
    sample: int | None = None
    question: int | None = None
    turns: tuple[int, ...] = ()
    dictated: tuple[int, ...] = ()

    @property
    def most_new_tokens(self) -> int:
        """The most tokens that can follow it, dictated ones included."""
        return self.example.max_new_tokens + len(self.dictated)

    @property
    def context_hash(self) -> str | None:
        """The sha256 of what one reading serves: a context that others ask about too, a prompt answered repeatedly.

        Of a conversation its first prompt's.
        """
        if not self.turns and self.context_tokens is None and self.sample is None:
            return None
        first = self.turns[0] if self.turns else self.context_tokens
        return hashlib.sha256(self.ids[:first].numpy().tobytes()).hexdigest()

    @property
    def draw(self) -> int:
        """A number for a policy's random draws: the example's index, or one of the context that questions share."""
        if not self.turns and self.context_tokens is None:
            return self.example.index
        return int(str(self.context_hash)[:15], 16) + (self.sample or 0)

    @property
    def own(self) -> bool:
        """Whether the history of its conversation has the model's own answers, which are not among ids."""
        return self.example.shared is not None and self.example.shared.own

    @property
    def known(self) -> int:
        """Tokens that an earlier question about the same context had the model read; 0 of a first one."""
        if self.context_tokens is not None and self.example.metadata.get("turn", 1) > 1:
            return self.context_tokens
        return sum(self.turns[:-1])

    @property
    def lengths(self) -> set[int]:
        """The lengths of all prompts its policy compresses, in tokens."""
        return {len(pair.context) for pair in self.pairs} or set(accumulate(self.turns)) or {self.length}

    @property
    def length(self) -> int:
        """Tokens the policy's cache takes for the prompt: its context, or of a text those it is not scored on."""
        if self.context_tokens is not None:
            return self.context_tokens
        reading = self.example.reading
        return len(self.ids) if reading is None or reading.prompt_tokens is None else reading.prompt_tokens


@dataclass(frozen=True)
class PromptMaker:
    """Puts prompts together for one task and one tokenizer.

    max_prompt_tokens: where tasks with truncation="middle" cut. max_positions: what the model can read and write.
    compress: "context" tells the tokens before the question from those of the question. asks: a policy that compresses
    both asks where the question begins.
    """

    tokenizer: PreTrainedTokenizerBase
    task: Task
    max_positions: int | None
    max_prompt_tokens: int | None = None
    compress: str = "prompt"
    asks: bool = False

    def make(self, example: Example) -> Prompt:
        """The prompt of an example.

        Raises UsageError where it does not fit the model's positions and the task does not allow cutting, and where
        its context is to be compressed but cannot be told from a question.
        """
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
        context, question = None, None
        if self.compress == "context":
            context = self._context(prompt, text, whole, ids, example)
        elif self.asks and example.question.strip() and example.target is None and example.reading is None:
            with suppress(UsageError):
                question = self._context(prompt, text, whole, ids, example)
        dictated = tuple(self.tokenizer.encode(example.dictated, add_special_tokens=False, verbose=False))
        self._check_positions(example, len(ids), len(dictated) + example.max_new_tokens)
        digest = hashlib.sha256((text + example.dictated + (example.target or "")).encode()).hexdigest()
        target = None if example.target is None else self._target(example)
        bare, tokens = replace(example, prompt="", question="", dictated=""), torch.tensor(ids, dtype=torch.int32)
        found = Prompt(bare, tokens, digest, target, context_tokens=context)
        return replace(found, question=question, dictated=dictated)

    def _limited(self, example: Example) -> Example:
        """The example with the most new tokens that the task allows and the model has positions for.

        A limit of more than half of the model's positions is cut to what is left beside the prompt, or to that half.
        """
        limit = self.task.max_new_tokens
        if example.rated or example.target is not None or example.reading is not None:
            if limit is not None:
                raise UsageError(f"task {self.task.name} generates no tokens: max_new_tokens={limit} has no effect")
            return example
        most = example.max_new_tokens if limit is None else limit
        if self.max_positions is not None and most > self.max_positions // 2:
            taken = len(self._encode(self._wrap(example.prompt, example) + example.answer_prefix + example.dictated))
            most = min(most, max(self.max_positions - taken, self.max_positions // 2))
            _log_cut_limit(self.task.name, example.max_new_tokens if limit is None else limit, self.max_positions)
        return replace(example, max_new_tokens=most)

    def _check_positions(self, example: Example, prompt: int, answer: int) -> None:
        """UsageError where the model has no positions for so many tokens."""
        if self.max_positions is not None and prompt + answer > self.max_positions:
            raise UsageError(
                f"task {self.task.name}: example {example.index} needs {prompt + answer} positions ({prompt} tokens of "
                f"prompt and {answer} of answer), the model's maximum is {self.max_positions}: choose a shorter length"
            )

    def _in_shared_cache(self, example: Example, shared: Shared) -> Prompt:
        """A question in the cache of others: its context, or the turns up to it, each text tokenised alone.

        Where the first text is too long its middle tokens go, as in SCBench's code: the same for all its questions.
        """
        chat = bool(self.task.asking(example).chat and self.tokenizer.chat_template)
        texts = shared_texts(self.tokenizer, example, shared, chat)
        first, *later = (encode(self.tokenizer, text, special=not n) for n, text in enumerate(texts))
        spare = shared.spare if self.max_positions is None else min(shared.spare, self.max_positions // 2)
        if shared.follow_ups is None:
            first = self._cut_middle(first, example, spare)
            return self._of_parts(example, shared, texts, [first, *later])
        first = self._cut_middle(first, example, spare + sum(map(len, later)))
        return self._of_parts(example, shared, texts, [first, *later[: shared.turn]])

    def _of_parts(self, example: Example, shared: Shared, texts: list[str], parts: list[list[int]]) -> Prompt:
        """The prompt whose tokens are these. texts: what they come from, of later turns too."""
        ids = torch.tensor([token for part in parts for token in part], dtype=torch.int32)
        digest = hashlib.sha256(json.dumps(texts[: len(parts)]).encode()).hexdigest()
        if shared.follow_ups is None:
            self._check_positions(example, len(ids), example.max_new_tokens)
            return Prompt(replace(example, prompt="", question=""), ids, digest, context_tokens=len(parts[0]))
        before = tuple(replace(turn, answer="", message="", plain="") for turn in shared.follow_ups[: shared.turn])
        written = sum(turn.most for turn in before) if shared.own else 0
        self._check_positions(example, len(ids), written + example.max_new_tokens)
        bare = replace(example, prompt="", question="", shared=replace(shared, follow_ups=before))
        return Prompt(bare, ids, digest, turns=tuple(map(len, parts)))

    def _cut_middle(self, ids: list[int], example: Example, spare: int) -> list[int]:
        """A prompt's first and last tokens, where the task allows that and `spare` positions would not be left."""
        most = self.max_prompt_tokens
        if most is None and self.max_positions is not None:
            most = self.max_positions - spare
        if most is None or len(ids) <= most or self.task.asking(example).truncation != "middle":
            return ids
        half = most // 2
        if half < 1:
            raise UsageError(
                f"task {self.task.name}: no room for a prompt beside {spare} tokens of questions and answers"
            )
        return ids[:half] + ids[-half:]

    def _check_question(self, example: Example) -> None:
        """UsageError for an example whose context cannot be compressed by itself."""
        if example.rated or example.target is not None or example.reading is not None:
            raise UsageError(
                f"compress=context compresses what stands before a question, and task {self.task.name} asks none (its "
                "tokens are given and rated): use compress=prompt"
            )
        if not example.question.strip():
            raise UsageError(
                f"compress=context compresses what stands before the question, and example {example.index} of task "
                f"{self.task.name} has no question that could be told from its context: use compress=prompt"
            )

    def _context(self, prompt: str, text: str, whole: list[int], ids: list[int], example: Example) -> int:
        """How many tokens of a prompt are its context's: those with which the context alone begins as well.

        A token that reaches over both is one of the question, of which nothing is known before. prompt: as it was cut;
        text: the same in the chat template, with the answer prefix; whole: its tokens, of which ids are left.
        """
        before = prompt.removesuffix(example.question)
        mark = "\x00"  # no text holds it: templates may strip what stands at either end, but nothing inside
        marked = self._wrap(f"{before}{mark}{example.question}", example) + example.answer_prefix
        context, _, rest = marked.partition(mark)
        if before == prompt or context + rest != text:
            cause = "it was cut to fit" if before == prompt else "the chat template changes the text"
            raise UsageError(
                f"task {self.task.name}: where the question of example {example.index} begins cannot be told "
                f"({cause}): use compress=prompt"
            )
        tokens = _shared(self._encode(context), whole) - (len(whole) - len(ids))
        if not before or tokens < 1:
            raise UsageError(
                f"task {self.task.name}: nothing stands before the question of example {example.index}, so that "
                "compress=context has nothing to compress: use compress=prompt"
            )
        return tokens

    def _rated(self, example: Example) -> Prompt:
        """The pairs of an example as tokens, contexts cut on the left. Raises UsageError where one has no token."""
        with refusing(f"task {self.task.name}: example {example.index}: "):
            pairs = tuple(encode_pair(self.tokenizer, first, then, self.max_positions) for first, then in example.rated)
        longest = max(pairs, key=lambda pair: len(pair.context) + len(pair.continuation))
        digest = hashlib.sha256(json.dumps(example.rated).encode()).hexdigest()
        return Prompt(replace(example, rated=()), torch.tensor(longest.context, dtype=torch.int32), digest, None, pairs)

    def _cut_left(self, ids: list[int], example: Example) -> list[int]:
        """The end of a prompt that is too long, where the task allows that, as lm-eval cuts it: BOS goes as well."""
        most = self.max_prompt_tokens
        if self.max_positions is not None:
            most = min(self.max_positions - example.max_new_tokens, most or self.max_positions)
        if most is None or len(ids) <= most or self.task.asking(example).truncation != "left":
            return ids
        if most < 1:
            raise UsageError(f"task {self.task.name}: no room for a prompt beside {example.max_new_tokens} new tokens")
        log.warning(
            "task %s: example %d is cut on the left from %d tokens to %d", self.task.name, example.index, len(ids), most
        )
        return ids[-most:]

    def _read(self, text: str, example: Example) -> list[int]:
        """Tokens of a text that is read: its first `tokens`. Raises UsageError where too few are left to be scored."""
        reading = example.reading
        assert reading is not None
        ids = self._encode(text)[: reading.tokens]
        least = (reading.prompt_tokens or 1) + 1
        if example.target is None and len(ids) < least:
            raise UsageError(
                f"task {self.task.name}: {example.metadata.get('text', example.index)} has {len(ids)} tokens, BOS "
                f"included, and {least} are needed before one can be scored (min_tokens leaves short texts out)"
            )
        return ids

    def _target(self, example: Example) -> Tensor:
        """Tokens of the target, as they follow the prompt. Raises UsageError where there is none."""
        ids = self.tokenizer.encode(example.target, add_special_tokens=False, verbose=False)
        if not ids:
            raise UsageError(f"task {self.task.name}: example {example.index} has an empty target, nothing to score")
        return torch.tensor(ids, dtype=torch.int32)

    def _wrap(self, prompt: str, example: Example) -> str:
        """`prompt` as one user turn of the model's chat template, where the task wants chat and the model has one."""
        if not self.task.asking(example).chat or not self.tokenizer.chat_template:
            return prompt
        turn = [{"role": "user", "content": prompt}]
        given = dict(self.task.asking(example).chat_template_args or {})
        return str(self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True, **given))

    def _fit(self, example: Example) -> str:
        """The prompt, its middle cut out where the task allows that and the unwrapped prompt is too long.

        First half and last half are decoded apart and joined as strings, as LongBench does it.
        """
        limit = self._limit(example) if self.task.asking(example).truncation == "middle" else None
        if limit is None:
            return example.prompt
        ids = self._encode(example.prompt)
        if len(ids) <= limit:
            return example.prompt
        half = limit // 2
        if half == 0:
            raise UsageError(f"task {self.task.name}: no room for a prompt beside {example.max_new_tokens} new tokens")
        return _decode(self.tokenizer, ids[:half]) + _decode(self.tokenizer, ids[-half:])

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
        "task %s: up to %d new tokens do not fit the model's %d positions, so that answers end where these are used up "
        "(set task.max_new_tokens for a lower limit)",
        *(task, limit, positions),
    )


def _shared(first: list[int], second: list[int]) -> int:
    """With how many equal tokens two texts begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def end_tokens(
    config: GenerationConfig | None,
    tokenizer: PreTrainedTokenizerBase,
    end_texts: Sequence[str] = (),
    stops: Sequence[str] = (),
) -> list[int]:
    """Ids that end an answer: the tokenizer's EOS, every one of the generation config, and those the task asks for.

    Of an end text it is the last token: SentencePiece tokenizers put a space piece in front of an encoded newline. Of
    the stop strings it is those that are special tokens.
    """
    generation = config.eos_token_id if config is not None else None
    listed = generation if isinstance(generation, list) else [generation]
    texts = [tokenizer.encode(text, add_special_tokens=False)[-1] for text in end_texts]
    special = special_ends(tokenizer, stops)
    return sorted({i for i in [tokenizer.eos_token_id, *listed, *texts, *special] if isinstance(i, int)})


def stop_test(tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> Callable[[list[int]], bool] | None:
    """A test that is true once the text of the new tokens holds one of the strings; None without strings."""
    if not stops:
        return None

    def stopped(tokens: list[int]) -> bool:
        text = _decode(tokenizer, tokens)
        return any(stop in text for stop in stops)

    return stopped


def answer(tokenizer: PreTrainedTokenizerBase, tokens: list[int], stops: Sequence[str]) -> str:
    """The text of an answer: special tokens left out, cut before each stop string in turn, nothing stripped."""
    text = _decode(tokenizer, tokens)
    for stop in stops:
        text = text.split(stop, 1)[0]
    return text


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))

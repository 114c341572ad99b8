"""The contract of a task: its examples, how prompts are built, and how one output is scored."""

from __future__ import annotations

import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from string import Formatter
from typing import Any, ClassVar, Protocol

from kvbench.errors import LARGEST, ConfigError, choice, whole_number

TRUNCATIONS = ("refuse", "middle", "left")


class Tokenizer(Protocol):
    """The methods of a tokenizer that prompt generators use. Special tokens are never added."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without BOS or EOS."""

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`."""


@dataclass(frozen=True)
class PlainTokenizer:
    """Adapts a Hugging Face tokenizer to `Tokenizer`, without special tokens or warnings about length."""

    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without BOS or EOS."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`, without special tokens."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


@dataclass(frozen=True)
class Reading:
    """Teacher forcing: given tokens are scored by their log-likelihood, nothing is generated.

    tokens: length at which the text is truncated, BOS included; None keeps all of it. prompt_tokens: length of the
    prompt, after which the policy evicts before the remaining tokens are scored; None scores all tokens but the first
    and evicts block by block. block: tokens between two evictions; None uses the policy's schedule.
    """

    tokens: int | None = None
    prompt_tokens: int | None = None
    block: int | None = None


@dataclass(frozen=True)
class FollowUp:
    """A later turn of a conversation, and the previous answer in its history.

    message: the user's message for a chat template; its answer begins with `begins`. plain: the complete text after the
    previous question, used without a chat template. most: the longest previous answer in tokens.
    """

    answer: str
    message: str
    plain: str
    most: int
    begins: str = ""


@dataclass(frozen=True)
class Shared:
    """How a question shares its context with others. Each text is tokenized separately.

    follow_ups: the later turns of the conversation that the prompt starts; the first `turn` of them precede this
    question. None: the question follows the context directly, and the context is prefilled once for all questions.
    own: the history contains the model's own answers instead of the given ones. spare: positions to leave free when the
    prompt is truncated, at most half of the model's.
    """

    spare: int
    follow_ups: tuple[FollowUp, ...] | None = None
    turn: int = 0
    own: bool = False


@dataclass(frozen=True)
class Example:
    """One prompt, its references, and how it is answered.

    The model's input is wrap(prompt) + answer_prefix, where wrap applies the chat template if the task uses one. The
    model then generates up to `max_new_tokens` tokens. dictated: the beginning of the answer; its tokens are fed one by
    one as if the model had generated them, and are neither counted nor scored. Three fields replace generation. target:
    a continuation that is scored token by token. reading, without a target: the prompt itself is scored. rated: pairs
    of a context and a continuation; the continuation is scored with the context as its prompt.
    question: the end of `prompt` that another question about the same context could replace; the text before it is
    the context. "" if the task does not separate them. shared: set if the question shares a cache with others.
    spans: parts of the prompt by name, as first and last characters [a, b), whose kept share is recorded. Policies may
    use them, except those of `evidence.HIDDEN`.
    sampling: temperature, top_p and top_k of the answer unless the run sets them; None is greedy decoding.

    No reference may be empty (`check_references`), because every output contains an empty text; a task without
    references has ().

    metadata is stored with the sample. Tables group scores by its "task", "length" and "depth"; "benchmark" names the
    module with the official aggregates (`tasks.scores`).
    """

    index: int
    prompt: str
    references: tuple[str, ...]
    max_new_tokens: int
    answer_prefix: str = ""
    dictated: str = ""
    question: str = ""
    target: str | None = None
    reading: Reading | None = None
    rated: tuple[tuple[str, str], ...] = ()
    sampling: Mapping[str, Any] | None = None
    spans: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    shared: Shared | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generates(self) -> bool:
        """Whether an answer is generated; else given tokens are scored."""
        return not self.rated and self.target is None and self.reading is None


THOUGHTS = {
    "<channel|>": "<|channel>",  # Gemma 4
    "<|channel|>final<|message|>": "<|channel|>analysis",  # gpt-oss
    "<|END_THINKING|>": "<|START_THINKING|>",  # Command A
    "<|inner_suffix|>": "<|inner_prefix|>",  # Apertus
    "<|think:end|>": "<|think:start|>",  # Solar Open 2
    "[unused17]": "[unused16]",  # openPangu
    "<unused95>": "<unused94>",  # MedGemma
    "Here is my response:": "Here is my thought process:",  # Granite 3.2
}
"""The texts that end and begin a thought of public models, where they are not a pair such as </think> and <think>."""


def thought_begin(end: str) -> str | None:
    """The text that begins a thought that `end` ends: <think> for </think>, or that of a public model; else None."""
    known = next((begin for mark, begin in THOUGHTS.items() if mark in end), None)
    slashed = re.match(r"\s*([^\w\s/]+)/(\w[^\s<\[]*)", end)
    return slashed[1] + slashed[2] if known is None and slashed else known


@dataclass(frozen=True)
class Thoughts:
    """The texts that begin and end a thought, such as <think> and </think>.

    An answer is the text after the last thought. An output in which a thought begins and none ends has no answer; an
    output without marks is the answer.
    """

    begin: str
    end: str

    def split(self, output: str, opened: bool = False) -> tuple[str, str | None]:
        """The thought with the white space behind it, and the answer; None inside a thought. opened: by the prompt."""
        if self.end in output:
            answer = output.rpartition(self.end)[2].lstrip()
            return output.removesuffix(answer), answer
        return (output, None) if opened or self.begin in output else ("", output)

    def opened(self, prompt: str, begun: str = "") -> bool:
        """Whether a prompt ends with the beginning of a thought, or the given beginning of the answer opens one."""
        last = prompt.rstrip().removesuffix("thought")  # the name of Gemma 4's channel
        text = self.begin * last.endswith(self.begin) + begun
        return text.rfind(self.begin) > text.rfind(self.end)


class Scored(Protocol):
    """A scored answer, as passed to the aggregates of a benchmark."""

    @property
    def references(self) -> Sequence[str]:
        """The references of the example."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of the example."""

    @property
    def output(self) -> str | None:
        """The generated text."""

    @property
    def score(self) -> float | None:
        """The task's score, 0 to 1; None if the example failed."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A seeded source of examples and the score of one output, independent of policies and models.

    name: name in tables. chat: wrap prompts in the model's chat template, if it has one. chat_template_args: further
    arguments of the template, such as {enable_thinking: false}. think_end: the text that ends thinking, such as
    </think>; only the text after the last one is scored (see `Thoughts`). think_begin: the text that begins it; None:
    <think> for </think>, and the pairs of public models in `THOUGHTS`. stop: strings that end an answer, outside of
    thoughts; they are not part of it. end_texts: the last token of each of them ends an answer, as EOS does.
    min_new_tokens: number of tokens before EOS or such a token may be generated. truncation: how a prompt longer than
    the model's context is handled: "refuse" is an error, "middle" keeps its first and last halves, "left" the end
    of its text, with BOS and the opening of the chat template.
    max_new_tokens: the longest answer; None uses the benchmark's value, which may differ between examples.
    divergence: feed the full cache's own answer (or given tokens, after prompt_tokens) to every policy, and compare the
    distributions of every next token with those of the full cache. There is no score then.
    """

    named_by: ClassVar[str | None] = None
    """The field that `task=<file>/<name>` sets, for tasks with many named subsets (`own_names`)."""

    length_field: ClassVar[str | None] = None
    """The field with the prompt length in tokens, for tasks that generate prompts of a given length."""

    cuts_bos: ClassVar[bool] = False
    """Whether truncation=left cuts BOS and the opening of the chat template too, as lm-eval does."""

    protects: ClassVar[tuple[str, ...]] = ()
    """The parts of a prompt (`Example.spans`) that protect=span keeps."""

    decoding: ClassVar[str] = "greedy"
    """How answers are decoded, unless the run sets it."""

    name: str
    chat: bool = False
    chat_template_args: Mapping[str, Any] | None = None
    think_end: str | None = None
    think_begin: str | None = None
    stop: tuple[str, ...] = ()
    end_texts: tuple[str, ...] = ()
    min_new_tokens: int = 0
    max_new_tokens: int | None = None
    truncation: str = "refuse"
    divergence: bool = False

    @classmethod
    def own_names(cls) -> Sequence[str]:
        """The names of its subsets, for completion."""
        return ()

    def __post_init__(self) -> None:
        for item in fields(self):  # YAML and the command line give lists; frozen tasks hold tuples
            value = getattr(self, item.name)
            if isinstance(value, Sequence) and not isinstance(value, str | tuple):
                object.__setattr__(self, item.name, tuple(value))
        if type(self).score is Task.score and type(self).judge is Task.judge:
            raise TypeError(f"{type(self).__name__} has neither a method score nor a method judge")
        if not self.name.strip() or not self.name.isprintable():
            raise ConfigError("name", self.name, why="is not allowed, it must be a word that tables can show")
        choice("truncation", self.truncation, *TRUNCATIONS)
        choice("divergence", self.divergence, True, False)
        whole_number("min_new_tokens", self.min_new_tokens, 0)
        if self.max_new_tokens is not None:
            whole_number("max_new_tokens", self.max_new_tokens, 0)
        if self.chat_template_args is not None and not isinstance(self.chat_template_args, Mapping):
            raise ConfigError("chat_template_args", self.chat_template_args, "fields, such as {enable_thinking: false}")
        self._check_thoughts()
        for name in ("stop", "end_texts"):
            texts = getattr(self, name)
            if not are_texts(texts):
                raise ConfigError(name, texts, why="is not allowed, it must be a list of strings that are not empty")

    def _check_thoughts(self) -> None:
        """Raise ConfigError for marks of thoughts that cannot be used."""
        for name, example in (("think_end", "</think>"), ("think_begin", "<think>")):
            mark = getattr(self, name)
            if mark is not None and (not isinstance(mark, str) or not mark.strip()):
                raise ConfigError(name, mark, f"a text, such as {example}, or null")
        if self.think_end is None and self.think_begin is not None:
            raise ConfigError("think_begin", self.think_begin, why="has no effect without think_end")
        if self.think_end is not None and self.think_begin == self.think_end:
            raise ConfigError("think_begin", self.think_begin, why="is not allowed, it must differ from think_end")
        if self.think_end is not None and self.think_begin is None and thought_begin(self.think_end) is None:
            why = "is not the end of a known thought: name the text that begins it, task.think_begin=..."
            raise ConfigError("think_end", self.think_end, why=why)

    @property
    def compress(self) -> str | None:
        """Compress the "prompt" or the "context", if the task determines it; None leaves it to the run."""
        return None

    @abstractmethod
    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """Yield the first `limit` examples, or all for None.

        Example i depends only on the fields, the tokenizer and the seed, not on limit, so a run can be continued.
        """

    def score(self, output: str, example: Example) -> float:
        """Score of one output, 0 to 1, higher is better. `output` is the new text only, without the answer prefix.

        A task defines this method or `judge`. Raises ValueError if the task has no score for the output.
        """
        score, _ = self.judge(output, example)
        if score is None:
            raise ValueError(f"{self.name} has no score for a single output")
        return score

    @property
    def thoughts(self) -> Thoughts | None:
        """The marks of thoughts before an answer; None if there are none."""
        begin = None if self.think_end is None else self.think_begin or thought_begin(self.think_end)
        return None if self.think_end is None or begin is None else Thoughts(begin, self.think_end)

    def after_thinking(self, output: str, opened: bool = False) -> str | None:
        """The part of an output that is scored; None if it ends inside a thought. opened: it begins inside one."""
        return output if self.thoughts is None else self.thoughts.split(output, opened)[1]

    def judge(self, output: str, example: Example) -> tuple[float | None, Mapping[str, Any]]:
        """The score of one output, and further measures by name that the benchmark's aggregates use.

        If the example has `rated` pairs, the output is JSON: [sum of log p, whether greedy decoding generates it] each.
        """
        return self.score(output, example), {}

    def task_of(self, example: Example) -> Task:
        """The task with the fields that apply to an example: this task, or a task of the suite."""
        return self


def is_blank(text: str) -> bool:
    """Whether a text has no visible character: only white space, control and formatting characters, or nothing."""
    return all(character.isspace() or unicodedata.category(character) in ("Cc", "Cf") for character in text)


def check_references(references: Sequence[str], where: str) -> None:
    """Raise ValueError, naming the place, for a reference without a visible character, which every output contains."""
    for reference in references:
        if is_blank(reference):
            got = "" if len(references) == 1 else f" in {list(references)!r:.60}"
            raise ValueError(f"{where}: {reference!r}{got} is an empty text, which every output would contain")


def are_texts(value: object) -> bool:
    """Whether a value is a tuple of non-empty strings."""
    return isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)


def counts(task: Task, low: int, *names: str, high: int = LARGEST) -> None:
    """Apply `whole_number` to fields of a task; None is accepted for optional fields."""
    for item in fields(task):
        value = getattr(task, item.name)
        if item.name in names and (value is not None or item.default is not None):
            whole_number(item.name, value, low, high)


def several(task: Task, name: str, *allowed: str) -> None:
    """Raise ConfigError unless a field is a list of different names, each of which is allowed."""
    values = getattr(task, name)
    if not isinstance(values, tuple) or not values or len(set(values)) < len(values):
        raise ConfigError(name, values, why="is not allowed, it must be a list of different names")
    for value in values:
        choice(name, value, *allowed)


def listed_numbers(task: Task, name: str) -> tuple[Any, ...]:
    """The values of a field. Raises ConfigError unless it is a list that is not empty."""
    values = getattr(task, name)
    if not isinstance(values, tuple) or not values:
        raise ConfigError(name, values, why="is not allowed, it must be a list of numbers")
    return values


def question_part(template: str, slot: str, context: str = "{context}") -> str:
    """The question at the end of a prompt template: the line with its slot, or all text after the context.

    Instructions between context and question are the same for every question and belong to the context, as does the
    white space before the question. "" if the question precedes the context or nothing follows the context.
    """
    before, _, after = template.rpartition(context)
    if slot in before:
        return ""
    place = after.find(slot)
    line = after.rfind("\n", 0, place) + 1 if place >= 0 else 0
    return after[line:].lstrip()


def slots(name: str, text: str, allowed: tuple[str, ...], required: tuple[str, ...] | None = None) -> None:
    """Raise ValueError if `text` has a slot that is not allowed or does not have a required one."""
    try:
        found = {slot for _, slot, _, _ in Formatter().parse(text) if slot is not None}
        if found <= set(allowed):
            text.format(**dict.fromkeys(allowed, ""))
    except ValueError as error:
        raise ConfigError(name, text, why=f"is not a template: {error}") from error
    needed = allowed if required is None else required
    if not set(needed) <= found <= set(allowed):
        must, may = (", ".join(f"{{{slot}}}" for slot in names) or "none" for names in (needed, allowed))
        raise ConfigError(name, text, why=f"is not allowed: it must have the slots {must}, and may have {may}")

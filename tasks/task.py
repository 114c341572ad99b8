"""The contract of a task: its examples, how prompts are put together, how one output is scored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from string import Formatter
from typing import Any, ClassVar, Protocol

from kvbench.errors import LARGEST, ConfigError, choice, whole_number

TRUNCATIONS = ("refuse", "middle", "left")


class Tokenizer(Protocol):
    """The part of a tokenizer that generators of prompts use. Special tokens are never added."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without BOS or EOS."""

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`."""


@dataclass(frozen=True)
class PlainTokenizer:
    """A Hugging Face tokenizer seen as a `Tokenizer`: no special tokens, no warnings about length."""

    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without BOS or EOS."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`, special tokens left out."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


@dataclass(frozen=True)
class Reading:
    """Teacher forcing: given tokens are scored by their log-likelihood, nothing is generated.

    tokens: the text is cut after so many, BOS included; None: not at all. prompt_tokens: so many are the prompt, at
    whose end the policy evicts before the others are scored; None: all but the first are scored while it evicts block
    by block. block: tokens between two evictions; None: as the policy's schedule says.
    """

    tokens: int | None = None
    prompt_tokens: int | None = None
    block: int | None = None


@dataclass(frozen=True)
class FollowUp:
    """A later turn of a conversation, and the answer that stands before it in the history.

    message: what the user says then, in a chat template; there the answer to it begins with `begins`. plain: all that
    follows the question before, where there is no template. most: tokens the answer before may take.
    """

    answer: str
    message: str
    plain: str
    most: int
    begins: str = ""


@dataclass(frozen=True)
class Shared:
    """How a question shares its context with others, each text tokenised alone.

    follow_ups: the later turns of the conversation that the prompt begins, of which `turn` are taken before it is
    answered; None: the question is asked alone, after a context that is read once. own: the history has the model's own
    answers in place of the given. spare: positions that stay free where the prompt is cut, half the model's at most.
    """

    spare: int
    follow_ups: tuple[FollowUp, ...] | None = None
    turn: int = 0
    own: bool = False


@dataclass(frozen=True)
class Example:
    """One prompt and what its score needs.

    The model reads wrap(prompt) + answer_prefix, where wrap is the chat template if the task asks for one, and then
    generates up to `max_new_tokens` tokens. dictated: how its answer begins; these tokens are fed one by one, as if it
    had written them, and are neither counted nor scored. Three fields replace generation. target: a continuation that
    is scored token by token. reading, without a target: the prompt itself is scored. rated: pairs of a context and its
    continuation, each rated with the context as the prompt.
    question: the end of `prompt`, which another question about the same context could replace; everything before it
    is the context. "" where the task does not tell them apart. shared: where it is asked in the cache of others.
    sampling: temperature, top_p, top_k of its answer, where nobody asks for others; None: it is greedy.

    metadata becomes part of the samples. Its "task", "length" and "depth" are what tables show scores by, its
    "benchmark" names the module that knows the official aggregates (`tasks.summary`).
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
    shared: Shared | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Scored(Protocol):
    """A scored answer, as the aggregates of a benchmark see it."""

    @property
    def references(self) -> Sequence[str]:
        """Those of its example."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """That of its example."""

    @property
    def output(self) -> str | None:
        """The generated text."""

    @property
    def score(self) -> float | None:
        """The score by its task, 0 to 1; None where the example failed."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A seeded source of examples and the score of one output. It knows no policy and no model.

    name: its name in tables. chat: wrap prompts in the model's chat template, where it has one. chat_template_args:
    what the template reads besides, such as {enable_thinking: false}. think_end: the text that ends thinking, such as
    </think>: what stands before the last one is not scored; an answer without it is scored whole. stop: strings that
    end an answer (which ends before them). end_texts: texts whose last token, each encoded alone, ends an answer as
    EOS does. min_new_tokens: the first so many tokens of an answer are neither EOS nor such a token. truncation: of a
    prompt longer than the model's context: "refuse" is an error, "middle" keeps its first and last halves, "left" its
    end. max_new_tokens: the longest answer; None: as the benchmark has it, which differs between its examples.
    """

    named_by: ClassVar[str | None] = None
    """The field that `task=<file>/<name>` sets, of a task that knows many by name."""

    length_field: ClassVar[str | None] = None
    """The field that says how many tokens its prompts are built to fill, of a task that builds them so."""

    decoding: ClassVar[str] = "greedy"
    """How its answers are decoded where nobody asks for another way."""

    name: str
    chat: bool = False
    chat_template_args: Mapping[str, Any] | None = None
    think_end: str | None = None
    stop: tuple[str, ...] = ()
    end_texts: tuple[str, ...] = ()
    min_new_tokens: int = 0
    max_new_tokens: int | None = None
    truncation: str = "refuse"

    def __post_init__(self) -> None:
        for item in fields(self):  # YAML and the command line give lists; frozen tasks hold tuples
            value = getattr(self, item.name)
            if isinstance(value, Sequence) and not isinstance(value, str | tuple):
                object.__setattr__(self, item.name, tuple(value))
        if not self.name.strip() or not self.name.isprintable():
            raise ConfigError("name", self.name, why="is not allowed, it must be a word that tables can show")
        choice("truncation", self.truncation, *TRUNCATIONS)
        whole_number("min_new_tokens", self.min_new_tokens, 0)
        if self.max_new_tokens is not None:
            whole_number("max_new_tokens", self.max_new_tokens, 0)
        if self.chat_template_args is not None and not isinstance(self.chat_template_args, Mapping):
            raise ConfigError("chat_template_args", self.chat_template_args, "fields, such as {enable_thinking: false}")
        if self.think_end is not None and (not isinstance(self.think_end, str) or not self.think_end):
            raise ConfigError("think_end", self.think_end, "a text, such as </think>, or null")
        for name in ("stop", "end_texts"):
            texts = getattr(self, name)
            if not are_texts(texts):
                raise ConfigError(name, texts, why="is not allowed, it must be a list of strings that are not empty")

    @property
    def compress(self) -> str | None:
        """What policies compress, "prompt" or "context", where the task decides it; None: as the run says."""
        return None

    @abstractmethod
    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """Yield the first `limit` examples, or all for None.

        Example i depends on the fields, the tokenizer and the seed alone, never on limit: a run can be continued.
        """

    @abstractmethod
    def score(self, output: str, example: Example) -> float:
        """Score of one output, 0 to 1, higher is better. `output` is the new text only, without the answer prefix."""

    def after_thinking(self, output: str) -> str:
        """The part of an output that is scored."""
        thought = self.think_end is not None and self.think_end in output
        return output.rpartition(str(self.think_end))[2].lstrip() if thought else output

    def judge(self, output: str, example: Example) -> tuple[float | None, Mapping[str, Any]]:
        """The score of one output, and by name what else the benchmark's own aggregates are made of.

        Of an example with `rated` pairs the output is JSON: [sum of log p, whether greedy decoding writes it] of each.
        """
        return self.score(output, example), {}

    def asking(self, example: Example) -> Task:
        """The task whose fields hold for one of its examples: itself, or for a suite the task that asks."""
        return self


def are_texts(value: object) -> bool:
    """Whether a field holds a tuple of strings that are not empty."""
    return isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)


def counts(task: Task, low: int, *names: str, high: int = LARGEST) -> None:
    """`whole_number` for fields of a task; a field that may be left out passes where it is None."""
    for item in fields(task):
        value = getattr(task, item.name)
        if item.name in names and (value is not None or item.default is not None):
            whole_number(item.name, value, low, high)


def question_part(template: str, slot: str, context: str = "{context}") -> str:
    """The end of a prompt's template that is the question: the line with its slot, or all after the context without it.

    Instructions between the two are the same for every question and belong to the context, as does the white space
    before the question. "" where the question stands before the context, or nothing after it.
    """
    before, _, after = template.rpartition(context)
    if slot in before:
        return ""
    place = after.find(slot)
    line = after.rfind("\n", 0, place) + 1 if place >= 0 else 0
    return after[line:].lstrip()


def slots(name: str, text: str, allowed: tuple[str, ...], required: tuple[str, ...] | None = None) -> None:
    """Raise ValueError with one sentence if `text` has a slot that is not allowed or lacks a required one."""
    try:
        found = {slot for _, slot, _, _ in Formatter().parse(text) if slot is not None}
        if found <= set(allowed):
            text.format(**dict.fromkeys(allowed, ""))
    except ValueError as error:
        raise ConfigError(name, text, why=f"is not a template: {error}") from error
    if not found <= set(allowed) or not set(allowed if required is None else required) <= found:
        names = ", ".join(f"{{{slot}}}" for slot in allowed)
        raise ConfigError(name, text, why=f"does not have the slots it may have: {names}")

"""Needle in a haystack: retrieve a fact hidden at a known depth of a long text."""

from __future__ import annotations

import random
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar

from kvbench.errors import ConfigError, choice, counted, number, whole_number
from kvbench.tasks.evidence import needle_spans, start_of
from kvbench.tasks.ruler.templates import NOISE
from kvbench.tasks.scores import contains, needle_words, rouge1_recall
from kvbench.tasks.task import Example, Task, Tokenizer, counts, is_blank, listed_numbers, question_part, slots
from kvbench.tasks.words import Filler, hide, largest_fitting, own_words, read_folder, repeated, written_sentences

HAYSTACKS = ("sentences", "noise")
MOST_DIGITS = 18  # fits into a 64-bit number, also in tables
FRAME = "Read this text and remember what it says.\n\n{context}\n\nQuestion: {question}\nAnswer:"


@dataclass(frozen=True)
class Planted:
    """The needles and the question of one prompt. `needles[0]` is at the example's depth, the others are anywhere.

    asked: the needles that the answer needs; (): unknown.
    """

    needles: tuple[str, ...]
    question: str
    answer_prefix: str
    references: tuple[str, ...]
    asked: tuple[str, ...] = ()
    later: tuple[Planted, ...] = ()  # further questions about the same text


METRICS: dict[str, Callable[[str, tuple[str, ...]], float]] = {
    "contains": contains,
    "needle_words": needle_words,
    "rouge1_recall": rouge1_recall,
}


@dataclass(frozen=True, kw_only=True)
class NeedleGrid(Task):
    """Prompts of `lengths` tokens with a needle at `depths`, `repeats` of each; subclasses define the needle.

    repeats: prompts of each length and depth. lengths: tokens of prompt, answer prefix and answer together; a prompt
    falls short by less than a sentence. depths: 0 (before the text) to 1 (after it), by characters, moved to the
    nearest end of a sentence.
    haystack: "sentences" (written by us, new for every prompt) or "noise" (RULER's five, repeated).
    data_dir: a folder of .txt files that replace the haystack, in the order of their names; a short text is repeated.
    frame: the prompt, with slots context and question. metric: "contains", "needle_words" or "rouge1_recall".
    template_tokens: tokens to leave free for the model's chat template. dictate_after: the number of prompt tokens (in
    whole words) before the rest, including the question, is dictated as the beginning of the model's own answer, so
    that policies evict while decoding it.
    """

    length_field: ClassVar[str | None] = "lengths"

    lengths: tuple[int, ...] = (2048,)
    depths: tuple[float, ...] = (0.0, 0.11, 0.22, 0.33, 0.44, 0.56, 0.67, 0.78, 0.89, 1.0)
    repeats: int = 2
    haystack: str = "sentences"
    data_dir: str | None = None
    frame: str = FRAME
    metric: str = "contains"
    max_new_tokens: int = 32
    template_tokens: int = 0
    dictate_after: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for length in listed_numbers(self, "lengths"):
            whole_number("lengths", length, 1)
        for depth in listed_numbers(self, "depths"):
            number("depths", depth, 0, 1)
        counts(self, 1, "repeats", "max_new_tokens", "dictate_after")
        counts(self, 0, "template_tokens")
        choice("haystack", self.haystack, *HAYSTACKS)
        choice("metric", self.metric, *METRICS)
        slots("frame", self.frame, ("context", "question"))

    @abstractmethod
    def plant(self, rng: random.Random, text: str) -> Planted:
        """Draw the needles. `text`: the known part of the haystack, which must not contain the answer."""

    def places(self, rng: random.Random, planted: Planted, depth: float) -> tuple[float, ...]:
        """The depth of each needle, 0 to 1, for an example at `depth`."""
        return depth, *(rng.random() for _ in planted.needles[1:])

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """See `Task.examples`. Any limit covers lengths and depths; each cell is used once before any is repeated."""
        grid = ((repeat, *cell) for repeat in range(self.repeats) for cell in interleaved(self.lengths, self.depths))
        # Every text has a separate random stream, so that it does not depend on earlier draws.
        hidden = (
            self._hidden(length, depth, random.Random(f"{seed} {length} {depth} {repeat}"), tokenizer)
            for repeat, length, depth in grid
        )
        found = (one for example, planted in hidden for one in self._questions(example, planted))
        return (replace(example, index=index) for index, example in enumerate(islice(found, limit)))

    def _questions(self, example: Example, planted: Planted) -> Iterator[Example]:
        """The questions about one text, here a single one."""
        yield example

    def score(self, output: str, example: Example) -> float:
        """Score by `metric`."""
        return METRICS[self.metric](output, example.references)

    def _hidden(self, length: int, depth: float, rng: random.Random, tokenizer: Tokenizer) -> tuple[Example, Planted]:
        """A text with its first question and all of its needles."""
        text = read_folder(self.data_dir) if self.data_dir is not None else ""
        planted = self.plant(rng, text)
        depths = self.places(rng, planted, depth)
        filler = Filler(repeated(text) if text else self._filler(rng))

        def context(size: int) -> str:
            return hide(planted.needles, depths, filler.first(size))

        def prompt(size: int) -> str:
            return self.frame.format(context=context(size), question=planted.question)

        def tokens(size: int) -> int:
            return len(tokenizer.encode(prompt(size) + planted.answer_prefix))

        size = largest_fitting(tokens, length - self.max_new_tokens - self.template_tokens)
        if size < 1:
            raise ConfigError(
                "lengths",
                length,
                why=f"is too small for {self.name}: question and needles take {counted(tokens(0), 'token')}, a first "
                f"sentence {tokens(1) - tokens(0)}, and {self.max_new_tokens + self.template_tokens} are kept free",
            )
        example = Example(
            index=0,
            prompt=prompt(size),
            references=planted.references,
            max_new_tokens=self.max_new_tokens,
            answer_prefix=planted.answer_prefix,
            question=question_part(self.frame, "{question}").format(question=planted.question),
            spans=needle_spans(
                context(size),
                planted.asked,
                planted.needles,
                start_of(self.frame, "context", question=planted.question),
            ),
            metadata={"task": self.name, "length": length, "depth": depth},
        )
        return example if self.dictate_after is None else _dictating(example, self.dictate_after, tokenizer), planted

    def _filler(self, rng: random.Random) -> Iterator[str]:
        return written_sentences(rng) if self.haystack == "sentences" else repeated(NOISE + " ")


def _dictating(example: Example, tokens: int, tokenizer: Tokenizer) -> Example:
    """The example with its prompt truncated to `tokens` tokens and the rest dictated."""
    words = re.findall(r"\s*\S+", example.prompt)
    read = tokenizer.encode(example.prompt)
    size = largest_fitting(lambda count: len(tokenizer.encode("".join(words[:count]))), min(tokens, len(read) - 1))
    begins = "".join(words[:size])
    if size < 1 or tokens >= len(read):
        raise ConfigError("dictate_after", tokens, why="leaves no prompt or no text to dictate")
    rest = example.prompt.removeprefix(begins) + example.answer_prefix
    spans = {name: tuple(part for part in parts if part[1] <= len(begins)) for name, parts in example.spans.items()}
    return replace(example, prompt=begins, question="", answer_prefix="", dictated=rest, spans=spans)


@dataclass(frozen=True, kw_only=True)
class Niah(NeedleGrid):
    """Random numbers: `keys` keys with `values` numbers each, and a question about `queries` of the keys.

    The first number of the first requested key is at the example's depth, all others are anywhere.
    keys: number of keys in a prompt. values: numbers of each key. queries: keys in the question. digits: of a number.
    needle: a sentence with slots key and value. question, answer_prefix: with slots keys,
    number ("number" or "numbers") and is_are ("is" or "are").
    """

    name: str = "niah"
    chat: bool = True
    keys: int = 1
    values: int = 1
    queries: int = 1
    digits: int = 7
    needle: str = "The secret number of {key} is {value}."
    question: str = "What {is_are} the secret {number} of {keys}?"
    answer_prefix: str = " The secret {number} of {keys} {is_are}"

    def __post_init__(self) -> None:
        super().__post_init__()
        counts(self, 1, "keys", "values", "queries", high=max(self.lengths))
        whole_number("digits", self.digits, 1, MOST_DIGITS)
        slots("needle", self.needle, ("key", "value"))
        slots("question", self.question, ("keys", "number", "is_are"), required=("keys",))
        slots("answer_prefix", self.answer_prefix, ("keys", "number", "is_are"), required=())
        if self.queries > self.keys:
            raise ConfigError("queries", self.queries, why=f"is more than the keys={self.keys} in a prompt")
        if self.keys * self.values > 9 * 10 ** (self.digits - 1) // 2:
            raise ConfigError(
                "digits", self.digits, why=f"gives too few numbers for keys={self.keys} with values={self.values}"
            )

    def plant(self, rng: random.Random, text: str) -> Planted:
        """See `NeedleGrid.plant`: different keys, different numbers."""
        words = own_words()
        keys = distinct(self.keys, lambda: f"{rng.choice(words.adjectives)}-{rng.choice(words.nouns)}", text)
        low, high = 10 ** (self.digits - 1), 10**self.digits - 1
        numbers = distinct(self.keys * self.values, lambda: str(rng.randint(low, high)), text)
        needles = [self.needle.format(key=keys[i // self.values], value=number) for i, number in enumerate(numbers)]
        first, *later = (
            self._question(keys[i : i + self.queries], numbers[i * self.values : (i + self.queries) * self.values])
            for i in range(0, self.keys - self.queries + 1, self.queries)
        )
        return replace(first, needles=tuple(needles), later=tuple(later))

    def _question(self, keys: list[str], numbers: list[str]) -> Planted:
        """The question for the numbers of some keys."""
        single = len(numbers) == 1
        filled = {
            "keys": _listed(keys),
            "number": "number" if single else "numbers",
            "is_are": "is" if single else "are",
        }
        asked = (self.needle.format(key=keys[i // self.values], value=number) for i, number in enumerate(numbers))
        question, prefix = self.question.format(**filled), self.answer_prefix.format(**filled)
        return Planted((), question, prefix, tuple(numbers), tuple(asked))


@dataclass(frozen=True, kw_only=True)
class TextNiah(NeedleGrid):
    """One fixed sentence as the needle. It may be part of a model's training data.

    The default is the sentence of Kamradt's test, used by later papers, scored by the share of its words.
    needle: the sentence. question, answer_prefix: of the prompt. answer: the reference.
    """

    name: str = "niah_text"
    stop: tuple[str, ...] = ("\n",)
    metric: str = "needle_words"
    needle: str = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
    question: str = "What is the best thing to do in San Francisco?"
    answer_prefix: str = " The best thing to do in San Francisco is"
    answer: str = "eat a sandwich and sit in Dolores Park on a sunny day."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.answer not in self.needle or is_blank(self.answer):
            raise ConfigError("answer", self.answer, why=f"is not a part of needle={self.needle!r}")

    def plant(self, rng: random.Random, text: str) -> Planted:
        """See `NeedleGrid.plant`."""
        if self.answer in text:
            raise ConfigError("data_dir", self.data_dir, why=f"already contains the answer={self.answer!r}")
        return Planted((self.needle,), self.question, self.answer_prefix, (self.answer,), (self.needle,))


def interleaved(lengths: Sequence[int], depths: Sequence[float]) -> Iterator[tuple[int, float]]:
    """Every pair of a length and a depth once, ordered so that any prefix covers the range of both.

    Lengths alternate. Depths begin with the smallest and the largest; each next one is the farthest from those before.
    """
    order: list[float] = []
    rest = sorted(depths)
    while rest:
        order.append(max(rest, key=lambda depth: min((abs(depth - other) for other in order), default=-depth)))
        rest.remove(order[-1])
    for turn in range(len(order)):
        for place, length in enumerate(lengths):
            yield length, order[(turn + place) % len(order)]


def distinct(count: int, draw: Callable[[], str], text: str) -> list[str]:
    """`count` different draws that do not occur in `text`."""
    drawn: dict[str, None] = {}
    for _ in range(1000 * count):
        item = draw()
        if item not in text:
            drawn.setdefault(item)
        if len(drawn) == count:
            return list(drawn)
    raise ValueError(f"data_dir contains nearly every possible needle, such as {item!r}: increase digits")


def _listed(items: list[str]) -> str:
    """ "a", "a and b" or "a, b and c"."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)

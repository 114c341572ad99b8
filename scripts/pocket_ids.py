"""Exercises of the larger pocket model, written in token ids: RULER's and our prompts at any length, very fast.

Every piece (a word after its blank, a sentence, a number) is tokenised alone and kept; the pieces are joined as ids.
The tokenizer cuts nowhere across these seams, so that the ids are those of the joined text: a test compares them.
"""

from __future__ import annotations

import random
import re
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise

from pocket_data import BOS, EOS, tokenizer

from kvbench.tasks.arithmetic import OPERATIONS, Arithmetic
from kvbench.tasks.haystack import written_sentences
from kvbench.tasks.niah import FRAME, Niah
from kvbench.tasks.ruler.templates import needle_line, noise_line, template
from kvbench.tasks.words import own_words

Ids = tuple[int, ...]
CHUNK = 128  # texts tokenised at a time
SENTENCES = 5000
_UUID_PIECES = re.compile(r"[0-9]{1,3}|[a-f]+|-")


@dataclass
class Doc:
    """Token ids; the places that can be known from the text before them; and where several ids are right.

    asked: places whose ids are an answer. aux: places that are known but no answer (a key said again).
    options: (place, ids) of answers in any order.
    """

    ids: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    aux: list[int] = field(default_factory=list)
    options: list[tuple[int, Ids]] = field(default_factory=list)

    def say(self, ids: Sequence[int]) -> None:
        """Text that nobody could know."""
        self.ids += ids

    def tell(self, ids: Sequence[int]) -> None:
        """An answer."""
        self.asked += range(len(self.ids), len(self.ids) + len(ids))
        self.ids += ids

    def repeat(self, ids: Sequence[int]) -> None:
        """Text that can be known but answers nothing."""
        self.aux += range(len(self.ids), len(self.ids) + len(ids))
        self.ids += ids

    def tell_any(self, items: Sequence[Ids], before: Callable[[int], Ids]) -> None:
        """A set: item i follows `before(i)`, and wherever another item that is left would fit, that is right too."""
        for i, item in enumerate(items):
            self.tell(before(i))
            for j in range(len(item)):
                right = {other[j] for other in items[i:] if other[:j] == item[:j] and len(other) > j}
                if len(right) > 1:
                    self.options.append((len(self.ids) + j, tuple(sorted(right))))
            self.tell(item)

    def append(self, other: Doc) -> None:
        """The other document behind this one."""
        shift = len(self.ids)
        self.ids += other.ids
        self.asked += [place + shift for place in other.asked]
        self.aux += [place + shift for place in other.aux]
        self.options += [(place + shift, ids) for place, ids in other.options]


@cache
def enc(text: str) -> Ids:
    """Ids of a text that comes again."""
    return tuple(tokenizer().encode(text, add_special_tokens=False).ids)


@cache
def _words_after_blank() -> tuple[tuple[Ids, ...], tuple[Ids, ...], tuple[Ids, ...], tuple[Ids, ...]]:
    """Adjectives, nouns and verbs after a blank, and nouns after a hyphen."""
    words = own_words()
    return (
        tuple(enc(" " + word) for word in words.adjectives),
        tuple(enc(" " + word) for word in words.nouns),
        tuple(enc(" " + word) for word in words.verbs),
        tuple(enc("-" + word) for word in words.nouns),
    )


@cache
def _groups() -> tuple[int, ...]:
    return tuple(enc(f"{number:03d}")[0] for number in range(1000))


@cache
def _sentences() -> tuple[Ids, ...]:
    """Written sentences after a blank: nobody has to learn them, so they may come again."""
    stream = written_sentences(random.Random("the larger pocket model's filler"))
    texts = [" " + next(stream).rstrip() for _ in range(SENTENCES)]
    return tuple(tuple(encoding.ids) for encoding in tokenizer().encode_batch(texts, add_special_tokens=False))


class Source:
    """What texts are made of: a random stream, and streams of coded words and names, each drawn once."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.coded = self._encoded(lambda: " " + "".join(self.rng.choices(string.ascii_lowercase, k=6)))
        self.names = {
            letters: self._encoded(lambda n=letters: " " + "".join(self.rng.choices(string.ascii_uppercase, k=n)))
            for letters in (3, 5)
        }

    @staticmethod
    def _encoded(draw: Callable[[], str]) -> Iterator[Ids]:
        while True:
            texts = [draw() for _ in range(CHUNK)]
            for encoding in tokenizer().encode_batch(texts, add_special_tokens=False):
                if encoding.tokens[0] != "\u0120VAR":  # a name of three letters that is the word before it
                    yield tuple(encoding.ids)

    def sentence(self) -> Ids:
        """A written sentence after its blank."""
        return self.rng.choice(_sentences())

    def uuid(self) -> Ids:
        """A uuid after its blank, in the pieces that the tokenizer cuts it into."""
        first, *rest = _UUID_PIECES.findall(str(uuid.UUID(int=self.rng.getrandbits(128), version=4)))
        return tuple(token for piece in (" " + first, *rest) for token in enc(piece))

    def number(self, digits: int = 7) -> Ids:
        """A number after its blank."""
        text = str(self.rng.randrange(10 ** (digits - 1), 10**digits))
        return enc(" ") + tuple(
            _groups()[int(text[i : i + 3])] if i + 3 <= digits else enc(text[i:])[0] for i in range(0, digits, 3)
        )

    def key(self, near: tuple[list[int], list[int]] | None = None) -> Ids:
        """An adjective-noun pair after its blank, its words at times among those of `near`."""
        adjectives, nouns, rng = _words_after_blank()[0], _words_after_blank()[3], self.rng
        a = rng.choice(near[0]) if near and rng.random() < 0.3 else rng.randrange(len(adjectives))
        n = rng.choice(near[1]) if near and rng.random() < 0.3 else rng.randrange(len(nouns))
        return adjectives[a] + nouns[n]

    def draw(self, kind: str, near: tuple[list[int], list[int]] | None = None) -> Ids:
        """A key or a value after its blank."""
        if kind == "numbers":
            return self.number()
        return self.uuid() if kind == "uuids" else self.key(near)

    def keys(self, count: int, kind: str) -> list[Ids]:
        """Different keys; of the pairs of words, many share one with others."""
        few = max(2, int(count**0.5) + 1)
        near = ([self.rng.randrange(250) for _ in range(few)], [self.rng.randrange(700) for _ in range(few)])
        chosen: dict[Ids, None] = {}
        while len(chosen) < count:
            chosen.setdefault(self.draw(kind, near))
        return list(chosen)


def _listing(comma: str) -> Callable[[int, int], Ids]:
    """What stands before item i of n: "a", "a{comma} and b", "a, b{comma} and c"."""
    first, between, last = (), enc(","), enc(comma + " and")
    return lambda i, n: first if i == 0 else last if i == n - 1 else between


@dataclass(frozen=True)
class Frame:
    """The ids around a context. A needle is statement[0] + key + statement[1] + value + statement[2]."""

    head: Ids
    statement: tuple[Ids, Ids, Ids]
    question: tuple[Ids, Ids]  # before and after the keys
    prefix: tuple[Ids, Ids]
    listing: Callable[[int, int], Ids]


def _cut(text: str, *slots: str) -> list[Ids]:
    """The ids of a template between its slots, each of which takes the blank before it."""
    for slot in slots:
        text = text.replace(f" {{{slot}}}", "\0")
    return [enc(part) for part in text.split("\0")]


@cache
def ruler_frame(single: bool, kind: str) -> Frame:
    """RULER's frame for values of this kind."""
    text, prefix = template("niah").text, template("niah").answer_prefix
    said = kind
    if single:
        text, prefix, said = _singular(text), _singular(prefix), kind.removesuffix("s")
    text, prefix = (part.replace("{type_needle_v}", said) for part in (text, prefix))
    head, question = text.split("{context}")
    before, after = _cut(question, "query")
    a, b, c = _cut(needle_line().replace("{type_needle_v}", kind), "key", "value")
    p, q = _cut(prefix, "query")
    return Frame(enc(head), (a, b, c), (before, after), (p, q), _listing(","))


def _singular(text: str) -> str:
    return text.replace("Some", "A").replace("are all", "is").replace("are", "is").replace("answers", "answer")


@cache
def secret_frame(single: bool) -> Frame:
    """The frame of the task niah."""
    task = Niah()
    number, verb = ("number", "is") if single else ("numbers", "are")
    head, rest = FRAME.split("{context}")
    asked = rest.replace("{question}", task.question.replace("{number}", number).replace("{is_are}", verb))
    before, after = _cut(asked, "keys")
    a, b, c = _cut(task.needle, "key", "value")
    p, q = _cut(task.answer_prefix.replace("{number}", number).replace("{is_are}", verb), "keys")
    return Frame(enc(head), (a, b, c), (before, after), (p, q), _listing(""))


@dataclass(frozen=True)
class Level:
    """As `pocket_text.Needles`: what is hidden where, and how it is asked for."""

    frame: str = "ruler"
    haystack: str = "noise"  # "noise", "story" or "needle"
    count: int = 1
    values: int = 1
    asked: int = 1
    together: int = 1
    key: str = "words"
    value: str = "numbers"


def needles(source: Source, length: int, level: Level) -> Doc:
    """One context with needles, and questions about them; at most `length` ids."""
    single = level.values * level.together == 1
    frame = ruler_frame(single, level.value) if level.frame == "ruler" else secret_frame(single)
    facts = [
        (key, [source.draw(level.value) for _ in range(level.values)])
        for key in source.keys(max(level.count, level.asked * level.together), level.key)
    ]
    a, b, c = frame.statement
    lines = [(i, value) for i, (_, values) in enumerate(facts) for value in values]
    source.rng.shuffle(lines)
    told = [(*a, *facts[i][0], *b, *value, *c) for i, value in lines]
    room = length - 1 - len(frame.head) - sum(map(len, told)) - len(told)
    tail = Doc()
    for start in range(0, level.asked * level.together, level.together):
        group = facts[start : start + level.together]
        question = Doc()
        keys = [ids for i, (key, _) in enumerate(group) for ids in (frame.listing(i, len(group)), key)]
        for say, (before, after) in ((question.say, frame.question), (question.repeat, frame.prefix)):
            question.say(before)
            for ids in keys:
                say(ids)
            question.say(after)
        if level.together == 1:
            values = [value for i, value in lines if i == start]
            question.tell_any(values, partial(_between, frame, len(values)))
        else:
            for i, (_, (value,)) in enumerate(group):
                question.tell(frame.listing(i, len(group)))
                question.tell(value)
        question.tell((EOS,))
        if len(question.ids) > room:
            break
        room -= len(question.ids)
        tail.append(question)
    doc = Doc([BOS, *frame.head])
    doc.say(_context(source, told, level, room, frame.statement))
    doc.append(tail)
    return doc


def _between(frame: Frame, count: int, i: int) -> Ids:
    return frame.listing(i, count)


def _context(source: Source, told: list[Ids], level: Level, room: int, statement: tuple[Ids, Ids, Ids]) -> list[int]:
    """The needles at random places of as much filler as fits."""
    lined = level.frame == "ruler" and level.haystack != "story"
    a, b, c = statement
    filler: list[Ids] = []
    while True:
        if level.haystack == "needle":
            line = (*a, *source.draw(level.key), *b, *source.draw(level.value), *c)
        elif level.haystack == "story":
            line = source.sentence()
        else:
            line = enc(noise_line())
        room -= len(line) + 1
        if room < 0:
            break
        filler.append(line)
    places = sorted(source.rng.randrange(len(filler) + 1) for _ in told)
    lines: list[Ids] = []
    last = 0
    for place, line in zip(places, told, strict=True):
        lines += filler[last:place]
        lines.append(line)
        last = place
    return joined(lines + filler[last:], lined)


@cache
def _blanked(first: int) -> int:
    """The id of a word after a blank, for that of a word at the start of a line; and the other way round."""
    text = tokenizer().decode([first])
    (other,) = enc(text.removeprefix(" ") if text.startswith(" ") else " " + text)
    return other


def joined(lines: Sequence[Ids], lined: bool) -> list[int]:
    """The lines one below the other, or with a blank between them. They begin with a word, with or without a blank."""
    newline = enc("\n")[0]
    ids: list[int] = []
    for i, line in enumerate(lines):
        first = line[0]
        if _begins_blank(first) != (bool(i) and not lined):
            first = _blanked(first)
        if i and lined:
            ids.append(newline)
        ids.append(first)
        ids += line[1:]
    return ids


@cache
def _begins_blank(first: int) -> bool:
    return tokenizer().decode([first]).startswith(" ")


def chains(source: Source, length: int, hops: int, count: int) -> Doc:
    """RULER's variable tracking after its worked example; all names of every chain are asked for, in its order."""
    doc = Doc([BOS])
    if length >= 700:
        shown = _chain(source, hops, 1, 3, source.rng.randrange(5, 13), extra=enc(" "))
        shown.ids.pop()  # no EOS: two line ends
        shown.ids += (*enc("\n"), *enc("\n"))
        shown.asked.pop()
        doc.append(shown)
    cost = len(enc(noise_line())) + 1
    rest = length - len(doc.ids) - 20 - count * (50 + (hops + 1) * 14)
    doc.append(_chain(source, hops, count, 5, max(hops + 1, rest // cost)))
    return doc


def _chain(source: Source, hops: int, count: int, letters: int, size: int, extra: Ids = ()) -> Doc:
    rng, names = source.rng, source.names[letters]
    lines = [enc(noise_line())] * size
    every = [[next(names) for _ in range(hops + 1)] for _ in range(count)]
    values = [str(rng.randint(10000, 99999)) for _ in range(count)]
    for chain, value in zip(every, values, strict=True):
        links = [(*enc("VAR"), *chain[0], *enc(" ="), *enc(" " + value[:3]), *enc(value[3:]))]
        links += [(*enc("VAR"), *b, *enc(" ="), *enc(" VAR"), *a, *enc(" ")) for a, b in pairwise(chain)]
        places = sorted(rng.sample(range(len(lines)), len(links)))
        for shift, (place, link) in enumerate(zip(places, links, strict=True)):
            lines.insert(place + shift, link)
    head, question = template("variable_tracking").text.split("{context}")
    prefix = template("variable_tracking").answer_prefix
    doc = Doc(list(enc(head)) + joined_lines(lines))
    for i in rng.sample(range(count), count):
        value = (*enc(" " + values[i][:3]), *enc(values[i][3:]))
        asking, asked = _cut(question, "query")
        telling, those, they = _cut(prefix.removesuffix(" "), "num_v", "query")
        for ids in (asking, value, asked, telling, enc(f" {hops + 1}"), those):
            doc.say(ids)
        doc.repeat(value)
        doc.say(they)
        doc.say(extra)
        doc.say(every[i][0][:1])  # the blank stands in the prefix
        doc.tell(every[i][0][1:])
        for name in every[i][1:]:
            doc.tell(name)
        doc.tell((EOS,))
    return doc


def joined_lines(lines: Sequence[Ids]) -> list[int]:
    """The lines one below the other, as they are."""
    ids: list[int] = []
    for i, line in enumerate(lines):
        if i:
            ids += enc("\n")
        ids += line
    return ids


def common_words(source: Source, length: int, common: int, often: int, seldom: int) -> Doc:
    """RULER's common words after its worked example, which is left out where there is no room for it."""
    doc = Doc([BOS])
    if length >= 500 and common == 10:
        shown = _count(source, *((10, 10, 3, 30) if seldom == 3 and length > 2000 else (10, 3, 1, 10)))
        shown.ids[-1] = enc("\n")[0]
        shown.asked.pop()
        doc.append(shown)
    size = (length - len(doc.ids) - 60 - 5 * common) // 4 - common * often
    doc.append(_count(source, common, often, seldom, max(common, size // seldom)))
    return doc


def _count(source: Source, common: int, often: int, seldom: int, others: int) -> Doc:
    adjectives, nouns, verbs, _ = _words_after_blank()
    drawn = source.rng.sample(adjectives + nouns + verbs, min(common + others, 1200))
    listed = drawn[:common] * often + drawn[common:] * seldom
    source.rng.shuffle(listed)
    head, question = template("common_words").text.split("{context}")
    doc = Doc(list(enc(head)))
    for i, word in enumerate(listed, start=1):
        doc.ids += enc(f" {i}." if i > 1 else "1.")
        doc.ids += word
    doc.say(enc((question + template("common_words").answer_prefix).replace("10", str(common))))
    doc.tell_any(drawn[:common], lambda i: enc(f" {i + 1}."))
    doc.tell((EOS,))
    return doc


def frequent_words(source: Source, length: int) -> Doc:
    """RULER's frequent words, the second to fourth in frequency told in that order; any left of them is right."""
    distinct = max(4, (length - 100) // 50)
    coded = list(dict.fromkeys(next(source.coded) for _ in range(distinct)))
    coded[0] = enc(" ...")
    size = int((length - 110) / (0.608 + 4.4 * 0.392))
    listed = [word for rank, word in enumerate(coded, 1) for _ in range(int(size * rank**-2.0 / 1.6449341))]
    source.rng.shuffle(listed)
    head, question = template("frequent_words").text.split(" {context}")
    doc = Doc([BOS, *enc(head)])
    for word in listed:
        doc.ids += word
    doc.say(enc(question + template("frequent_words").answer_prefix))
    doc.tell_any(coded[1:4], lambda i: ())
    doc.tell((EOS,))
    return doc


def sums(source: Source, length: int, keys: int, asked: int, haystack: str) -> Doc:
    """The task arithmetic, several questions after one context; the operands are written before the result."""
    rng, task, nouns = source.rng, Arithmetic(), _words_after_blank()[1]
    chosen = rng.sample(nouns, keys)
    counts = [rng.randint(task.low, task.high) for _ in chosen]
    a, b, c = _cut(task.needle, "key", "value")
    told = [(*a, *key, *b, *enc(f" {count}"), *c) for key, count in zip(chosen, counts, strict=True)]
    head, rest = FRAME.split("{context}")
    tail = Doc()
    room = length - 1 - len(enc(head)) - sum(map(len, told))
    for _ in range(asked):
        i, j = rng.sample(range(keys), 2)
        word = rng.choice(list(OPERATIONS.values()))
        if word == "minus" and counts[i] < counts[j]:
            i, j = j, i
        question = Doc()
        for part in (_cut(rest.replace("{question}", task.question).replace("{sign}", word), "first", "second"),):
            for ids in (part[0], chosen[i], part[1], chosen[j], part[2]):
                question.say(ids)
        before, between, after = _cut(task.answer_prefix.replace("{sign}", word), "first", "second")
        question.say(before)
        question.repeat((*chosen[i], *between, *chosen[j]))
        question.say(after)
        result = counts[i] + counts[j] if word == "plus" else counts[i] - counts[j]
        question.tell(enc(f" {counts[i]} {'+' if word == 'plus' else '-'} {counts[j]} = {result}"))
        question.tell((EOS,))
        if len(question.ids) > room:
            break
        room -= len(question.ids)
        tail.append(question)
    doc = Doc([BOS, *enc(head)])
    rng.shuffle(told)
    doc.say(_context(source, told, Level("secret", haystack), room, (a, b, c)))
    doc.append(tail)
    return doc


def copying(source: Source, length: int) -> Doc:
    """Random tokens in which spans recur; of a few kinds of token at times, as in a uuid."""
    rng = source.rng
    alphabet = rng.choices(range(3, 5700), k=rng.choice((24, 100, 400))) if rng.random() < 0.4 else range(3, 5700)
    doc = Doc([BOS])
    while len(doc.ids) < length:
        span = rng.randint(4, 24)
        if len(doc.ids) > 40 and rng.random() < 0.6:
            start = rng.randrange(1, len(doc.ids) - span)
            warm = 1 if len(alphabet) > 1000 else 4
            doc.say(doc.ids[start : start + warm])
            doc.tell(doc.ids[start + warm : start + span])
        else:
            doc.say(rng.choices(alphabet, k=span))
    return doc

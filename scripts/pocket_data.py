"""Token-level exercises of the pocket model: copying spans, then facts hidden in noise and asked for at the end.

An exercise is a pair (ids, predictable): token ids and, for each of them, whether it can be known from what stands
before it. Only those tokens carry loss. Everything is drawn from one numpy generator: same seed, same exercise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.random import Generator
from pocket_tokenizer import FUNCTION_WORDS, SPACE, SPECIAL, build_tokenizer
from tokenizers import Tokenizer

from kvbench.tasks.words import own_words

PAD, BOS, EOS = range(len(SPECIAL))
Exercise = tuple[list[int], list[bool]]


@dataclass(frozen=True)
class Pools:
    """Token ids to draw from, by what they are."""

    every: np.ndarray
    keys: np.ndarray  # adjectives and nouns after a blank
    heads: np.ndarray  # adjectives after a blank
    tails: np.ndarray  # nouns without a blank
    noise: np.ndarray  # verbs and function words after a blank
    groups: np.ndarray  # the 1000 groups of three digits
    links: np.ndarray  # what may stand between a key and its value
    hyphen: int
    stop: int
    line: int


@cache
def tokenizer() -> Tokenizer:
    return build_tokenizer()


@cache
def pools() -> Pools:
    ids = tokenizer().get_vocab()
    words = own_words()

    def after_blank(texts: tuple[str, ...]) -> np.ndarray:
        return np.array([ids[SPACE + text] for text in texts])

    return Pools(
        every=np.arange(len(SPECIAL), len(ids)),
        keys=after_blank(words.adjectives + words.nouns),
        heads=after_blank(words.adjectives),
        tails=np.array([ids[noun] for noun in words.nouns]),
        noise=after_blank(words.verbs + tuple(FUNCTION_WORDS)),
        groups=np.array([ids[f"{number:03d}"] for number in range(1000)]),
        links=np.array([ids[token] for token in (SPACE + "is", ":", SPACE, SPACE + "=", SPACE + "text")]),
        hyphen=ids["-"],
        stop=ids["."],
        line=ids[chr(0x10A)],
    )


def copying(rng: Generator, length: int) -> Exercise:
    """Random tokens in which spans of 4 to 12 recur; all but the first token of a recurring span is predictable."""
    pool = pools()
    ids, known = [BOS], [False]
    vocabulary = pool.every if rng.random() < 0.5 else np.concatenate([pool.keys, pool.groups, pool.tails])
    while len(ids) < length:
        span = int(rng.integers(4, 13))
        if len(ids) > 24 and rng.random() < 0.6:
            start = int(rng.integers(1, len(ids) - span))
            ids += ids[start : start + span]
            known += [False] + [True] * (span - 1)
        else:
            ids += rng.choice(vocabulary, span).tolist()
            known += [False] * span
    return ids[:length], known[:length]


@dataclass(frozen=True)
class Facts:
    """How hard the facts are: their number, tokens between key and value, tokens of a value, share of two-word keys."""

    count: int
    gap: int = 1
    value: int = 2
    paired: float = 0.0
    asked: int = 12


def facts(rng: Generator, length: int, level: Facts) -> Exercise:
    """`key link value .` hidden in noise; at the end some of them again: there, the value is predictable."""
    pool = pools()
    paired = rng.random() < level.paired
    keys = _paired_keys(rng, level.count) if paired else [[key] for key in rng.choice(pool.keys, level.count, False)]
    values = [rng.choice(pool.groups, int(rng.integers(1, level.value + 1))).tolist() for _ in keys]
    link = rng.choice(pool.links, int(rng.integers(0, level.gap + 1))).tolist()
    statements = [[*key, *link, *value, pool.stop] for key, value in zip(keys, values, strict=True)]
    asked = rng.permutation(level.count)[: level.asked]
    tail: list[int] = []
    known: list[bool] = []
    for index in asked:
        tail += [pool.line, *keys[index], *link, *values[index], pool.stop]
        known += [False] * (1 + len(keys[index]) + len(link)) + [True] * (len(values[index]) + 1)
    room = length - 1 - len(tail) - sum(map(len, statements))
    assert room >= 0, f"{level} does not fit into {length} tokens"
    body = _hide(rng, statements, rng.choice(pool.noise, room).tolist())
    return [BOS, *body, *tail], [False] * (1 + len(body)) + known


def _paired_keys(rng: Generator, count: int) -> list[list[int]]:
    """`adjective-noun` keys, all different; half of them share a word with others."""
    pool = pools()
    few = max(2, int(count**0.5) + 1)
    heads = np.concatenate([rng.choice(pool.heads, few, False), rng.choice(pool.heads, few)])
    tails = np.concatenate([rng.choice(pool.tails, few, False), rng.choice(pool.tails, few)])
    chosen: dict[tuple[int, int], None] = {}
    while len(chosen) < count:
        near = rng.random() < 0.5
        head = rng.choice(heads if near else pool.heads)
        tail = rng.choice(tails if near else pool.tails)
        chosen.setdefault((int(head), int(tail)))
    keys = [[head, pool.hyphen, tail] for head, tail in chosen]
    return [keys[i] for i in rng.permutation(count)]


def _hide(rng: Generator, statements: list[list[int]], noise: list[int]) -> list[int]:
    """The statements in their order at random places of the noise."""
    cuts = np.sort(rng.integers(0, len(noise) + 1, len(statements)))
    body: list[int] = []
    last = 0
    for cut, statement in zip(cuts, statements, strict=True):
        body += noise[last:cut] + statement
        last = cut
    return body + noise[last:]

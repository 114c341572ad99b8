"""The pocket model's curriculum: which exercises, how long, and when the next stage may begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.random import Generator
from pocket_data import PAD, Exercise, Facts, copying, facts
from pocket_text import Needles, chains, common_words, frequent_words, needles

Maker = Callable[[Generator, int], Exercise]


@dataclass(frozen=True)
class Part:
    """One kind of exercise in a stage: its name in the log, its maker, its length in tokens, its share of the steps."""

    name: str
    make: Maker
    length: int
    share: float = 1.0


@dataclass(frozen=True)
class Stage:
    """A mix of parts; the stage ends when the running accuracy of the part named `gate` passes `target`."""

    name: str
    parts: tuple[Part, ...]
    gate: str = ""
    target: float = 0.96
    at_least: int = 20  # steps


@dataclass(frozen=True)
class Batch:
    """Token ids [B, T], where they are predictable [B, T], and the name of the part they come from."""

    part: str
    ids: np.ndarray
    known: np.ndarray


def make_batch(stage: Stage, seed: int, step: int, tokens: int) -> Batch:
    """The batch of this step, a pure function of its arguments: about `tokens` tokens of one part of the stage."""
    rng = np.random.default_rng([seed, step])
    shares = np.array([part.share for part in stage.parts])
    part = stage.parts[int(rng.choice(len(shares), p=shares / shares.sum()))]
    rows = [part.make(rng, part.length) for _ in range(max(1, round(tokens / part.length)))]
    width = max(len(ids) for ids, _ in rows)
    ids = np.full((len(rows), width), PAD, dtype=np.int64)
    known = np.zeros((len(rows), width), dtype=bool)
    for row, (row_ids, row_known) in enumerate(rows):
        ids[row, : len(row_ids)] = row_ids
        known[row, : len(row_known)] = row_known
    return Batch(part.name, ids, known)


def _facts(name: str, length: int, share: float = 1.0, **level: float) -> Part:
    return Part(name, partial(facts, level=Facts(**level)), length, share)


COPY = Part("copy", copying, 256)
SHORT_COPY = Part("copy-64", copying, 64)


def retrieval(rng: Generator, length: int) -> Exercise:
    """One of the needle tasks: their frame, haystack, number of keys, values and questions are drawn."""
    room = length // 64  # questions and needles that leave most of the text to the haystack
    asked = int(rng.integers(1, min(16, max(1, room // 2)) + 1))
    frame = "secret" if rng.random() < 0.6 else "ruler"
    haystack = ("story", "noise", "needle")[
        int(rng.choice(3, p=[0.5, 0.25, 0.25] if frame == "secret" else [0.15, 0.35, 0.5]))
    ]
    together = values = 1
    kind = rng.random()
    if length >= 256 and kind < 0.12:
        together, asked = int(rng.integers(2, 5)), max(1, asked // 4)
    elif length >= 256 and kind < 0.24:
        values, asked = int(rng.integers(2, 5)), max(1, asked // 4)
    count = max(asked * together, int(rng.integers(1, max(2, room))))
    if values > 1:
        count = max(asked, count // values)
    return needles(rng, length, Needles(frame, haystack, count, values, asked, together))


def crowded(rng: Generator, length: int) -> Exercise:
    """Nothing but needles, many of them asked for: two-word keys that share their words."""
    frame = "ruler" if rng.random() < 0.8 else "secret"
    return needles(rng, length, Needles(frame, "needle", asked=max(2, min(16, length // 100))))


def uuids(rng: Generator, length: int) -> Exercise:
    """Needles whose keys and values are uuids."""
    return needles(rng, length, Needles(haystack="needle", asked=1 + length // 1024, key="uuids", value="uuids"))


def tracking(rng: Generator, length: int) -> Exercise:
    """Chains of assignments; short texts have short chains or several of them."""
    hops = int(rng.integers(1, 5)) if rng.random() < 0.3 or length < 512 else 4
    return chains(rng, length, hops, count=1 if length >= 512 else 2 if hops <= 2 else 1)


def counting(rng: Generator, length: int) -> Exercise:
    """Common or frequent words; the ratio of the counts is drawn."""
    if rng.random() < 0.35:
        return frequent_words(rng, length)
    common = 10 if length >= 512 else int(rng.integers(2, 6))
    often, seldom = (6, 1) if length < 3000 else (30, 3)
    return common_words(rng, length, common, often, seldom)


def _text(length: int, target: float = 0.96, at_least: int = 60) -> Stage:
    """Retrieval at this length and at shorter ones, and the other tasks at up to this length."""
    half, quarter = max(256, length // 2), max(256, length // 4)
    parts = (
        Part(f"r{length}", retrieval, length, 4),
        Part(f"r{half}-", retrieval, half, 2.5),
        Part("keys-", crowded, half, 1.5),
        Part(f"vt{length}", tracking, length, 0.4),
        Part("vt-", tracking, half, 0.6),
        Part("uuid-", uuids, half, 0.4),
        Part(f"count{length}", counting, length, 0.5),
        Part("count-", counting, quarter, 1.0),
    )
    return Stage(f"text-{length}", parts, gate=f"r{length}", target=target, at_least=at_least)


def curriculum() -> tuple[Stage, ...]:
    """Copying first, then facts, then sentences: number, gap and length grow together."""
    return (
        Stage("copy-64", (SHORT_COPY,), gate="copy-64", target=0.80),
        Stage("copy", (COPY, SHORT_COPY), gate="copy", target=0.85),
        Stage("facts-64", (_facts("f64", 64, count=3, gap=1, asked=3), COPY), gate="f64"),
        Stage(
            "facts-128", (_facts("f128", 128, 2, count=6, gap=2, asked=6), Part("r128", retrieval, 128)), gate="f128"
        ),
        Stage(
            "facts-256",
            (_facts("f256", 256, 2, count=10, gap=3, value=3, asked=8), Part("r256", retrieval, 256)),
            gate="f256",
        ),
        Stage(
            "pairs-256",
            (_facts("p256", 256, 3, count=8, gap=3, value=3, asked=7, paired=1.0), Part("r256", retrieval, 256)),
            gate="p256",
        ),
        _text(256, target=0.93),
        _text(512, target=0.95),
        _text(1024, target=0.95),
        _text(2048, target=0.93),
        _text(4288),
    )

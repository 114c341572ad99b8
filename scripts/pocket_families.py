"""What the larger pocket model practises: families of exercises, five lengths, and batches of them in packed arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from pocket_data import PAD
from pocket_ids import Doc, Level, Source, chains, common_words, copying, frequent_words, needles, sums

LENGTHS = (272, 544, 1088, 2176, 4352)
MOST_TARGETS = 12_288  # per batch: the head over the whole vocabulary is what they cost


def _frame(source: Source) -> str:
    return "secret" if source.rng.random() < 0.5 else "ruler"


def _haystack(source: Source, frame: str) -> str:
    weights = (0.25, 0.65, 0.1) if frame == "secret" else (0.45, 0.3, 0.25)
    return source.rng.choices(("noise", "story", "needle"), weights)[0]


def single(source: Source, length: int) -> Doc:
    """One key asked for at a time, anything as the haystack; in RULER's frame some values are uuids."""
    rng, frame = source.rng, _frame(source)
    asked = rng.randint(1, max(1, min(20, length // 90)))
    kind = "uuids" if frame == "ruler" and length > 500 and rng.random() < 0.15 else "numbers"
    asked = max(1, asked // 3) if kind == "uuids" else asked
    count = rng.randint(asked, max(asked, length // 60 if rng.random() < 0.5 else asked))
    return needles(source, length, Level(frame, _haystack(source, frame), count, asked=asked, value=kind))


def crowded(source: Source, length: int) -> Doc:
    """Nothing but needles, whose keys share words."""
    asked = source.rng.randint(1, max(2, min(16, length // 110)))
    return needles(source, length, Level("ruler" if source.rng.random() < 0.8 else "secret", "needle", asked, 1, asked))


def several_values(source: Source, length: int) -> Doc:
    """Two to four values of a key, told in any order."""
    rng, frame = source.rng, _frame(source)
    values = rng.randint(2, 3) if length < 500 else rng.choice((2, 3, 4, 4, 4))
    asked = rng.randint(1, max(1, min(10, length // 260)))
    haystack = _haystack(source, frame)
    return needles(source, length, Level(frame, haystack, asked + rng.randrange(2), values, asked))


def several_keys(source: Source, length: int) -> Doc:
    """Two to four keys asked for at once."""
    rng, frame = source.rng, _frame(source)
    together = rng.randint(2, 3) if length < 500 else rng.choice((2, 3, 4, 4, 4))
    asked = rng.randint(1, max(1, min(8, length // 400)))
    spare = rng.randrange(1 + min(8, length // 120))
    return needles(source, length, Level(frame, _haystack(source, frame), asked * together + spare, 1, asked, together))


def uuids(source: Source, length: int) -> Doc:
    """Keys and values are uuids, nothing else stands in the text; short texts have fewer than they could."""
    rng = source.rng
    asked = 1 if length < 500 else rng.randint(1, max(2, length // 500))
    haystack = "noise" if rng.random() < 0.1 else "needle"
    return needles(source, length, Level("ruler", haystack, asked, 1, asked, key="uuids", value="uuids"))


def tracking(source: Source, length: int) -> Doc:
    """Chains of assignments; short texts have short chains, some texts several."""
    rng = source.rng
    hops = rng.randint(1, 2) if length < 290 else rng.randint(1, 4) if length < 500 or rng.random() < 0.25 else 4
    count = rng.randint(1, max(1, min(6, length // 400))) if rng.random() < 0.6 else 1
    return chains(source, length, hops, count)


def common(source: Source, length: int) -> Doc:
    """Common words; the ratio of the counts is drawn."""
    rng = source.rng
    if length < 700:
        return common_words(source, length, rng.randint(2, 5), rng.choice((4, 6)), 1)
    often, seldom = (30, 3) if length > 3000 and rng.random() < 0.6 else (10, 3) if rng.random() < 0.15 else (6, 1)
    return common_words(source, length, 10, often, seldom)


def frequent(source: Source, length: int) -> Doc:
    """Frequent words."""
    return frequent_words(source, length)


def adding(source: Source, length: int) -> Doc:
    """Sums and differences of counts."""
    rng = source.rng
    haystack = rng.choice(("story", "story", "noise"))
    keys = rng.randint(2, 10 if length > 500 else 5)
    return sums(source, length, keys, rng.randint(1, max(1, min(12, length // 120))), haystack)


@dataclass(frozen=True)
class Family:
    """A kind of exercise: its maker (source, length) -> document and its share of a batch before it is learnt."""

    name: str
    make: Callable[[Source, int], Doc]
    share: float


FAMILIES = (
    Family("copy", copying, 0.5),
    Family("single", single, 1.0),
    Family("crowded", crowded, 1.0),
    Family("values", several_values, 1.2),
    Family("queries", several_keys, 1.2),
    Family("uuids", uuids, 1.6),
    Family("vt", tracking, 1.4),
    Family("cwe", common, 1.2),
    Family("fwe", frequent, 1.0),
    Family("sums", adding, 1.0),
)


@dataclass(frozen=True)
class Packed:
    """Rows of one length: token ids [B,T], and for every token to be known its place, id, weight, family and options.

    place: flat index of the token before it. family: row of FAMILIES; their number for what is no answer.
    option_of, option: pairs (index of a target, an id that is right there too).
    """

    level: int
    ids: np.ndarray  # [B,T] uint16
    place: np.ndarray  # [M] int32
    target: np.ndarray  # [M] int16
    weight: np.ndarray  # [M] float32: a document weighs the square root of its targets
    family: np.ndarray  # [M] uint8
    option_of: np.ndarray  # int32
    option: np.ndarray  # int16


def make_packed(seed: int, number: int, level: int, shares: np.ndarray, tokens: int) -> Packed:
    """Batch `number`: as many documents of this length as `tokens` hold, families drawn by their shares."""
    length, source = LENGTHS[level], Source(hash((seed, number)))
    rows = tokens // length
    numpy_rng = np.random.default_rng([seed, number])
    bounds = np.cumsum(shares / shares.sum())
    drawn = np.searchsorted(bounds, (np.arange(rows) + numpy_rng.random()) / rows).clip(0, len(shares) - 1)
    ids = np.full((rows, length), PAD, dtype=np.uint16)
    places: list[int] = []
    families: list[int] = []
    weights: list[float] = []
    options: list[tuple[int, tuple[int, ...]]] = []
    for row, family in enumerate(drawn.tolist()):
        shortest = 0.5 if level and source.rng.random() < 0.25 else 0.85
        doc = FAMILIES[family].make(source, source.rng.randint(int(shortest * length), length))
        ids[row, : len(doc.ids)] = doc.ids[:length]
        told = [place for place in doc.asked if place < length]
        aux = [place for place in doc.aux if place < length]
        places += [row * length + place for place in told + aux]
        families += [family] * len(told) + [len(FAMILIES)] * len(aux)
        weights += [max(1, len(told)) ** -0.5] * len(told) + [0.2 * max(1, len(aux)) ** -0.5] * len(aux)
        options += [(row * length + place, right) for place, right in doc.options if place < length]
    place = np.array(places, dtype=np.int32)
    order = np.sort(numpy_rng.permutation(len(place))[:MOST_TARGETS])
    place = place[order]
    found = {int(p): i for i, p in enumerate(place)} if options else {}
    pairs = [(found[p], token) for p, right in options if p in found for token in right]
    option_of, option = np.array(pairs, dtype=np.int32).reshape(-1, 2).T
    return Packed(
        level, ids, place - 1, ids.reshape(-1)[place].astype(np.int16), np.array(weights, np.float32)[order],
        np.array(families, np.uint8)[order], option_of.copy(), option.astype(np.int16),
    )  # fmt: skip

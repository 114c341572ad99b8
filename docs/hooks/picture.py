"""The picture of the concepts: twelve tokens of one layer and KV head go through the five decisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

SCORES = (5, 3, 1, 2, 6, 1, 2, 4, 1, 3, 4, 5)
VALUED = (6, 2, 1, 3, 5, 1, 1, 5, 1, 2, 4, 5)
KEPT = (0, 3, 4, 7, 10, 11)
MERGED = (2, 3)  # token 2 goes into token 3
EXACT = 2  # newest tokens of the store that are not codes
LAYERS = (9, 7, 5, 3)  # slots of four layers: 6 on average
LEFT, STEP, BOX = 268, 38, 30
SHARES_LEFT, SLOT = 780, 20
COLOURS = {"kept": "#4051b5", "value": "#c2711e", "merge": "#a23b72", "store": "#2a7f62"}


def decisions() -> str:
    """The picture as an SVG that takes its text colour from the page."""
    rows = [*_tokens(), *_bars(), *_kept(), *_store(), *_shares()]
    title = "Twelve tokens of one layer and KV head are scored, weighed, selected, merged and stored"
    return (
        '<figure class="picture"><svg viewBox="0 0 1010 440" role="img" xmlns="http://www.w3.org/2000/svg" '
        f'font-family="inherit" font-size="14" fill="currentColor"><title>{title}</title>{"".join(rows)}</svg></figure>'
    )


def _x(place: int) -> int:
    return LEFT + place * STEP


def _text(x: float, y: float, words: str, size: int = 14, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" {more}>{words}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str, dashed: bool = False) -> str:
    stroke = 'stroke="currentColor" stroke-opacity=".5"' + (' stroke-dasharray="3 3"' if dashed else "")
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" {stroke}/>'


def _label(y: float, question: str, part: str) -> str:
    return _text(0, y, question, 15, more='font-weight="600"') + _text(0, y + 19, part, 13, more='opacity=".75"')


def _tokens() -> Iterator[str]:
    yield _label(24, "stored tokens", "keys and values, by position")
    for place in range(len(SCORES)):
        yield _box(_x(place), 14, BOX, BOX, "none") + _text(_x(place) + BOX / 2, 34, str(place), anchor="middle")


def _bars() -> Iterator[str]:
    yield _label(92, "which tokens matter", "scorer: what queries attend to")
    yield _label(172, "does the value count", "value: the error of losing it")
    for y, scores, colour in ((124, SCORES, COLOURS["kept"]), (204, VALUED, COLOURS["value"])):
        yield f'<line x1="{LEFT}" x2="{_x(12) - 8}" y1="{y}" y2="{y}" stroke="currentColor" stroke-opacity=".5"/>'
        for place, score in enumerate(scores):
            yield f'<rect x="{_x(place) + 5}" y="{y - 9 * score}" width="20" height="{9 * score}" fill="{colour}"/>'


def _kept() -> Iterator[str]:
    yield _label(262, "what becomes of the evicted", "selection, merger: dropped, or merged")
    for place in range(len(SCORES)):
        kept = place in KEPT
        yield _box(_x(place), 252, BOX, BOX, COLOURS["kept"] if kept else "none", dashed=not kept)
        white = 'fill="#fff"' if kept else 'opacity=".55"'
        yield _text(_x(place) + BOX / 2, 272, str(place), anchor="middle", more=white)
    source, target = (_x(place) + BOX / 2 for place in MERGED)
    yield (
        f'<path d="M{source} 284 q{(target - source) / 2} 26 {target - source} 3" fill="none" '
        f'stroke="{COLOURS["merge"]}" stroke-width="2.5" marker-end="url(#tip)"/>'
        f'<marker id="tip" viewBox="0 0 6 6" refX="4" refY="3" markerWidth="5" markerHeight="5" orient="auto">'
        f'<path d="M0 0L6 3L0 6z" fill="{COLOURS["merge"]}"/></marker>'
    )
    words = "2 is averaged into 3; 1, 5, 6, 8 and 9 are gone"
    yield _text(source - 4, 318, words, 13, more=f'fill="{COLOURS["merge"]}"')


def _store() -> Iterator[str]:
    yield _label(364, "how the kept are stored", "store: as they are, or in a few bits")
    for slot, place in enumerate(KEPT):
        exact = slot >= len(KEPT) - EXACT
        height = BOX if exact else BOX / 2
        yield _box(_x(slot), 354 + BOX - height, BOX, height, COLOURS["store"] if exact else "none")
        colour = 'fill="#fff"' if exact else ""
        yield _text(_x(slot) + BOX / 2, 374 if exact else 381, str(place), 14 if exact else 12, "middle", colour)
    yield _text(_x(len(KEPT)) + 6, 374, "bytes are counted from these tensors", 13)
    yield _text(LEFT, 414, "The schedule says when: after the whole prompt or every block of it,", 13)
    yield _text(LEFT, 432, "and whether decoding gives a token up for each new one or grows.", 13)


def _shares() -> Iterator[str]:
    yield _text(SHARES_LEFT, 24, "who gets how much", 15, more='font-weight="600"')
    yield _text(SHARES_LEFT, 43, "allocator: layers, KV heads", 13, more='opacity=".75"')
    for layer, slots in enumerate(LAYERS):
        y = 62 + 40 * layer
        yield _text(SHARES_LEFT, y + 18, f"{slots}", 14)
        yield from (_box(SHARES_LEFT + 20 + SLOT * slot, y + 2, SLOT - 4, 24, COLOURS["kept"]) for slot in range(slots))
    yield _text(SHARES_LEFT, 240, f"{_sum(LAYERS)} = 4 layers × 6", 13)
    yield _text(SHARES_LEFT, 258, "budget 6: the total is exact", 13, more='opacity=".75"')


def _sum(numbers: Sequence[int]) -> str:
    assert sum(numbers) == 6 * len(numbers), "the picture must keep the law it shows"
    return " + ".join(map(str, numbers))

"""Equations as docstrings write them, `c_j = alpha_j / (1 - alpha_j) * ||X - v_j||`, set as MathML.

Browsers draw MathML themselves: no script, no font from elsewhere. The notation is a part of AsciiMath: `_` and `^`
take one symbol or a group in parentheses, `a / b` is a fraction of the symbols or groups beside it, names of Greek
letters are the letters, "quoted" is text, `||x||`, `|x|`, `sqrt(x)`, `floor(x)`, `hat(x)` and `bar(x)` are what they
say, `sum`, `max` and `min` carry their subscript below.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape, unescape
from typing import NamedTuple

SIGNS = {
    "...": "…", "<=": "≤", ">=": "≥", "!=": "≠", "->": "→", "<-": "←", "*": "·", "-": "−", "in": "∈", "inf": "∞",
    "~": "≈", "notin": "∉", "union": "∪", "minus": "∖", "and": "∧",
}  # fmt: skip
PLAIN_SIGNS = "=+<>,:;.[]"
BIG = {"sum": "∑", "max": "max", "min": "min", "argmax": "argmax", "argmin": "argmin", "top": "top"}
NAMED = ("log", "mean", "var")  # functions that may stand before their argument without parentheses
ACCENTS = {"hat": "^", "bar": "¯"}
FENCES = {"sqrt": None, "floor": ("⌊", "⌋"), "ceil": ("⌈", "⌉")}
_TOKEN = re.compile(r'\s*(?:("[^"]*")|(\d+(?:\.\d+)?)|([A-Za-z]+\d*)|(\|\||\.\.\.|<=|>=|!=|->|<-|[^\s\w]|_))')


class Token(NamedTuple):
    """One symbol of an equation; `tight`: no space stands before it."""

    text: str
    tight: bool


class Part(NamedTuple):
    """A symbol or group as MathML; bare: a group without its parentheses, as fractions and scripts show it."""

    shown: str
    bare: str
    name: str = ""


def tokens(line: str) -> list[Token]:
    """The symbols of a line. Raises ValueError where one is not known."""
    found, at = [], 0
    while line[at:].strip():
        match = _TOKEN.match(line, at)
        if match is None:
            raise ValueError(f"{line!r} is no equation: what is {line[at:].strip()[:10]!r}?")
        text = match.group().strip()
        found.append(Token(text, not match.group()[0].isspace()))
        at = match.end()
    return found


def mathml(line: str) -> str:
    """One equation as a MathML block; the notation stays readable as its `alttext`. Raises ValueError."""
    reader = _Reader(line)
    body = reader.expression(())
    if reader.left:
        raise ValueError(f"{line!r} is no equation: {reader.left[0].text!r} closes nothing")
    return f'<math display="block" alttext="{escape(line.strip())}">{body}</math>'


class _Reader:
    """Reads the symbols of a line from left to right; every method takes some and returns MathML."""

    def __init__(self, line: str) -> None:
        self.line = line
        self.left = tokens(line)

    def expression(self, closing: tuple[str, ...]) -> str:
        """Everything up to one of `closing`, which is not taken."""
        parts: list[Part] = []
        while self.left and self.left[0].text not in (*closing, ")"):
            if self._take("/"):
                fraction = f"<mfrac>{parts.pop().bare}{self.term(closing).bare}</mfrac>"
                parts.append(Part(fraction, fraction))
            else:
                comma = self.left[0].text == "," and not closing
                parts.append(self.term(closing))
                parts += [Part(_SPACE, _SPACE)] if comma else []
        shown = "".join(part.shown for part in parts)
        return shown if len(parts) == 1 else f"<mrow>{shown}</mrow>"

    def term(self, closing: tuple[str, ...]) -> Part:
        """A symbol or group with its subscript, superscript and, where it is a function, its argument."""
        part = self.symbol(closing)
        below, above = self._script("_", closing), self._script("^", closing)
        below = below or (self._script("_", closing) if above else "")
        under, over = ("munder", "munderover") if part.name in BIG else ("msub", "msubsup")
        tag = (over if above else under) if below else "msup" if above else ""
        shown = f"<{tag}>{part.shown}{below}{above}</{tag}>" if tag else part.shown
        if part.name and self.left and self.left[0] == Token("(", True):
            shown = f"<mrow>{shown}{self.symbol(closing).shown}</mrow>"
        elif part.name in NAMED:
            shown = f'<mrow>{shown}<mspace width=".2em"/></mrow>'
        return part if shown == part.shown else Part(shown, shown)

    def symbol(self, closing: tuple[str, ...]) -> Part:
        """One symbol or group."""
        if not self.left:
            raise ValueError(f"{self.line!r} is no equation: it ends too early")
        text = self.left.pop(0).text
        if text == "(":
            inside = self._until(")", closing)
            return Part(_fenced("(", inside, ")"), f"<mrow>{inside}</mrow>")
        if text in ("||", "|"):
            bar = "‖" if text == "||" else "|"
            shown = _fenced(bar, self._until(text, closing), bar)
        elif text in (*ACCENTS, *FENCES) and self.left[:1] == [Token("(", True)]:
            shown = self._dressed(text, closing)
        else:
            shown = _single(text, self.line)
            return Part(shown, shown, text if text[0].isalpha() and text not in SIGNS else "")
        return Part(shown, shown)

    def _take(self, text: str) -> bool:
        """Whether `text` is next, which then is taken."""
        return bool(self.left) and self.left[0].text == text and bool(self.left.pop(0))

    def _until(self, end: str, closing: tuple[str, ...]) -> str:
        inside = self.expression((*closing, end))
        if not self._take(end):
            raise ValueError(f"{self.line!r} is no equation: {end!r} is missing")
        return inside

    def _dressed(self, name: str, closing: tuple[str, ...]) -> str:
        self.left.pop(0)
        inside = self._until(")", closing)
        if name in ACCENTS:
            return f'<mover accent="true">{inside}<mo>{ACCENTS[name]}</mo></mover>'
        fence = FENCES[name]
        return f"<msqrt>{inside}</msqrt>" if fence is None else _fenced(fence[0], inside, fence[1])

    def _script(self, mark: str, closing: tuple[str, ...]) -> str:
        return self.symbol(closing).bare if self._take(mark) else ""


_SPACE = '<mspace width="1em"/>'


def _single(text: str, line: str) -> str:
    if text.startswith('"') and len(text) > 1:
        words = escape(text[1:-1])
        return f"<mtext>\u00a0{words}\u00a0</mtext>" if len(text) > 3 else f"<mtext>{words}</mtext>"
    if text[0].isdigit():
        return f"<mn>{text}</mn>"
    sign = BIG.get(text) or SIGNS.get(text) or (text if text in PLAIN_SIGNS else "")
    if sign:
        return f"<mo>{escape(sign)}</mo>"
    if text[0].isalpha():
        letters = text.rstrip("0123456789")
        name = f"<mi>{_greek(letters)}</mi>"
        return name if letters == text else f"<msub>{name}<mn>{text[len(letters) :]}</mn></msub>"
    raise ValueError(f"{line!r} is no equation: what is {text!r}?")


def _greek(name: str) -> str:
    """The letter that HTML calls so, where that is a Greek one."""
    letter = unescape(f"&{name};")
    return letter if "Α" <= letter <= "ω" else name


def _fenced(before: str, inside: str, after: str) -> str:
    fence = '<mo fence="true" stretchy="true">{}</mo>'
    return f"<mrow>{fence.format(before)}{inside}{fence.format(after)}</mrow>"


def blocks(text: str) -> Iterator[tuple[str, bool]]:
    """The paragraphs of a docstring, and of each whether it is one of equations: indented by four spaces."""
    for paragraph in re.split(r"\n[ \t]*\n", text.strip("\n")):
        yield paragraph, all(line.startswith("    ") for line in paragraph.splitlines())


def typeset(paragraph: str) -> str:
    """A paragraph of equations, one a line, as HTML; a line indented further continues the one before."""
    joined = re.sub(r"\n {5,}", " ", paragraph)
    return (
        '<div class="equation" data-search-exclude>' + "".join(mathml(line) for line in joined.splitlines()) + "</div>"
    )

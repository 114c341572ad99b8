"""Equations as docstrings write them, `c_j = alpha_j / (1 - alpha_j) * ||X - v_j||`, set as MathML.

Browsers draw MathML themselves: no script, no font from elsewhere. The notation is a part of AsciiMath: `_` and `^`
take one symbol or a group in parentheses, `a / b` is a fraction of the symbols or groups beside it, names of Greek
letters are the letters, "quoted" is text, `||x||`, `|x|`, `sqrt(x)`, `floor(x)`, `hat(x)` and `bar(x)` are what they
say, `sum`, `max` and `min` carry their subscript below.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

GREEK = {
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
    "delta": "δ",
    "epsilon": "ε",
    "eta": "η",
    "theta": "θ",
    "lambda": "λ",
    "mu": "μ",
    "nu": "ν",
    "pi": "π",
    "rho": "ρ",
    "sigma": "σ",
    "tau": "τ",
    "phi": "φ",
    "psi": "ψ",
    "omega": "ω",
    "Delta": "Δ",
    "Sigma": "Σ",
}
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
        parts: list[str] = []
        while self.left and self.left[0].text not in closing:
            if self.left[0].text == ")":
                break
            if self.left[0].text == "/":
                self.left.pop(0)
                parts.append(f"<mfrac>{_bare(parts.pop())}{_bare(self.term(closing))}</mfrac>")
            else:
                comma = self.left[0].text == "," and not closing
                parts.append(self.term(closing))
                parts += ['<mspace width="1em"/>'] if comma else []
        return _row(parts)

    def term(self, closing: tuple[str, ...]) -> str:
        """A symbol or group with its subscript, superscript and, where it is a function, its argument."""
        name, base = self.symbol(closing)
        below, above = self._script("_", closing), self._script("^", closing)
        below = below or (self._script("_", closing) if above else "")
        under = name in BIG
        if below and above:
            tag = "munderover" if under else "msubsup"
            base = f"<{tag}>{base}{below}{above}</{tag}>"
        elif below:
            tag = "munder" if under else "msub"
            base = f"<{tag}>{base}{below}</{tag}>"
        elif above:
            base = f"<msup>{base}{above}</msup>"
        if name and self.left and self.left[0] == Token("(", True):
            return f"<mrow>{base}{self.symbol(closing)[1]}</mrow>"
        return f'<mrow>{base}<mspace width=".2em"/></mrow>' if name in NAMED else base

    def symbol(self, closing: tuple[str, ...]) -> tuple[str, str]:
        """(name or "", MathML) of one symbol or group."""
        if not self.left:
            raise ValueError(f"{self.line!r} is no equation: it ends too early")
        text = self.left.pop(0).text
        if text == "(":
            return "", _fenced("(", self._until(")", closing), ")")
        if text in ("||", "|"):
            bar = "‖" if text == "||" else "|"
            return "", _fenced(bar, self._until(text, closing), bar)
        if text in (*ACCENTS, *FENCES) and self.left[:1] == [Token("(", True)]:
            return "", self._dressed(text, closing)
        return text if text[0].isalpha() and text not in SIGNS else "", _single(text, self.line)

    def _until(self, end: str, closing: tuple[str, ...]) -> str:
        inside = self.expression((*closing, end))
        if not self.left or self.left[0].text != end:
            raise ValueError(f"{self.line!r} is no equation: {end!r} is missing")
        self.left.pop(0)
        return inside

    def _dressed(self, name: str, closing: tuple[str, ...]) -> str:
        self.left.pop(0)
        inside = self._until(")", closing)
        if name in ACCENTS:
            return f'<mover accent="true">{inside}<mo>{ACCENTS[name]}</mo></mover>'
        fence = FENCES[name]
        return f"<msqrt>{inside}</msqrt>" if fence is None else _fenced(fence[0], inside, fence[1])

    def _script(self, mark: str, closing: tuple[str, ...]) -> str:
        if not self.left or self.left[0].text != mark:
            return ""
        self.left.pop(0)
        return _bare(self.symbol(closing)[1])


def _single(text: str, line: str) -> str:
    if text.startswith('"') and len(text) > 1:
        words = escape(text[1:-1])
        return f"<mtext>\u00a0{words}\u00a0</mtext>" if len(text) > 3 else f"<mtext>{words}</mtext>"
    if text[0].isdigit():
        return f"<mn>{text}</mn>"
    if text in BIG:
        return f"<mo>{BIG[text]}</mo>"
    if text in SIGNS:
        return f"<mo>{escape(SIGNS[text])}</mo>"
    if text in PLAIN_SIGNS:
        return f"<mo>{escape(text)}</mo>"
    if text[0].isalpha():
        letters = text.rstrip("0123456789")
        name = f"<mi>{GREEK.get(letters, letters)}</mi>"
        return name if letters == text else f"<msub>{name}<mn>{text[len(letters) :]}</mn></msub>"
    raise ValueError(f"{line!r} is no equation: what is {text!r}?")


def _row(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"<mrow>{''.join(parts)}</mrow>"


def _fenced(before: str, inside: str, after: str) -> str:
    return f"<mrow>{_FENCE.format(before)}{inside}{_FENCE.format(after)}</mrow>"


_FENCE = '<mo fence="true" stretchy="true">{}</mo>'
_PARENTHESES = re.compile(rf"<mrow>{_FENCE.format(r'[(]')}(.*){_FENCE.format(r'[)]')}</mrow>")


def _bare(part: str) -> str:
    """A group without its parentheses, as fractions and scripts show it."""
    match = _PARENTHESES.fullmatch(part)
    if match is None or not _balanced(match.group(1)):
        return part
    return f"<mrow>{match.group(1)}</mrow>"


def _balanced(inside: str) -> bool:
    """Whether what stands between the outermost parentheses is one group, not `a) (b`."""
    depth = 0
    for sign in re.findall(r">([()])<", inside):
        depth += 1 if sign == "(" else -1
        if depth < 0:
            return False
    return depth == 0


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

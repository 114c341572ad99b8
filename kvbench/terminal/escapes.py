"""Escapes in double quotes on the command line: `'task.stop=["\n"]'` means a newline, as in YAML.

And the reverse, for texts of others: characters that a terminal, or the layout of a table, would obey.
"""

from __future__ import annotations

import re
from unicodedata import category

_OVERRIDE = re.compile(r"[+~]*\w[\w./@:-]*=")
_QUOTED = re.compile(r""""((?:\\.|[^"\\])*)"|'(?:\\.|[^'\\])*'""", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_NAMED = dict(zip('0abtnvfre "/\\N_LP', '\0\a\b\t\n\v\f\r\x1b "/\\\x85\xa0\u2028\u2029', strict=True))


def unescaped(word: str) -> str:
    """An override `field=value` in which YAML's escapes inside double quotes are the characters they mean.

    Hydra leaves them as they are, but for escaped quotes. Other escapes, single quotes and other words do not change.
    """
    start = _OVERRIDE.match(word)
    return word if start is None else start[0] + _QUOTED.sub(_decoded, word[start.end() :])


def visible(text: str, kept: str = "") -> str:
    """A text in which every character that is not printable, except those of `kept`, is its escape: `\\x1b`, `\\n`.

    These are control characters, which move a cursor or change a terminal, and those that reorder or hide text.
    """
    if text.isprintable():
        return text
    return "".join(sign if _is_visible(sign) or sign in kept else _escape(sign) for sign in text)


def _is_visible(sign: str) -> bool:
    return sign.isprintable() or category(sign) == "Zs"  # a space, such as that of Chinese text


def _escape(sign: str) -> str:
    return sign.encode("unicode_escape", "surrogatepass").decode("ascii")


def _decoded(quoted: re.Match[str]) -> str:
    if quoted[1] is None:  # single quotes
        return quoted[0]
    text = _ESCAPE.sub(_character, quoted[1])
    return '"' + re.sub(r'(\\*)("|$)', lambda x: x[1] * 2 + ("\\" + x[2] if x[2] else ""), text) + '"'


def _character(escape: re.Match[str]) -> str:
    kind = escape[1]
    if len(kind) > 1 and int(kind[1:], 16) <= 0x10FFFF:
        return chr(int(kind[1:], 16))
    return _NAMED.get(kind, escape[0])

"""Escapes in double quotes on the command line: `'task.stop=["\n"]'` means a newline, as in YAML."""

from __future__ import annotations

import re

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

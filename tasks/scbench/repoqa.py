"""RepoQA's score: whether the function in an output is the requested one, by BLEU among the functions of a repository.

Source: microsoft/MInference at fb56c91, scbench/repo_qa_utils.py, which finds functions with tree-sitter. Here they are
found by their first line, and by indentation or braces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

THRESHOLD = 0.8
_FENCED = re.compile(r"^```(?:\w+)?\s*\n(.*?)(?=^```)```", re.DOTALL | re.MULTILINE)
_BRACES = re.compile(r'"(?:\\.|[^"\\\n])*"|[{}]')
_BEGINS = {
    "python": r"^[ \t]*((?:async[ \t]+)?def[ \t]+\w+[ \t]*\()",
    "java": r"^[ \t]*((?:@\w+\s+|(?!return|new|else|throw)[\w<>\[\],.?]+[ \t]+)+\w+[ \t]*\([^;{}]*\)[^;{}]*\{)",
    "typescript": r"((?:\basync[ \t]+)?\bfunction[ \t]+\w+[^{]*?\([^{]*\)[^{;]*\{)",
    "rust": r"((?:\bpub(?:\([^)]*\))?\s+)?(?:(?:const|async|unsafe|extern(?:\s*\"[^\"]*\")?)\s+)*\bfn\s+\w+[^;{]*\{)",
    "cpp": r"^[ \t]*((?!return\b|else\b|new\b)[\w:<>,*& \t]+?[ \t*&]\w+[ \t]*\([^;{}]*\)[^;{}()]*\{)",
    "go": r"^[ \t]*(func[ \t]+\w+[^{]*\{)",
}
LANGUAGES = tuple(_BEGINS)


def repoqa(output: str, lang: str, name: str, needles: Sequence[Mapping[str, str]]) -> float:
    """1 if the requested function is the most similar to the output among `needles`, with a BLEU of at least 0.8.

    needles: all requested functions of the repository, with `needle` (the code) and `name`.
    """
    best, similarity = most_similar(output, lang, needles)
    return float(best == name and similarity >= THRESHOLD)


def most_similar(output: str, lang: str, needles: Sequence[Mapping[str, str]]) -> tuple[str | None, float]:
    """The name of the function most similar to the output, and its BLEU; (None, 0) if no BLEU is positive."""
    written, best, similarity = function_of(output, lang), None, 0.0
    for needle in needles:
        found = _bleu(written, needle["needle"])
        if found > similarity:
            best, similarity = needle["name"], found
    return best, similarity


def function_of(output: str, lang: str) -> str:
    """The first function in the fenced blocks, or the first block, or the output."""
    output = output.strip()
    blocks: list[str] = _FENCED.findall(output)
    functions = (_first_function(block, lang) for block in blocks)
    return next((function for function in functions if function), blocks[0] if blocks else output)


def _first_function(code: str, lang: str) -> str | None:
    begin = re.search(_BEGINS[lang], code, re.MULTILINE)
    if begin is None:
        return None
    end = _indented_end(code, begin) if lang == "python" else _closing_brace(code, begin.end())
    return code[begin.start(1) : end]


def _indented_end(code: str, begin: re.Match[str]) -> int:
    """The start of the first line after the signature that is neither blank nor indented deeper."""
    place, depth = begin.end(), 1
    while place < len(code) and depth:
        depth += (code[place] in "([{") - (code[place] in ")]}")
        place += 1
    indent = begin.start(1) - (code.rfind("\n", 0, begin.start(1)) + 1)
    after = re.compile(rf"\n(?=[ \t]{{0,{indent}}}[^ \t\r\n])").search(code, place)
    return after.start() if after else len(code)


def _closing_brace(code: str, place: int) -> int:
    """The position after the brace that closes the one opened before `place`; braces in quotes do not count."""
    depth = 1
    for mark in _BRACES.finditer(code, place):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return mark.end()
    return len(code)


def _bleu(written: str, needle: str) -> float:
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu  # here: slow to import

    words = [re.split(r"\s+", text.strip()) for text in (needle, written)]
    return float(sentence_bleu([words[0]], words[1], smoothing_function=SmoothingFunction().method4))

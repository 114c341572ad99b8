"""InfiniteBench's scores of one prediction, 0 to 1: the authors' rules, kvpress's, and corrected ones.

Sources: OpenBMB/InfiniteBench at 88b3daa, src/compute_scores.py; NVIDIA/kvpress at 8bb29b9,
evaluation/benchmarks/infinite_bench/calculate_metrics.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvbench.tasks.longbench.metrics import character_f1, qa_f1
from kvbench.tasks.predictions import Rule
from kvbench.tasks.scores import NUMBER, best, chosen_letter, rouge_lsum

_SIGNED = re.compile(r"-?\d+(?:\.\d+)?")
_LETTERS = {"code_debug": "A-J", "longbook_choice_eng": "A-D"}
_RETRIEVED = "\n:\"'.,?!{}"
_DEBUG_PREFIXES = ("answer is:", "is:", "answer:", "correct option is:")
_CHOICE_PREFIXES = ("answer is:", "answer:", "answer is", "option is")


def first(references: Any) -> Any:  # noqa: ANN401 - texts or numbers
    """The first item of a list, or the value itself."""
    return references[0] if isinstance(references, list) else references


def listed(references: Any) -> list[Any]:  # noqa: ANN401 - texts or numbers
    """A list unchanged, any other value as a list of one item."""
    return references if isinstance(references, list) else [references]


def first_digits(output: str, references: Any) -> float:  # noqa: ANN401
    """1 if the first run of ASCII digits is the reference."""
    found = re.search("[0-9]+", output)
    return float(first(references) == (found[0] if found else ""))


def is_a_word(output: str, references: Any) -> float:  # noqa: ANN401
    """1 if the value is a word after quotes, braces and punctuation are replaced by spaces. 0 for a list."""
    return float(references in _blanked(output, _RETRIEVED).split())


def last_word_as_int(output: str, references: Any) -> float:  # noqa: ANN401
    """1 if the last word, as an integer, equals the reference."""
    words = _blanked(output, "\n.`'\":").split()
    try:
        return float(bool(words) and int(words[-1]) == first(references))
    except ValueError:
        return 0.0


def first_number(output: str, references: Any) -> float:  # noqa: ANN401
    """1 if the first number, without its sign, is the reference. ValueError for a decimal if that is an integer."""
    wanted = first(references)
    if isinstance(wanted, bool) or not isinstance(wanted, int | float):
        raise TypeError(f"Expected int or float, got {type(wanted)}")
    found = NUMBER.search(output)
    return float(found is not None and type(wanted)(found[0]) == wanted)


def right_prefix(output: str, references: Any, pattern: str = "[0-9]+") -> float:  # noqa: ANN401
    """Share of the references that the output's numbers begin with. The default `pattern` ignores signs."""
    wanted = references[0] if isinstance(references[0], list) else references
    numbers = [int(number) for number in re.findall(pattern, output)]
    right = [number == value for number, value in zip(numbers, wanted, strict=False)]
    return (right.index(False) if False in right else len(right)) / len(wanted)


def debug_authors(output: str, references: Sequence[str]) -> float:
    """1 if the output begins with the letter and a full stop or colon, or names letter or function after a prefix."""
    _, letter = references
    if output.strip()[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    return float(_after_a_prefix(_plain_debug(output), _DEBUG_PREFIXES, references) or False)


def debug_kvpress(output: str, references: Sequence[str]) -> float:
    """1 if the last letter A to J of the first line with one is right, or the output begins with letter or name."""
    _, letter = references
    plain = _plain_debug(output)
    if _last_letter(output.strip(), "A-J") == letter or plain.startswith(tuple(references)):
        return 1.0
    return float(_after_a_prefix(plain, _DEBUG_PREFIXES, references) or False)


def choice_authors(output: str, references: Sequence[str]) -> float:
    """1 if the first character (A to D), the whole output, the text after a prefix or the first such word is right."""
    output = output.strip()
    if not output:
        return 0.0
    if output[0] in "ABCD":
        return float(output[0] in references)
    if output in references:
        return 1.0
    plain = re.sub(" +", " ", _blanked(output, "\n\"'.,?!{}"))
    after = _after_a_prefix(plain, _CHOICE_PREFIXES, references)
    if after is not None:
        return float(after)
    word = next((word for word in plain.split() if word in "ABCD"), None)
    return float(word in references)


def choice_kvpress(output: str, references: Sequence[str]) -> float:
    """1 if the last letter from A to D of the first line with one is right; otherwise as the authors."""
    return float(_last_letter(output.strip(), "A-D") in references) or choice_authors(output, references)


def dialogue_authors(output: str, references: Any) -> float:  # noqa: ANN401
    """1 if the first reference, unchanged, is a word of the upper-cased output."""
    return float(references[0] in _blanked(output, _RETRIEVED).upper().split())


def any_inside(output: str, references: Any) -> float:  # noqa: ANN401
    """1 if any reference is part of the output, ignoring case. For a string, each character is a reference."""
    return float(any(reference.upper() in output.strip().upper() for reference in references))


AUTHORS: dict[str, Rule] = {
    "passkey": first_digits,
    "number_string": first_digits,
    "kv_retrieval": is_a_word,
    "code_run": last_word_as_int,
    "code_debug": debug_authors,
    "longbook_choice_eng": choice_authors,
    "longdialogue_qa_eng": dialogue_authors,
    "longbook_qa_eng": best(qa_f1),
    "longbook_qa_chn": best(character_f1),
    "longbook_sum_eng": best(rouge_lsum),
    "math_find": first_number,
    "math_calc": right_prefix,
}
KVPRESS: dict[str, Rule] = {
    **AUTHORS,
    "kv_retrieval": lambda output, references: is_a_word(output, first(references)),
    "code_debug": debug_kvpress,
    "longbook_choice_eng": choice_kvpress,
    "longdialogue_qa_eng": any_inside,
}
"""By task. kvpress does not score summaries, so the authors' rule is used."""


def last_choice(task: str, output: str, references: Sequence[str]) -> float:
    """1 if the chosen letter (see `chosen_letter`) is right; without a letter, if the output has the option."""
    letter = chosen_letter(output, _LETTERS[task])
    if letter is not None:
        return float(letter in references)
    return float(any(len(one) > 1 and one.lower() in output.lower() for one in references))


def same_number(output: str, references: Any) -> float:  # noqa: ANN401
    """1 if the first number, with its sign, has the value of the reference."""
    found = _SIGNED.search(output)
    return float(found is not None and float(found[0]) == first(references))


SOUND: dict[str, Rule] = {
    "kv_retrieval": KVPRESS["kv_retrieval"],
    "code_debug": lambda output, references: last_choice("code_debug", output, listed(references)),
    "longbook_choice_eng": lambda output, references: last_choice("longbook_choice_eng", output, listed(references)),
    "math_find": same_number,
    "math_calc": lambda output, references: right_prefix(output, listed(references), "-?[0-9]+"),
}
"""By task, for official rules that reject correct answers or raise errors."""


def _blanked(text: str, marks: str) -> str:
    return text.translate(str.maketrans(marks, " " * len(marks)))


def _plain_debug(output: str) -> str:
    return re.sub(" +", " ", re.sub("Option|option", " ", _blanked(output.strip(), "\n`'\"-*")))


def _last_letter(text: str, letters: str) -> str | None:
    """The last letter that is a word by itself in the first line that has one."""
    lines = (re.findall(rf"\b[{letters}]\b", line) for line in text.split("\n"))
    return next((found[-1] for found in lines if found), None)


def _after_a_prefix(text: str, prefixes: Sequence[str], wanted: Sequence[str]) -> bool | None:
    """Whether one of `wanted` follows the first prefix that occurs, one character later; None without a prefix."""
    for prefix in prefixes:
        if prefix in text:
            return text[text.index(prefix) + len(prefix) + 1 :].startswith(tuple(wanted))
    return None

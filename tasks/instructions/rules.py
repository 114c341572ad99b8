"""Verifiers that differ from the package if-verifiable, so that verdicts are the official ones and nothing is drawn.

if-verifiable 0.1.2 has IFBench's verifiers of its first version. The official code at db69a6f splits sentences with
NLTK and has other rules for nine kinds of instructions. Its classes are subclassed here; their texts are unchanged.
Source: allenai/IFBench at db69a6f, ifbench/instructions.py; google-research, instruction_following_eval.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from typing import Any

Verifier = Any
"""A class of if-verifiable or lm-eval with build_description and check_following."""

LETTERS = "keywords:letter_frequency"
_WORDS = (
    "i me we us you he him she her it they them my mine our ours your yours his hers its their theirs "
    "myself ourselves yourself yourselves himself herself itself themselves this that these those "
    "who whom whose which what whoever whomever whatever whichever "
    "anybody anyone anything everybody everyone everything nobody nothing somebody someone something "
    "each either neither both all some any none"
)
PRONOUNS = frozenset(_WORDS.split())


def any_character(verifier: Verifier) -> Verifier:
    """IFEval's count of a letter, for any character of the row.

    The official code replaces a character that is not an ASCII letter, such as "#", with a letter that it draws (rows
    1122 and 1129 of IFEval).
    """
    if getattr(verifier, "takes_any_character", False):
        return verifier

    class AnyCharacter(verifier):  # type: ignore[misc]
        takes_any_character = True

        def build_description(self, *, letter: str | None = None, **more: Any) -> str:  # noqa: ANN401
            given = letter if isinstance(letter, str) and len(letter) == 1 and not letter.isspace() else None
            text: str = super().build_description(letter="a" if given else letter, **more)
            if given:
                self._letter = given.lower()
            return text

    return AnyCharacter


def ifbench_verifiers(known: Mapping[str, Verifier]) -> dict[str, Verifier]:
    """if-verifiable's verifiers of IFBench by name, with the official rules at db69a6f."""
    from if_verifiable.ifbench import instructions_util
    from nltk import sent_tokenize

    instructions_util.split_into_sentences = sent_tokenize
    changed = {name: _with_check(known[name], check) for name, check in _CHECKS.items()}
    return {**known, **changed, _SPAN: _with_span(known[_SPAN])}


def _with_check(verifier: Verifier, check: Callable[[Any, str], bool]) -> Verifier:
    return type(verifier.__name__, (verifier,), {"check_following": check})


def _words(text: str) -> list[str]:
    """NLTK's words without those that are punctuation only."""
    from nltk import word_tokenize

    return [word for word in word_tokenize(text) if any(map(str.isalnum, word))]


def _has_word(word: str, text: str, flags: int = 0) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text, flags) is not None


def _person_names(verifier: Any, answer: str) -> bool:  # noqa: ANN401
    names = verifier._description_pattern.rpartition(":")[2].split(",")  # the instruction lists them
    found = {name for name in (one.strip(" .") for one in names) if _has_word(name, answer)}
    return len(found) >= int(verifier._num_person_names)


def _keyword_in_sentence(verifier: Any, answer: str) -> bool:  # noqa: ANN401
    from nltk import sent_tokenize

    sentences, place = sent_tokenize(answer), int(verifier._keyword_position)
    return len(sentences) >= place and _has_word(verifier._keyword, sentences[place - 1], re.IGNORECASE)


def _pronouns(verifier: Any, answer: str) -> bool:  # noqa: ANN401
    from nltk import word_tokenize

    words = word_tokenize(answer.replace("/", " ").lower())
    return sum(word in PRONOUNS for word in words) >= int(verifier._num_pronouns)


def _quotes_explained(_: Any, answer: str) -> bool:  # noqa: ANN401
    text = "".join(answer.replace("'\"'", "").split())
    inside = text.strip(string.digits + string.punctuation.replace('"', ""))
    return '""' not in text and not inside.endswith('"')


def _word_at_place(verifier: Any, answer: str) -> bool:  # noqa: ANN401
    from nltk import sent_tokenize

    sentences = sent_tokenize(answer)
    words = _words(sentences[verifier._n - 1]) if len(sentences) >= verifier._n else []
    return len(words) >= int(verifier._m) and words[verifier._m - 1].lower() == str(verifier._keyword).lower()


def _second_words(verifier: Any, answer: str) -> bool:  # noqa: ANN401
    from nltk import word_tokenize

    words = [word.lower() for word in word_tokenize(answer)]
    last = 3 if words and words[-1] in string.punctuation else 2
    return len(words) >= last and words[1] == words[-last] == str(verifier._keyword).lower()


def _title_case(_: Any, answer: str) -> bool:  # noqa: ANN401
    from nltk import word_tokenize

    words = [word for word in word_tokenize(answer) if word[0].isalpha() and word[0].islower()]
    return not any(len(word) == 1 or word[1:].isupper() or word[1:].islower() for word in words)


_CHECKS = {
    "count:person_names": _person_names,
    "sentence:keyword": _keyword_in_sentence,
    "count:pronouns": _pronouns,
    "format:quote_unquote": _quotes_explained,
    "words:keywords_specific_position": _word_at_place,
    "words:words_position": _second_words,
    "format:title_case": _title_case,
}
_SPAN = "repeat:repeat_span"


def _with_span(verifier: Verifier) -> Verifier:
    """The span between two characters, both included, which may begin at 0."""

    class Span(verifier):  # type: ignore[misc]
        def build_description(
            self, prompt_to_repeat: str | None = None, n_start: int | None = None, n_end: int | None = None
        ) -> str:
            if not prompt_to_repeat or n_start is None or n_end is None:
                raise ValueError("prompt_to_repeat, n_start and n_end must be set")
            text: str = super().build_description(prompt_to_repeat, n_start or 1, n_end or 1)
            self._n_start, self._n_end = n_start, n_end
            return text

        def check_following(self, value: str) -> bool:
            span = self._prompt_to_repeat[self._n_start : self._n_end + 1]
            return value.strip().lower() == str(span).strip().lower()

    return Span

"""Rows with a context, a question and its answers: of local files, or of a data set on the hub."""

from __future__ import annotations

import json
import logging
import re
from ast import literal_eval
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvbench.tasks import text_files
from kvbench.tasks.evidence import EVIDENCE, Parts, shifted, start_of
from kvbench.tasks.hub import hub_rows
from kvbench.tasks.task import Example, question_part

TEXTS = ("context", "question")
_FLOAT = re.compile(r"-?\d+\.0|-?\d\.\d+e\+\d+")
log = logging.getLogger(__name__)
ANSWERS = ("answers", "answer")


@dataclass(frozen=True)
class Row:
    """One question. values: the row. name: its place in the data. answers: at least one text."""

    values: Mapping[str, Any]
    name: str
    answers: tuple[str, ...]

    def example(self, frame: str, max_new_tokens: int | None, **metadata: Any) -> Example:  # noqa: ANN401
        """The question in a frame with slots context and question; max_new_tokens: None for the row's own."""
        texts = {name: self.values[name] for name in TEXTS}
        evidence = {EVIDENCE: _evidence(self.values.get("evidence"), texts["context"], self.name)}
        return Example(
            index=0,
            prompt=frame.format(**texts),
            references=self.answers,
            max_new_tokens=self._new_tokens(max_new_tokens),
            answer_prefix=self.values.get("answer_prefix") or "",
            question=question_part(frame, "{question}").format(**texts),
            spans=shifted(evidence, start_of(frame, "context", **texts)),
            metadata=metadata,
        )

    def _new_tokens(self, given: int | None) -> int:
        """The given number, or the row's own. Raises ValueError if there is neither."""
        most = self.values.get("max_new_tokens") if given is None else given
        if most in (None, ""):
            raise ValueError(f"{self.name}: no max_new_tokens, set task.max_new_tokens")
        whole = int(most) if isinstance(most, str) and most.isdecimal() else most
        if isinstance(whole, float) and whole.is_integer():  # a column of numbers with gaps
            whole = int(whole)
        if isinstance(whole, bool) or not isinstance(whole, int) or whole < 1:
            raise ValueError(f"{self.name}: max_new_tokens is {most!r:.60}, it must be an integer of at least 1")
        return whole


def from_files(data_dir: str, files: Sequence[str]) -> Iterator[Row]:
    """The rows of a file, or of the files of a folder that match one of the patterns, in order of their paths.

    Raises ValueError if no file matches, and, naming file and row, if a row cannot be used.
    """
    for path, name in text_files.found(data_dir, files, text_files.TABLES):
        yield from _read(text_files.rows(path, name, TEXTS), name)


def from_hub(hub: str, subset: str | None, split: str, revision: str | None, named: str = "hub") -> Iterator[Row]:
    """The rows of a data set on the hub. ValueError, beginning with `named`, if it cannot be loaded."""
    loaded = hub_rows(hub, subset, split, revision, named)
    yield from _read(loaded, "/".join([hub, *([subset] if subset else []), split]))


def _read(found: Iterable[Mapping[str, Any]], name: str) -> Iterator[Row]:
    warned = False
    for number, values in enumerate(found, start=1):
        where = f"{name}, row {number}"
        more = [field for field in ("answer_prefix", "task") if values.get(field) is not None]
        text_files.check_row(values, [*TEXTS, *more], (), where)
        answers = _answers(values, where)
        floats = [answer for answer in answers if _FLOAT.fullmatch(answer)]
        if floats and not warned:
            why = "looks like a whole number that was written as a float; it is compared as it is, as a text"
            log.warning("%s: the answer %s %s", where, floats[0], why)
            warned = True
        yield Row(values, where, answers)


def _answers(values: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """A text or a list of texts; a file with texts only (.csv) has the list as JSON, or as Python writes it.

    ValueError for answers without a visible character, which every output would contain.
    """
    given = [name for name in ANSWERS if values.get(name) is not None]
    if not given:
        raise ValueError(f"{where}: neither answers nor answer, its fields are {', '.join(map(str, values))}")
    name = next((name for name in given if values[name] != ""), given[0])
    value = values[name]
    found = _listed(value, name, where) if isinstance(value, str) else value
    text_files.check_row({name: found}, (), [name], where)
    return tuple(found)


def _evidence(given: Any, context: str, where: str) -> Parts:  # noqa: ANN401 - whatever a file holds
    """The parts of the context that the answer needs: of texts that occur exactly once, or of pairs [first, end).

    A file with texts only (.csv) has the list as JSON. Raises ValueError, naming file and row.
    """
    if given is None or given == "":
        return ()
    listed: Any = given
    if isinstance(given, str):
        with suppress(ValueError, RecursionError):
            listed = json.loads(given)
        listed = listed if isinstance(listed, list) else [given]
    if not isinstance(listed, list | tuple):
        raise ValueError(f"{where}: evidence is {given!r:.60}, it must be a list of texts or of pairs [first, end)")
    return tuple(_part(one, context, where) for one in listed)


def _part(one: Any, context: str, where: str) -> tuple[int, int]:  # noqa: ANN401 - whatever a file holds
    if isinstance(one, str):
        times = context.count(one) if one.strip() else 0
        if times != 1:
            found = f"occurs {times} times in the context" if times else "does not occur in the context"
            raise ValueError(f"{where}: evidence {one!r:.60} {found}, it must occur once (or give [first, end))")
        return context.index(one), context.index(one) + len(one)
    whole = isinstance(one, list | tuple) and [type(x) for x in one] == [int, int]
    if not whole or not 0 <= one[0] < one[1] <= len(context):
        why = f"it must be a text or a pair [first, end) of characters of the context (0 to {len(context)})"
        raise ValueError(f"{where}: evidence {one!r:.60} is not allowed, {why}")
    return one[0], one[1]


def _listed(text: str, name: str, where: str) -> list[str]:
    """The list in a text, `["a"]` or `['a']`; other texts are one answer, and so is a list of numbers as `answer`."""
    listed: object = None
    for read in (json.loads, literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            listed = read(text.strip())
            break
    if not isinstance(listed, list | tuple) or not listed:
        return [text]
    if re.search(r"""['"]\s+['"]""", text) and len(listed) == 1:
        raise ValueError(f'{where}: {name} is {text:.60}, a list without commas: write it as JSON, ["a", "b"]')
    plain = name == "answers" and all(isinstance(one, str | int | float) for one in listed)
    return [str(one) for one in listed] if plain or all(isinstance(one, str) for one in listed) else [text]

"""RULER's prompt texts, as data: `tasks/data/ruler_templates.json` names their source and licence."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from kvbench.tasks.task import question_part


@dataclass(frozen=True)
class Template:
    """Text with slots, and the start of the answer that follows it after the chat wrap."""

    text: str
    answer_prefix: str

    def fill(self, **slots: object) -> tuple[str, str]:
        """(prompt, answer prefix) with their slots filled."""
        return self.text.format(**slots), self.answer_prefix.format(**slots)

    @property
    def question(self) -> str:
        """The end of the text that is the question, with its slots."""
        return question_part(self.text, "{query}")


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(
        files("kvbench.tasks").joinpath("data/ruler_templates.json").read_text(encoding="utf-8")
    )
    return data


def template(task: str) -> Template:
    """The template of "niah", "variable_tracking", "common_words", "frequent_words" or "qa"."""
    entry = _data()[task]
    return Template(text=entry["template"], answer_prefix=entry["answer_prefix"])


def noise_line() -> str:
    """The five short sentences that RULER repeats as filler."""
    return str(_data()["noise"])


def document_line() -> str:
    """One document of the qa tasks, with slots i and document."""
    return str(_data()["document"])


def needle_line() -> str:
    """The needle of the niah tasks, with slots type_needle_v, key and value."""
    return str(_data()["needle"])

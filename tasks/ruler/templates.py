"""RULER's prompt texts, as data: `tasks/data/ruler_templates.json` names their source and licence."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.tasks.task import Tokenizer, question_part
from kvbench.tasks.words import shipped


@dataclass(frozen=True)
class Draft:
    """One prompt that may be too long. question: the question at the end of the prompt."""

    prompt: str
    answer_prefix: str
    references: tuple[str, ...]
    question: str = ""

    def tokens(self, tokenizer: Tokenizer) -> int:
        """Length of the prompt with its answer prefix, in tokens."""
        return len(tokenizer.encode(self.prompt + self.answer_prefix))


@dataclass(frozen=True)
class Template:
    """Text with slots, and the start of the answer, which follows the chat template."""

    text: str
    answer_prefix: str

    @property
    def question(self) -> str:
        """The question at the end of the text, with its slots."""
        return question_part(self.text, "{query}")

    def fill(self, references: tuple[str, ...] = (), **slots: object) -> Draft:
        """A prompt with filled slots."""
        filled = (part.format(**slots) for part in (self.text, self.answer_prefix, self.question))
        prompt, answer_prefix, question = filled
        return Draft(prompt, answer_prefix, references, question)


def template(task: str) -> Template:
    """The template of "niah", "variable_tracking", "common_words", "frequent_words" or "qa"."""
    entry = shipped("ruler_templates.json")[task]
    return Template(text=entry["template"], answer_prefix=entry["answer_prefix"])


NOISE: str = shipped("ruler_templates.json")["noise"]
"""The five short sentences that RULER repeats as filler."""
DOCUMENT: str = shipped("ruler_templates.json")["document"]
"""One document of the qa tasks, with slots i and document."""
NEEDLE: str = shipped("ruler_templates.json")["needle"]
"""The needle of the niah tasks, with slots type_needle_v, key and value."""

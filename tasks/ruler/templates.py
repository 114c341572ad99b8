"""RULER's prompt texts, as data: `tasks/data/ruler_templates.json` names their source and licence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbench.tasks.evidence import Parts, shifted, start_of
from kvbench.tasks.task import Tokenizer, question_part
from kvbench.tasks.words import shipped


@dataclass(frozen=True)
class Draft:
    """One prompt that may be too long. question: the question at its end. spans: of the evidence."""

    prompt: str
    answer_prefix: str
    references: tuple[str, ...]
    question: str = ""
    spans: Mapping[str, Parts] = field(default_factory=dict)

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

    def fill(
        self, references: tuple[str, ...] = (), spans: Mapping[str, Parts] | None = None, **slots: object
    ) -> Draft:
        """A prompt with filled slots. spans: of the evidence in the context."""
        filled = (part.format(**slots) for part in (self.text, self.answer_prefix, self.question))
        prompt, answer_prefix, question = filled
        found = shifted(spans, start_of(self.text, "context", **slots)) if spans else {}
        return Draft(prompt, answer_prefix, references, question, found)


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

"""RULER prompts from the files of other generators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from os.path import expanduser
from pathlib import Path

from kvbench.errors import ConfigError, choice
from kvbench.tasks.ruler.niah import singular
from kvbench.tasks.ruler.predictions import PROTOCOLS, Protocol
from kvbench.tasks.ruler.templates import template
from kvbench.tasks.task import Example, Task, Tokenizer, counts
from kvbench.tasks.text_files import rows

_MARK = 10  # characters by which the official script finds the answer prefix


@dataclass(frozen=True, kw_only=True)
class RulerFile(Task):
    """The lines of a file that RULER's scripts wrote: input, outputs and, since 2025, answer_prefix.

    task: one of the 13 tasks, which defines the score. path: the file. max_new_tokens: None uses the official number.
    answer_prefix: begin the answer with the prefix, which leaves no room for a thought before it.
    In files from before 2025 the answer prefix is the end of input; it is split off at its first characters, so that it
    follows the chat template, as in the official code.
    """

    name: str = "ruler_file"
    chat: bool = True
    task: str = "niah_single_1"
    path: str | None = None
    answer_prefix: bool = True
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("task", self.task, *PROTOCOLS)
        choice("answer_prefix", self.answer_prefix, True, False)
        counts(self, 1, "max_new_tokens")

    @property
    def protocol(self) -> Protocol:
        """The protocol of the task."""
        return PROTOCOLS[self.task]

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """See `Task.examples`; the seed has no effect. Raises ValueError, naming file and row, for a damaged file."""
        for index, (text, prefix, references) in enumerate(islice(self._lines(), limit)):
            yield Example(
                index=index,
                prompt=text,
                references=references,
                max_new_tokens=self.max_new_tokens or self.protocol.max_new_tokens,
                answer_prefix=prefix if self.answer_prefix else "",
                question=self._question(text),
                metadata={"task": self.task, "benchmark": "ruler"},
            )

    def score(self, output: str, example: Example) -> float:
        """Score by the metric of the task."""
        return self.protocol.score(output, example.references)

    def _question(self, text: str) -> str:
        """The end of a recorded prompt, from the beginning of its template's question; "" if it does not occur."""
        plural = template(self.protocol.template).question
        start = max(text.rfind(question.partition("{")[0]) for question in (plural, singular(plural)))
        return text[start:] if start >= 0 else ""

    def _lines(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """(input without the answer prefix, answer prefix, references) of every line."""
        if self.path is None:
            raise ConfigError("path", None, why=f"is not allowed for {self.name}, it must be a file that RULER wrote")
        path = Path(expanduser(self.path))
        for number, row in enumerate(rows(path, path.name, ("input",), ("outputs",)), start=1):
            text, prefix = row["input"], row.get("answer_prefix") or ""
            if not prefix:
                start = text.rfind(template(self.protocol.template).answer_prefix[:_MARK])
                if start < 0:
                    raise ValueError(
                        f"{path}, row {number}: no answer_prefix, and the input does not end with it: check that "
                        f"the file is of task={self.task}"
                    )
                text, prefix = text[:start], text[start:]
            yield text, prefix, tuple(row["outputs"])

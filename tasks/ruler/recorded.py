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
    """The lines of a file that RULER's own scripts wrote: input, outputs and, since 2025, answer_prefix.

    task: which of the 13 they are, which says how they are scored. path: the file. max_new_tokens: None for the
    official number. In files made before 2025 the answer prefix is the end of input; it is cut off there by the way it
    begins, so that it follows the chat template, as officially.
    """

    name: str = "ruler_file"
    chat: bool = True
    task: str = "niah_single_1"
    path: str | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("task", self.task, *PROTOCOLS)
        counts(self, 1, "max_new_tokens")

    @property
    def protocol(self) -> Protocol:
        """How the task is scored."""
        return PROTOCOLS[self.task]

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """See `Task.examples`; nothing is drawn. Raises ValueError, naming file and line, where the file is damaged."""
        for index, (text, prefix, references) in enumerate(islice(self._lines(), limit)):
            yield Example(
                index=index,
                prompt=text,
                references=references,
                max_new_tokens=self.max_new_tokens or self.protocol.max_new_tokens,
                answer_prefix=prefix,
                question=self._question(text),
                metadata={"task": self.task, "benchmark": "ruler"},
            )

    def score(self, output: str, example: Example) -> float:
        """Score by the metric of the task."""
        return self.protocol.score(output, example.references)

    def _question(self, text: str) -> str:
        """The end of a recorded prompt from where its template's question begins; "" where it does not have that."""
        plural = template(self.protocol.template).question
        start = max(text.rfind(asked.partition("{")[0]) for asked in (plural, singular(plural)))
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
                        f"{path}, row {number}: neither answer_prefix nor an input that ends in it, is it a line of "
                        f"{self.task}?"
                    )
                text, prefix = text[:start], text[start:]
            yield text, prefix, tuple(row["outputs"])

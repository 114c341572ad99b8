"""RULER prompts that were generated elsewhere, read from their file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from os.path import expanduser
from pathlib import Path

from kvbench.errors import ConfigError
from kvbench.tasks.ruler.niah import singular
from kvbench.tasks.ruler.protocol import PROTOCOLS, Protocol
from kvbench.tasks.ruler.templates import template
from kvbench.tasks.task import Example, Task, Tokenizer, at_least, one_of

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
        one_of("task", self.task, tuple(PROTOCOLS))
        if self.max_new_tokens is not None:
            at_least("max_new_tokens", self.max_new_tokens, 1)

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
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("path", self.path, why=f"cannot be read ({error})") from error
        if not content.strip():
            raise ConfigError("path", self.path, why="is empty")
        for number, line in enumerate(content.removesuffix("\n").split("\n"), start=1):  # texts hold other separators
            yield self._read(line, f"{path}, line {number}")

    def _read(self, line: str, where: str) -> tuple[str, str, tuple[str, ...]]:
        try:
            values = json.loads(line)
            text, outputs, prefix = values["input"], values["outputs"], values.get("answer_prefix", "")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where}: no line of RULER, or cut off ({type(error).__name__}: {error})") from error
        if not isinstance(text, str) or not isinstance(prefix, str):
            raise ValueError(f"{where}: input and answer_prefix must be texts")
        if not isinstance(outputs, list) or not outputs or not all(isinstance(output, str) for output in outputs):
            raise ValueError(f"{where}: outputs must be a list of at least one text")
        if not prefix:
            start = text.rfind(template(self.protocol.template).answer_prefix[:_MARK])
            if start < 0:
                raise ValueError(
                    f"{where}: neither answer_prefix nor an input that ends in it, is it a line of {self.task}?"
                )
            text, prefix = text[:start], text[start:]
        return text, prefix, tuple(outputs)

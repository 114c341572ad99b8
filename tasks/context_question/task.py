"""Questions about long contexts from files with the columns of the public long-context sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from kvbench.errors import ConfigError
from kvbench.tasks.context_question.metrics import METRICS, check_form
from kvbench.tasks.context_question.rows import Row, from_files, from_hub
from kvbench.tasks.scores import composed
from kvbench.tasks.task import Example, Task, Tokenizer, are_texts, counts, several, slots

FILES = ("*.parquet", "*.jsonl", "*.csv")


@dataclass(frozen=True, kw_only=True)
class ContextQuestion(Task):
    """Rows with the columns context, question, answers (or answer), and perhaps answer_prefix, max_new_tokens, task,
    evidence.

    data_dir: a .parquet, .jsonl or .csv file, or a folder. files: patterns of the files to read from a folder, in the
    order of their paths. hub: a data set on the Hub instead. subset, split: its parts. revision: its commit or branch;
    None: the newest. frame: the prompt, with slots
    context and question; the public sets have the instructions in their columns. metrics: names in `metrics.METRICS`;
    the first one is the score, and the means of several are printed as aggregates. max_new_tokens: None uses the
    column. The column evidence has the parts of the context that the answer needs: a list of texts that occur exactly
    once in it, or of pairs [first, end) of characters. How much of it a policy keeps is recorded.
    """

    name: str = "context_question"
    chat: bool = True
    data_dir: str | None = None
    files: tuple[str, ...] = FILES
    hub: str | None = None
    subset: str | None = None
    split: str = "test"
    revision: str | None = None
    frame: str = "{context}{question}"
    metrics: tuple[str, ...] = ("contains_any",)
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        several(self, "metrics", *METRICS)
        if not self.files or not are_texts(self.files):
            raise ConfigError(
                "files", self.files, why="is not allowed, it must be a list of patterns such as *.parquet"
            )
        counts(self, 1, "max_new_tokens")
        slots("frame", self.frame, ("context", "question"))
        if self.data_dir is not None and self.hub is not None:
            raise ConfigError("data_dir", self.data_dir, why=f"and hub={self.hub} are both given, give one of them")

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """See `Task.examples`: examples follow the rows; the seed has no effect."""
        for index, row in enumerate(islice(self._rows(), limit)):
            check_form(self.metrics[0], row.answers, row.name)
            task = row.values.get("task") or self.name
            example = row.example(self.frame, self.max_new_tokens, task=task, benchmark="context_question")
            yield replace(example, index=index)

    def judge(self, output: str, example: Example) -> tuple[float | None, Mapping[str, Any]]:
        """The score, and all metrics by name if there are several."""
        references = tuple(map(composed, example.references))
        found = {name: METRICS[name](composed(output), references) for name in self.metrics}
        return found[self.metrics[0]], found if len(found) > 1 else {}

    def _rows(self) -> Iterator[Row]:
        if self.hub is not None:
            return from_hub(self.hub, self.subset, self.split, self.revision)
        if self.data_dir is not None:
            return from_files(self.data_dir, self.files)
        raise ConfigError(
            "data_dir",
            None,
            why="is not allowed without hub: give "
            "task.data_dir=<a .parquet, .jsonl or .csv file> or task.hub=<a data set's name>",
        )

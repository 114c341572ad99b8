"""The tasks of LongBench: one subset, or a suite of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice

from kvbench.errors import ConfigError, choice, whole_number
from kvbench.tasks.hub import HubFile, data_file
from kvbench.tasks.longbench.metrics import score
from kvbench.tasks.longbench.subsets import EXTENDED, SUBSETS, Subset
from kvbench.tasks.longbench.summary import length_bin
from kvbench.tasks.suite import TaskSuite
from kvbench.tasks.task import Example, Task, Tokenizer, question_part
from kvbench.tasks.text_files import Row, rows


@dataclass(frozen=True, kw_only=True)
class LongBench(Task):
    """One subset of LongBench v1, in file order: official prompts, generation lengths, stop rules and metrics.

    subset: one of 21. extended: use the rows of LongBench-E, which has 13 subsets. max_new_tokens: None uses the
    official number. chat: wrap prompts in the model's chat template, except for six subsets. truncation: the official
    rule removes the middle of a prompt that is longer than the model's max_prompt_tokens, before it is wrapped.
    official: ROUGE is 0 if the official code overflows Python's stack. data_dir: a folder with the .jsonl files or
    data.zip. archive: the file data.zip on the Hub, used without a data_dir. bundled: a folder in tasks/data, which
    replaces both.
    Source: THUDM/LongBench at 2e00731.
    """

    name: str = "longbench"
    subset: str
    extended: bool = False
    chat: bool = True
    truncation: str = "middle"
    max_new_tokens: int | None = None
    official: bool = False
    data_dir: str | None = None
    archive: HubFile | None = None
    bundled: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("subset", self.subset, *SUBSETS)
        if self.extended and self.subset not in EXTENDED:
            raise ConfigError(
                "subset", self.subset, why=f"has no rows in LongBench-E, choose one of {', '.join(EXTENDED)}"
            )
        if self.max_new_tokens is None:
            object.__setattr__(self, "max_new_tokens", self.protocol.max_new_tokens)
        whole_number("max_new_tokens", self._new_tokens, 1)
        object.__setattr__(self, "chat", self.chat and self.protocol.chat)
        if self.protocol.newline_ends:
            object.__setattr__(self, "end_texts", ("\n",))
            object.__setattr__(self, "min_new_tokens", 1)

    @property
    def protocol(self) -> Subset:
        """Prompt and scoring of this subset."""
        return SUBSETS[self.subset]

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """See `Task.examples`; the seed has no effect."""
        text = self.protocol.prompt
        question = question_part(text, "{input}")
        for index, row in enumerate(islice(self._rows(), limit)):
            metadata = {
                "task": self.name,
                "benchmark": "longbench",
                "subset": self.subset,
                "words": row["length"],
                "id": str(row.get("_id", "")),
            }
            if self.extended:
                metadata["bin"] = length_bin(row["length"])
            if row.get("all_classes"):
                metadata["all_classes"] = row["all_classes"]
            yield Example(
                index=index,
                prompt=text.format(context=row["context"], input=row["input"]),
                references=tuple(row["answers"]),
                max_new_tokens=self._new_tokens,
                question=question.format(input=row["input"]),
                metadata=metadata,
            )

    def score(self, output: str, example: Example) -> float:
        """Best score over the answers by the subset's metric."""
        return score(self.protocol, output, example.references, example.metadata.get("all_classes"), self.official)

    def _rows(self) -> Iterator[Row]:
        folder = self.data_dir if self.bundled is None else str(files("kvbench.tasks") / "data" / self.bundled)
        file = f"{self.subset}_e.jsonl" if self.extended else f"{self.subset}.jsonl"
        path = data_file(folder, (file, f"data/{file}", "data.zip"), self.archive, "LongBench's data.zip")
        for row in rows(path, path.name, ("context", "input"), ("answers",), member=f"data/{file}"):
            if not isinstance(row.get("length"), int):
                raise ValueError(f"{path}: length is {row.get('length')!r}, it must be a number of words")
            yield row

    @property
    def _new_tokens(self) -> int:
        assert self.max_new_tokens is not None, "set when the task was built"
        return self.max_new_tokens


@dataclass(frozen=True, kw_only=True)
class LongBenchSuite(TaskSuite):
    """Several subsets in turn. All fields but `name` and `tasks` override the same field of every subset.

    extended, official, data_dir: as in `LongBench`.
    The mean over examples is not the benchmark's average, because subsets differ in size; see `tasks.scores`.
    """

    shared = ("chat", "truncation", "extended", "official", "data_dir")

    chat: bool = True
    truncation: str = "middle"
    extended: bool = False
    official: bool = False
    data_dir: str | None = None

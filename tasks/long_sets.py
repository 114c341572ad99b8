"""Base class of the public sets of long texts, with prompts and scores of their authors or of kvpress."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, ClassVar

from kvbench.errors import choice
from kvbench.tasks.context_question import rows as columns
from kvbench.tasks.hub import HubFile, data_file
from kvbench.tasks.predictions import JUDGES
from kvbench.tasks.task import Example, Task, Tokenizer, check_references, counts
from kvbench.tasks.text_files import Row, rows
from kvbench.tasks.words import shipped


@dataclass(frozen=True, kw_only=True)
class LongSet(Task):
    """One configuration of a public set, in file order.

    protocol: "authors" uses the prompts, answer lengths and scores of the benchmark's authors with their data at `hub`.
    "kvpress" uses the columns of kvpress's data set at `kvpress_hub`, always with the chat template, and kvpress's
    scores. hub, kvpress_hub: these data sets, owner/name. revision, kvpress_revision: a commit, or a branch, which may
    change. sha256: checksum of the authors' file. data_dir: a local file or folder with the protocol's data.
    max_new_tokens: None uses the protocol's value. subset: the configuration. truncation: a prompt that is too long
    loses its middle, as in the authors' code; kvpress drops the end of the context.
    """

    benchmark: ClassVar[str]
    """Name in `tasks/data/long_sets.json`, which has the authors' prompts and limits."""
    file: ClassVar[str]
    """Path of the authors' data on the Hub, with the slot {subset}."""
    texts: ClassVar[tuple[str, ...]]
    """Fields of the data with texts."""
    summed_by: ClassVar[str | None] = None
    """The package of `kvbench.tasks` with the official aggregates."""

    protocol: str = "authors"
    truncation: str = "middle"
    max_new_tokens: int | None = None
    data_dir: str | None = None
    hub: str
    revision: str
    sha256: str | None = None
    kvpress_hub: str
    kvpress_revision: str
    subset: str

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("protocol", self.protocol, *JUDGES)
        choice("subset", self.subset, *subsets(self.benchmark))
        counts(self, 1, "max_new_tokens")
        if self.protocol == "kvpress":
            object.__setattr__(self, "chat", True)

    @abstractmethod
    def row_examples(self, row: Row) -> Iterator[Example]:
        """The examples of one row of the authors' data. ValueError or LookupError if the row has another format."""

    def of_columns(self, row: columns.Row) -> Mapping[str, Any]:
        """Metadata that the score needs from a row of kvpress's data."""
        return {}

    def column_example(self, row: columns.Row) -> Example:
        """The example of a row of kvpress's data."""
        return row.example("{context}{question}", self.max_new_tokens, **self._about(self.of_columns(row)))

    @property
    def template(self) -> str:
        """The authors' prompt, with its slots."""
        return str(subsets(self.benchmark)[self.subset]["prompt"])

    def example(self, prompt: str, question: str, references: tuple[str, ...], **metadata: Any) -> Example:  # noqa: ANN401
        """An example with the authors' prompt and answer length."""
        check_references(references, "references")
        most = self.max_new_tokens or subsets(self.benchmark)[self.subset]["max_new_tokens"]
        return Example(0, prompt, references, most, question=question, metadata=self._about(metadata))

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """See `Task.examples`. Examples follow the order of the data; the seed has no effect."""
        found = self._of_authors() if self.protocol == "authors" else self._of_kvpress()
        return (replace(example, index=index) for index, example in enumerate(islice(found, limit)))

    def _about(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        summed_by = {} if self.summed_by is None else {"benchmark": self.summed_by}
        return {"task": self.name, **summed_by, **metadata}

    def _of_authors(self) -> Iterator[Example]:
        source = HubFile(self.hub, self.revision, self.file.format(subset=self.subset), self.sha256)
        stem = PurePosixPath(source.path).stem
        names = [f"{stem}{end}" for end in (".jsonl", ".json", ".parquet", ".zip", "/test.jsonl")]
        path = data_file(self.data_dir, ("", *names), source)
        for number, row in enumerate(rows(path, path.name, self.texts), start=1):
            try:
                yield from self.row_examples(row)
            except (LookupError, SyntaxError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path.name}, row {number}: unexpected format, expected the format of {self.hub} ({error})"
                ) from error

    def _of_kvpress(self) -> Iterator[Example]:
        name = self.subset
        if self.data_dir is None:
            found = columns.from_hub(self.kvpress_hub, name, "test", self.kvpress_revision, "kvpress_hub")
        else:
            found = columns.from_files(self.data_dir, (f"{name}.parquet", f"{name}.jsonl", f"{name}/*.parquet"))
        for row in found:
            yield self.column_example(row)


def subsets(benchmark: str) -> Mapping[str, Mapping[str, Any]]:
    """The prompt and the maximum of new tokens of each subset of a benchmark."""
    found: Mapping[str, Mapping[str, Any]] = shipped("long_sets.json")[benchmark]["subsets"]
    return found

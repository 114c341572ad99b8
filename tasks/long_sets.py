"""What the public sets of long texts share: each is asked as its authors ask, or as kvpress does."""

from __future__ import annotations

import json
import zipfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from os.path import expanduser
from pathlib import Path, PurePosixPath
from typing import Any

from kvbench.errors import ConfigError
from kvbench.tasks import text_files
from kvbench.tasks.context_question import rows as columns
from kvbench.tasks.hub import HubFile
from kvbench.tasks.predictions import JUDGES
from kvbench.tasks.task import Example, Task, Tokenizer, at_least, one_of

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Asked:
    """One question as a protocol puts it. question: see `Example`."""

    prompt: str
    question: str
    references: tuple[str, ...]
    max_new_tokens: int
    answer_prefix: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LongSet(Task):
    """One configuration of a public set, in file order.

    protocol: "authors": prompts, new tokens and scores of the benchmark's authors, from their rows at `hub`. "kvpress":
    the prompts and new tokens that kvpress's data set has in its columns, always with the chat template, and kvpress's
    scores, from `kvpress_hub`. revision, kvpress_revision: a commit there, or a branch, which may move. data_dir: a
    copy of the protocol's rows instead, a file or a folder of them. max_new_tokens: None for the protocol's.
    truncation: a prompt that is too long loses its middle, as for the authors; kvpress drops the end of the context.
    """

    protocol: str = "authors"
    truncation: str = "middle"
    max_new_tokens: int | None = None
    data_dir: str | None = None
    hub: str
    revision: str
    kvpress_hub: str
    kvpress_revision: str

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("protocol", self.protocol, JUDGES)
        if self.max_new_tokens is not None:
            at_least("max_new_tokens", self.max_new_tokens, 1)
        if self.protocol == "kvpress":
            object.__setattr__(self, "chat", True)

    @property
    @abstractmethod
    def file(self) -> HubFile:
        """The file of the authors' rows."""

    @property
    @abstractmethod
    def fields(self) -> tuple[str, ...]:
        """Fields of these rows that hold texts."""

    @property
    @abstractmethod
    def configuration(self) -> str:
        """What kvpress's data set calls the same rows."""

    @abstractmethod
    def asked(self, row: Row) -> Iterator[Asked]:
        """What the authors ask about one of their rows. ValueError or LookupError where it is of another form."""

    def of_columns(self, row: columns.Row) -> Mapping[str, Any]:
        """What else a score needs of a row of kvpress's."""
        return {}

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """See `Task.examples`: in the order of the rows; nothing is drawn, the seed changes nothing."""
        found = self._of_authors() if self.protocol == "authors" else self._of_kvpress()
        for index, one in enumerate(islice(found, limit)):
            yield Example(
                index=index,
                prompt=one.prompt,
                references=one.references,
                max_new_tokens=self.max_new_tokens or one.max_new_tokens,
                answer_prefix=one.answer_prefix,
                question=one.question,
                metadata={"task": self.name, **one.metadata},
            )

    def score(self, output: str, example: Example) -> float:
        """The score of one output, 0 to 1."""
        score, _ = self.judge(output, example)
        assert score is not None, "only a set without answers has none, and says so"
        return score

    def _of_authors(self) -> Iterator[Asked]:
        for number, row in enumerate(self._rows(), start=1):
            try:
                yield from self.asked(row)
            except (LookupError, SyntaxError, TypeError, ValueError) as error:
                raise ValueError(f"{self.file.path}, row {number}: not of the form of {self.hub} ({error})") from error

    def _rows(self) -> Iterator[Row]:
        path = PurePosixPath(self.file.path)
        if self.data_dir is None:
            yield from _records(self.file.fetch(f"give task.data_dir=<folder with {path.name}>"), self.fields)
            return
        folder = Path(expanduser(self.data_dir))
        names = [f"{path.stem}{suffix}" for suffix in (".jsonl", ".json", ".parquet", ".zip")]
        places = [folder, *(folder / name for name in (*names, f"{path.stem}/test.jsonl"))]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise ConfigError("data_dir", self.data_dir, why=f"has no {' or '.join(names)}: put {self.file.url} there")
        yield from _records(found, self.fields)

    def _of_kvpress(self) -> Iterator[Asked]:
        name = self.configuration
        if self.data_dir is None:
            rows = columns.from_hub(self.kvpress_hub, name, "test", self.kvpress_revision, "kvpress_hub")
        else:
            rows = columns.from_files(self.data_dir, (f"{name}.parquet", f"{name}.jsonl", f"{name}/*.parquet"))
        for row in rows:
            if row.max_new_tokens is None:
                raise ValueError(f"{row.name}: no max_new_tokens, which the data sets of kvpress have")
            prompt = row.context + row.question
            metadata = self.of_columns(row)
            yield Asked(prompt, row.question, row.answers, row.max_new_tokens, row.answer_prefix, metadata)


def _records(path: Path, fields: Sequence[str]) -> Iterator[Row]:
    """The rows of a table, of JSON lines or a JSON list under any name, or of `test.jsonl` in a .zip file."""
    if path.suffix in text_files.TABLES:
        yield from text_files.rows(path, path.name, fields)
        return
    try:
        text = _text(path)
        lines = [line for line in text.split("\n") if line.strip()]
        rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in lines]
    except (OSError, ValueError, LookupError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path} is damaged or not a file of rows ({error})") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {number}: not a JSON object")
        text_files.check_texts(row, fields, f"{path}, row {number}")
        yield row


def _text(path: Path) -> str:
    if path.suffix != ".zip":
        return path.read_text(encoding="utf-8-sig")
    with zipfile.ZipFile(path) as archive:
        member = [name for name in archive.namelist() if PurePosixPath(name).name == "test.jsonl"][0]  # noqa: RUF015
        return archive.read(member).decode("utf-8-sig")

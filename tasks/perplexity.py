"""Perplexity: of whole texts, and of reference summaries given their chapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from kvbench.errors import ConfigError, whole_number
from kvbench.tasks.hub import HubFile, HubFolder, data_file
from kvbench.tasks.task import Example, Reading, Task, Tokenizer, are_texts, counts, slots
from kvbench.tasks.text_files import rows, texts

FILES = ("*.txt", "*.jsonl", "*.parquet")


@dataclass(frozen=True, kw_only=True)
class ReadingTask(Task):
    """Given tokens are scored by the model's -log p (nats); nothing is generated; lower is better.

    texts: the maximum number of texts (None: all). block: tokens between two evictions, overriding the policy's
    schedule (None keeps it). data_dir: a local file or folder instead of the data set on the Hub.
    """

    texts: int | None = None
    block: int | None = None
    data_dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        counts(self, 1, "texts", "block")

    def score(self, output: str, example: Example) -> float:
        """Raises ValueError: nothing is generated."""
        raise ValueError(f"{self.name} scores given tokens and has no score for an output")

    def _most(self, limit: int | None) -> int | None:
        return min((n for n in (self.texts, limit) if n is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class Perplexity(ReadingTask):
    """The first `length` tokens of each text (None: all), including BOS if the tokenizer uses one.

    length: tokens of a text that are used; None: all. source: a file on the Hub, used without a data_dir.
    prompt_tokens: None scores all tokens but the first and evicts block by block. A number sets the length of a prompt
    that is compressed at its end, and the rest is scored token by token. min_tokens: shorter texts are skipped (None:
    a text too short to be scored is an error; BOS does not count). files: patterns of the files to read from a folder,
    ordered by path. field: the column with the text in .jsonl, .csv and .parquet.
    """

    name: str = "perplexity"
    length: int | None = 4096
    min_tokens: int | None = None
    prompt_tokens: int | None = None
    files: tuple[str, ...] = FILES
    field: str = "text"
    source: HubFile | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        counts(self, 1, "min_tokens", "prompt_tokens")
        if self.length is not None:
            whole_number("length", self.length, 2)
        if self.length is not None and (self.prompt_tokens or 0) >= self.length:
            raise ConfigError(
                "prompt_tokens",
                self.prompt_tokens,
                why=f"leaves no token to score of length={self.length}: make it smaller",
            )
        if not self.files or not are_texts(self.files):
            raise ConfigError("files", self.files, why="is not allowed, it must be a list of patterns such as *.txt")

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """See `Task.examples`; the seed has no effect."""
        reading = Reading(tokens=self.length, prompt_tokens=self.prompt_tokens, block=self.block)
        least = self.min_tokens or 0
        found = texts(self._path(), self.files, self.field)
        chosen = (text for text in found if not least or len(tokenizer.encode(text.text)) >= least)
        for index, text in enumerate(islice(chosen, self._most(limit))):
            where = {"task": self.name, "text": text.name}
            yield Example(index, text.text, references=(), max_new_tokens=0, reading=reading, metadata=where)

    def _path(self) -> str:
        if self.data_dir is not None:
            return self.data_dir
        if self.source is None:
            raise ConfigError(
                "data_dir",
                None,
                why="is not allowed, it must be a .txt file, a .jsonl file with a field 'text', or a folder",
            )
        return str(self.source.fetch("download it elsewhere and give data_dir=<its folder>"))


@dataclass(frozen=True, kw_only=True)
class Summaries(ReadingTask):
    """BookSum: a chapter is the prompt, and its reference summary is scored after it, token by token.

    split: "test", "dev" or "train", each a .csv file with the fields chapter and summary_text. frame: the prompt, with
    slot chapter. source: a data set on the Hub, used without a data_dir. Prompts longer than the model's context lose
    their middle.
    """

    name: str = "booksum"
    chat: bool = True
    truncation: str = "middle"
    split: str = "test"
    frame: str = "{chapter}\n\nSummarize the chapter above.\n\nSummary:\n"
    source: HubFolder | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        slots("frame", self.frame, ("chapter",))

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """See `Task.examples`; the seed has no effect."""
        wanted = f"{self.split}.csv"
        source = None if self.source is None else self.source.file(wanted)
        path = data_file(self.data_dir, (wanted, ""), source, f"BookSum's {wanted}")
        pairs = rows(path, path.name, ("chapter", "summary_text"))
        for index, row in enumerate(islice(pairs, self._most(limit))):
            summary = row["summary_text"].strip()
            yield Example(
                index=index,
                prompt=self.frame.format(chapter=row["chapter"].strip()),
                references=(summary,),
                max_new_tokens=len(tokenizer.encode(summary)),
                target=summary,
                reading=Reading(block=self.block),
                metadata={"task": self.name, "text": f"{path.name}:{index + 1}"},
            )

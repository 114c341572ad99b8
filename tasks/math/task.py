"""Mathematical problems; the answer is in a box at the end of a long text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kvbench.errors import choice
from kvbench.tasks.hub import HubFile, data_file
from kvbench.tasks.math.predictions import answered, score, sound
from kvbench.tasks.task import Example, Task, Tokenizer, check_references, counts, slots
from kvbench.tasks.text_files import rows


@dataclass(frozen=True, kw_only=True)
class BoxedMath(Task):
    """The rows of a file with the columns problem and answer, such as MATH-500's, in their order.

    prompt: with slot problem. protocol: "sound" compares the value in the last box by math-verify; "kvpress" compares
    the characters of the first box up to the next brace, so a nested answer is always wrong. Both are recorded.
    hub, revision, file: the data set; data_dir: a local copy instead, a file or a folder with it.
    """

    name: str = "math500"
    chat: bool = True
    think_end: str | None = "</think>"
    protocol: str = "sound"
    prompt: str = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
    max_new_tokens: int = 32768
    data_dir: str | None = None
    hub: str = "HuggingFaceH4/MATH-500"
    revision: str = "main"
    file: str = "test.jsonl"

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("protocol", self.protocol, "sound", "kvpress")
        counts(self, 1, "max_new_tokens")
        slots("prompt", self.prompt, ("problem",))

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """See `Task.examples`: the seed has no effect."""
        path = data_file(self.data_dir, ("", self.file), HubFile(self.hub, self.revision, self.file))
        for index, row in enumerate(islice(rows(path, path.name, ("problem", "answer")), limit)):
            check_references([row["answer"]], f"{path.name}, row {index + 1}: answer")
            about = {key: row[key] for key in ("subject", "level") if isinstance(row.get(key), str | int)}
            metadata = {"task": self.name, **about, "groups": list(about)}
            prompt = self.prompt.format(problem=row["problem"])
            yield Example(index, prompt, (row["answer"],), self.max_new_tokens, metadata=metadata)

    def judge(self, output: str, example: Example) -> tuple[float, Mapping[str, Any]]:
        """The score by the protocol's rule, the scores by both rules, and whether the output has a box."""
        (answer,) = example.references
        found = {"sound": sound(output, answer), "kvpress": score("math500", output, answer)}
        return found[self.protocol], {**found, "answered": answered(output)}

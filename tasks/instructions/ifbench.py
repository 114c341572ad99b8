"""IFBench: 300 prompts with 58 kinds of instructions that a program verifies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kvbench.tasks.hub import data_file, hub_rows
from kvbench.tasks.instructions.verify import (
    TAGGER,
    Instructions,
    check_metric,
    check_nltk,
    instructions_of,
    measures,
    read_instructions,
)
from kvbench.tasks.task import Example, Task, Tokenizer, counts
from kvbench.tasks.text_files import rows


@dataclass(frozen=True, kw_only=True)
class IFBench(Task):
    """The rows of a file with the columns key, prompt, instruction_id_list and kwargs, in their order.

    metric: the score of an example: prompt_strict (1 if all instructions are followed), prompt_loose, or the share of
    them, instruction_strict or instruction_loose; all four are recorded. exclude: kinds of instructions whose prompts
    are left out. hub, split, revision: the data set; data_dir: a local copy instead, a file or a folder.
    file: the name of the file in a folder.
    """

    name: str = "ifbench"
    chat: bool = True
    think_end: str | None = "</think>"
    metric: str = "prompt_strict"
    exclude: tuple[str, ...] = ()
    max_new_tokens: int = 2048
    data_dir: str | None = None
    file: str = "IFBench_test.jsonl"
    hub: str = "allenai/IFBench_test"
    split: str = "train"
    revision: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_metric(self.metric)
        counts(self, 1, "max_new_tokens")

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """See `Task.examples`: the seed has no effect."""
        for index, (key, found) in enumerate(islice(self._rows(), limit)):
            metadata = {
                "benchmark": "instructions",
                "task": self.name,
                "key": key,
                **found.metadata,
            }
            yield Example(index, found.prompt, (), self.max_new_tokens, metadata=metadata)

    def _rows(self) -> Iterator[tuple[str, Instructions]]:
        if self.data_dir is not None:
            path = data_file(self.data_dir, ("", self.file), None)
            name, found = path.name, rows(path, path.name, ("prompt",), ("instruction_id_list",))
        else:
            name, found = self.hub, iter(hub_rows(self.hub, None, self.split, self.revision))
        read = [
            (str(row.get("key")), read_instructions("ifbench", row, f"{name}, row {i}"))
            for i, row in enumerate(found, 1)
        ]
        chosen = [(key, one) for key, one in read if not set(one.ids) & set(self.exclude)]
        tagged = sum(TAGGER in one.ids for _, one in chosen)
        advice = f"or task.exclude=[{TAGGER}] leaves out the {tagged} prompts that need it"
        check_nltk("ifbench", [name for _, one in chosen for name in one.ids], advice)
        return iter(chosen)

    def judge(self, output: str, example: Example) -> tuple[float, Mapping[str, Any]]:
        """The score by `metric`; whether each instruction is followed, and the four accuracies."""
        found = instructions_of("ifbench", example.metadata).follows(output)
        return measures(found)[self.metric], {**found, **measures(found)}

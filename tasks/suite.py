"""Several tasks in one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from kvbench.tasks.task import Example, Task, Tokenizer


def in_turn(running: dict[str, Iterator[Example]], limit: int | None) -> Iterator[tuple[str, Example]]:
    """The first examples of all tasks, then the second ones, and so on, with task names and new indices."""
    index = 0
    while running and (limit is None or index < limit):
        for name in list(running):
            example = next(running[name], None)
            if example is None:
                del running[name]
            elif limit is None or index < limit:
                yield name, replace(example, index=index)
                index += 1


@dataclass(frozen=True, kw_only=True)
class TaskSuite(Task):
    """The examples of several tasks in turn, each scored by its own task, which metadata["task"] names.

    tasks: the tasks by name. The fields of a task (chat, stop, truncation, ...) apply to its own examples (`task_of`);
    the suite's own values are not used. Tasks alternate, so that any limit covers them evenly, and the mean over
    examples is the mean over tasks if the limit is a multiple of their number.
    """

    shared: ClassVar[tuple[str, ...]] = ()
    """Fields of the suite that override the same field of every task; a data_dir of None does not.

    So do think_end, think_begin and chat_template_args, if they are set.
    """

    tasks: Mapping[str, Task]

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in self.shared}
        thinking = {name: getattr(self, name) for name in ("think_end", "think_begin", "chat_template_args")}
        values |= {name: value for name, value in thinking.items() if value is not None}
        if values.get("data_dir", "") is None:
            del values["data_dir"]
        object.__setattr__(self, "tasks", {name: replace(task, **values) for name, task in self.tasks.items()})
        super().__post_init__()
        if not self.tasks:
            raise ValueError(f"tasks of suite {self.name} is empty, it needs at least one task")

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """See `Task.examples`; limit counts the examples of all tasks together."""
        running = {name: task.examples(tokenizer, seed) for name, task in self.tasks.items()}
        for name, example in in_turn(running, limit):
            yield replace(example, metadata={**example.metadata, "task": name})

    def score(self, output: str, example: Example) -> float:
        """The score by the example's task."""
        return self.task_of(example).score(output, example)

    def task_of(self, example: Example) -> Task:
        """See `Task.task_of`."""
        return self.tasks[example.metadata["task"]]


@dataclass(frozen=True, kw_only=True)
class RulerSuite(TaskSuite):
    """RULER tasks of one length. All fields but `name` and `tasks` override the same field of every task.

    length, samples, official, template_tokens, answer_prefix: as in each task. data_dir: a folder with the data files
    of the tasks; None keeps the tasks' own folders.
    """

    length_field: ClassVar[str | None] = "length"
    shared = (
        *("chat", "stop", "truncation", "answer_prefix"),
        *("length", "samples", "official", "template_tokens", "data_dir"),
    )

    chat: bool = True
    length: int = 4096
    samples: int = 500
    official: bool = False
    template_tokens: int = 0
    answer_prefix: bool = True
    data_dir: str | None = None

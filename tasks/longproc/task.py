"""LongProc's tasks: official prompts and scores; countdown and path traversal are also generated."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from kvbench.errors import ConfigError, choice
from kvbench.tasks.hub import data_file
from kvbench.tasks.longproc import countdown, routes, scores
from kvbench.tasks.longproc.programs import check_isolation, pseudo_to_code
from kvbench.tasks.task import Example, Task, Tokenizer, check_references, counts
from kvbench.tasks.text_files import rows
from kvbench.tasks.words import shipped

TASKS = ("countdown", "path_traversal", "tom_tracking", "html_to_tsv", "pseudo_to_code")
SIZES = {"0.5k": 1024, "2k": 3072, "8k": 9216}
"""Lengths of the reference, and the official number of new tokens."""
LOGS = {"0.5k": (7, 14), "2k": (35, 70), "8k": (145, 290)}
"""Lines of the search log in the official sets of countdown."""
STEPS = {"0.5k": (32, 49), "2k": (128, 192), "8k": (512, 768)}
"""Steps of a route and number of cities; those of 2k and 8k are ours."""
QUESTION = {
    "countdown": "Numbers: ",
    "path_traversal": "Now find the route from ",
    "tom_tracking": "[QUESTION]",
    "html_to_tsv": "[TARGET INFORMATION]",
}
URL = "https://github.com/princeton-pli/LongProc/tree/main/data"
CODE_REFUSED = (
    "pseudo_to_code compiles and runs C++ that the model wrote: task.allow_code_execution=true permits it. It runs on "
    "this machine with limits on time and memory, without network, and can read and write files: use a container"
)


class _Problem(NamedTuple):
    """The fields of the prompt, the reference, and what the score needs besides it."""

    fields: Mapping[str, Any]
    reference: str
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class LongProc(Task):
    """One task of LongProc at one size.

    task: countdown, path_traversal, tom_tracking, html_to_tsv or pseudo_to_code. size: 0.5k, 2k or 8k tokens of the
    reference. data_dir: the official folder `data` or the task's folder in it; None generates countdown and
    path_traversal. metric: the score of an example: "partial" (partial_accuracy, or f1 for html_to_tsv) or "accuracy".
    official: keep scores below 0, which the official code gives to some logs. allow_code_execution: let pseudo_to_code
    compile and run answers.
    """

    name: str = "longproc"
    chat: bool = True
    think_end: str | None = "</think>"
    task: str
    size: str = "0.5k"
    metric: str = "partial"
    official: bool = False
    allow_code_execution: bool = field(default=False, metadata={"decides": False})  # a permission
    max_new_tokens: int | None = None
    data_dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("task", self.task, *TASKS)
        choice("size", self.size, *SIZES)
        choice("metric", self.metric, "partial", "accuracy")
        counts(self, 1, "max_new_tokens")
        if self.task == "pseudo_to_code" and self.size == "8k":
            raise ConfigError("size", self.size, why="does not exist for pseudo_to_code, it must be 0.5k or 2k")
        if self.task == "html_to_tsv" and self.metric == "accuracy":
            raise ConfigError("metric", self.metric, why="does not exist for html_to_tsv, whose score is F1")

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """See `Task.examples`: the rows of the official file, or 200 problems that the seed draws."""
        if self.task == "pseudo_to_code" and not self.allow_code_execution:
            raise ConfigError("allow_code_execution", False, why=f": {CODE_REFUSED}")
        if self.task == "pseudo_to_code":
            check_isolation()
        problems = self._generated(seed) if self.data_dir is None else self._rows(self.data_dir)
        template = shipped("longproc.json")["prompts"][self.task]
        for index, problem in enumerate(islice(problems, limit)):
            prompt = template.format(**problem.fields)
            place = prompt.rindex(QUESTION[self.task]) if self.task in QUESTION else len(prompt)
            yield Example(
                index=index,
                prompt=prompt,
                references=(problem.reference,),
                max_new_tokens=SIZES[self.size],
                question=prompt[place:],
                metadata={"benchmark": "longproc", "task": self.name, "size": self.size, **problem.data},
            )

    def _generated(self, seed: int) -> Iterator[_Problem]:
        if self.task not in ("countdown", "path_traversal"):
            raise ConfigError(
                "data_dir", None, why=f"is not allowed for {self.task}: download {URL} and give its folder"
            )
        for number in range(200):
            rng = random.Random(f"{seed} {self.task} {self.size} {number}")
            if self.task == "countdown":
                yield _countdown(*countdown.draw(rng, *LOGS[self.size]))
            else:
                edges, route = routes.draw(rng, *STEPS[self.size])
                yield _path(routes.described(edges), route[0][0], route[-1][1], routes.written(route))

    def _rows(self, data_dir: str) -> Iterator[_Problem]:
        names = [f"{self.task}_{self.size}.json", f"{self.task}_{self.size}_few.json"]
        path = data_file(data_dir, ("", *(f"{place}{n}" for n in names for place in ("", f"{self.task}/"))), None, URL)
        for number, row in enumerate(rows(path, path.name, ()), start=1):
            try:
                problem = _READERS[self.task](row, path.parent)
                check_references([problem.reference], "its reference")
            except (KeyError, TypeError, IndexError, ValueError, AttributeError, OSError) as error:
                why = f"no field {error}" if isinstance(error, KeyError) else str(error)
                raise ValueError(f"{path.name}, row {number} is not a row of {self.task}: {why}") from error
            yield problem

    def judge(self, output: str, example: Example) -> tuple[float, Mapping[str, Any]]:
        """The score by `metric`, and the official metrics, at least 0 unless `official`.

        An answer on which the official code raises an error scores 0.
        """
        data, (reference,) = example.metadata, example.references
        try:
            if self.task == "countdown":
                found = scores.countdown_score(output, data["nums"], data["target"], reference)
            elif self.task == "pseudo_to_code":
                if not self.allow_code_execution:
                    raise ConfigError("allow_code_execution", False, why=f": {CODE_REFUSED}")
                found = pseudo_to_code(output, data["testcases"])
            else:
                found = {
                    "path_traversal": scores.path_traversal,
                    "tom_tracking": scores.tom_tracking,
                    "html_to_tsv": scores.html_to_tsv,
                }[self.task](output, reference)
        except countdown.RaisesError:
            found = scores.accuracy(False, 0.0, False)
        if not self.official:
            found = {name: min(1.0, max(0.0, value)) for name, value in found.items()}
        partial = "f1" if self.task == "html_to_tsv" else "partial_accuracy"
        return found[partial if self.metric == "partial" else "accuracy"], found


# --- rows of the official files --------------------------------------------------------------------------------------
def _countdown(numbers: list[int], target: int, reference: str) -> _Problem:
    demonstrations = [(one["nums"], one["target"]) for one in shipped("longproc.json")["demonstrations"]]
    examples = (
        f"# Example\nNumbers: {nums}\nTarget: {end}\n\n{countdown.reference(nums, end)}" for nums, end in demonstrations
    )
    fields = {"demonstration": "\n\n".join(examples), "nums": numbers, "target": target}
    return _Problem(fields, reference, {"nums": numbers, "target": target})


def _read_countdown(row: Mapping[str, Any], _: Path) -> _Problem:
    numbers, target = row["nums"], row["target"]
    if len(numbers) != 4 or not all(type(number) is int and number > 0 for number in [*numbers, target]):
        raise ValueError(f"nums={numbers!r:.60} and target={target!r:.20} must be five whole numbers above 0")
    reference = countdown.reference(numbers, target)
    if reference is None:
        raise ValueError(f"{target} cannot be reached from {numbers}")
    return _countdown(numbers, target, reference)


def _path(context: str, source: str, end: str, reference: str) -> _Problem:
    return _Problem({"city_context": context, "src_city": source, "dst_city": end}, reference, {})


def _read_path(row: Mapping[str, Any], _: Path) -> _Problem:
    source, end = _texts({"source": row["question_repr"][0], "end": row["question_repr"][1]}, "source", "end")
    context, reference = _texts(row, "context_nl", "answer_nl")
    return _path(context, source, end, reference)


def _read_tom(row: Mapping[str, Any], _: Path) -> _Problem:
    story, question, reference = _texts(row, "story", "question", "solution")
    return _Problem({"story": story, "question": question}, reference, {})


def _read_html(row: Mapping[str, Any], folder: Path) -> _Problem:
    names = ("task_topic", "task_description", "filtering_instruction", "tsv_header", "html_path", "gt")
    fields = dict(zip(names, _texts(row, *names), strict=True))
    page = (folder / fields.pop("html_path")).read_text(encoding="utf-8")
    return _Problem({**fields, "html_str": page}, fields.pop("gt"), {})


def _read_code(row: Mapping[str, Any], _: Path) -> _Problem:
    tests = [[list(map(str, part)) for part in test] for test in row["testcases"]]
    if not tests or any(len(test) != 2 for test in tests):
        raise ValueError("testcases must be pairs of lines of input and output")
    lines = {name: "\n".join(row[f"{name}_lines"]) for name in ("pseudocode", "code")}
    return _Problem({"pseudocode": lines["pseudocode"]}, lines["code"], {"testcases": tests[:10]})


def _texts(row: Mapping[str, Any], *names: str) -> list[str]:
    """The texts in these fields. Raises ValueError for another value."""
    for name in names:
        if not isinstance(row[name], str):
            raise ValueError(f"its {name} is {row[name]!r:.40}, it must be a text")
    return [row[name] for name in names]


_READERS = {
    "countdown": _read_countdown,
    "path_traversal": _read_path,
    "tom_tracking": _read_tom,
    "html_to_tsv": _read_html,
    "pseudo_to_code": _read_code,
}

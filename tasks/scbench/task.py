"""The 12 tasks of SCBench."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

from kvbench.errors import choice
from kvbench.tasks.evidence import pair_spans
from kvbench.tasks.hub import hub_rows
from kvbench.tasks.long_sets import subsets
from kvbench.tasks.predictions import judged
from kvbench.tasks.scbench.predictions import REPOQA, RULES, SOUND
from kvbench.tasks.scbench.repoqa import repoqa
from kvbench.tasks.shared_context import Question, SharedContext
from kvbench.tasks.task import Example, Tokenizer, check_references, counts
from kvbench.tasks.text_files import TABLES, Row, found, rows

_TARGET = re.compile(r"The .+ is")
SCDQ_SPARE = 1000  # positions that the official code reserves for a question after its context


@dataclass(frozen=True, kw_only=True)
class SCBench(SharedContext):
    """One task of SCBench: each turn of each context is an example, scored by the official rule.

    metadata has `answers` in the format of the scorer. If the official scorer raises an error, the score is 0. For
    broken official rules, the aggregates also have `score_sound`, the mean of a corrected rule. A first prompt that is
    too long loses its middle.

    subset: the task. turns_asked: the number of turns used of every context. max_new_tokens: None uses the authors'
    number. data_dir: a local file or folder of rows, which replaces the data set on the Hub. hub: that data set,
    owner/name. revision: a commit of it, or a branch, which may change.
    Source: microsoft/MInference at fb56c91, scbench/eval_utils.py and scbench/run_scbench.py.
    """

    name: str = "scbench"
    chat: bool = True
    truncation: str = "middle"
    subset: str
    turns_asked: int = 5
    max_new_tokens: int | None = None
    data_dir: str | None = None
    hub: str
    revision: str

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("subset", self.subset, *subsets("scbench"))
        counts(self, 1, "turns_asked", "max_new_tokens")

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """See `Task.examples`: examples follow the rows; the seed has no effect."""
        found = (example for row, where in self._rows() for example in self._of_row(row, where))
        return (replace(example, index=index) for index, example in enumerate(islice(found, limit)))

    def judge(self, output: str, example: Example) -> tuple[float, Mapping[str, Any]]:
        """The score by the official rule, and a corrected score if that rule is broken."""
        about = example.metadata
        kind, answers = about["task"], about["answers"]
        if kind == REPOQA:
            return repoqa(output, about["lang"], about["func_name"], self._functions[about["repo"]]), {}
        return judged(RULES[kind], SOUND.get(kind), output, answers)

    @property
    def _prompts(self) -> Mapping[str, Any]:
        return subsets("scbench")[self.subset]

    def _rows(self) -> Iterator[tuple[Row, str]]:
        """Every context and its place in the data."""
        name = f"scbench_{self.subset}"
        if self.data_dir is None:
            files: Iterable[tuple[Iterable[Row], str]] = [(hub_rows(self.hub, name, "test", self.revision), self.hub)]
        else:
            paths = found(self.data_dir, [f"{name}.jsonl", f"{name}.parquet", f"{name}/*.parquet"], TABLES)
            files = ((rows(path, name, ()), name) for path, name in paths)
        return ((row, f"{name}, row {n}") for some, name in files for n, row in enumerate(some, start=1))

    def _of_row(self, row: Row, where: str) -> list[Example]:
        """The questions about one context. ValueError if a row has another format."""
        try:
            turns = row["multi_turns"][: self.turns_asked]
            text = row["context"] if "context" in row else row["input"]
            request = turns[0]["input"] if self.mode == "scdq" else self._request(turns[0])
            context = self._prompts["context"].format(context=text, request=request)
            questions = [self._question(row, turn, context, first=not number) for number, turn in enumerate(turns)]
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"{where}: unexpected format, expected the format of {self.hub} ({type(error).__name__}: {error})"
            ) from error
        return list(self.turns(context, "\n\n", questions, self._spare(len(turns))))

    def _question(self, row: Row, turn: Row, context: str, first: bool) -> Question:
        """One turn. first: the first turn, which for `mf` is already part of the context."""
        kind = turn.get("task") or f"scbench_{self.subset}"
        options = dict(zip("ABCD", turn.get("options") or (), strict=False))
        given = {"input": turn["input"], "request": self._request(turn), **options}
        in_context = first and self.subset == "mf" and self.mode == "multi_turn"
        template = "{input}" if in_context else self._prompts["question"]
        most = self._prompts["max_new_tokens"]
        answers = self._answers(kind, turn)
        references = tuple(map(str, answers if isinstance(answers, list) else [answers]))
        check_references(references, "answer")
        code = {name: row[name] for name in ("lang", "repo")} | {"func_name": turn["name"]} if kind == REPOQA else {}
        return Question(
            text=template.format(**given),
            answer=str(turn["answer"]),
            references=references,
            most=self.max_new_tokens or (most[kind] if isinstance(most, dict) else most),
            begins=self._prompts.get("begins"),
            later=self._prompts["later"].format(**given) if "later" in self._prompts else None,
            spans=pair_spans(str(turn["answer"]), context) if self.subset == "kv" else {},
            metadata={"task": kind, "benchmark": "scbench", "mode": self.mode, "answers": answers, **code},
        )

    def _request(self, turn: Row) -> str:
        """For `mf`, the sentence that names the requested statistic. LookupError if a turn names none."""
        return f"What is {_TARGET.findall(turn['input'])[0].lower()[:-3]}?" if self.subset == "mf" else ""

    def _answers(self, kind: str, turn: Row) -> Any:  # noqa: ANN401 - JSON
        answer = turn["answer"]
        if kind == "scbench_choice_eng":
            return [answer, "ABCD"[list(turn["options"]).index(answer)]]
        return [answer] if kind == "scbench_qa_eng" else answer

    def _spare(self, turns: int) -> int:
        """Positions that the official code reserves when it truncates a first prompt."""
        most = self._prompts["max_new_tokens"]
        answers = sum(most.values()) * turns // 2 if isinstance(most, dict) else most * turns
        return answers + (SCDQ_SPARE if self.mode == "scdq" else 0)

    @cached_property
    def _functions(self) -> Mapping[str, list[dict[str, str]]]:
        """All requested functions of each repository."""
        requested: dict[str, list[dict[str, str]]] = {}
        for row, _ in self._rows():
            for turn in row["multi_turns"][: self.turns_asked]:
                if (turn.get("task") or REPOQA) == REPOQA:
                    requested.setdefault(row["repo"], []).append({"needle": turn["answer"], "name": turn["name"]})
        return requested

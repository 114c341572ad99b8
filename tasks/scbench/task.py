"""SCBench as a task: one of its 12."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

from kvbench.errors import choice
from kvbench.tasks.hub import hub_rows
from kvbench.tasks.long_sets import subsets
from kvbench.tasks.predictions import RAISED
from kvbench.tasks.scbench.predictions import REPOQA, RULES, SOUND
from kvbench.tasks.scbench.repoqa import repoqa
from kvbench.tasks.shared_context import Question, SharedContext
from kvbench.tasks.task import Example, Tokenizer, counts
from kvbench.tasks.text_files import TABLES, Row, found, rows

_TARGET = re.compile(r"The .+ is")
SCDQ_SPARE = 1000  # positions that the official code keeps free for a question after its context


@dataclass(frozen=True, kw_only=True)
class SCBench(SharedContext):
    """One task of SCBench: each turn of each context is an example, scored by the official rule.

    metadata has `answers` as the scorer takes them. An answer on which the official scorer raises counts 0; where an
    official rule is broken, the mean of a sound one is printed beside it as `score_sound`. A first prompt that is too
    long loses its middle.

    subset: which task. turns_asked: the first so many of every context. max_new_tokens: None for the authors'.
    data_dir: a copy of the rows, a file or a folder of them, in place of those at the hub. hub: the data set there.
    revision: a commit of it, or a branch, which may move.
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
        asked = (example for row, where in self._rows() for example in self._of_row(row, where))
        return (replace(example, index=index) for index, example in enumerate(islice(asked, limit)))

    def score(self, output: str, example: Example) -> float:
        """The official score of one answer."""
        return self.judge(output, example)[0]

    def judge(self, output: str, example: Example) -> tuple[float, Mapping[str, Any]]:
        """The score by the official rule, and a corrected score if that rule is broken."""
        about = example.metadata
        kind, answers = about["task"], about["answers"]
        if kind == REPOQA:
            return repoqa(output, about["lang"], about["func_name"], self._functions[about["repo"]]), {}
        try:
            score = RULES[kind](output, answers)
        except RAISED:
            score = 0.0
        return score, {"score": score, "score_sound": SOUND[kind](output, answers)} if kind in SOUND else {}

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
            told = turns[0]["input"] if self.mode == "scdq" else self._told(turns[0])
            context = self._prompts["context"].format(context=text, told=told)
            questions = [self._question(row, turn, first=not number) for number, turn in enumerate(turns)]
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"{where}: unexpected format, expected that of {self.hub} ({type(error).__name__}: {error})"
            ) from error
        return list(self.turns(context, "\n\n", questions, self._spare(len(turns))))

    def _question(self, row: Row, turn: Row, first: bool) -> Question:
        """One turn. first: of a conversation whose context has been told already what is asked."""
        kind = turn.get("task") or f"scbench_{self.subset}"
        options = dict(zip("ABCD", turn.get("options") or (), strict=False))
        given = {"input": turn["input"], "told": self._told(turn), **options}
        told_before = first and self.subset == "mf" and self.mode == "multi_turn"
        template = "{input}" if told_before else self._prompts["question"]
        most = self._prompts["max_new_tokens"]
        answers = self._answers(kind, turn)
        code = {name: row[name] for name in ("lang", "repo")} | {"func_name": turn["name"]} if kind == REPOQA else {}
        return Question(
            text=template.format(**given),
            answer=str(turn["answer"]),
            references=tuple(map(str, answers if isinstance(answers, list) else [answers])),
            most=self.max_new_tokens or (most[kind] if isinstance(most, dict) else most),
            begins=self._prompts.get("begins"),
            later=self._prompts["later"].format(**given) if "later" in self._prompts else None,
            metadata={"task": kind, "benchmark": "scbench", "mode": self.mode, "answers": answers, **code},
        )

    def _told(self, turn: Row) -> str:
        """Of statistics, the sentence that says what is requested. LookupError where a turn does not say."""
        return f"What is {_TARGET.findall(turn['input'])[0].lower()[:-3]}?" if self.subset == "mf" else ""

    def _answers(self, kind: str, turn: Row) -> Any:  # noqa: ANN401 - as the scorer takes them
        answer = turn["answer"]
        if kind == "scbench_choice_eng":
            return [answer, "ABCD"[list(turn["options"]).index(answer)]]
        return [answer] if kind == "scbench_qa_eng" else answer

    def _spare(self, turns: int) -> int:
        """Positions that the official code keeps free when it cuts a first prompt."""
        most = self._prompts["max_new_tokens"]
        answers = sum(most.values()) * turns // 2 if isinstance(most, dict) else most * turns
        return answers + (SCDQ_SPARE if self.mode == "scdq" else 0)

    @cached_property
    def _functions(self) -> Mapping[str, list[dict[str, str]]]:
        """All functions asked of each repository."""
        asked: dict[str, list[dict[str, str]]] = {}
        for row, _ in self._rows():
            for turn in row["multi_turns"][: self.turns_asked]:
                if (turn.get("task") or REPOQA) == REPOQA:
                    asked.setdefault(row["repo"], []).append({"needle": turn["answer"], "name": turn["name"]})
        return asked

"""Base class of tasks with several questions about one context, separately or as turns of a conversation."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvbench.errors import ConfigError, choice
from kvbench.tasks.evidence import Parts
from kvbench.tasks.task import Example, FollowUp, Shared, Task

MODES = ("multi_turn", "scdq")
HISTORIES = ("golden", "own")
BETWEEN = "\n\n"  # an answer and the next question, without a chat template


@dataclass(frozen=True)
class Question:
    """One question about a context.

    answer: the answer in the history of later turns. most: maximum new tokens. prefix: the beginning of the answer. For
    later turns, `begins` is that beginning in a chat template and `later` the question without one, if they differ.
    spans: parts of the context by name, see `Example.spans`.
    """

    text: str
    answer: str
    references: tuple[str, ...]
    most: int
    prefix: str = ""
    begins: str | None = None
    later: str | None = None
    spans: Mapping[str, Parts] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SharedContext(Task, ABC):
    """Questions that share a context. Each is an example; metadata["turn"] counts from 1.

    mode: "scdq" (same context, different questions) compresses the context by itself and appends each question to it
    separately. "multi_turn" compresses context and first question together; every later question, preceded by the
    previous answer, is another prompt in the same cache. history: the answers in the history: "golden" for the
    reference answers (the generated answer is removed from the cache) or "own" for the model's.
    """

    mode: str = "multi_turn"
    history: str = "golden"

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("mode", self.mode, *MODES)
        choice("history", self.history, *HISTORIES)
        if self.history == "own" and self.mode == "scdq":
            raise ConfigError("history", "own", why="has no effect with mode=scdq, which has no history")

    @property
    def compress(self) -> str:
        """See `Task.compress`."""
        return "context" if self.mode == "scdq" else "prompt"

    def turns(self, context: str, first: str, questions: Sequence[Question], spare: int = 0) -> Iterator[Example]:
        """An example for each question. first: the text between the context and the first question of a conversation.

        spare: see `Shared`.
        """
        follow_ups = tuple(map(self._follow_up, questions, questions[1:]))
        for turn, current in enumerate(questions):
            begin = current if self.mode == "scdq" else questions[0]
            question = begin.text if self.mode == "scdq" else first + begin.text
            shared = Shared(spare)
            if self.mode == "multi_turn":
                shared = replace(shared, follow_ups=follow_ups, turn=turn, own=self.history == "own")
            yield Example(
                index=0,
                prompt=context + question,
                references=current.references,
                max_new_tokens=current.most,
                answer_prefix=begin.prefix,
                question=begin.text,
                spans=current.spans,
                shared=shared,
                metadata={**current.metadata, "turn": turn + 1, "groups": ["turn"]},
            )

    def _follow_up(self, before: Question, current: Question) -> FollowUp:
        begins = current.prefix if current.begins is None else current.begins
        if self.history == "own":
            return FollowUp("", current.text, current.text + current.prefix, before.most, begins)
        plain = before.answer + BETWEEN + (current.later or current.text) + current.prefix
        return FollowUp(before.answer, current.text, plain, before.most, begins)

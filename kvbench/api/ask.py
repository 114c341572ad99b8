"""`kvbench.ask`: questions about one context, which is compressed once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from transformers import PreTrainedTokenizerBase

from kvbench.api.evaluate import Model, evaluate
from kvbench.api.fields import AskFields, explaining_calls
from kvbench.errors import UsageError, as_python, whole_number
from kvbench.policies.policy import Policy
from kvbench.tasks.task import Example, Shared, Task, Tokenizer


@dataclass(frozen=True, kw_only=True)
class Questions(Task):
    """Questions about one text, without references."""

    name: str = "ask"
    chat: bool = True
    context: str = ""
    questions: tuple[str, ...] = ()

    @property
    def compress(self) -> str:
        """The context, before the questions are known."""
        return "context"

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """See `Task.examples`: one for each question; the seed has no effect."""
        shared = Shared(spare=0)  # the context is prefilled and compressed once for all questions
        for index, question in enumerate(self.questions[:limit]):
            words, most = f"\n\n{question}", self.max_new_tokens or 0
            yield Example(index, self.context + words, (), most, question=words, shared=shared)

    def score(self, output: str, example: Example) -> float:
        """Nothing is scored."""
        return 0.0


@explaining_calls
def ask(
    model: Model,
    tokenizer: PreTrainedTokenizerBase | None = None,
    context: str = "",
    *,
    questions: Sequence[str],
    policy: Policy | str = "snapkv",
    budget: float = 128,
    max_new_tokens: int = 128,
    chat: bool = True,
    chat_template_args: Mapping[str, Any] | None = None,
    think_end: str | None = None,
    think_begin: str | None = None,
    **fields: Unpack[AskFields],
) -> list[str]:
    """The answers to questions about one context, which is prefilled and compressed once, before they are known.

    model, tokenizer, policy, budget and fields: as in `evaluate`. chat: use the model's chat template, if it has one;
    chat_template_args: its arguments, such as {"enable_thinking": False}. think_end: the text that ends thinking, such
    as "</think>": an answer is the text after it, "" if it was cut off in a thought. think_begin: the text that begins
    thinking, if it is not that of a known model. Each question is answered alone.
    Raises ValueError for a wrong value, and BudgetError if the cache holds more than the policy allows.
    """
    texts = [questions] if isinstance(questions, str) else list(questions or ())
    whole_number("max_new_tokens", as_python(max_new_tokens), 1)
    if (
        not isinstance(context, str)
        or not context.strip()
        or not texts
        or not all(isinstance(text, str) and text.strip() for text in texts)
    ):
        raise UsageError("ask needs a context and questions, texts that are not empty")
    task = Questions(
        context=context, questions=tuple(texts), max_new_tokens=max_new_tokens, chat=chat,
        chat_template_args=chat_template_args, think_end=think_end, think_begin=think_begin,
    )  # fmt: skip
    results = evaluate(model, tokenizer, policies=[policy], budgets=[budget], tasks=[task], **fields)
    answers = [(sample.output if sample.answer is None else sample.answer) or "" for sample in results[0].samples]
    return answers if think_end is None else [text.strip() for text in answers]

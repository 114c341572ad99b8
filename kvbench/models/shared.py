"""The texts of questions that share a context, with or without a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvbench.tasks.task import Example, FollowUp, Shared

_MARK = "\x00"  # occurs in no text


def shared_texts(
    tokenizer: PreTrainedTokenizerBase,
    example: Example,
    shared: Shared,
    chat: bool,
    given: Mapping[str, Any] | None = None,
    system: Sequence[dict[str, str]] = (),
) -> list[str]:
    """Context and question; or the first prompt of a conversation and all later ones with the answers before them.

    chat: use the tokenizer's chat template. given: its further arguments. system: messages before the first prompt.
    """
    if shared.follow_ups is not None:
        first = _templated(tokenizer, given, example.prompt, *system) if chat else example.prompt
        end = tokenizer.eos_token or "" if shared.own else ""  # a template contains the end of an answer
        later = [_templated_turn(tokenizer, given, turn) if chat else end + turn.plain for turn in shared.follow_ups]
        return [first + example.answer_prefix, *later]
    context = example.prompt.removesuffix(example.question)
    whole = f"{context}{_MARK}{example.question}"
    before, _, after = (_templated(tokenizer, given, whole, *system) if chat else whole).partition(_MARK)
    return [before, after + example.answer_prefix]


def _templated(
    tokenizer: PreTrainedTokenizerBase, given: Mapping[str, Any] | None, message: str, *before: dict[str, str]
) -> str:
    turns = [*before, {"role": "user", "content": message}]
    fields = {"tokenize": False, "add_generation_prompt": True, **(given or {})}
    return str(tokenizer.apply_chat_template(turns, **fields))


def _templated_turn(tokenizer: PreTrainedTokenizerBase, given: Mapping[str, Any] | None, turn: FollowUp) -> str:
    """The text from the previous answer up to the beginning of the next one."""
    before = {"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK + turn.answer}
    return _templated(tokenizer, given, turn.message, *before).partition(_MARK)[2] + turn.begins

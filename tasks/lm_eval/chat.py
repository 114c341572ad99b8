"""A conversation as the one string a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError


def chat_text(tokenizer: Any, turns: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:  # noqa: ANN401
    """The turns in a Hugging Face tokenizer's chat template.

    add_generation_prompt: open a new turn for the answer, else leave the last one open. Templates that know no system
    turn get the others, as lm-eval does it. Raises ValueError where the tokenizer has no template.
    """
    if not tokenizer.chat_template:
        raise ValueError("apply_chat_template=true, but the model's tokenizer has no chat template")
    ways = {
        "tokenize": False,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": not add_generation_prompt,
    }
    try:
        return str(tokenizer.apply_chat_template(list(turns), **ways))
    except TemplateError:
        rest = [turn for turn in turns if turn["role"] != "system"]
        if len(rest) == len(turns):
            raise
        return str(tokenizer.apply_chat_template(rest, **ways))

"""lm-eval's conversations in a chat template, and what generation arguments ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

HONOURED = ("until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k")


def chat_text(
    tokenizer: Any,  # noqa: ANN401
    turns: Sequence[dict[str, str]],
    add_generation_prompt: bool = True,
    also: Mapping[str, Any] | None = None,
) -> str:
    """The turns in a Hugging Face tokenizer's chat template; also: further arguments of the template.

    A template without system turns gets the other turns, as in lm-eval. Raises ValueError if there is no template.
    """
    if not tokenizer.chat_template:
        raise ValueError("apply_chat_template=true, but the model's tokenizer has no chat template")
    opens = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
    ways = {**(also or {}), "tokenize": False, **opens}
    try:
        return str(tokenizer.apply_chat_template(list(turns), **ways))
    except TemplateError:
        rest = [turn for turn in turns if turn["role"] != "system"]
        if len(rest) == len(turns):
            raise
        return str(tokenizer.apply_chat_template(rest, **ways))


def sampling_of(kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Temperature, top_p and top_k that normalised generation arguments sample with; None: they are greedy.

    Raises ValueError for arguments that cannot be honoured.
    """
    sampled = bool(kwargs.get("do_sample"))
    others = sorted(set(kwargs) - {*HONOURED, *([] if sampled else ["min_p"])})
    if others:
        raise ValueError(f"gen_kwargs {', '.join(others)} cannot be honoured, only {', '.join(HONOURED)} can")
    if not sampled:
        return None
    found = {"temperature": 1.0, **{name: kwargs[name] for name in ("temperature", "top_p", "top_k") if name in kwargs}}
    if found["temperature"] <= 0:
        raise ValueError(f"do_sample=true needs a temperature above 0, got {found['temperature']}")
    return found

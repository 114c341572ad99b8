"""lm-eval's conversations in a chat template, and the generation arguments that greedy decoding honours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

HONOURED = ("until", "max_gen_toks", "do_sample", "temperature")
WITHOUT_EFFECT = ("top_p", "top_k", "min_p")  # they choose among what is sampled


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


def refuse_sampling(kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError where normalised generation arguments ask for anything but greedy decoding."""
    if kwargs.get("do_sample"):
        raise ValueError(
            f"do_sample=true (temperature={kwargs.get('temperature')}) asks for sampling, and decoding is greedy here: "
            f"set do_sample=false in gen_kwargs, which is another protocol, or choose another task"
        )
    others = sorted(set(kwargs) - {*HONOURED, *WITHOUT_EFFECT})
    if others:
        raise ValueError(f"gen_kwargs {', '.join(others)} cannot be honoured, only {', '.join(HONOURED)} can")

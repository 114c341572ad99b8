"""What lm-eval's tasks ask of generation, and what of it greedy decoding can honour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HONOURED = ("until", "max_gen_toks", "do_sample", "temperature")
WITHOUT_EFFECT = ("top_p", "top_k", "min_p")  # they choose among what is sampled


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

"""What kvbench uses of a generation config, where an answer ends, and the text of its tokens."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from kvbench.models.tokens import special_tokens
from kvbench.tasks.task import Thoughts

log = logging.getLogger(__name__)

UNUSED: dict[str, object] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "num_beams"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
    **dict.fromkeys(("watermarking_config", "stop_strings")),
}
"""Fields of a generation config that change the tokens of `model.generate`, and the value that changes nothing.

kvbench chooses tokens by the model's own logits. Sampling fields are not among them: `generation` sets them.
"""


def unused_fields(config: GenerationConfig | None) -> dict[str, Any]:
    """The fields of a generation config that change the tokens of `model.generate`, but not those of kvbench."""
    given = {} if config is None else json.loads(config.to_json_string(use_diff=False))
    return {name: given[name] for name in UNUSED if given.get(name) not in (None, UNUSED[name], [], {})}


@cache  # once for each model, not for each example
def _warn(unused: str) -> None:
    log.warning(
        "the model's generation config sets %s, which model.generate uses but kvbench does not: it chooses tokens by "
        "the model's own logits",
        unused,
    )


def end_tokens(
    config: GenerationConfig | None,
    tokenizer: PreTrainedTokenizerBase | None,
    end_texts: Sequence[str] = (),
    stops: Sequence[str] = (),
) -> list[int]:
    """Ids that end an answer: EOS of the tokenizer and of the generation config, and the end texts of the task.

    An end text is represented by its last token, because SentencePiece tokenizers add a space before an encoded
    newline. Stop strings have an id if they are special tokens. Warns of the other fields that `model.generate` uses.
    """
    if unused := unused_fields(config):
        _warn(", ".join(f"{name}={value}" for name, value in unused.items()))
    generation = config.eos_token_id if config is not None else None
    found: list[Any] = list(generation) if isinstance(generation, list) else [generation]
    if tokenizer is not None:
        texts = [tokenizer.encode(text, add_special_tokens=False)[-1] for text in end_texts]
        found += [tokenizer.eos_token_id, *texts, *special_tokens(tokenizer, stops.__contains__)]
    return sorted({i for i in found if isinstance(i, int)})


@dataclass(frozen=True)
class Ending:
    """Where an answer ends besides EOS, and its text.

    stops: strings that end an answer; they are not part of it. thoughts: nothing but EOS ends a thought. opened: the
    prompt has opened one. ends: ids of tokens that end an answer which has begun, if there may be thoughts before it.
    """

    tokenizer: PreTrainedTokenizerBase
    stops: Sequence[str] = ()
    thoughts: Thoughts | None = None
    opened: bool = False
    ends: Sequence[int] = ()

    @property
    def test(self) -> Callable[[list[int]], bool] | None:
        """Whether the new tokens so far are a whole answer; None if only EOS ends it."""
        return self.reached if self.stops or self.ends else None

    def reached(self, tokens: list[int]) -> bool:
        """See `test`."""
        _, text = self._parts(tokens)
        if text is None:
            return False
        return any(stop in text for stop in self.stops) or bool(text.strip() and tokens[-1] in self.ends)

    def text(self, tokens: list[int]) -> str:
        """The text of an answer without special tokens, cut before each stop string in turn, not stripped."""
        thought, text = self._parts(tokens)
        for stop in self.stops if text is not None else ():
            text = str(text).split(stop, 1)[0]
        return thought + (text or "")

    def _parts(self, tokens: list[int]) -> tuple[str, str | None]:
        """The thought and the answer after it; None if the thought has not ended."""
        if self.thoughts is None:
            return "", decoded(self.tokenizer, tokens)
        return self.thoughts.split(
            decoded(self.tokenizer, tokens, (self.thoughts.begin, self.thoughts.end)), self.opened
        )


def decoded(tokenizer: PreTrainedTokenizerBase, tokens: list[int], kept: Sequence[str] = ()) -> str:
    """The text of tokens without special tokens, except those that occur in the texts `kept`."""
    shown = special_tokens(tokenizer, lambda token: any(token in text for text in kept)) if kept else ()
    parts, start = [], 0
    for place in [n for n, token in enumerate(tokens) if token in shown]:
        parts += [tokenizer.decode(tokens[start:place], skip_special_tokens=True), tokenizer.decode([tokens[place]])]
        start = place + 1
    return "".join(map(str, [*parts, tokenizer.decode(tokens[start:], skip_special_tokens=True)]))

"""Tokenization as in lm-eval: one BOS and no EOS, separate context and continuation, end tokens by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from transformers import PreTrainedTokenizerBase

from kvbench.errors import counted

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pair:
    """Token ids of a context [T] and of the continuation [M] that is rated; neither is empty."""

    context: list[int]
    continuation: list[int]

    @property
    def tokens(self) -> int:
        """The number of tokens of both."""
        return len(self.context) + len(self.continuation)


def encode_pair(tokenizer: PreTrainedTokenizerBase, context: str, continuation: str, most: int | None) -> Pair:
    """The tokens of both, cut on the left to the `most` positions of a model; the last token needs none.

    Both are encoded as one text and split after the number of tokens of the context alone. Trailing spaces of the
    context belong to the continuation, because many vocabularies begin words with a space. An empty context is the BOS
    token, or else EOS. Raises ValueError if the continuation has no token or does not fit.
    """
    if not context:
        prefix, second = prefix_token(tokenizer), _encode(tokenizer, continuation, special=False)
        first, second = [prefix], second[1:] if second[:1] == [prefix] else second  # the prefix is not repeated
    else:
        stripped = context.rstrip()
        first = encode(tokenizer, stripped)
        second = encode(tokenizer, context + continuation)[len(first) :]
    if not second or not first:
        raise ValueError(f"the continuation {continuation!r} adds no token to its context, so it cannot be rated")
    if most is None:
        return Pair(first, second)
    if len(second) > most:
        raise ValueError(
            f"a continuation of {counted(len(second), 'token')} does not fit the {counted(most, 'position')} "
            "of the model"
        )
    if len(first) + len(second) > most + 1:
        log.warning("a context is cut on the left from %d tokens to %d", len(first), most + 1 - len(second))
    return Pair((first + second)[-(most + 1) :][: -len(second)], second)


def prefix_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token before the first one: BOS, else EOS. Raises ValueError if the tokenizer has neither."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    raise ValueError("the tokenizer has neither BOS nor EOS, so the first token of a text has no context")


@dataclass(frozen=True)
class Encoder:
    """A tokenizer for pre-passes (`TextEncoder` in `policies.pre_passes.pre_pass`)."""

    tokenizer: PreTrainedTokenizerBase

    def encode(self, text: str) -> list[int]:
        """The tokens of a text without special tokens."""
        return _encode(self.tokenizer, text, special=False)

    @property
    def turn_end(self) -> str:
        """The text between a user's message and the answer in the chat template; a newline without a template."""
        if not self.tokenizer.chat_template:
            return "\n"
        mark = "\x00"  # occurs in no text
        turn = [{"role": "user", "content": mark}]
        whole = str(self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
        return whole.rpartition(mark)[2]


def encode(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = True) -> list[int]:
    """Token ids with one BOS, if the tokenizer uses one; chat templates often contain it already.

    EOS, which some tokenizers append, is removed: an answer continues the text. special: False for a text that follows
    another one, which gets no BOS.
    """
    bos = tokenizer.bos_token
    special = special and not (isinstance(bos, str) and text.startswith(bos))
    ids = _encode(tokenizer, text, special=special)
    return ids[: len(ids) - len(appended(tokenizer))] if special else ids


def appended(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens, such as EOS, that a tokenizer puts behind every text. Warns of them once."""
    text = _encode(tokenizer, "a", special=False)
    whole = _encode(tokenizer, "a", special=True)
    start = next((n for n in range(len(whole)) if text and whole[n : n + len(text)] == text), len(whole))
    found = whole[start + len(text) :]
    if found:
        _warn_of_end(" ".join(map(str, tokenizer.convert_ids_to_tokens(found))))
    return found


@cache  # once, not for each prompt
def _warn_of_end(tokens: str) -> None:
    log.warning("the tokenizer appends %s to every text; kvbench removes it from prompts and scored texts", tokens)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = ascii(text[max(0, error.start - 20) : error.end + 20])
        raise ValueError(f"the text has half of a character (a lone surrogate) at {error.start}: {around}") from error
    return list(tokenizer.encode(text, add_special_tokens=special, verbose=False))


def special_tokens(tokenizer: PreTrainedTokenizerBase, chosen: Callable[[str], bool]) -> list[int]:
    """Ids of the chosen special tokens, which do not appear in decoded text."""
    return [index for index, token in tokenizer.added_tokens_decoder.items() if token.special and chosen(str(token))]

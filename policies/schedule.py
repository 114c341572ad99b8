"""Schedules: when a policy evicts during the prompt, and whether it evicts or grows while decoding."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvbench.policies.checks import LARGEST, check_choices, choice, whole_number
from kvbench.policies.observation import Phase
from kvbench.policies.protections import PROTECTIONS, Protection


class Span(NamedTuple):
    """Tokens [start, end) of one sequence, appended and attended together.

    opens: they begin a block (of the prompt, or a decoded token). evicts: they end a block, and eviction follows.
    """

    start: int
    end: int
    opens: bool
    evicts: bool
    phase: Phase


@dataclass(frozen=True)
class Schedule(ABC):
    """decode: `evict` returns to the budget while decoding; `grow` keeps all generated tokens in addition to it;
    `threshold` evicts tokens below the threshold of the allocator `Threshold`; `share` returns to a budget that grows
    with the answer: the same share of all tokens seen so far (kvpress's CompressionRatioDecodingPress).

    every: decoding evicts `every` tokens at once, as soon as the cache exceeds the budget by this number.
    protect: `prompt` keeps all tokens of the prompt, inside the budget; a prompt that does not fit is refused. `span`
    keeps the parts of the prompt that the task names, such as instructions, in the same way; or a `Protection` of your
    own. spans: positions [first, end) of the parts, which the task gives for each example.
    order: `attend_then_evict` computes a step's attention before its eviction; `evict_then_attend` evicts first, and
    attention uses the kept tokens (CAOTE, eq. 5-7). late: the prompt is evicted after the first decoded token has
    attended to all of it.
    rerotate: after an eviction of several tokens, the kept keys are rotated to consecutive positions, and the next
    token follows them (FINCH, arXiv 2408.00167); a single evicted token leaves a gap.
    """

    decode: Literal["evict", "grow", "threshold", "share"] = "evict"
    order: Literal["attend_then_evict", "evict_then_attend"] = "attend_then_evict"
    late: bool = False
    rerotate: bool = False
    every: int = 1
    protect: str | Protection = "none"
    spans: tuple[tuple[int, int], ...] = field(default=(), kw_only=True, metadata={"decides": False})

    def __post_init__(self) -> None:
        check_choices(self)
        whole_number("every", self.every, 1)
        if not isinstance(self.protect, Protection):
            choice("protect", self.protect, *PROTECTIONS)
        idle = self.protection is not None and self.decode in self.protection.no_effect
        if idle or (self.every > 1 and self.decode != "evict"):
            raise ValueError(
                f"every= and protect={self.protect if idle else 'prompt'} need decode=evict: they have no effect with "
                f"decode={self.decode}"
            )
        if self.rerotate and self.order == "evict_then_attend":
            raise ValueError("rerotate=true needs order=attend_then_evict")
        if self.late and (self.decode, self.order) != ("evict", "attend_then_evict"):
            raise ValueError("late=true evicts after the first decoded token: it needs decode=evict, attend_then_evict")

    @property
    def decoding_evicts(self) -> bool:
        """Whether an eviction follows a decoded token."""
        return self.decode != "grow"

    @property
    def returns_to_budget(self) -> bool:
        """Whether these evictions return to a budget: see `decoded`."""
        return self.decode in ("evict", "share")

    @property
    def protection(self) -> Protection | None:
        """The tokens that are kept beside those of the scorer."""
        return PROTECTIONS[self.protect] if isinstance(self.protect, str) else self.protect

    @property
    def spare(self) -> int:
        """Tokens per KV head by which decoding exceeds the budget before it evicts."""
        return self.every if self.returns_to_budget else 0

    @property
    def one_each(self) -> bool:
        """Whether each decoded token attends and then one token is evicted, so that all steps are alike."""
        return self.every == 1 and self.evicts_last

    @property
    def evicts_last(self) -> bool:
        """Whether decoded tokens attend, and evictions that return to one budget follow."""
        return (self.decode, self.order) == ("evict", "attend_then_evict")

    def share(self, budget: int, processed: int, prompt: int) -> int:
        """The slots of a layer's budget that may be used after `processed` of a prompt's tokens."""
        return budget

    def decoded(self, budget: int, seen: int, prompt: int) -> int:
        """The slots of a layer after `seen` tokens, of which `prompt` are the prompt, where decoding evicts."""
        return budget * seen // prompt if self.decode == "share" else budget

    def call_size(self, prompt: int) -> int:
        """The best number of prompt tokens per call of the model."""
        return prompt

    @abstractmethod
    def settled(self, tokens: int) -> int:
        """The number of prompt tokens up to the last eviction among the first `tokens` tokens; 0 without eviction."""

    @abstractmethod
    def prompt_steps(self, first: int, last: int, prompt: int) -> Iterator[Span]:
        """Steps for prompt tokens [first, last) of a call, with last <= prompt."""

    def steps(self, first: int, count: int, prompt: int, single: bool = False) -> list[Span]:
        """The steps in which one sequence's next `count` tokens, the first at position `first`, are appended.

        prompt: its prompt length in tokens. single: decoded tokens are appended one by one, as with decode=evict.
        ValueError if a call ends inside a block with order=evict_then_attend.
        """
        last = first + count
        boundary = min(last, prompt)
        steps = list(self.prompt_steps(first, boundary, prompt)) if first < boundary else []
        if self.order == "evict_then_attend" and not all(step.evicts for step in steps):
            raise ValueError(
                f"order=evict_then_attend needs each block in one call of the model, but a call ends inside a block at "
                f"token {last}: call it with whole blocks, or with the whole prompt"
            )
        evicts = self.decoding_evicts
        decoded = range(max(first, boundary), last)
        if evicts or single:
            steps += [
                Span(p, p + 1, True, evicts, "prompt" if self.late and p == prompt else "decode") for p in decoded
            ]
        elif decoded:
            steps.append(Span(decoded.start, last, True, False, "decode"))
        return steps


@dataclass(frozen=True)
class Prompt(Schedule):
    """Evict at the end of the prompt. Peak memory: what is kept, and the full prompt of the layers that evict together,
    which are one layer or as many as fit a workspace (`kvbench.cache.attend`).
    """

    def __str__(self) -> str:
        return "prompt"

    def settled(self, tokens: int) -> int:
        return 0

    def prompt_steps(self, first: int, last: int, prompt: int) -> Iterator[Span]:
        yield Span(first, last, first == 0, last == prompt and not self.late, "prompt")


@dataclass(frozen=True)
class Blocks(Schedule):
    """Evict after every block of `size` prompt tokens (CAOTE, section 2); the last block may be shorter.

    size: tokens, or infinity for the whole prompt as one block. fill: the cache is filled up to its budget `first`, or
    `evenly`: in proportion to the processed part of the prompt (FINCH).
    """

    size: float = 128
    fill: Literal["first", "evenly"] = "first"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.size == math.inf or (1 <= self.size <= LARGEST and self.size == int(self.size))):
            raise ValueError(f"block must be a number of tokens >= 1 or inf, got {self.size}")
        if self.late:
            raise ValueError("late=true keeps the whole prompt until a token is decoded, so it needs schedule=prompt")

    def __str__(self) -> str:
        return "one block" if self.size == math.inf else f"blocks of {self.size:g}"

    def share(self, budget: int, processed: int, prompt: int) -> int:
        return budget if self.fill == "first" else budget * min(processed, prompt) // prompt

    def settled(self, tokens: int) -> int:
        return 0 if self.size == math.inf else tokens // int(self.size) * int(self.size)

    def call_size(self, prompt: int) -> int:
        return prompt if self.size == math.inf else int(self.size)

    def prompt_steps(self, first: int, last: int, prompt: int) -> Iterator[Span]:
        size = prompt if self.size == math.inf else int(self.size)
        while first < last:
            full = (first // size + 1) * size
            end = min(full, last)
            yield Span(first, end, first % size == 0, end in (full, prompt), "block")
            first = end

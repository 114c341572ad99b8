"""Tokens that a schedule keeps inside the budget, beside those of the scorer: `schedule.protect`.

Shapes: B batch, H_kv KV heads, T slots.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.errors import counted
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation
from kvbench.policies.ranking import protected, within

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Protection(ABC):
    """A set of tokens that is never evicted. The fields of a class are its settings.

    reads: what it reads of each sequence: names of fields of `SequenceInfo` (`prompts`, `begins`, `questions`), and
    `spans` for the parts of the prompt that the task names. no_effect: values of `decode` with which it has no effect.
    single: it keeps single tokens, in every layer.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    no_effect: ClassVar[tuple[str, ...]] = ()
    single: ClassVar[bool] = False

    @abstractmethod
    def mask(self, observation: Observation, spans: Spans) -> Tensor:
        """The stored tokens that stay, bool [B,H_kv,T]; spans: positions [first, end) that the task names."""

    @abstractmethod
    def check_fits(self, name: str, budget: int, always: Protected, prompt: int, begin: int, spans: Spans) -> None:
        """Raise ValueError if the tokens exceed the budget of a layer in slots per KV head.

        name: of the policy. always: tokens that its scorer keeps. The newest prompt has positions `begin` to
        `prompt` - 1.
        """


@dataclass(frozen=True)
class WholePrompt(Protection):
    """Keep all tokens of the prompt; generated tokens compete for the rest of the budget."""

    reads = ("prompts",)
    no_effect = ("grow", "threshold")

    def mask(self, observation: Observation, spans: Spans) -> Tensor:
        prompts = observation.sequences.prompts
        if len(set(prompts)) == 1:
            return observation.first(prompts[0])
        return protected(observation.positions, observation.seen, prompts, [0] * len(prompts))

    def check_fits(self, name: str, budget: int, always: Protected, prompt: int, begin: int, spans: Spans) -> None:
        if prompt + max(always.newest, 1) > budget:
            also = (
                f" and the newest {counted(always.newest, 'token')}"
                if always.newest
                else " and at least one generated token"
            )
            raise ValueError(
                f"protect=prompt keeps all {prompt} tokens of the prompt{also}, but {name} has {budget} tokens per KV "
                "head: use a larger budget, shorter prompts or protect=none"
            )


@dataclass(frozen=True)
class NamedParts(Protection):
    """Keep the parts of the prompt that the task names, such as instructions, in prompt and decoding."""

    reads = ("spans",)
    single = True

    def mask(self, observation: Observation, spans: Spans) -> Tensor:
        return within(observation.positions, spans)

    def check_fits(self, name: str, budget: int, always: Protected, prompt: int, begin: int, spans: Spans) -> None:
        if not spans:
            raise ValueError(
                "protect=span keeps the parts of a prompt that the task names, and this prompt has none: use "
                "task=instructions or protect=none"
            )
        named = {*range(always.first), *(at for first, end in spans for at in range(first, min(end, prompt)))}
        if min(len(named) + always.newest, prompt) > budget:
            raise ValueError(
                f"protect=span keeps {counted(len(named), 'token')} of the prompt, and {name} always keeps the newest "
                f"{always.newest}, but it has {budget} tokens per KV head: use a larger budget or protect=none"
            )


PROTECTIONS: dict[str, Protection | None] = {"none": None, "prompt": WholePrompt(), "span": NamedParts()}
"""The values of `protect` that have a name."""


def read_by(needs: Needs, protection: Protection | None, has_pass: bool) -> tuple[str, ...]:
    """The fields of `SequenceInfo` that a policy reads; has_pass: it has a pre-pass, whose scorers read the prompt."""
    own = [*needs.reads, *["prompts"] * has_pass, *["prompts", "questions"] * needs.question]
    return tuple(sorted({*own, *(() if protection is None else protection.reads)} - {"spans"}))

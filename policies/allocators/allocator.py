"""The contract of an allocator: who gets how much of the budget.

Shapes: B batch, L layers, H_q query heads, H_kv KV heads.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.ranking import Ranking


def even_shares(total: int, layers: int) -> list[int]:
    """The total dealt evenly; where it does not divide, the first layers get one slot more."""
    base, more = divmod(total, layers)
    return [base + (layer < more) for layer in range(layers)]


def known(length: int | None, who: str) -> int:
    """A prompt's length; ValueError, saying who needs it, where it is not known."""
    if length is None:
        raise ValueError(f"{who} needs the prompt's length before its end: pass KVCache(..., prompt_length=...)")
    return length


def check_alike(heads: Sequence[int]) -> None:
    """ValueError unless all layers have as many KV heads."""
    if len(set(heads)) > 1:
        raise ValueError(
            "slots that are dealt out among the KV heads of all layers ask for as many heads in each, and this model's "
            f"layers have {' and '.join(map(str, sorted(set(heads))))}: use an allocator that looks at one layer's "
            "heads at a time, such as uniform or ada"
        )


class Allocator(ABC):
    """Divides a total of slots among the layers, and a layer's slots among its KV heads.

    Subclasses are frozen dataclasses of their knobs. Budgets are slots per KV head, protected tokens inside. A field
    with `metadata={"inherits": True}`, left unset, takes the value of the scorer's field of that name.
    """

    per_head: ClassVar[bool] = False
    """Whether the KV heads of a layer may get different budgets; the store should then be `ragged`."""

    sets_budget: ClassVar[bool] = False
    """Whether it decides by itself how much stays: its policy has no budget, and a total is all that could be kept."""

    @property
    def needs(self) -> Needs:
        """What it reads; no layer gets less than its window. A class attribute where no field decides it."""
        return Needs()

    @property
    def exact(self) -> bool:
        """Whether its shares sum to the total; False only for `official` rounding rules."""
        return True

    def check_policy(self, name: str, queries: int) -> None:  # noqa: B027 - most work beside any scorer
        """ValueError if it cannot work beside the scorer of policy `name`, whose window has `queries` queries."""

    def check_next_prompt(self, name: str) -> None:  # noqa: B027 - most can
        """ValueError if it cannot divide slots again after another prompt, when heads hold different tokens."""

    def check_heads(self, heads: Sequence[int]) -> None:  # noqa: B027 - most deal tokens per KV head, layer by layer
        """ValueError if it cannot divide slots among layers with so many KV heads each, or names one not there."""

    @abstractmethod
    def split(self, total: int, layers: int, length: int | None, floor: int) -> list[int]:
        """Slots per KV head for each of `layers` layers, summing to `total` exactly, none below `floor`.

        length: prompt length in tokens, None while unknown; ValueError if the rule needs it. floor: the smallest budget
        of a layer (what is always kept).
        """

    def heads(self, layer: int, ranking: Ranking, budgets: Sequence[int]) -> Tensor | None:
        """[B,H_kv] slots per KV head of this layer, each row summing to budgets[b] * H_kv; None = equal budgets."""
        return None


class StatisticAllocator(Allocator):
    """An allocator that measures the whole prompt in every layer before it decides."""

    @property
    def cascades(self) -> bool:
        """Whether layers are evicted as soon as they are measured (exact only if shares never grow again)."""
        return False

    def split(self, total: int, layers: int, length: int | None, floor: int) -> list[int]:
        """Even shares: for prompts that fit their budget, where nothing is evicted and nothing was measured."""
        return even_shares(total, layers)

    def leaves_whole(self, length: int, total: int, layers: int, floor: int) -> bool:
        """Whether nothing of a prompt of `length` tokens is evicted: it fits the total of all `layers` layers."""
        return length * layers <= total

    @abstractmethod
    def measure(self, observation: Observation, state: State) -> Tensor:
        """The statistic of a layer at the end of the prompt: [B,k] float32."""

    @abstractmethod
    def share(self, statistics: Sequence[Sequence[float]], total: int, layers: int, floor: int, cap: int) -> list[int]:
        """Slots per KV head for the layers measured so far, given one statistic [k] per such layer.

        total: slots of all `layers` layers, at most `cap` each. Every share is at least floor and at most cap (the
        prompt's length). With all layers measured the sum is exactly `total`; before, it is at most `total` less
        `floor` for each layer that is not measured yet.
        """


class JointAllocator(Allocator):
    """An allocator that ranks the tokens of all layers before it decides over any, such as by one threshold.

    Each layer's budget is then its even share in name only: all of them together are what the policy promises.
    """

    per_head: ClassVar[bool] = True

    def split(self, total: int, layers: int, length: int | None, floor: int) -> list[int]:
        """Even shares, whose sum counts."""
        return even_shares(total, layers)

    def check_heads(self, heads: Sequence[int]) -> None:
        check_alike(heads)

    @abstractmethod
    def heads_of_all(self, rankings: Sequence[Ranking], budgets: Sequence[Sequence[int]]) -> list[Tensor]:
        """[B,H_kv] slots per KV head of every layer; all of a sequence sum to H_kv times its budgets, [L,B]."""

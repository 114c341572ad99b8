"""The interface of an allocator, which divides the budget among layers and KV heads.

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
    """The total divided evenly; the first layers get one extra slot each if there is a remainder."""
    base, more = divmod(total, layers)
    return [base + (layer < more) for layer in range(layers)]


def required_length(length: int | None, who: str) -> int:
    """Return the prompt's length. Raises ValueError, naming the component `who`, if it is unknown."""
    if length is None:
        raise ValueError(f"{who} needs the prompt's length before its end: pass KVCache(..., prompt_length=...)")
    return length


def check_equal_heads(heads: Sequence[int]) -> None:
    """Raise ValueError unless all layers have the same number of KV heads."""
    if len(set(heads)) > 1:
        raise ValueError(
            "an allocator that divides slots among the KV heads of all layers needs the same number of heads in each "
            f"layer, but the layers of this model have {' and '.join(map(str, sorted(set(heads))))}: use an allocator "
            "that works layer by layer, such as uniform or ada"
        )


class Allocator(ABC):
    """Divides a total of slots among the layers, and a layer's slots among its KV heads.

    Subclasses are frozen dataclasses of parameters. Budgets are slots per KV head and include
    protected tokens. An unset field with `metadata={"inherits": True}` takes the value of the scorer's field of the
    same name.
    """

    per_head: ClassVar[bool] = False
    """Whether the KV heads of a layer may get different budgets; the store should then be `ragged`."""

    sets_budget: ClassVar[bool] = False
    """Whether the allocator determines the budget itself; `total` is then all tokens that could be kept."""

    @property
    def needs(self) -> Needs:
        """The allocator's inputs; every layer gets at least `window` slots. A class attribute unless fields matter."""
        return Needs()

    @property
    def exact(self) -> bool:
        """Whether the shares sum to the total; False only for `official` rounding rules."""
        return True

    def check_policy(self, name: str, queries: int) -> None:  # noqa: B027 - most work with any scorer
        """Raise ValueError if the scorer of policy `name`, with a window of `queries` queries, is incompatible."""

    def check_next_prompt(self, name: str) -> None:  # noqa: B027 - most support them
        """Raise ValueError if later prompts, when heads hold different tokens, are not supported."""

    def check_heads(self, heads: Sequence[int]) -> None:  # noqa: B027 - most divide slots layer by layer
        """Raise ValueError if layers with these numbers of KV heads are unsupported, or a named head does not exist."""

    @abstractmethod
    def split(self, total: int, layers: int, length: int | None, floor: int) -> list[int]:
        """Slots per KV head for each of `layers` layers, summing to `total` exactly, none below `floor`.

        length: prompt length in tokens, None while unknown; raises ValueError if the rule needs it. floor: the smallest
        budget of a layer (its protected tokens).
        """

    def heads(self, layer: int, ranking: Ranking, budgets: Sequence[int]) -> Tensor | None:
        """Slots per KV head of this layer, [B,H_kv]; row b sums to budgets[b] * H_kv. None: equal budgets."""
        return None


class StatisticAllocator(Allocator):
    """An allocator that measures the whole prompt in every layer before it decides."""

    @property
    def cascades(self) -> bool:
        """Whether layers are evicted as soon as they are measured (exact only if shares never grow again)."""
        return False

    def split(self, total: int, layers: int, length: int | None, floor: int) -> list[int]:
        """Even shares, used for prompts that fit their budget: nothing is evicted and nothing is measured."""
        return even_shares(total, layers)

    def leaves_whole(self, length: int, total: int, layers: int, floor: int) -> bool:
        """Whether a prompt of `length` tokens fits the total of all `layers` layers, so that no token is evicted."""
        return length * layers <= total

    @abstractmethod
    def measure(self, observation: Observation, state: State) -> Tensor:
        """The statistic of a layer at the end of the prompt: [B,k] float32."""

    @abstractmethod
    def share(self, statistics: Sequence[Sequence[float]], total: int, layers: int, floor: int, cap: int) -> list[int]:
        """Slots per KV head for the layers measured so far, given one statistic [k] per such layer.

        total: slots of all `layers` layers, at most `cap` each. Every share is at least floor and at most cap (the
        prompt's length). If all layers are measured, the sum is exactly `total`; before, it is at most `total` minus
        `floor` per unmeasured layer.
        """


class JointAllocator(Allocator):
    """An allocator that ranks the tokens of all layers together, for example with one threshold.

    The budget of a single layer may differ from its even share; only the sum over all layers is guaranteed.
    """

    per_head: ClassVar[bool] = True

    def split(self, total: int, layers: int, length: int | None, floor: int) -> list[int]:
        """Even shares; only their sum matters."""
        return even_shares(total, layers)

    def check_heads(self, heads: Sequence[int]) -> None:
        check_equal_heads(heads)

    def rank_of_all(self, rankings: Sequence[Ranking]) -> Sequence[Ranking]:
        """The rankings of all layers, changed if layers decide together; with `per_head` False, while decoding too."""
        return rankings

    @abstractmethod
    def heads_of_all(self, rankings: Sequence[Ranking], budgets: Sequence[Sequence[int]]) -> list[Tensor]:
        """Slots per KV head of every layer, [B,H_kv]; a sequence's slots sum to H_kv times its budgets [L,B]."""

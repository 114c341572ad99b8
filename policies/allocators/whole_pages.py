"""Budgets of whole pages, and one token set for all layers, as serving engines need them.

Shapes: B batch, L layers, H KV heads, T slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvbench.errors import ConfigError, counted
from kvbench.policies.allocators.allocator import Allocator, JointAllocator, StatisticAllocator, even_shares
from kvbench.policies.allocators.uniform import Uniform
from kvbench.policies.ranking import Ranking
from kvbench.policies.schedule import Schedule
from kvbench.policies.scorers.scorer import Scorer
from kvbench.policies.selections.pages import Pages
from kvbench.policies.stores.paged import Paged
from kvbench.policies.stores.store import Store


def whole(pages: Pages, budget: int) -> int:
    """A budget in tokens, rounded to whole pages."""
    if pages.unit == "token":
        return budget
    return (budget // pages.length if pages.rounding == "down" else -(-budget // pages.length)) * pages.length


@dataclass(frozen=True)
class WholePages(Allocator):
    """The budgets of another allocator, rounded to whole pages.

    A policy with the selection `Pages` sets it. base: the allocator, which divides the total by rule. pages: the
    selection.
    """

    base: Allocator = field(default_factory=Uniform)
    pages: Pages = field(default_factory=Pages, metadata={"decides": False})  # the policy's selection

    @property
    def exact(self) -> bool:
        return False

    def split(self, total: int, layers: int, length: int | None, floor: int) -> list[int]:
        return [whole(self.pages, budget) for budget in self.base.split(total, layers, length, floor)]

    def heads(self, layer: int, ranking: Ranking, budgets: Sequence[int]) -> Tensor:
        return self.pages.counts(ranking, ranking.seen.new_tensor([n // self.pages.length for n in budgets]))


@dataclass(frozen=True)
class OneSet(JointAllocator):
    """All layers and KV heads keep the same tokens. A policy with the selection `Pages(heads=model)` sets it.

    pages: the selection.
    """

    per_head = False

    pages: Pages = field(default_factory=Pages, metadata={"decides": False})  # the policy's selection

    @property
    def exact(self) -> bool:
        return False

    def split(self, total: int, layers: int, length: int | None, floor: int) -> list[int]:
        return [whole(self.pages, even_shares(total, layers)[-1])] * layers

    def rank_of_all(self, rankings: Sequence[Ranking]) -> list[Ranking]:
        return self.pages.rank_of_all(rankings)

    def heads_of_all(self, rankings: Sequence[Ranking], budgets: Sequence[Sequence[int]]) -> list[Tensor]:
        counts = rankings[0].seen.new_tensor(budgets[0])
        if self.pages.unit == "page":
            return [self.pages.counts(one, (counts // self.pages.length).to(one.scores.device)) for one in rankings]
        return [counts.to(one.scores.device)[:, None].expand(one.scores.shape[:2]) for one in rankings]


def paged_allocator(name: str, pages: Pages, own: Allocator, schedule: Schedule, store: Store) -> Allocator:
    """The allocator of a policy that keeps pages. Raises ValueError for parts that cannot keep such sets."""
    if isinstance(own, WholePages | OneSet):  # a copy of a policy
        own = own.base if isinstance(own, WholePages) else Uniform()
    if isinstance(store, Paged) and store.page != pages.length:
        raise ConfigError("selection.length", pages.length, why=f"differs from the {store.page} slots of store.page")
    if (pages.unit, pages.heads) == ("token", "own"):
        return own
    if own.per_head or isinstance(own, StatisticAllocator) or (pages.heads == "model" and type(own) is not Uniform):
        kind = "of all layers" if pages.heads == "model" else "of whole pages, the same for all heads"
        raise ValueError(
            f"{name} keeps a set of tokens {kind}, and its allocator {type(own).__name__} gives them different "
            "budgets: use the uniform allocator, or selection.unit=token with selection.heads=own"
        )
    evicts = schedule.returns_to_budget
    if pages.unit == "page" and evicts and schedule.every % pages.length:
        raise ConfigError("every", schedule.every, f"a multiple of {pages.length}, because pages leave whole")
    if pages.heads == "model" and evicts and schedule.every == 1:
        raise ConfigError("every", 1, "2 or more: one set for all layers is chosen after the last layer")
    return OneSet(pages) if pages.heads == "model" else WholePages(own, pages) if pages.unit == "page" else own


def check_pages(name: str, pages: Pages, scorer: Scorer, budget: int) -> None:
    """Raise ValueError if the pages of protected tokens may exceed the pages of a budget."""
    first, newest, _ = scorer.protects(budget)
    least = -(-first // pages.length) + (newest + 2 * pages.length - 2) // pages.length * (newest > 0)
    if pages.unit == "page" and whole(pages, budget) < max(least, 1) * pages.length:
        raise ValueError(
            f"a budget of {budget} tokens is too small for {name}: {first} first and {newest} newest tokens are always "
            f"kept, in up to {counted(least, 'page')} of {counted(pages.length, 'token')}"
        )

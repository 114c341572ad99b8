"""The contracts of the parts fit a screen: so many public members, fields included, and no more."""

from inspect import get_annotations

import pytest

from kvbench.policies.allocators.allocator import Allocator, JointAllocator, StatisticAllocator
from kvbench.policies.mergers.merger import Merger
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import BlockPasses, ExtraPasses, PromptChoice, TokenRating
from kvbench.policies.readers.reader import Reader
from kvbench.policies.scorers.scorer import Scorer
from kvbench.policies.selections.selection import Selection
from kvbench.policies.stores.store import Store
from kvbench.policies.values.value import ValueAware


def members(contract: type) -> set[str]:
    """The public names of a class and of those it is made of."""
    own = {name for part in contract.__mro__[:-1] for name in (*vars(part), *get_annotations(part))}
    return {name for name in own if not name.startswith("_")}


@pytest.mark.parametrize(
    ("contract", "most"),
    [
        (Policy, 20),
        (Scorer, 9),
        (Allocator, 9),
        (StatisticAllocator, 13),
        (JointAllocator, 11),
        (Merger, 5),
        (ValueAware, 2),
        (Selection, 1),
        (Reader, 9),
        (Store, 10),
        (PromptChoice, 4),
        (TokenRating, 4),
        (ExtraPasses, 5),
        (BlockPasses, 6),
    ],
)
def test_a_contract_fits_a_screen(contract: type, most: int) -> None:
    assert len(members(contract)) <= most, sorted(members(contract))

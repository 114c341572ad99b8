"""What one step shows of a layer: to its attention, to its policy, to its store.

Shapes: B batch, H_q query heads, m tokens of a step, D head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from kvbench.cache.steps import Slice
from kvbench.policies.observation import Arithmetic, Observation
from kvbench.policies.stores.store import Held

ALL = slice(None)


@dataclass(eq=False)  # not frozen, as in `Observation`
class Evidence:
    """A layer whose step's tokens are in and whose eviction is to come.

    queries [B,H_q,m,D]. held: what they attend to. fresh: these are exactly this step's tokens, in order, for every
    head. look: what the policy is shown; None where it is shown nothing. alone: the call of the model is this one step.
    rows: the layer's sequences that it is about. parts: the same for those of each length, where they differ.
    """

    queries: Tensor
    now: Slice
    how: Arithmetic
    held: Held
    fresh: bool
    look: Callable[["Evidence"], Observation] | None = None
    alone: bool = True
    rows: slice = field(default_factory=lambda: ALL)
    parts: tuple["Evidence", ...] = ()
    _seen: Observation | None = field(default=None, init=False, repr=False)

    def of(self, rows: slice, held: Held) -> "Evidence":
        """The same of some of the sequences, which `held` holds."""
        return Evidence(self.queries[rows], self.now.of(rows), self.how, held, self.fresh, self.look, self.alone, rows)

    @property
    def scored(self) -> bool:
        """Whether the policy is shown the step."""
        return self.look is not None

    @property
    def observation(self) -> Observation:
        """What the policy may look at; made when it is asked for, and once."""
        if self._seen is None:  # no `cached_property`: before Python 3.12 it takes a lock, in every layer of a step
            assert self.look is not None, "the policy is shown nothing of this step"
            self._seen = self.look(self)
        return self._seen

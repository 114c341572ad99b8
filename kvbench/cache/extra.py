"""The hooks of extras: what some models and policies need beside the path that every token takes.

A cache calls the hooks of its extras (`kvbench.cache.extras`) and knows none of them by name.

Shapes: B batch, H_kv KV heads, M new tokens of a call, D head dim.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

from kvbench.cache.hook import LayerCall, LayerCaller
from kvbench.cache.rows import Rows
from kvbench.cache.sequence import CachedSequence
from kvbench.cache.step import Step
from kvbench.policies.observation import AttentionParams, StepCache
from kvbench.policies.policy import Policy

When = Literal["now", "end of call", "later"]
Passed = tuple[LayerCall, LayerCall] | tuple[Tensor, Tensor]


class Caller(LayerCaller, Protocol):
    """A cache with extras."""

    def read(self, place: int, queries: Tensor, params: AttentionParams) -> Tensor | None:
        """Attention [B,H_q,1,D] of queries to the tokens of an attention layer that has attended in this call.

        Only of rows that are in tables, 0 for others; None if no row is.
        """

    def end_call(self) -> None:
        """All layers of a call of the model have attended."""


class Extra:
    """A feature of some models or policies. A hook that a feature does not need does nothing."""

    def check(self, policy: Policy) -> None:
        """Raise ValueError for a policy that cannot be used with the model."""

    def new_call(self, cache: Caller, index: int, place: int, keys: Tensor, values: Tensor) -> Passed | None:
        """What the model gets from its cache as keys and values, for new ones [B,H_kv,M,D]; None: as in other layers.

        index, place: of the layer in the model and among the layers with keys and values.
        """
        return None

    def begin_call(self, sequences: Sequence[CachedSequence], mask: Tensor | None) -> None:
        """A call of the model begins; mask [B,M] bool: its real tokens, None if all are. ValueError if it cannot."""

    def between_layers(self) -> None:
        """A layer of the call begins, or its evictions have ended."""

    def attended(self, step: Step) -> None:
        """A layer has attended in a step."""

    def before_eviction(self, step: Step) -> When:
        """When the step's eviction is due. "later": the extra carries it out, or passes it to `KVCache.resume`."""
        return "now"

    def rows(self, steps: Sequence[Step], known: StepCache) -> Rows | None:
        """The eviction of some steps, if it is not that of all other policies (`kvbench.cache.eviction.StepRows`)."""
        return None

    @property
    def call_is_over(self) -> bool:
        """Whether the call may end after the last layer with keys and values."""
        return True

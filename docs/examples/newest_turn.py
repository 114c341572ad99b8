"""A schedule that keeps the newest turn of a conversation."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvbench.policies.constants import on_device
from kvbench.policies.needs import Protected
from kvbench.policies.observation import Observation
from kvbench.policies.protections import Protection


@dataclass(frozen=True)
class NewestTurn(Protection):
    """Keep the newest prompt of a conversation, from the second on; answers compete with earlier turns."""

    reads = ("begins", "prompts")

    def mask(self, observation: Observation, spans: Sequence[tuple[int, int]]) -> Tensor:
        positions, of = observation.positions, observation.sequences  # [B,H_kv,T]
        begins, ends = (on_device(numbers, positions.device)[:, None, None] for numbers in (of.begins, of.prompts))
        return (positions >= begins) & (positions < ends) & (begins > 0)

    def check_fits(
        self, name: str, budget: int, always: Protected, prompt: int, begin: int, spans: Sequence[tuple[int, int]]
    ) -> None:
        turn = prompt - begin
        if begin and always.first + turn + always.newest > budget:
            raise ValueError(
                f"a turn of {turn} tokens, {always.first} first and {always.newest} newest tokens exceed the budget of "
                f"{budget} tokens per KV head of {name}: use a larger budget or shorter turns"
            )

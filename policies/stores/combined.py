"""What several layers hold, seen as one: the sequences of all, one after another.

Shapes: B sequences of all, H KV heads, C slots of the longest, D head dim.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from kvbench.policies.observation import State
from kvbench.policies.stores.slots import biases, padded
from kvbench.policies.stores.store import LayerStore


class CombinedStore(LayerStore):
    """Views are copies in which shorter sequences end in empty slots."""

    @property
    @abstractmethod
    def members(self) -> Sequence[LayerStore]:
        """The layers, in the order of their sequences."""

    @property
    def keys(self) -> Tensor:
        return padded([held.keys for held in self.members])

    @property
    def values(self) -> Tensor:
        return padded([held.values for held in self.members])

    @property
    def positions(self) -> Tensor:
        return padded([held.positions for held in self.members], fill=-1)

    @property
    def bias(self) -> Tensor | None:
        return biases([(held.bias, held.positions) for held in self.members])

    @property
    def state(self) -> State:
        states = [held.state for held in self.members]
        return {name: padded([state[name] for state in states]) for name in states[0]}

    def remember(self, state: State) -> None:
        begin = 0
        for held in self.members:
            own, end = held.state, begin + len(held.positions)
            for name, x in own.items():
                x.copy_(state[name][begin:end, :, : x.shape[2]])
            held.remember(own)
            begin = end

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.members)

    @property
    def spare_nbytes(self) -> int:
        return sum(held.spare_nbytes for held in self.members)

    def expect(self, tokens: int) -> None:
        for held in self.members:
            held.expect(tokens)

    def parts(self) -> dict[str, int]:
        sizes: Counter[str] = Counter()
        for held in self.members:
            sizes.update(held.parts())
        return dict(sizes)

    @property
    def packed(self) -> bool:
        members = self.members
        return all(held.packed for held in members) and len({held.positions.shape[2] for held in members}) == 1

    @property
    def ascending(self) -> bool:
        return all(held.ascending for held in self.members)

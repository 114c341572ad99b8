"""The classes that stores of codes derive from."""

from dataclasses import dataclass, field

from torch import Tensor

from kvbench.policies.checks import choice
from kvbench.policies.observation import MOVED
from kvbench.policies.stores.code_blocks import BlockLayer
from kvbench.policies.stores.coding import Coding
from kvbench.policies.stores.key_bias import UnbiasedLayer
from kvbench.policies.stores.ring_layout import RingLayer
from kvbench.policies.stores.store import LayerStore
from kvbench.policies.stores.token_codes import TokenCodeLayer


class Codec(Coding):
    """A store of codes: `encode` and `decode`, and `due` for tokens that are coded together."""

    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        layer = TokenCodeLayer if not self.grouped else RingLayer if self.most_exact else BlockLayer
        return layer(self, keys, values, statistics, width)


@dataclass(frozen=True)
class TokenCodec(Codec):
    """A codec of single tokens.

    unbias_keys: keys are coded without the bias of the model's key projection, which is added back when they are read.
    """

    unbias_keys: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        choice("unbias_keys", self.unbias_keys, True, False)

    @property
    def reads_model(self) -> bool:  # type: ignore[override]
        return self.unbias_keys

    @property
    def replayable(self) -> bool:  # type: ignore[override]
        return not self.unbias_keys and super().replayable

    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        if not self.unbias_keys:
            return super().open(keys, values, statistics, width)
        if MOVED in statistics:
            raise ValueError("unbias_keys=true does not support rerotate=true, which rotates keys a second time")
        return UnbiasedLayer(self, keys, values, statistics, width)

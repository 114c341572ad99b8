"""Watchers: what a sequence evicts, whatever evicts it, on every device."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor


class Watcher(ABC):
    """A number about an example, made of what its cache evicts. Each example and policy has an object of its own.

    A subclass is a dataclass, whose fields are its settings. `watch=[{_target_: my_module.MyWatcher}]` adds its number
    to samples and tables. name: of its column.
    """

    name: ClassVar[str]

    @abstractmethod
    def evicted(self, layer: int, gone: Tensor, seen: int) -> None:
        """Called after every call of the model, for every attention layer: a decoded token, a block, or a whole prompt.

        gone [H_kv, seen] bool: the tokens, by position, that the layer has evicted since the last time. seen: tokens of
        the sequence. Numbers that stay on the device, such as sums, do not make the host wait for it.
        """

    @abstractmethod
    def value(self) -> float | None:
        """The number at the end of the example; None without one."""

"""How the steps of a table attend and read slots: the only code of a table that depends on a device.

Shapes: L layers, P rows of a step, k layers and b rows of a group, n = k * b, H_q query heads, H KV heads, T slots of
the longest row, D head dim.
"""

from torch import Tensor

from kvbench.cache.attend.backend import Backend, GroupSlots, LayerStep
from kvbench.cache.attend.torch import TorchBackend
from kvbench.cache.attend.triton import TritonBackend
from kvbench.kernels.devices import use_triton

__all__ = ["Backend", "GroupSlots", "LayerStep", "TorchBackend", "TritonBackend", "backend_of"]


def backend_of(like: Tensor) -> Backend:
    """The backend for tensors of this device and dtype."""
    return TritonBackend() if use_triton(like) else TorchBackend()

"""What attention on packed codes allocates, seen from outside."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvbench.kernels.quantised_attention import quantised_attention_triton


class Largest(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that any operation returned."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.nbytes = max(self.nbytes, out.nbytes)
        return out


def largest(**call: Any) -> tuple[int]:
    """Bytes of the largest tensor made on the way."""
    with Largest() as seen:
        quantised_attention_triton(**call)
    return (seen.nbytes,)

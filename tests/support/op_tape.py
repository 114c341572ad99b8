"""A stand-in for CUDA graphs on a CPU: operations are recorded once and replayed on the same tensors.

Recording changes no tensor that existed before. Operations for which the host of a GPU would wait are refused, as they
are while a CUDA graph is captured.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "lift_fresh", "masked_select", "unique", "equal")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


def waits(func: Any, args: Any) -> bool:
    """Whether the host of a GPU waits in this operation, for a number or a size, or copies a number to the GPU."""
    name = func.name().split("::")[-1].split(".")[0]
    if name in INDEXING:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return name in WAITING or (name == "where" and len(args) == 1)


class Tape(TorchDispatchMode):
    """Takes the place of torch.cuda.CUDAGraph."""

    replays = 0

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._made: set[int] = set()  # storages that were made while recording
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # older storages as bytes, and copies of them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if waits(func, args):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func.name()}")
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._made and storage.data_ptr() not in self._before:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._before[storage.data_ptr()] = whole, whole.clone()
        out = func(*args, **(kwargs or {}))
        self._made |= {x.untyped_storage().data_ptr() for x in _tensors(out)} - self._before.keys()
        self._operations.append((func, args, kwargs or {}, _tensors(out)))
        return out

    def rewind(self) -> None:
        """Restore the tensors that existed before recording."""
        for whole, copy in self._before.values():
            whole.copy_(copy)

    def replay(self) -> None:
        Tape.replays += 1
        for func, args, kwargs, recorded in self._operations:
            for new, old in zip(_tensors(func(*args, **kwargs)), recorded, strict=True):
                if new.untyped_storage().data_ptr() != old.untyped_storage().data_ptr():
                    old.copy_(new)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def record(tape: Tape, **_: object) -> Iterator[None]:
    """Takes the place of torch.cuda.graph."""
    try:
        with tape:
            yield
    finally:
        tape.rewind()

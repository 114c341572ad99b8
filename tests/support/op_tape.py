"""What a CUDA graph does, on the CPU: operations written down once, then carried out again on the very same tensors.

Recording computes nothing that lasts (every tensor that was there before is put back), and whatever the host knew while
it recorded stays in the tape as it was. Operations in which a GPU's host would have to wait are refused, as they are
while a graph is captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "lift_fresh", "masked_select", "unique", "equal")
MASKS = ("index", "index_put", "index_put_", "_index_put_impl_")
READINGS = (
    Tensor.item,
    Tensor.tolist,
    Tensor.cpu,
    Tensor.numpy,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__array__,
)


def waits(func: Any, args: Any) -> bool:
    """Whether the host of a GPU waits in this operation: it asks for a number or a size, or copies one of its own."""
    name = func.name().split("::")[-1].split(".")[0]
    if name in MASKS:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return name in WAITS or (name == "where" and len(args) == 1)


class _Operations(TorchDispatchMode):
    """Notes the operations in which a GPU's host would wait."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if waits(func, args):
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


class _Readings(TorchFunctionMode):
    """Notes readings of a tensor that are no operation where it lies on the CPU already."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READINGS:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def watched() -> Iterator[list[str]]:
    """A list that fills with whatever a GPU's host would wait for."""
    found: list[str] = []
    with _Readings(found), _Operations(found):
        yield found


class Tape(TorchDispatchMode):
    """Stands where torch.cuda.CUDAGraph stands."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, Any]] = []
        self._made: set[int] = set()  # storages that came to be while recording
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # older storages, as bytes: themselves and a copy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if waits(func, args):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func.name()}")
        for tensor in _tensors((args, kwargs)):
            self._remember(tensor)
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            if tensor.untyped_storage().data_ptr() not in self._before:
                self._made.add(tensor.untyped_storage().data_ptr())
        self._operations.append((func, args, kwargs, out))
        return out

    def _remember(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._made and storage.data_ptr() not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            self._before[storage.data_ptr()] = whole, whole.clone()

    def rewind(self) -> None:
        """Undo what recording did to tensors that were there before."""
        for whole, copy in self._before.values():
            whole.copy_(copy)

    def replay(self) -> None:
        for func, args, kwargs, recorded in self._operations:
            for new, old in zip(_tensors(func(*args, **kwargs)), _tensors(recorded), strict=True):
                if new.untyped_storage().data_ptr() != old.untyped_storage().data_ptr():
                    old.copy_(new)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def record(tape: Tape, **_: object) -> Iterator[None]:
    """Stands where torch.cuda.graph stands."""
    try:
        with tape:
            yield
    finally:
        tape.rewind()

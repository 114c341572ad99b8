"""What launchers ask for on GPUs that are not there: every launch of a call with fake tensors, and it compiled.

Fake tensors have shapes, strides and a CUDA device, and no memory: launchers take the way that they take on a GPU, and
whoever asks the device for a value fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_compiled import OPTIONS, POINTERS, Compiled, build
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvbench.kernels import (
    append,
    attention_moments,
    column_sums,
    compaction,
    decode_attention,
    join_splits,
    merge_one,
    nearest,
    prompt_attention,
    quantise,
    quantised_attention,
    selection,
    value_errors,
    window_largest,
    window_statistics,
)

# every module with a kernel that is launched from Python
MODULES = (
    *(
        append,
        attention_moments,
        column_sums,
        compaction,
        decode_attention,
        join_splits,
        merge_one,
        nearest,
        prompt_attention,
        quantise,
    ),
    *(quantised_attention, selection, value_errors, window_largest, window_statistics),
)
SIZES = {80: (163, 108), 89: (99, 128), 90: (227, 132), 100: (227, 148)}
"""KiB of shared memory a block may ask for, and multiprocessors; sm_89 has the least memory of all since 2020."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its grid, and its arguments, constants and options by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


class _Noted:
    """Stands where a kernel stands: notes what it is launched with, and launches nothing."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def note(*args: Any, **how: Any) -> None:
            given = dict(zip(self._kernel.arg_names, args, strict=False))
            assert not given.keys() & how.keys()
            self._launches.append(Launch(self._kernel, grid, given | how))

        return note


class Made(TorchDispatchMode):
    """Remembers every memory that operations make inside."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        self.tensors += [x for x in tree_leaves(out) if isinstance(x, Tensor) and _memory(x) not in given]
        return out


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


@contextmanager
def launches_on(capability: int, modules: tuple[ModuleType, ...]) -> Iterator[list[Launch]]:
    """The launches of these modules' kernels inside, in order, as on a GPU of sm_<capability>."""
    triton = pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    shared, processors = SIZES[capability]
    properties = SimpleNamespace(shared_memory_per_block_optin=shared * 1024, multi_processor_count=processors)
    noted: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        patch.setattr(torch.cuda, "device_of", lambda _: nullcontext())
        patch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        patch.setattr(torch.cuda, "get_device_capability", lambda _: divmod(capability, 10))
        _forget(modules)
        for module in modules:
            for name, kernel in list(vars(module).items()):
                if isinstance(kernel, triton.runtime.JITFunction):
                    patch.setattr(module, name, _Noted(kernel, noted))
        yield noted
    _forget(modules)


def _forget(modules: tuple[ModuleType, ...]) -> None:
    """Let the modules ask anew what device this is."""
    for module in modules:
        for cached in [x for x in vars(module).values() if hasattr(x, "cache_clear")]:
            cached.cache_clear()


def compiled_launch(launch: Launch, capability: int) -> Compiled:
    """The kernel as Triton would compile it for this launch: sizes of one are constants, multiples of 16 are known."""
    types: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    whole: list[tuple[int, ...]] = []

    def typed(value: Any, path: tuple[int, ...], varies: bool) -> Any:
        """The type of an argument at a place of the signature, or of each field of a named tuple."""
        if isinstance(value, tuple):
            fields = [typed(field, (*path, place), varies) for place, field in enumerate(value)]
            return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)
        if value is None or (isinstance(value, int) and value == 1 and not varies):
            constants[path] = value
            return "constexpr"
        if isinstance(value, float):
            return "fp32"
        if isinstance(value, Tensor) or (value % 16 == 0 and not varies):
            whole.append(path)
        return POINTERS[value.dtype] if isinstance(value, Tensor) else "i32" if abs(value) < 2**31 else "i64"

    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            types[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            types[parameter.name] = typed(value, (place,), parameter.do_not_specialize)
    options = {name: value for name, value in launch.arguments.items() if name in OPTIONS}
    return build(launch.kernel, types, constants, whole, options, capability)

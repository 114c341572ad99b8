"""What a cache holds as plain data: lists and numbers for a JSON header, tensors set aside by name; and back again.

Only objects of classes marked with `saved` are told and made: no file can ask for another class.
"""

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from torch import Tensor

Class = TypeVar("Class", bound=type)
Plain = Any
"""None, numbers, words and lists; everything else is a dictionary that says what it is."""

_SAVED: dict[str, type] = {}


def saved(cls: Class) -> Class:
    """Let objects of a class be told attribute by attribute and made anew from that.

    Dataclasses and named tuples are made by calling the class, which checks them. What another class need not tell of
    itself it leaves out in `__getstate__`.
    """
    _SAVED[_name(cls)] = cls
    return cls


def saved_classes() -> list[type]:
    """Every class marked so far."""
    return list(_SAVED.values())


def tell(value: object, path: str, tensors: dict[str, Tensor]) -> Plain:
    """A value as plain data; its tensors are put into `tensors`, each under where it is found ("layers.0._held._x").

    Raises ValueError for a value that cannot be told.
    """
    if value is None or type(value) in (bool, int, str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, float):
        return {"float": str(value)}  # JSON has neither infinity nor NaN
    if isinstance(value, Tensor):
        return _set_aside(value, path, tensors)
    if type(value) is list:
        return [tell(x, f"{path}.{i}", tensors) for i, x in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": tell(list(value), path, tensors)}
    if type(value) is dict:
        return {"dict": [[tell(key, path, tensors), tell(x, f"{path}.{key}", tensors)] for key, x in value.items()]}
    if _SAVED.get(_name(type(value))) is type(value):
        return {"class": _name(type(value)), **tell_all(_state(value), path, tensors)}
    raise ValueError(
        f"{path} is a {_name(type(value))}, which cannot be written to a file: mark the class with "
        "kvbench.policies.contents.saved if its attributes are all there is to it"
    )


def tell_all(state: dict[str, Any], path: str, tensors: dict[str, Tensor]) -> dict[str, Plain]:
    """Named values as plain data."""
    return {name: tell(x, f"{path}.{name}", tensors) for name, x in state.items()}


def make(plain: Plain, tensor: Callable[[str], Tensor]) -> Any:  # noqa: ANN401 - whatever was told
    """The value that was told; `tensor` gives each tensor by its name.

    Raises KeyError, TypeError or ValueError where the plain data are not what `tell` says.
    """
    if isinstance(plain, list):
        return [make(x, tensor) for x in plain]
    if not isinstance(plain, dict):
        return plain
    if "class" in plain:
        state = make_all({name: x for name, x in plain.items() if name != "class"}, tensor)
        return _object(_SAVED[plain["class"]], state)
    if "tensor" in plain:
        kept, order = tensor(plain["tensor"]), plain["order"]
        return kept.permute([order.index(dim) for dim in range(kept.dim())])
    ((kind, told),) = plain.items()
    if kind == "dict":
        return {make(key, tensor): make(x, tensor) for key, x in told}
    return {"tuple": tuple, "float": float}[kind](make(told, tensor))


def make_all(told: dict[str, Plain], tensor: Callable[[str], Tensor]) -> dict[str, Any]:
    """Named values that were told."""
    return {name: make(x, tensor) for name, x in told.items()}


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _state(value: Any) -> dict[str, Any]:  # noqa: ANN401
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    state: dict[str, Any] = value._asdict() if hasattr(value, "_asdict") else value.__getstate__()
    return state


def _object(cls: type, state: dict[str, Any]) -> Any:  # noqa: ANN401
    if is_dataclass(cls) or issubclass(cls, tuple):
        return cls(**state)
    made = object.__new__(cls)
    made.__dict__.update(state)
    return made


def _set_aside(x: Tensor, path: str, tensors: dict[str, Tensor]) -> Plain:
    """Keep a tensor for the file, on the CPU, with its dimensions in the order in which they lie in memory.

    Without that order a tensor read back would lie otherwise, and products with it could round otherwise.
    """
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])
    kept = x.detach().permute(order).contiguous().cpu()
    known = {other.data_ptr() for other in tensors.values() if other.numel()}
    if kept.untyped_storage().nbytes() != kept.nbytes or kept.data_ptr() in known:
        kept = kept.clone()  # a file holds no views, and nothing twice
    tensors[path] = kept
    return {"tensor": path, "order": order}

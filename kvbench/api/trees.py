"""Policy and task objects as the trees of YAML that would make them: what a run's config.yaml keeps."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from kvbench.errors import UsageError


def tree_of(part: object, name: str, kept: bool) -> Any:  # noqa: ANN401 - whatever YAML holds
    """The tree that `kvbench.config.tree.build` makes a part of. Raises UsageError where there is none.

    name: where the part stands, "policy.scorer". kept: its runs stay on disk, and are continued by other processes.
    """
    if is_dataclass(part) and not isinstance(part, type):
        cls = type(part)
        _check_home(cls, kept)
        inner = {f.name: tree_of(getattr(part, f.name), f"{name}.{f.name}", kept) for f in fields(part) if f.init}
        return {"_target_": f"{cls.__module__}.{cls.__qualname__}", **inner}
    if isinstance(part, Mapping):
        return {str(key): tree_of(value, f"{name}.{key}", kept) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [tree_of(item, name, kept) for item in part]
    if isinstance(part, str | int | float | None):
        return part
    raise UsageError(f"{name} is a {type(part).__name__}, a run can only name plain values and dataclasses of them")


def _check_home(cls: type, kept: bool) -> None:
    """UsageError for a class that another process could not import, or whose code it could not tell from other code."""
    if "<locals>" in cls.__qualname__:
        raise UsageError(f"{cls.__name__} is defined in a function: define it at the top of its module or notebook")
    if kept and getattr(sys.modules[cls.__module__], "__file__", None) is None:
        raise UsageError(
            f"{cls.__name__} is defined in a notebook, where a kept run cannot see that its code changed: move it to a "
            "module, or leave out= out"
        )

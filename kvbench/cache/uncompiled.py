"""Functions that `torch.compile` calls as they are."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def uncompiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """`torch.compiler.disable`, which carries no types of its own, with those of the function."""
    return cast(Callable[Parameters, Result], torch.compiler.disable(function))

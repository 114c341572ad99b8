"""Functions that `torch.compile` calls as they are."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def uncompiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """`torch.compiler.disable` with the types of the function, and at no cost where nothing is compiled."""
    untraced: Callable[Parameters, Result] = torch.compiler.disable(function)

    @wraps(function)
    def as_it_is(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        called = untraced if torch.compiler.is_compiling() else function
        return called(*args, **kwargs)

    return as_it_is

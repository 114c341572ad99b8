"""The requirements of a KVCache on what transformers and the model do with it, and on its policy."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar, cast

from torch import Tensor
from torch._compile import _disable_dynamo

from kvbench.cache.families import INSTEAD, InterfaceError
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import PromptChoice

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def uncompiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Exclude a function from `torch.compile`.

    Unlike `torch.compiler.disable`, it imports the compiler at the first call, and keeps the types of the function.
    """
    return cast(Callable[Parameters, Result], _disable_dynamo(function))


class _NotATensorError(InterfaceError, AttributeError):
    """Also an AttributeError, so that `hasattr` returns False."""


class NotATensor:
    """Replaces a layer's keys and values between the cache and the attention function.

    InterfaceError for a model that computes with them.
    """

    if not TYPE_CHECKING:  # else every attribute would seem to exist

        def __getattr__(self, name: str) -> NoReturn:
            """Called only for attributes that do not exist."""
            if hasattr(Tensor, name):
                raise _NotATensorError(_computes(name))
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        raise _NotATensorError(_computes(getattr(function, "__name__", str(function))))


def _computes(name: str) -> str:
    return (
        f"the model uses keys or values of its cache outside attention (it calls {name!r}; a package that wraps "
        f"attention functions may also do so), but kvbench passes them only to attention; {INSTEAD}"
    )


class NoRollback:
    """Methods of a layer that would remove its newest tokens, or move tokens to other sequences: all are refused."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise ValueError("kvbench caches do not support beam search; generate with num_beams=1")

    def crop(self, *args: object, **kwargs: object) -> None:
        raise ValueError(
            "kvbench caches cannot be cropped, because policies do not undo the appending of tokens, so assisted and "
            "prompt-lookup decoding are not supported"
        )

    batch_repeat_interleave = batch_select_indices = crop


def check_policy(policy: object) -> None:
    """ValueError for what is no policy, and for policies that only our own generation can drive."""
    if not isinstance(policy, Policy):
        raise ValueError(f"policy must be a Policy, such as make_policy('snapkv', 512) gives, got {policy!r}")
    if policy.generator is not None:
        raise ValueError(
            f"{policy.name} compresses a cache of its own, not a KVCache, so it can only generate: use "
            "kvbench.generate, or a task whose answers are written"
        )
    if isinstance(policy.pre_pass, PromptChoice):
        raise ValueError(f"{policy.name} rewrites the prompt before it is cached: use kvbench.generate")

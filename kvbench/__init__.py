"""kvbench measures what a smaller KV cache costs, and proves that it was smaller."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvbench.cache.registration import register_with_transformers

if TYPE_CHECKING:
    from kvbench.cache.cache import BudgetError, KVCache
    from kvbench.config.presets import make_policy, preset_names

_HOMES = {
    "BudgetError": "kvbench.cache.cache",
    "KVCache": "kvbench.cache.cache",
    "make_policy": "kvbench.config.presets",
    "preset_names": "kvbench.config.presets",
}
register_with_transformers()  # models loaded from now on know attn_implementation="kvbench"
__all__ = ["BudgetError", "KVCache", "make_policy", "preset_names"]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Public names load on first use, so that `python -m kvbench --help` need not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

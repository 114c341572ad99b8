"""kvbench measures what a smaller KV cache costs in quality, and verifies that the cache was smaller."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvbench.terminal.start import end_at_interrupt, is_command

if TYPE_CHECKING:
    from kvbench.api.ask import ask
    from kvbench.api.evaluate import evaluate
    from kvbench.api.generate import generate
    from kvbench.api.results import Results, load_results
    from kvbench.cache.cache import BudgetError, KVCache, ScoreError
    from kvbench.config.presets import make_policy, preset_names
    from kvbench.policies.allocators.allocator import Allocator
    from kvbench.policies.policy import Policy
    from kvbench.policies.scorers.scorer import Scorer
    from kvbench.policies.stores.store import Store
    from kvbench.results.result import Result
    from kvbench.tasks.task import Task

__version__ = "0.1.0"  # read from here, because a checkout that is not installed has no metadata
_HOMES = {
    "Allocator": "kvbench.policies.allocators.allocator",
    "BudgetError": "kvbench.cache.cache",
    "KVCache": "kvbench.cache.cache",
    "Policy": "kvbench.policies.policy",
    "Result": "kvbench.results.result",
    "Results": "kvbench.api.results",
    "ScoreError": "kvbench.cache.cache",
    "Scorer": "kvbench.policies.scorers.scorer",
    "Store": "kvbench.policies.stores.store",
    "Task": "kvbench.tasks.task",
    "ask": "kvbench.api.ask",
    "evaluate": "kvbench.api.evaluate",
    "generate": "kvbench.api.generate",
    "load_results": "kvbench.api.results",
    "make_policy": "kvbench.config.presets",
    "preset_names": "kvbench.config.presets",
}
if is_command():
    end_at_interrupt()
# Imported here, with Ctrl-C handled; makes attn_implementation="kvbench" available in transformers.
import_module("kvbench.cache.registration").register_with_transformers()
__all__ = [
    "Allocator",
    "BudgetError",
    "KVCache",
    "Policy",
    "Result",
    "Results",
    "ScoreError",
    "Scorer",
    "Store",
    "Task",
    "ask",
    "evaluate",
    "generate",
    "load_results",
    "make_policy",
    "preset_names",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Public names load on first use, so that `python -m kvbench --help` need not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

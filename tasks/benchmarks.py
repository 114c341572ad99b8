"""What a benchmark adds to its tasks, found by its name: a package of `kvbench.tasks`, or a module of your own.

A package has modules `summary` and `predictions` for it. A module of your own is named in full (`my_package.my_bench`)
and may have both functions in one place:

    summary(answers)                   official aggregates of scored answers, by name (see `tasks.summary`)
    score_predictions(line, **flags)   what is added to a line of recorded predictions (see `tasks.predictions`)
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType

from kvbench import tasks


def benchmark_module(name: str, part: str) -> ModuleType:
    """The module that has a benchmark's `part`. Raises ModuleNotFoundError where there is none of that name."""
    own = f"{tasks.__name__}.{name}"
    return import_module(f"{own}.{part}" if name.isidentifier() and find_spec(own) else name)


def benchmarks_with(part: str) -> list[str]:
    """Names of our own benchmarks that have such a part, sorted."""
    packages = sorted(module.name for module in iter_modules(tasks.__path__) if module.ispkg)
    return [name for name in packages if find_spec(f"{tasks.__name__}.{name}.{part}")]

"""Registers `kvbench` with transformers without importing transformers, which takes seconds.

`import kvbench` is enough for `from_pretrained(..., attn_implementation="kvbench")`, and `--help` stays fast: the name
is registered now if transformers' registry was imported, and right after its import otherwise.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from kvbench.cache import NAME

REGISTRY = "transformers.modeling_utils"


def register_with_transformers() -> None:
    """Register the attention and mask functions, now or as soon as transformers' registry is imported."""
    _hide_our_kernels()
    if REGISTRY in sys.modules:
        _register(sys.modules[REGISTRY])
    else:
        sys.meta_path.insert(0, _AfterImport())


def _hide_our_kernels() -> None:
    """Hide the folder `kernels` of a checkout from transformers, which would take it for the package `kernels`.

    transformers would search all installed packages for its version, which takes 0.3 s.
    """
    spec = find_spec("kernels")
    ours = Path(__file__).parents[1] / "kernels" / "__init__.py"
    if spec is not None and spec.origin is not None and ours.samefile(spec.origin):
        sys.modules["kernels"] = None  # type: ignore[assignment]  # Python's entry for a failed import


def _register(registry: ModuleType) -> None:
    register = getattr(sys.modules.get(f"{__package__}.hook"), "register", None)  # None: not or not wholly imported
    if register is not None:
        register()
        return
    registry.AttentionInterface.register(NAME, _attention)
    import_module("transformers.masking_utils").AttentionMaskInterface.register(NAME, _mask)


def _attention(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Imports `kvbench.cache.hook`, which registers its own functions in place of these."""
    return import_module("kvbench.cache.hook").kvbench_attention(*args, **kwargs)


def _mask(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    return import_module("kvbench.cache.hook").kvbench_mask(*args, **kwargs)


class _AfterImport(MetaPathFinder):
    """Imports the registry as usual, and registers with it afterwards."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec

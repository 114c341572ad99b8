"""Makes the name `kvbench` known to transformers, without importing transformers, which takes seconds.

`import kvbench` must be enough for `from_pretrained(..., attn_implementation="kvbench")`, and `--help` must stay quick.
So the names are registered when transformers' own registry comes to life: at once, or right after its import.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
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
        sys.meta_path.insert(0, _Watch())


def _hide_our_kernels() -> None:
    """Keep transformers from taking our folder `kernels` for the package of that name.

    In a checkout Python looks there first. transformers would search all installed packages for its version, 0.3 s, and
    5.2 fails where it finds none.
    """
    spec = find_spec("kernels")
    ours = Path(__file__).parents[1] / "kernels" / "__init__.py"
    if spec is not None and spec.origin is not None and ours.samefile(spec.origin):
        sys.modules["kernels"] = None  # type: ignore[assignment]  # what cannot be imported, as Python writes it


def _register(registry: ModuleType) -> None:
    registry.AttentionInterface.register(NAME, _attention)
    import_module("transformers.masking_utils").AttentionMaskInterface.register(NAME, _mask)


def unwrap() -> None:
    """Take the wrapper of kvpress off our attention function.

    On import, kvpress wraps every registered attention function to mask keys of its caches. kvbench's function gets
    layers instead of keys, which the wrapper cannot handle.
    """
    functions = import_module(REGISTRY).ALL_ATTENTION_FUNCTIONS
    if getattr(functions[NAME], "__module__", "").partition(".")[0] == "kvpress":
        functions[NAME] = import_module("kvbench.cache.hook").kvbench_attention


def _attention(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Stands for `kvbench.cache.hook.kvbench_attention` until that module, imported here, takes its place."""
    return import_module("kvbench.cache.hook").kvbench_attention(*args, **kwargs)


def _mask(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    return import_module("kvbench.cache.hook").kvbench_mask(*args, **kwargs)


class _Watch(MetaPathFinder):
    """Lets the registry be imported as it would be, and registers with it right afterwards."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


class _Registering(Loader):
    """The loader of the registry, with one step more."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader  # its source is found through it
        _register(module)

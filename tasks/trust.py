"""What a file of results may load by its name: the parts of kvbench and kvpress, and modules that the user names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from typing import Any

import click

from kvbench.errors import UsageError

OWN = ("kvbench.policies.", "kvbench.tasks.")
PERMISSIONS = ("trust_remote_code", "allow_code_execution", "include_path")
"""Fields with which a configuration runs code: of a model, of its answers, or of lm-eval tasks in a folder."""
_trusted: set[str] = set()


def trust(modules: Iterable[str]) -> None:
    """Trust the packages of modules that the user named, in a configuration or with --trust. Raises UsageError."""
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            hint = "; its folder must be on PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
            raise UsageError(f"{module} cannot be imported: {error}{hint}") from error
        _trusted.add(module.partition(".")[0])


trust_option = click.option(
    "--trust",
    multiple=True,
    metavar="MODULE",
    expose_value=False,
    is_eager=True,
    callback=lambda _context, _parameter, modules: trust(modules),
    help="Load classes and functions of this module where results name them; this runs its code.",
)
"""The option of commands that read results."""


def is_trusted(module: str) -> bool:
    """Whether the user named the module's package."""
    return module.partition(".")[0] in _trusted


def check_parts(config: Any, allowed: Collection[str] = (), path: str = "") -> None:  # noqa: ANN401 - whatever YAML holds
    """Raise UsageError if building a configuration out of a results folder would run the code of others.

    allowed: paths of fields whose values the user gave. Nothing is imported before its module is known to be allowed.
    """
    if isinstance(config, list):
        for place, value in enumerate(config):
            check_parts(value, allowed, f"{path}.{place}")
    if not isinstance(config, Mapping):
        return
    for key, value in config.items():
        field = f"{path}.{key}".lstrip(".")
        if key in PERMISSIONS and value and field not in allowed:
            raise UsageError(f"{field}={value} runs code of others; give it on the command line if you trust it")
        if key == "_target_" and field not in allowed and not _is_part(str(value)):
            package = str(value).partition(".")[0]
            raise UsageError(
                f"{field}={value} is not a part of kvbench; --trust {package} loads it, if you trust its code"
            )
        check_parts(value, allowed, field)


def _is_part(target: str) -> bool:
    """Whether a class belongs to kvbench's parts or to the presses of kvpress, or its package is trusted."""
    module, _, name = target.rpartition(".")
    if is_trusted(target):
        return True
    if not module.startswith(("kvpress", *OWN)) or (module.startswith("kvpress") and module.split(".")[0] != "kvpress"):
        return False
    try:
        part = getattr(import_module(module), name)
    except (ImportError, AttributeError):
        return False
    bases = getattr(part, "__mro__", ())
    own = getattr(part, "__module__", "").startswith(OWN)  # a module also has the classes that it imports
    return own or any(base.__name__ == "BasePress" and base.__module__.startswith("kvpress.") for base in bases)

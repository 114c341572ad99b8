"""What a file of results may load by its name: the parts of kvbench and kvpress, and modules that the user names.

Results are read without the network: see `reading`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from typing import Any

import click

from kvbench.errors import UsageError

OWN = ("kvbench.policies.", "kvbench.tasks.")
PERMISSIONS = ("trust_remote_code", "allow_code_execution", "include_path")
"""Fields with which a configuration runs code: of a model, of its answers, or of lm-eval tasks in a folder."""
LM_EVAL = "kvbench.tasks.lm_eval."
"""The part whose tasks are code of lm-eval, which a configuration selects by their names."""
_OFFLINE = {
    "huggingface_hub.constants": ("HF_HUB_OFFLINE",),
    "datasets.config": ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
}
_trusted: set[str] = set()
_is_reading: ContextVar[bool] = ContextVar("reading", default=False)


def trust(modules: Iterable[str]) -> None:
    """Trust the packages of modules that the user named, in a configuration or with --trust. Raises UsageError."""
    for module in modules:
        try:
            if "<locals>" not in module:  # a class inside a function of a module that is loaded
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


@contextmanager
def reading() -> Iterator[None]:
    """Read results without the network: whatever a results folder names, nothing is fetched in this context.

    Data sets and models that are on this machine are found. A connection raises ConnectionRefusedError.
    """
    from huggingface_hub import constants

    _install()
    token, before = _is_reading.set(True), constants.HF_HUB_OFFLINE
    _set_offline(True)  # the Hub's libraries then look into their caches at once, in all of their threads
    try:
        yield
    finally:
        _is_reading.reset(token)
        _set_offline(before)


def _set_offline(value: bool) -> None:
    for name, flags in _OFFLINE.items():
        for flag in flags if name in sys.modules else ():
            setattr(sys.modules[name], flag, value)


@cache
def _install() -> None:
    """Let Python call `_refuse` before each event; a hook cannot be removed."""
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto") and _is_reading.get():
        raise ConnectionRefusedError(f"results are read without the network: {event} is refused")


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
        if key == "_target_" and field not in allowed and str(value).startswith(LM_EVAL) and not is_trusted("lm_eval"):
            raise UsageError(f"{field}={value} runs code of lm-eval's tasks; --trust lm_eval loads it, if you trust it")
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
    if not isinstance(part, type):  # calling a function may do anything
        return False
    own = part.__module__.startswith(OWN)  # a module also has the classes that it imports
    return own or any(base.__name__ == "BasePress" and base.__module__.startswith("kvpress.") for base in part.__mro__)

"""The flags of a command line, which are Hydra's: read in one place, and refused in one sentence."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from kvbench.terminal.errors import UsageError


def read_flags(arguments: Sequence[str]) -> Namespace:
    """What the flags say, and in `overrides` the arguments that are none.

    Raises UsageError for an unknown flag, and where --config-dir is no folder.
    """
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]  # Hydra's own prints its usage and ends the process
    told = parser.parse_intermixed_args(list(arguments))
    if (told.package or told.resolve) and not told.cfg:
        _refuse("--package and --resolve belong to --cfg")
    if told.shell_completion:
        _refuse("--shell-completion is not for kvbench")
    if told.config_dir is not None and not (told.config_dir and Path(told.config_dir).is_dir()):
        raise UsageError(f"--config-dir {told.config_dir} is not a folder")
    return told


def _refuse(message: str) -> NoReturn:
    raise UsageError(f"{message} (fields are written field=value, without dashes; --help lists them)")

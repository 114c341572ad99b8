"""Folders of the user: of configurations (`--config-dir`), and of modules with classes of one's own."""

from __future__ import annotations

import sys
from pathlib import Path

from kvbench.errors import ConfigError


def own_folders(config_dir: str | Path | None) -> list[Path]:
    """The folder of a `config_dir`, if there is one; modules beside it are found. ConfigError unless it exists."""
    folders = [] if config_dir is None else [Path(config_dir).expanduser()]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError("config_dir", folder, why="is not a folder")
    find_modules(*map(module_folder, folders))
    return folders


def module_folder(config_dir: Path) -> Path:
    """The folder beside which a folder of configurations lies: its modules have the classes of one's own."""
    return config_dir.resolve().parent


def find_modules(*folders: Path) -> None:
    """Let Python find modules in folders, after all others, so that no file there replaces an installed module.

    Only for configurations of the user: commands that read results of others must not call it.
    """
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.append(folder)

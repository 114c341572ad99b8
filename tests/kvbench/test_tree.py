"""The one reader and builder of trees of parts: it needs no Hydra, and refuses in one sentence."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbench import make_policy
from kvbench.config.tree import build, find, names, read

BLOCKS = "kvbench.policies.schedule.Blocks"


def test_a_policy_is_made_where_hydra_is_not_installed() -> None:
    code = """
import sys
sys.modules.update(hydra=None, omegaconf=None)
from kvbench import make_policy
print(make_policy("caote_snapkv_kivi_g32", 64, window=16).store.group)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "32\n"), done.stderr


@pytest.mark.parametrize("wrapper", names("wrapper"))
def test_every_file_in_conf_wrapper_adds_parts_that_build(wrapper: str) -> None:
    file = find("wrapper", wrapper)
    assert file is not None
    assert file.read_text(encoding="utf-8").startswith("# ")
    assert make_policy(f"{wrapper}_knorm", 64) != make_policy("knorm", 64)


def test_one_folder_of_ones_own_comes_before_ours(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "tova.yaml").write_text("name: mine\n")
    assert read("policy", "tova", [tmp_path]) == {"name": "mine"}
    assert read("policy", "h2o", [tmp_path])["scorer"]["recent"] == "half"


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"_target_": BLOCKS, "sise": 4}, r"Blocks has no field 'sise' \(allowed: decode, order, .*size, fill\)"),
        ({"_target_": BLOCKS, "size": "4"}, "size must be a number, got '4'"),
        ({"_target_": "kvbench.tasks.hub.HubFile"}, "HubFile needs repo"),
        ({"_target_": "kvbench.nowhere.Part"}, "_target_=kvbench.nowhere.Part cannot be imported: No module named"),
    ],
)
def test_a_tree_that_describes_no_part_is_refused(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        build(config)
    assert "\n" not in str(caught.value)

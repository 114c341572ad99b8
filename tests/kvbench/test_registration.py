"""`import kvbench` is enough for transformers to know the name, whichever of the two is imported first."""

import subprocess
import sys
from pathlib import Path

import pytest

LOAD = """
import torch
model = AutoModelForCausalLM.from_pretrained({folder!r}, attn_implementation="kvbench")
from kvbench import KVCache, make_policy
cache = KVCache(model.config, make_policy("snapkv", 8, window=2), prompt_length=20)
model.generate(torch.arange(3, 23)[None], past_key_values=cache, max_new_tokens=2, do_sample=False)
assert int(cache.kept_tokens().max()) == 9, cache.kept_tokens()
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import kvbench\nfrom transformers import AutoModelForCausalLM",
        pytest.param("from transformers import AutoModelForCausalLM\nimport kvbench", marks=pytest.mark.slow),
        pytest.param(
            "import transformers.modeling_utils\nimport kvbench\nfrom transformers import AutoModelForCausalLM",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_importing_the_package_is_enough(imports: str, tiny_model: Path) -> None:
    program = imports + LOAD.format(folder=str(tiny_model))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_neither_torch_nor_transformers_are_imported_for_it() -> None:
    program = "import kvbench, sys; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_help_needs_no_torch() -> None:
    program = "import sys; from kvbench.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)

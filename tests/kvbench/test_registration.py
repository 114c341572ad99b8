"""`import kvbench` is enough for transformers to know the name, whichever of the two is imported first."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
from kv_models import prompt, tiny
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvbench import make_policy
from kvbench.cache.hook import kvbench_attention, prepare
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.generate import generate_tokens
from kvbench.engine.sequence import Request, script_of


@pytest.mark.slow("starts a process that imports transformers")
def test_importing_the_package_is_enough(tiny_model: Path) -> None:
    program = (
        "import transformers.modeling_utils\nimport kvbench\nfrom transformers import AutoModelForCausalLM\n"
        f'AutoModelForCausalLM.from_pretrained({str(tiny_model)!r}, attn_implementation="kvbench")'
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def _blind(module: object, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError(f"asked of keys that are none: {key.shape[2]} of {query.shape[2]}")


@torch.inference_mode()
@pytest.mark.parametrize("together", [False, True])
def test_kvpress_may_be_imported_at_any_time(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wraps every attention function and reads the shape of the keys, which a layer of ours does not have."""
    monkeypatch.setitem(sys.modules, "kvpress", ModuleType("kvpress"))
    monkeypatch.setattr(_blind, "__module__", "kvpress.attention_patch")
    model, policy, ids = prepare(tiny()), make_policy("snapkv", 8, window=2), torch.tensor([prompt(20)])
    ALL_ATTENTION_FUNCTIONS["kvbench"] = _blind
    if together:
        (row,) = DecodeBatch(model).admit([Request(script_of(ids), max_new_tokens=1)], [policy])[0]
        assert row.error is None
    else:
        generate_tokens(model, ids, policy, max_new_tokens=1)
    assert ALL_ATTENTION_FUNCTIONS["kvbench"] is kvbench_attention

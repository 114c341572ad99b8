"""The table of model families says what becomes of a family when it is tried."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_families", ROOT / "scripts" / "check_families.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_families"] = module  # where its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def verdict(script: ModuleType, name: str) -> tuple[str, str]:
    (family,) = [one for one in script.families() if one.name == name]
    found = script.check(family)
    return found.kind, found.why


@pytest.mark.slow("loads many models")
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "mistral",
        "gemma3",
        "gemma4",
        "mimo_v2_flash",
        "cohere_compass_text",
        "whisper",
        "electra",
        "gpt2",
        "opt",
        "phi3",
        "stablelm",
        "mixtral",
        "qwen3_next",
        "falcon_h1",
        "jamba",
        "qwen2 with a sliding window",
    ],
)
def test_representative_families_are_exact(script: ModuleType, family: str) -> None:
    assert verdict(script, family)[0] == "exact"

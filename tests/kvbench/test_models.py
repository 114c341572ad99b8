"""From a configuration to a loaded model: what is recorded, and what is refused in which words."""

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from kv_models import tiny
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DynamicCache,
    FalconConfig,
    FalconForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
)

from kvbench.errors import UsageError
from kvbench.models.files import ModelSpec
from kvbench.models.loading import Checkpoint, load, locate
from kvbench.tools.harness_model import KVBenchLM

CPU = torch.device("cpu")


def spec(folder: Path, **fields: object) -> ModelSpec:
    return ModelSpec(name="tiny", path=str(folder), **fields)


def small_model(family: str) -> PreTrainedModel:
    if family != "gemma3":
        return tiny(family, layers=3, dtype=torch.float32)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8, "vocab_size": 512}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    config = Gemma3TextConfig(**shape, **heads, layer_types=kinds, sliding_window=24)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("tokens", [10, 24, 60])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3"])
def test_the_full_cache_equals_transformers_cache(family: str, tokens: int) -> None:
    model = small_model(family)
    cache = DynamicCache(config=model.config)
    ids = torch.arange(1, tokens + 1)[None]
    model(input_ids=ids[:, :-1], past_key_values=cache)
    model(input_ids=ids[:, -1:], past_key_values=cache)
    held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    checkpoint = Checkpoint(ModelSpec(name=family, path="."), Path(), model.config, torch.float32, ())
    assert checkpoint.full_cache_bytes(tokens) == held


def test_pickled_weights_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"no \*\.safetensors"):
        locate(spec(folder))


def reweighted(folder: Path, copy: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of the model whose tensors were changed."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


KEY = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda tensors: tensors.update({KEY: torch.zeros(8, 32)}),
            rf"wrong shape: {KEY} \[8, 32\] instead of \[16, 32\]$",
        ),
        (
            lambda tensors: tensors.update({"model.other": tensors.pop(KEY)}),
            rf"missing: {KEY}; unexpected: model\.other$",
        ),
        (
            lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("model.layers.1.")],
            r"missing: model\.layers\.1\.input_layernorm\.weight, .* and 1 more$",
        ),
    ],
)
def test_weights_that_are_not_the_models_are_named_and_refused(
    tiny_model: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], sentence: str
) -> None:
    """Nine tensors are a layer's: two norms, four projections of attention, three of the MLP."""
    folder = reweighted(tiny_model, tmp_path / "other", change)
    with pytest.raises(UsageError, match=r"^model=tiny: the weights in .* do not fit this model: ") as refused:
        load(locate(spec(folder)), CPU)
    refused.match(sentence)
    with pytest.raises(ValueError, match="do not fit this model"):
        KVBenchLM(str(folder))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"hidden_size": ', "It looks like the config file at .* is not a valid JSON file"),
        ('{"hidden_size": 32}', "Unrecognized model in "),
    ],
)
def test_a_broken_configuration_is_one_sentence(tiny_model: Path, tmp_path: Path, config: str, said: str) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "broken")
    (folder / "config.json").write_text(config)
    with pytest.raises(UsageError, match=rf"^model=tiny: .*/broken/config\.json cannot be used: {said}"):
        locate(spec(folder))


@pytest.mark.parametrize(
    ("quantization", "package"),
    [
        ({"quant_method": "gptq", "bits": 4}, "optimum"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, "gptqmodel"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ],
)
def test_quantized_weights_without_their_package_name_it(
    tiny_model: Path, tmp_path: Path, quantization: dict[str, object], package: str
) -> None:
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    folder = shutil.copytree(tiny_model, tmp_path / "quantized")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    with pytest.raises(UsageError, match=rf"^model=tiny cannot be loaded: .* requires {package}"):
        load(locate(spec(folder)), CPU)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_of_bitsandbytes_are_loaded_as_they_are_stored(tiny_model: Path, tmp_path: Path, bits: int) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    settings = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    quantized = AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=settings, device_map={"": "cpu"})
    folder = shutil.copytree(tiny_model, tmp_path / "quantized")
    (folder / "model.safetensors").unlink()
    quantized.save_pretrained(folder)
    found = load(locate(spec(folder)), CPU).model
    assert {4: "Linear4bit", 8: "Linear8bitLt"}[bits] in {type(part).__name__ for part in found.modules()}


def test_a_model_with_code_of_its_own_is_not_run(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "code")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(UsageError, match="trust_remote_code"):
        locate(spec(folder))


def test_a_model_outside_the_attention_interface_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    config = FalconConfig(vocab_size=258, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    FalconForCausalLM(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, tmp_path)
    with pytest.raises(UsageError, match=r"Falcon.* attention interface"):
        locate(spec(tmp_path))  # from the configuration alone: no weights are fetched or loaded first


def test_a_hub_model_that_cannot_be_downloaded_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match=r"owner/absent is not in the .* cache .*`hf download owner/absent`"):
        locate(ModelSpec(name="absent", hub_id="owner/absent"))


def test_a_hub_model_in_the_cache_is_known_by_its_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit, repository = "c" * 40, tmp_path / "models--owner--tiny"
    shutil.copytree(tiny_model, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    checkpoint = locate(ModelSpec(name="cached", hub_id="owner/tiny"))
    assert checkpoint.identity == (("hub_id", "owner/tiny"), ("commit", commit))
    assert load(checkpoint, CPU).record["commit"] == commit

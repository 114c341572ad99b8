"""The model of a benchmark. Random weights are sufficient, because time and memory do not depend on them."""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvbench.config.compose import find, read
from kvbench.errors import UsageError, unknown
from kvbench.models.devices import free
from kvbench.models.files import ModelSpec
from kvbench.models.loading import DTYPES, load, locate


def build(model: Any, dtype: str, device: torch.device) -> tuple[PreTrainedModel, str]:  # noqa: ANN401
    """The model and its name.

    model: a name of conf/model; a folder with weights, or with a config.json only (random weights); or the fields of a
    transformers configuration with its `model_type` (random weights). Raises UsageError for other values, and for a
    model that does not fit into memory.
    """
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, list(DTYPES))
    if isinstance(model, dict):
        fields = dict(model)
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        return _random(config, dtype, device), f"{config.model_type} with random weights"
    folder = Path(expanduser(str(model)))
    if (folder / "config.json").is_file() and not any(folder.glob("*.safetensors")):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        return _random(config, dtype, device), f"{folder.resolve().name} with random weights"
    if not folder.exists() and find("model", str(model)) is None:
        raise UsageError(f"model={model} is neither a name of conf/model, a folder with a config.json, nor a GGUF file")
    named = ModelSpec(folder.name, path=str(folder)) if folder.exists() else ModelSpec(model, **read("model", model))
    return load(locate(named, dtype), device).model, named.name


def _random(config: PreTrainedConfig, dtype: str, device: torch.device) -> PreTrainedModel:
    """A model with random weights, made on the device itself."""
    kind: Any = getattr(torch, dtype) if dtype != "auto" else config.dtype or torch.float32
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config, dtype=kind).num_parameters() * kind.itemsize
    if weights > (there := free(device)):
        raise UsageError(
            f"the weights need {weights / 2**30:.1f} GiB and {device} has {there / 2**30:.1f} GiB free: use fewer "
            "layers (model.num_hidden_layers=2) or another model (model=pocket)"
        )
    torch.manual_seed(0)
    with torch.device(device):
        built: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=kind).eval()
    return built

"""The model of a benchmark: a published shape with random weights, made on the device itself, or real weights.

Time does not depend on the weights, so neither they nor a network are needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from os.path import expanduser
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvbench.cache.interface import check_interface
from kvbench.config.tree import find, read
from kvbench.models.cache_shapes import DTYPES, cache_shape
from kvbench.models.loading import ModelSpec, load, locate
from kvbench.models.trial import count_parameters
from kvbench.terminal.errors import UsageError, refusing
from kvbench.tools.bench.machine import free_bytes


@dataclass(frozen=True)
class Published:
    """What a published configuration says beside the shape of the cache, which conf/model says."""

    kind: str
    hidden: int
    intermediate: int
    vocabulary: int
    theta: float
    positions: int
    paper_name: str
    tied: bool = False


PUBLISHED = {
    "llama2_7b": Published("llama", 4096, 11008, 32000, 1e4, 4096, "Llama-2-7B"),
    "llama2_7b_chat": Published("llama", 4096, 11008, 32000, 1e4, 4096, "Llama-2-7B-chat-hf"),
    "llama2_13b": Published("llama", 5120, 13824, 32000, 1e4, 4096, "Llama-2-13B"),
    "llama31_8b_instruct": Published("llama", 4096, 14336, 128256, 5e5, 131072, "Llama-3.1-8B-Instruct"),
    "llama32_3b_instruct": Published("llama", 3072, 8192, 128256, 5e5, 131072, "Llama-3.2-3B-Instruct", tied=True),
    "llama3_8b": Published("llama", 4096, 14336, 128256, 5e5, 8192, "Llama-3-8B"),
    "mistral_7b_instruct_v03": Published("mistral", 4096, 14336, 32768, 1e6, 32768, "Mistral-7B-Instruct-v0.3"),
    "qwen25_7b_instruct": Published("qwen2", 3584, 18944, 152064, 1e6, 32768, "Qwen2.5-7B-Instruct"),
}
"""Names of conf/model that can be built without a file; figures from their published configurations."""


@dataclass(frozen=True)
class Built:
    """A model on its device and what a header says of it."""

    model: PreTrainedModel
    name: str  # as the papers' tables write it, where the model is one of theirs
    description: str

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights, shared ones once."""
        return sum(p.nbytes for p in self.model.parameters())

    @property
    def said(self) -> str:
        """A line for headers."""
        unit, divisor = ("GiB", 2**30) if self.weights_bytes >= 2**30 else ("MiB", 2**20)
        return f"{self.description}; {self.weights_bytes / divisor:.2f} {unit} of weights"

    @property
    def bytes_read(self) -> int:
        """Bytes of weights that one decoding step must read: all but the table of embeddings, unless the head reads it.

        A token reads one row of that table.
        """
        table, head = (e() for e in (self.model.get_input_embeddings, self.model.get_output_embeddings))
        if table is None or head is None or table.weight is head.weight:
            return self.weights_bytes
        assert isinstance(table.weight, torch.Tensor)
        return self.weights_bytes - table.weight.nbytes


def build(model: str, weights: str | None, layers: int | None, dtype: str | None, device: torch.device) -> Built:
    """The model of `model=`: a name of `PUBLISHED` or conf/model, `pocket`, or a folder.

    weights: `random` (the default where none are at hand) or `real`; layers: so many of the model's own. UsageError for
    what does not exist, is not allowed, or does not fit into the memory that is free.
    """
    if weights not in (None, "random", "real"):
        raise UsageError(f"weights={weights} is not allowed, choose random or real")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype={dtype} is not allowed, choose one of {', '.join(DTYPES)}")
    folder = _folder(model)
    if weights == "real" or (weights is None and folder is not None and any(folder.glob("*.safetensors"))):
        if layers is not None:
            raise UsageError(f"layers={layers} cuts models of random weights only: add weights=random")
        return _real(model, folder, dtype, device)
    config, name = _configuration(model, folder)
    return _random(model, name, config, layers, dtype, device)


def _folder(model: str) -> Path | None:
    path = Path(str(resources.files("kvbench") / "pocket")) if model == "pocket" else Path(expanduser(model))
    if path.is_dir() and not (path / "config.json").is_file():
        raise UsageError(f"model={model} has no config.json: it must be a folder made by save_pretrained")
    return path if path.is_dir() else None


def _real(model: str, folder: Path | None, dtype: str | None, device: torch.device) -> Built:
    if folder is None and find("model", model) is None:
        raise _unknown(model)
    spec = ModelSpec(model, **read("model", model)) if folder is None else ModelSpec(folder.name, path=str(folder))
    loaded = load(locate(spec, dtype or "auto"), device)
    return Built(loaded.model, spec.name, f"{spec.name}, its own weights, {loaded.record['dtype']}")


def _unknown(model: str) -> UsageError:
    known = f"pocket, {', '.join(PUBLISHED)}"
    return UsageError(f"model={model} is neither a folder with a config.json nor one of {known}")


def _random(
    model: str, name: str, config: PreTrainedConfig, layers: int | None, dtype: str | None, device: torch.device
) -> Built:
    whole, cut = config.num_hidden_layers, ""
    if layers is not None:
        if layers > whole:
            raise UsageError(f"layers={layers} is not allowed: {name} has {whole}")
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
        cut = f"{layers} of {whole} layers" if layers < whole else ""
    kind = DTYPES[dtype] if dtype else config.dtype
    if not isinstance(kind, torch.dtype):
        kind = torch.float32
    if device.type == "cpu" and kind == torch.float16:
        kind = torch.float32  # not a silent change of what is measured: the description and every row say the dtype
    with refusing(f"model={model}: "):
        check_interface(config)
        _check_room(model, config, kind, device)
    torch.manual_seed(0)
    with torch.device(device):
        built = AutoModelForCausalLM.from_config(config, dtype=kind).eval()
    words = f"{name}, random weights, {str(kind).removeprefix('torch.')}"
    return Built(built, f"{name} ({cut})", f"{words}, {cut}") if cut else Built(built, name, words)


def _configuration(model: str, folder: Path | None) -> tuple[PreTrainedConfig, str]:
    """The configuration of a folder's model, or of a published one; and what it is called."""
    if folder is not None:
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(f"model={model}: {folder}/config.json cannot be used: {error}") from error
        return config.get_text_config(decoder=True), folder.resolve().name
    if model not in PUBLISHED:
        raise _unknown(model)
    said, shape = PUBLISHED[model], cache_shape(model)
    config = AutoConfig.for_model(
        said.kind,
        vocab_size=said.vocabulary,
        hidden_size=said.hidden,
        intermediate_size=said.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.query_heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=said.positions,
        tie_word_embeddings=said.tied,
        rope_parameters={"rope_type": "default", "rope_theta": said.theta},
        dtype=shape.dtype,
        **({"sliding_window": None} if said.kind == "mistral" else {}),  # version 0.3 has none
    )
    return config, said.paper_name


def _check_room(model: str, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
    """UsageError where the weights alone are more than the memory that is free."""
    need, free = (count_parameters(config) or 0) * dtype.itemsize, free_bytes(device)
    if need > free:
        raise UsageError(
            f"model={model} needs {need / 2**30:.1f} GiB for its weights and {device} has {free / 2**30:.1f} GiB free: "
            "take fewer layers (layers=2), or another model (model=pocket scale=64)"
        )

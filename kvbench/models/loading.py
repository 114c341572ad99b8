"""Finds and loads models: the folder of a configured model, its identity, and its weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvbench.cache.hook import prepare
from kvbench.errors import CHANGED, UsageError, refusing, unknown
from kvbench.models.answers import unused_fields
from kvbench.models.files import CONFIG_FILES, WANTED, ModelSpec, model_folder, model_identity, weights_folder
from kvbench.models.trial import layer_shapes, state_bytes, try_out

DEVICE_MAPS = (None, "auto", "balanced", "balanced_low_0", "sequential")
DTYPES = ("auto", "float32", "bfloat16", "float16")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """The local files of a model, or a model object. `identity` identifies its weights."""

    spec: ModelSpec
    folder: Path
    config: Any = field(compare=False)  # transformers' own configuration object
    dtype: torch.dtype
    identity: tuple[tuple[str, str], ...]  # (("hub_id", ...), ("commit", ...)), (("sha256", ...),), (("object", ...),)
    given: GivenModel | None = field(default=None, compare=False, repr=False)  # a model object

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the weights in the checkpoint."""
        return self.config.dtype or torch.float32

    @property
    def max_positions(self) -> int | None:
        """The maximum context length in tokens; None if the configuration has none."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)

    def full_cache_bytes(self, tokens: int) -> int:
        """Bytes of keys and values in transformers' own cache after `tokens` tokens, in the model's dtype.

        Layers with latents store latents. A layer with a sliding window of w tokens stores the newest w - 1 tokens,
        because the next token attends to no others.
        """
        return self.dtype.itemsize * sum(heads * numbers * stored for heads, numbers, stored in self._full(tokens))

    def full_position_bytes(self, tokens: int) -> int:
        """Bytes of the positions of these tokens: 4 for each token and KV head, as in stores of single tokens."""
        return 4 * sum(heads * stored for heads, _, stored in self._full(tokens))

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the states of recurrent layers, per sequence."""
        return state_bytes(self.config, self.dtype)

    def _full(self, tokens: int) -> list[tuple[int, int, int]]:
        """(KV heads, numbers per head and token, stored tokens) of every layer of transformers' own cache."""
        return [
            (heads, numbers, tokens if window is None else min(tokens, window - 1))
            for heads, numbers, window in self._layers
        ]

    @cached_property
    def _layers(self) -> list[tuple[int, int, int | None]]:
        """(KV heads, numbers per token, window) of every layer. Cached, because every example uses it."""
        windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=self.config).layers]
        shapes = self.shapes
        windows = [windows[index] for index in shapes if index < len(windows)]
        # For a configuration without layer types, transformers creates layers on demand, without windows.
        windows = windows if len(windows) == len(shapes) else [None] * len(shapes)
        return [
            (heads, key + value, window) for (heads, key, value), window in zip(shapes.values(), windows, strict=True)
        ]

    @cached_property
    def shapes(self) -> dict[int, tuple[int, int, int]]:
        """KV heads, key size and value size of every attention layer, by its index in the model."""
        return layer_shapes(self.config)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer. Raises UsageError if it cannot be loaded."""
        if self.given is not None:
            return self.given.tokenizer
        return _tokenizer(self.folder, self.spec.trust_remote_code, self.identity)

    @property
    def is_unchanged(self) -> bool:
        """Whether the files of a local model still are those of `identity`; a commit of the Hub does not change."""
        if self.given is not None or dict(self.identity).keys() == {"hub_id", "commit"}:
            return True
        try:
            return model_identity(self.spec, self.folder) == self.identity
        except (OSError, UsageError):
            return False


@dataclass(frozen=True)
class LoadedModel:
    """A model with kvbench's attention, and a record of it for `environment.json`."""

    model: PreTrainedModel
    record: dict[str, Any]


@dataclass(frozen=True)
class GivenModel(LoadedModel):
    """A model object of the user, with its tokenizer."""

    tokenizer: PreTrainedTokenizerBase


def locate(spec: ModelSpec, dtype: str = "auto") -> Checkpoint:
    """Find the files of a model, or download them once, without loading weights.

    dtype: "auto" is the dtype of the spec or, if that is also "auto", of the checkpoint. Raises UsageError if the model
    is not available or not supported.
    """
    found = _located(spec, dtype)
    if not found.is_unchanged:
        _located.cache_clear()
        found = _located(spec, dtype)
    return found


@lru_cache(maxsize=8)
def _located(spec: ModelSpec, dtype: str) -> Checkpoint:
    if dtype not in DTYPES or spec.dtype not in DTYPES:
        raise unknown("dtype", dtype if dtype not in DTYPES else spec.dtype, list(DTYPES))
    _check_device_map(spec.device_map)
    config = _config(spec, model_folder(spec, CONFIG_FILES))  # checked before gigabytes of weights are downloaded
    chosen = next((d for d in (dtype, spec.dtype) if d != "auto"), None)
    resolved = getattr(torch, chosen) if chosen else config.dtype or torch.float32
    folder = model_folder(spec, WANTED)
    return Checkpoint(spec, folder, config, resolved, model_identity(spec, folder))


def load(checkpoint: Checkpoint, device: torch.device) -> LoadedModel:
    """Load the weights (safetensors only) onto `device`, with kvbench's attention. The last model is cached.

    A `device_map` assigns devices to the layers; prompts are then on `device`. Quantized weights are loaded as the
    checkpoint's `quantization_config` says. Raises UsageError for an unsupported model, invalid weights, or a missing
    package of the quantization.
    """
    if checkpoint.given is not None:
        return checkpoint.given
    key = (checkpoint, device)
    if key not in _last_loaded:
        _last_loaded.clear()  # first, so that two models need not fit into memory
        loaded = _load(checkpoint, device)
        if not checkpoint.is_unchanged:  # its files were read after their digest
            raise UsageError(f"model={checkpoint.spec.name}: {CHANGED}")
        _last_loaded[key] = loaded
    return _last_loaded[key]


_last_loaded: dict[tuple[Checkpoint, torch.device], LoadedModel] = {}  # shared by the runs of a sweep


def _load(checkpoint: Checkpoint, device: torch.device) -> LoadedModel:
    quantized = getattr(checkpoint.config, "quantization_config", None) is not None  # cannot be moved afterwards
    folder = weights_folder(checkpoint.spec, checkpoint.folder)
    try:
        with _unreported():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=checkpoint.dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=checkpoint.spec.trust_remote_code,
                device_map=checkpoint.spec.device_map or ({"": str(device)} if quantized else None),
                ignore_mismatched_sizes=True,  # check_weights refuses them with a better message
                output_loading_info=True,
            )
    except (ImportError, OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"model={checkpoint.spec.name} cannot be loaded: {_reason(error)}") from error
    model, loading = loaded
    with refusing(f"model={checkpoint.spec.name}: "):
        check_weights(loading, folder)
        prepare(model)
    record = {
        "name": checkpoint.spec.name,
        "class": type(model).__name__,
        "folder": str(folder),
        **dict(checkpoint.identity),
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "parameters": model.num_parameters(),
        "trust_remote_code": checkpoint.spec.trust_remote_code,
        "generation_config_unused": unused_fields(model.generation_config),
    }
    if checkpoint.spec.device_map is None and not quantized:
        model.to(device)
    elif checkpoint.spec.device_map is not None:
        record["device_map"] = {part: str(where) for part, where in _placed(model).items()}
    return LoadedModel(model.eval(), record)


def _placed(model: PreTrainedModel) -> Mapping[str, object]:
    """The devices of the model's parts; accelerate sets no map if all of them are on one device."""
    return getattr(model, "hf_device_map", None) or {"": model.device}


def _check_device_map(name: str | None) -> None:
    if name not in DEVICE_MAPS:
        raise UsageError(
            f"model.device_map={name} is not allowed, choose one of {', '.join(map(str, DEVICE_MAPS[1:]))}, or null "
            "for one device"
        )
    if name is not None and find_spec("accelerate") is None:
        raise UsageError(f"model.device_map={name} needs a package that is not installed: pip install accelerate")


def check_weights(loading: Mapping[str, Any], folder: Path) -> None:
    """Raise ValueError unless the tensors of model and checkpoint are the same, with equal shapes.

    loading: the info of `from_pretrained(..., output_loading_info=True)`, in which tied weights are not missing.
    """
    mismatched = [
        f"{name} {list(found)} instead of {list(wanted)}" for name, found, wanted in loading["mismatched_keys"]
    ]
    wrong = {"missing": loading["missing_keys"], "wrong shape": mismatched, "unexpected": loading["unexpected_keys"]}
    problems = [f"{problem}: {_first(sorted(names))}" for problem, names in wrong.items() if names]
    if problems or loading["error_msgs"]:
        raise ValueError(
            f"the weights in {folder} do not fit this model: {'; '.join(problems) or loading['error_msgs'][0]}"
        )


@contextmanager
def _unreported() -> Iterator[None]:
    """Suppress transformers' table of wrong tensors, which `check_weights` reports in one line."""
    reports = logging.getLogger("transformers.modeling_utils")
    reports.addFilter(_is_error)  # a filter, because another level makes transformers check tensor parallelism
    try:
        yield
    finally:
        reports.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _first(names: Sequence[str], most: int = 8) -> str:
    """The first names of a list, and the number of the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _config(spec: ModelSpec, folder: Path) -> Any:  # noqa: ANN401 - transformers' own configuration object
    """The model's configuration. Raises UsageError if it cannot be read or the model is not supported."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=spec.trust_remote_code)
    except Exception as error:  # a damaged file may raise anything in transformers or remote code
        raise UsageError(f"model={spec.name}: {folder}/config.json cannot be used: {_reason(error)}") from error
    with refusing(f"model={spec.name}: "):
        try_out(config)
    return config


@lru_cache(maxsize=2)
def _tokenizer(folder: Path, trust_remote_code: bool, identity: tuple[tuple[str, str], ...]) -> PreTrainedTokenizerBase:
    """identity: of the files, which may be replaced."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"no tokenizer could be loaded from {folder}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The beginning of a library's message, or how to allow remote code if the model needs it."""
    if "trust_remote_code" in str(error):
        return "it needs remote code, which runs only with model.trust_remote_code=true"
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first

"""Model objects of the user as checkpoints: their digest, and kvbench's attention while they are used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvbench.cache.hook import attention
from kvbench.errors import UsageError, refusing
from kvbench.models.answers import unused_fields
from kvbench.models.files import ModelSpec
from kvbench.models.loading import Checkpoint, GivenModel
from kvbench.models.trial import try_out

_WORDS = 2**20  # words that are summed up at once: 8 MiB
_ELSEWHERE = ("_name_or_path", "transformers_version")
"""Fields of a configuration that do not affect what the model computes."""


def given_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> GivenModel:
    """A model object with its tokenizer and the digest of both. Raises ValueError for an unsupported model."""
    name = given_name(model)
    _check_model(model)
    with refusing(f"model={name}: "):
        try_out(model.config)
    record = {
        "name": name,
        "class": type(model).__name__,
        "object": _digest(model, tokenizer),
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": model.num_parameters(),
        "generation_config_unused": unused_fields(model.generation_config),
    }
    return GivenModel(model, record, tokenizer)


def given_name(model: PreTrainedModel) -> str:
    """The name of a model object in tables: the folder or hub name it was loaded from, else its class."""
    return Path(str(model.config.name_or_path or type(model).__name__)).name


def checkpoint_of(given: GivenModel, spec: ModelSpec) -> Checkpoint:
    """A model object as a checkpoint without files."""
    identity = (("object", str(given.record["object"])),)
    return Checkpoint(spec, Path(), given.model.config, given.model.dtype, identity, given)


@contextmanager
def borrowed(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The model with kvbench's attention in evaluation mode. Both settings are restored afterwards.

    Raises ValueError if the model has no weights or does not use transformers' attention interface.
    """
    _check_model(model)
    training = model.training
    try:
        with attention(model):
            yield model.eval()
    finally:
        model.train(training)


def _digest(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over configuration, tokenizer, and the name, shape, dtype and checksum of every tensor."""
    digest = hashlib.sha256()
    for part in (_settings(model), _tokenizer(tokenizer)):
        digest.update(json.dumps(part, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        # quantized models also have settings
        content = _checksum(model, name, tensor) if isinstance(tensor, Tensor) else tensor
        digest.update(
            f"{name} {tuple(getattr(tensor, 'shape', ()))} {getattr(tensor, 'dtype', '')} {content}\0".encode()
        )
    return digest.hexdigest()


def _checksum(model: PreTrainedModel, name: str, tensor: Tensor) -> int:
    """The checksum of a tensor; one that accelerate has offloaded is loaded for it."""
    if not tensor.is_meta:
        return checksum(tensor)
    from accelerate.utils import align_module_device

    place, _, own = name.rpartition(".")
    module = model.get_submodule(place)
    with align_module_device(module, torch.device("cpu")):
        return checksum(getattr(module, own))


def _check_model(model: PreTrainedModel) -> None:
    """Raise UsageError for a model without head, and for a tensor without data that accelerate has not offloaded."""
    if not model.can_generate():
        raise UsageError(
            f"a {type(model).__name__} has no head that predicts tokens: load it with AutoModelForCausalLM"
        )
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta and not hasattr(model.get_submodule(name.rpartition(".")[0]), "_hf_hook"):
            raise UsageError(f"the model has no weights: {name} is on the device meta")


def _settings(model: PreTrainedModel) -> list[Any]:
    parts = [model.config.to_dict()]
    if model.generation_config is not None:  # its keys may be tuples (sequence_bias)
        parts.append(json.loads(model.generation_config.to_json_string(use_diff=False)))
    return [type(model).__name__, *({k: v for k, v in part.items() if k not in _ELSEWHERE} for part in parts)]


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """The settings of a tokenizer that affect tokens or text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content: Any = sorted(tokenizer.get_vocab().items())
    else:
        content = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("truncation", "padding")}
    return [type(tokenizer).__name__, content, tokenizer.special_tokens_map, tokenizer.chat_template]


def checksum(tensor: Tensor) -> int:
    """The sum of a tensor's 8-byte words, each multiplied by an odd number that depends on its index, modulo 2**64.

    It changes with every single bit and is equal on all devices. It is not cryptographic, but a GPU computes it in
    place, while sha256 would need a copy of all weights.
    """
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    odd = torch.arange(1, 2 * min(_WORDS, len(data) // 8 + 1), 2, device=tensor.device)
    total = 0
    for start in range(0, len(data), 8 * _WORDS):
        part = data[start : start + 8 * _WORDS]
        words = pad(part, (0, -len(part) % 8)).view(torch.int64)
        total += int((words * odd[: len(words)]).sum()) + start // 4 * int(words.sum())
    return total % 2**64

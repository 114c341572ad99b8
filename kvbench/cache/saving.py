"""Save a cache to one safetensors file, and load it.

A tensor is stored under the path of its attribute, such as "cache.layers.0.store.memory.keys". The file's metadata
contain, as JSON, all other attributes of the objects, and the model and the policy of the cache.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from kvbench.cache.group import PolicyGroup
from kvbench.cache.layout import kv_shapes
from kvbench.policies.describe import describe
from kvbench.policies.policy import Policy

FORMAT = 13
"""Raised when a saved class or attribute changes its name or meaning. Files of other formats are refused."""
KEY = "kvbench"
CLASSES = ("builtins.dict", "builtins.list", "builtins.tuple", "kvbench.cache.", "kvbench.policies.")
"""The first part of the names of all classes that are saved and loaded."""
OMITTED = {"rule", "isolated", "on_change", "on_evict"}
"""Attributes that belong to the use of a cache. Policies are omitted too, because `load` receives its policy."""


def save(config: PreTrainedConfig, group: PolicyGroup, path: Path) -> None:
    """Write a cache to `path`, atomically: an older file there is replaced only by a complete one.

    Raises ValueError for a cache that failed, within a call or a prompt, and for objects of other packages; OSError if
    the file cannot be written.
    """
    if group.error is not None:
        raise ValueError(f"a cache that failed cannot be saved: {group.error}")
    if group.progress.in_prompt or group.within_call:
        raise ValueError("a cache can be saved only after a whole prompt and between calls of the model")
    tensors: dict[str, Tensor] = {}
    state = _encode(group, "cache", tensors)
    header = {"format": FORMAT, "purpose": _purpose(config, group.policy), "state": state}
    metadata = {KEY: json.dumps({**header, "sha256": _digest(header, tensors)})}
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        save_file(tensors, temporary, metadata)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except SafetensorError as error:  # full disk, no permission, no folder
        raise OSError(f"{path} cannot be written: {str(error).splitlines()[0]}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load(config: PreTrainedConfig, group: PolicyGroup, path: Path, device: torch.device | str) -> None:
    """Set the state of a new cache to that of the file at `path`, with its tensors on `device`.

    Raises ValueError unless `save` wrote the file, for a model of the same shape and the same policy.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    damaged = f"{path} is damaged, or was not written by KVCache.save"
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()[KEY])
            found, digest = header["format"], header.pop("sha256")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(damaged) from error
    if found != FORMAT:
        raise ValueError(f"{path} has format {found}, but this version of kvbench reads format {FORMAT}")
    if digest != _digest(header, tensors):
        raise ValueError(damaged)
    for name, value in _purpose(config, group.policy).items():
        if header["purpose"][name] != value:
            raise ValueError(f"{path} was saved for {name}={header['purpose'][name]}, not {value}")
    _decode(header["state"], {name: x.to(device, copy=True) for name, x in tensors.items()}, group)


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:  # noqa: ANN401
    """A value as JSON; its tensors are added to `tensors`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):  # the order of its dimensions in memory is kept, because it affects rounding
        strides = value.stride()
        order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
        tensors[path] = value.detach().permute(order).cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": path, "order": order}
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if not name.startswith(CLASSES):
        raise ValueError(f"{path} is a {name}, which cannot be saved: only classes of kvbench can")
    return {"class": name, "parts": [[key, _encode(x, f"{path}.{key}", tensors)] for key, x in _parts(value).items()]}


def _decode(plain: Any, tensors: Mapping[str, Tensor], current: Any = None) -> Any:  # noqa: ANN401
    """The inverse of `_encode`. An object of a new cache, `current`, is updated and keeps its omitted attributes."""
    if not isinstance(plain, dict):
        return plain
    if "tensor" in plain:
        order = plain["order"]
        return tensors[plain["tensor"]].permute([order.index(dim) for dim in range(len(order))])
    if not plain["class"].startswith(CLASSES):
        raise ValueError(f"the file contains a {plain['class']}, but only classes of kvbench can be loaded")
    module, _, name = plain["class"].rpartition(".")
    kind = getattr(import_module(module), name)
    old = _parts(current) if type(current) is kind else {}
    parts = {key: _decode(x, tensors, old.get(key)) for key, x in plain["parts"]}
    if kind is dict:
        return parts
    if issubclass(kind, list | tuple):
        return list(parts.values()) if kind is list else tuple.__new__(kind, parts.values())
    made = current if type(current) is kind else object.__new__(kind)
    vars(made).update(parts)
    return made


def _parts(value: Any) -> dict[Any, Any]:  # noqa: ANN401
    """The items of a container, or the saved attributes of an object."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return value
    state = value.__getstate__() or {}
    return {name: x for name, x in state.items() if name not in OMITTED and not isinstance(x, Policy)}


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of a header, and of every tensor with its name, dtype and shape."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _purpose(config: PreTrainedConfig, policy: Policy) -> Any:  # noqa: ANN401
    """The policy, and the fields of a configuration that determine keys and values, apart from the weights."""
    names = "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "sliding_window", "rope_parameters"
    purpose = {f"model.{name}": getattr(config, name, None) for name in names}
    purpose["KV heads and head dim"] = [shape[:2] for shape in kv_shapes(config)]
    purpose |= {f"policy.{name}": value for name, value in describe(policy, without=("name",)).items()}
    return json.loads(json.dumps(purpose))

"""Saving a cache to one safetensors file, and loading it.

The tensors of all sequences and layers lie in the file by the name of where they are held; the header says, as JSON,
what else the objects hold, and for which model and policy. Objects are made anew from their attributes; classes from
outside of kvbench are refused, so that no file can ask for one.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from kvbench.cache.group import PolicyGroup
from kvbench.cache.interface import kv_shapes
from kvbench.policies.describe import describe
from kvbench.policies.policy import Policy

FORMAT = 12
"""Raised whenever what a class holds changes its name or its meaning: older files are then refused."""
KEY = "kvbench"
DERIVED = frozenset(
    (
        *("policy", "names", "layers", "budgets", "progress", "index", "isolated", "on_change", "on_evict", "rule"),
        *("not_numbers", "nan_flags", "_policy", "_layers", "_progress", "_forced", "_rope_switch", "_steps", "_last"),
        *("_memory", "_starts"),
    )
)
"""Attributes that follow from configuration, policy and the other attributes; all others are saved."""


def save(config: PreTrainedConfig, group: PolicyGroup, path: Path) -> None:
    """Write a cache to `path`, which a reader sees whole or not at all; an older file there is replaced.

    Raises ValueError while a prompt is still coming in, and for what cannot be saved.
    """
    _check_between_calls(group)
    tensors: dict[str, Tensor] = {}
    state = {name: _encoded(_attributes(part), name, tensors) for name, part in _parts(group).items()}
    header = {"format": FORMAT, "model": _model(config), "policy": _policy(group.policy), "state": state}
    metadata = {KEY: json.dumps({**header, "sha256": _digest(header, tensors.items())})}
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {path.parent}")
    beside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        save_file(tensors, beside, metadata)
        with beside.open("rb") as written:
            os.fsync(written.fileno())
        beside.replace(path)
    except SafetensorError as error:  # a full disk, or no permission
        raise OSError(f"{path} cannot be written: {str(error).splitlines()[0]}") from error
    finally:
        beside.unlink(missing_ok=True)


def load(config: PreTrainedConfig, group: PolicyGroup, path: Path, device: torch.device | str) -> None:
    """Let the sequences of a new cache hold what the file at `path` has, on `device`.

    Raises ValueError unless it is a file of `save`, for the same kind of model, under the same policy.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if KEY not in metadata:
                raise ValueError(f"{path} is a safetensors file, but none that KVCache.save wrote")
            header = json.loads(metadata[KEY])
            if header["format"] != FORMAT:
                raise ValueError(f"{path} has format {header['format']}, this kvbench reads format {FORMAT}")
            digest = header.pop("sha256")
            if digest != _digest(header, ((name, file.get_tensor(name)) for name in file.keys())):  # noqa: SIM118
                raise ValueError(f"{path} is damaged: its sha256 is not that of its contents")
            _check_same("model", header["model"], _model(config), path)
            _check_same("policy", header["policy"], _policy(group.policy), path)
            for name, part in _parts(group).items():
                vars(part).update(_decoded(header["state"][name], lambda key: file.get_tensor(key).to(device).clone()))
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {path}") from error
    except (OSError, SafetensorError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, or no file of KVCache.save: {str(error).splitlines()[0]}") from error
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: its header does not describe a cache ({error!r})") from error


def _parts(group: PolicyGroup) -> dict[str, object]:
    layers = {f"layers.{index}": layer for index, layer in enumerate(group.layers)}
    return {"sequences": group, "progress": group.progress, "budgets": group.budgets, **layers}


def _attributes(part: object) -> dict[str, Any]:
    return {name: {} if name == "_views" else value for name, value in vars(part).items() if name not in DERIVED}


def _check_between_calls(group: PolicyGroup) -> None:
    """ValueError unless the cache is between two calls, with all of its prompt in."""
    progress = group.progress
    if group.error is not None:
        raise ValueError(f"a cache that failed cannot be saved: {group.error}")
    if not progress.seen:
        raise ValueError("a cache that has seen no token cannot be saved: call the model with it first")
    for row, (seen, end) in enumerate(zip(progress.seen, progress.prompt, strict=True)):
        if seen < end:
            raise ValueError(
                f"a cache cannot be saved while a prompt comes in: {end - seen} tokens of sequence {row} are to come"
            )
    if group.within_call:
        raise ValueError("a cache cannot be saved inside a call of the model, nor after one that broke off")


# --- objects as plain data and tensors -------------------------------------------------------------------------------
def _encoded(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:  # noqa: ANN401
    """A value as what JSON holds; its tensors go into `tensors`, each by its path ("layers.0._store._x")."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):  # products round by the order in which dimensions lie in memory, so it is kept
        strides = value.stride()
        order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
        tensors[path] = value.detach().permute(order).cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": path, "order": order}
    if isinstance(value, dict):
        return {"dict": [[key, _encoded(x, f"{path}.{key}", tensors)] for key, x in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_encoded(x, f"{path}.{i}", tensors) for i, x in enumerate(value)]}
    kind = type(value)
    if not kind.__module__.startswith("kvbench."):
        raise ValueError(f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be written to a file")
    state = value._asdict() if hasattr(value, "_asdict") else _attributes(value)
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "state": _encoded(state, path, tensors)}


def _decoded(plain: Any, tensor: Callable[[str], Tensor]) -> Any:  # noqa: ANN401
    """The value of `_encoded`; `tensor` gives each tensor by its path."""
    if not isinstance(plain, dict):
        return plain
    if "tensor" in plain:
        return tensor(plain["tensor"]).permute([plain["order"].index(dim) for dim in range(len(plain["order"]))])
    if "class" in plain:
        module, _, name = plain["class"].rpartition(".")
        kind = getattr(import_module(module), name) if module.startswith("kvbench.") else {}[plain["class"]]
        state = _decoded(plain["state"], tensor)
        if issubclass(kind, tuple):
            return kind(**state)
        made = object.__new__(kind)
        vars(made).update(state)
        return made
    ((kind, parts),) = plain.items()
    if kind == "dict":
        return {key: _decoded(x, tensor) for key, x in parts}
    return {"list": list, "tuple": tuple}[kind](_decoded(x, tensor) for x in parts)


def _digest(header: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The sha256 of a header, and of every tensor with its name, type and shape."""
    found = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, x in sorted(tensors, key=itemgetter(0)):
        found.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        found.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


# --- what a cache is for ---------------------------------------------------------------------------------------------
def _policy(policy: Policy) -> Any:  # noqa: ANN401
    """All parts and the budget; not the name, which decides nothing."""
    return json.loads(json.dumps(describe(policy, without=("name",))))


def _model(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a configuration that determine keys and values, apart from the weights."""
    names = "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "sliding_window"
    facts = {name: getattr(config, name, None) for name in names}
    facts["kv_heads_and_head_dim"] = [list(shape[:2]) for shape in kv_shapes(config)]
    facts["rope_parameters"] = getattr(config, "rope_parameters", None)
    return dict(json.loads(json.dumps(facts)))


def _check_same(kind: str, saved: Mapping[str, Any], given: Mapping[str, Any], path: Path) -> None:
    """ValueError for the first field in which the file and the new cache differ."""
    for key in chain(saved, given):
        mine, its = saved.get(key), given.get(key)
        if isinstance(mine, dict) and isinstance(its, dict):
            _check_same(f"{kind}.{key}", mine, its, path)
        elif mine != its:
            short = (x["class"].rpartition(".")[2] if isinstance(x, dict) and "class" in x else x for x in (mine, its))
            raise ValueError("{} was saved for {}.{}={}, not {}".format(path, kind, key, *short))

"""A cache as a file: what a document was compressed to, to be asked about later and elsewhere.

A safetensors file, so that nothing in it is ever run. Its tensors are those the layers hold, byte for byte; its one
entry of metadata, `kvbench`, is a JSON header: what the cache was made for, and all it knows beside the tensors. Its
sha256 over both tells a file of which a bit was lost: nothing else could, and the answers would only be a little wrong.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
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
from kvbench.policies.contents import make_all, tell_all
from kvbench.policies.describe import describe
from kvbench.policies.policy import Policy

FORMAT = 9
"""Raise it where what a class holds changes its name or its meaning: older files are then refused."""
KEY = "kvbench"
ROPE = ("rope_type", "rope_theta", "factor", "partial_rotary_factor")
"""What decides how keys were rotated, of the parameters that a configuration may name."""
GIVEN = frozenset(
    (
        *("policy", "names", "layers", "budgets", "progress", "index", "readers", "isolated"),
        *("on_change", "on_evict", "_policy", "_layers", "_progress", "_forced", "_alike", "rule"),
        *("_steps", "_last", "not_numbers"),  # of the last call
    )
)
"""Attributes of sequences and layers that new ones have from configuration and policy; all others are saved."""


def save(kind: str, config: PreTrainedConfig, group: PolicyGroup, path: Path) -> None:
    """Write a cache to `path`, which a reader sees whole or not at all; an older file there is replaced.

    kind: the class of the cache. Raises ValueError while a prompt is still coming in, and for what cannot be saved.
    """
    _check_settled(group)
    tensors: dict[str, Tensor] = {}
    state = {name: tell_all(_state(part), name, tensors) for name, part in _parts(group).items()}
    header = {
        "format": FORMAT,
        "kvbench": _version(),
        "cache": kind,
        "model": _model_facts(config),
        "policy_name": group.policy.name,
        "policy": _described(group.policy),
        "tokens_seen": group.progress.seen,
        "state": state,
    }
    _write(path, tensors, json.dumps({**header, "sha256": _digest(header, tensors.items())}, ensure_ascii=False))


def load(kind: str, config: PreTrainedConfig, group: PolicyGroup, path: Path, device: torch.device | str) -> None:
    """Let the sequences of a new cache hold what the file at `path` says, on `device`.

    Raises ValueError unless it is a file of `save`, for the same kind of model, under the same policy.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = _header(file.metadata() or {}, path)
            digest = header.pop("sha256")
            if digest != _digest(header, ((name, file.get_tensor(name)) for name in file.keys())):  # noqa: SIM118 - no mapping
                raise ValueError(f"{path} is damaged: it holds something else than was saved, its sha256 says")
            _check(header, kind, config, group.policy, path)
            read = partial(_tensor, file, device)
            state = {name: make_all(saved, read) for name, saved in header["state"].items()}
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {path}") from error
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged, or no file of KVCache.save: {str(error).splitlines()[0]}") from error
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: its header does not say what a cache holds ({error!r})") from error
    parts = _parts(group)
    for name, part in parts.items():
        missing = sorted(_state(part).keys() - state.get(name, {}).keys())
        if missing:
            raise ValueError(f"{path} is damaged: it does not say {name}.{missing[0]}")
        vars(part).update(state[name])


def _parts(group: PolicyGroup) -> dict[str, object]:
    """Everything that has a state of its own, by its name in the file."""
    layers = {f"layers.{index}": layer for index, layer in enumerate(group.layers)}
    return {"sequences": group, "progress": group.progress, "budgets": group.budgets, **layers}


def _state(part: object) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if name not in GIVEN}


def _check_settled(group: PolicyGroup) -> None:
    """ValueError unless the cache is between two calls, with all of its prompt in."""
    progress = group.progress
    if group.error is not None:
        raise ValueError(f"a cache that was given up cannot be saved: {group.error}")
    if not progress.seen:
        raise ValueError("a cache that has seen no token cannot be saved: call the model with it first")
    for row, (seen, end) in enumerate(zip(progress.seen, progress.prompt, strict=True)):
        if seen < end:
            raise ValueError(
                f"a cache cannot be saved while a prompt comes in: {end - seen} tokens of sequence {row} are to come"
            )
    if group.within_call:
        raise ValueError("a cache cannot be saved inside a call of the model, nor after one that broke off")


def _version() -> str:
    try:
        return version("kvbench")
    except PackageNotFoundError:  # a checkout that was not installed
        return "of a checkout"


# --- what a cache is for -------------------------------------------------------------------------------------------
def _described(policy: Policy) -> Any:  # noqa: ANN401 - whatever JSON holds
    """All parts and the budget; not the name, which decides nothing."""
    return json.loads(json.dumps(describe(policy, without=("name",))))


def _model_facts(config: PreTrainedConfig) -> dict[str, Any]:
    """What a configuration says of the keys and values of its model. It does not know the weights."""
    dtype = getattr(config, "dtype", None)
    return {
        "model_type": config.model_type,
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "kv_heads_and_head_dim": [list(shape[:2]) for shape in kv_shapes(config)],
        "sliding_window": getattr(config, "sliding_window", None),
        "rope_parameters": _rope(getattr(config, "rope_parameters", None) or {}),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
    }


def _rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters, one set for all layers or one for each kind of them."""
    return {
        name: _rope(value) if isinstance(value, Mapping) else value
        for name, value in parameters.items()
        if isinstance(value, Mapping) or name in ROPE
    }


def _check(header: dict[str, Any], kind: str, config: PreTrainedConfig, policy: Policy, path: Path) -> None:
    """ValueError, in one sentence, for the first thing in which the file and the new cache differ."""
    if header["cache"] != kind:
        raise ValueError(f"{path} holds a {header['cache']}: read it with {header['cache']}.load")
    facts = _model_facts(config)
    if facts["dtype"] is None or header["model"]["dtype"] is None:  # a configuration need not say it
        facts["dtype"] = header["model"]["dtype"]
    other = _difference(header["model"], facts, "")
    if other is not None:
        raise ValueError(
            f"{path} was saved from a model with {other}: load it with the configuration of the model that read it"
        )
    other = _difference(header["policy"], _described(policy), "policy.")
    if other is not None:
        raise ValueError(f"{path} was saved under {other}: load it with the policy that compressed it")


def _difference(saved: Any, given: Any, path: str) -> str | None:  # noqa: ANN401
    """The first difference between plain data, in words; None where there is none."""
    if isinstance(saved, dict) and isinstance(given, dict):
        found = (_difference(saved.get(key), given.get(key), f"{path}{key}.") for key in chain(saved, given))
        return next((difference for difference in found if difference is not None), None)
    return None if saved == given else f"{path[:-1]}={_short(saved)}, not {_short(given)}"


def _short(value: Any) -> str:  # noqa: ANN401
    """A part by the name of its class."""
    return str(value["class"]).rpartition(".")[2] if isinstance(value, dict) and "class" in value else str(value)


# --- the file ------------------------------------------------------------------------------------------------------
def _header(metadata: Mapping[str, str], path: Path) -> dict[str, Any]:
    if KEY not in metadata:
        raise ValueError(f"{path} is a safetensors file, but none that KVCache.save wrote")
    try:
        header = json.loads(metadata[KEY])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: its header is no JSON ({error})") from error
    if header["format"] != FORMAT:
        raise ValueError(
            f"{path} is in format {header['format']} (kvbench {header['kvbench']}), this kvbench "
            f"{_version()} reads format {FORMAT}: compress the document again"
        )
    return dict(header)


def _digest(header: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The sha256 of a header, and of every tensor with its name, type and shape."""
    found = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, x in sorted(tensors, key=itemgetter(0)):
        found.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        found.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _tensor(file: safe_open, device: torch.device | str, name: str) -> Tensor:
    """A tensor of the file with memory of its own on `device`."""
    x: Tensor = file.get_tensor(name)
    return x.clone() if torch.device(device).type == "cpu" else x.to(device)


def _write(path: Path, tensors: dict[str, Tensor], header: str) -> None:
    """Write beside `path`, then move there, so that a kill at any moment leaves the old or the new file."""
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {path.parent}")
    beside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        save_file(tensors, beside, {KEY: header})
        with beside.open("rb") as written:
            os.fsync(written.fileno())
        beside.replace(path)
    except SafetensorError as error:  # a full disk, or no permission
        raise OSError(f"{path} cannot be written: {str(error).splitlines()[0]}") from error
    finally:
        beside.unlink(missing_ok=True)

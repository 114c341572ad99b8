"""The shape of a model's cache, from conf/model or a config.json, without weights or network."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from importlib import resources
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from kvbench.cache.families import layout_of
from kvbench.config.compose import find, names, read
from kvbench.errors import ConfigError, unknown, whole_number
from kvbench.models.trial import layer_shapes, state_bytes

LATENT = {"kv_lora_rank", "qk_rope_head_dim"}  # additional fields of shapes with latents
HYBRID = {"attention_layers", "state_bytes"}  # additional fields of shapes with recurrent layers
MORE: tuple[set[str], ...] = (set(), LATENT, HYBRID, {"state_bytes"})
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class CacheShape:
    """L layers with keys and values, H_kv KV heads, H_q query heads, head dimension D, and dtype.

    Layers that read the cache of another layer are not counted. Layers with latents have one KV head, which stores
    kv_lora_rank and qk_rope_head_dim numbers per token; head_dim is then that of queries. state_bytes: of the states of
    recurrent layers, per sequence. These three fields are 0 for other models. own: if layers differ, the number of KV
    heads and the sizes of key and value of each layer; kv_heads and head_dim are then the values of the first layer.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    state_bytes: int = 0
    own: tuple[tuple[int, int, int], ...] = ()

    @property
    def stored(self) -> tuple[int, int]:
        """Numbers that a KV head stores per token: key and value, or latent and rotated key."""
        latents = self.kv_lora_rank, self.qk_rope_head_dim
        return latents if self.kv_lora_rank else (self.head_dim, self.head_dim)

    def layer(self, index: int) -> tuple[int, int, int]:
        """KV heads of one of the L layers, and the numbers each stores per token."""
        return self.own[index] if self.own else (self.kv_heads, *self.stored)

    @property
    def numbers(self) -> int:
        """Numbers that all layers store per token."""
        return sum(heads * (key + value) for heads, key, value in map(self.layer, range(self.layers)))


def cache_shape(model: str, folders: Sequence[Path] = ()) -> CacheShape:
    """The shape for a name of conf/model, a folder with a config.json, or the path of a config.json.

    folders: folders of --config-dir, searched before conf/. Raises ValueError if there is no shape, or if it is
    incomplete.
    """
    fields = read("model", model, folders) if find("model", model, folders) else {}
    if fields.get("shape"):
        return _of_yaml(model, fields)
    bundled = fields.get("bundled")
    path = Path(str(resources.files("kvbench") / bundled) if bundled else expanduser(fields.get("path") or model))
    path = path / "config.json" if path.is_dir() else path
    try:
        return from_config(json.loads(path.read_text(encoding="utf-8"), object_hook=_special_floats))
    except OSError as error:
        known = [name for name in names("model", folders) if name not in ("hub", "local")]
        raise unknown("model", model, known, "; or a folder with a config.json") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"model={model}: {path} does not define the size of a cache ({why})") from error


def _special_floats(values: dict[str, Any]) -> dict[str, Any] | float:
    """transformers writes infinity in a configuration as {"__float__": "Infinity"}."""
    return float(values["__float__"]) if values.keys() == {"__float__"} else values


def _of_yaml(model: str, fields: Mapping[str, Any]) -> CacheShape:
    """The shape in a file of conf/model."""
    if fields.get("dtype") not in DTYPES:
        raise ValueError(f"model={model} has a shape, so its dtype must be one of {', '.join(DTYPES)}")
    check_shape(fields["shape"])
    shape = dict(fields["shape"])
    layers = shape["layers"] = shape.pop("attention_layers", shape["layers"])
    heads, dims = (_repeated(shape[name], layers) for name in ("kv_heads", "head_dim"))
    shape |= {"kv_heads": heads[0], "head_dim": dims[0]}
    own = tuple(zip(heads, dims, dims, strict=True))
    return CacheShape(**shape, dtype=DTYPES[fields["dtype"]], own=own if len(set(own)) > 1 else ())


def _repeated(value: int | list[int], layers: int) -> list[int]:
    """One number for every layer, from a single number or a repeating pattern."""
    pattern = value if isinstance(value, list) else [value]
    return [pattern[index % len(pattern)] for index in range(layers)]


def check_shape(shape: object) -> None:
    """Raise ConfigError unless the field `shape` of a model has the required whole numbers.

    kv_heads and head_dim may be lists: a pattern that repeats over the layers with keys and values. A model with
    recurrent layers may also have attention_layers and state_bytes; a model with latents has their sizes.
    """
    names = [f.name for f in fields(CacheShape) if f.default is MISSING and f.name != "dtype"]
    more = set(shape) - set(names) if isinstance(shape, Mapping) else None
    if not isinstance(shape, Mapping) or more is None or not set(names) <= set(shape) or more not in MORE:
        may = " or ".join(" and ".join(sorted(some)) for some in (LATENT, HYBRID))
        raise ConfigError("shape", shape, why=f"is not allowed, it must have {', '.join(names)}, and may have {may}")
    for name, value in shape.items():
        pattern = value if name in ("kv_heads", "head_dim") and isinstance(value, list) and value else [value]
        for number in pattern:
            whole_number(f"shape.{name}", number, 1)


def from_config(config: dict[str, Any]) -> CacheShape:
    """The shape from a config.json of transformers. Raises KeyError for a missing field."""
    config = config.get("text_config", config)
    heads = config["num_attention_heads"]
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    known = None
    if config.get("model_type") in CONFIG_MAPPING:
        known = CONFIG_MAPPING[config["model_type"]].from_dict(config).get_text_config(decoder=True)
    if known is None:
        dim = config.get("head_dim") or config["hidden_size"] // max(heads, 1)  # 0 is an error below
        own = [(config.get("num_key_value_heads") or heads, dim, dim)] * config["num_hidden_layers"]
    else:
        shapes = layer_shapes(known)
        own = [shapes[index] for index in layout_of(known).attention]
    shape = {"layers": len(own), "query_heads": heads, "kv_heads": own[0][0], "head_dim": own[0][1]}
    if config.get("kv_lora_rank"):
        shape |= {name: config[name] for name in LATENT}
        shape |= {"kv_heads": 1, "head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"]}
    check_shape(shape)
    states = 0 if known is None else state_bytes(known, DTYPES[dtype])
    found = CacheShape(**shape, dtype=DTYPES[dtype], state_bytes=states)
    return found if set(own) <= {found.layer(0)} else replace(found, own=tuple(own))

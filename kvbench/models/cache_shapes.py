"""The shape of a model's cache, from conf/model or a configuration: no weights and no network needed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from importlib import resources
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from kvbench.cache.layout import layout_of
from kvbench.config.tree import find, names, read
from kvbench.errors import ConfigError, whole_number
from kvbench.models.trial import layer_shapes, state_bytes

LATENT = {"kv_lora_rank", "qk_rope_head_dim"}  # what shapes of layers with latents have beside
HYBRID = {"attention_layers", "state_bytes"}  # what shapes with recurrent layers have beside
MORE: tuple[set[str], ...] = (set(), LATENT, HYBRID, {"state_bytes"})
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class CacheShape:
    """L layers with keys and values, of H_kv KV heads and H_q query heads with head dimension D; dtype of these.

    Layers that read what another one stores are not counted. Layers of latents have one KV head, which stores
    kv_lora_rank and qk_rope_head_dim numbers of a token; D is then that of queries. state_bytes: of the recurrent
    layers' states, for each sequence. Elsewhere these three are 0. own: where layers differ, KV heads of each of the L,
    and numbers of a key and of a value; kv_heads and head_dim are then those of the first.
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
        """Numbers that a KV head stores of a token: of its key and its value, or of its latent and its rotated key."""
        latents = self.kv_lora_rank, self.qk_rope_head_dim
        return latents if self.kv_lora_rank else (self.head_dim, self.head_dim)

    def layer(self, index: int) -> tuple[int, int, int]:
        """KV heads of one of the L layers, and what each stores of a token."""
        return self.own[index] if self.own else (self.kv_heads, *self.stored)

    @property
    def numbers(self) -> int:
        """What all layers together have of a token."""
        return sum(heads * (key + value) for heads, key, value in map(self.layer, range(self.layers)))


def cache_shape(model: str, folders: Sequence[Path] = ()) -> CacheShape:
    """The shape for a name of conf/model, a folder with a config.json, or such a file.

    folders: of --config-dir, searched before conf/. Raises ValueError where there is none, or it does not say what is
    needed.
    """
    said = read("model", model, folders) if find("model", model, folders) else {}
    if said.get("shape"):
        return _of_yaml(model, said)
    bundled = said.get("bundled")
    path = Path(str(resources.files("kvbench") / bundled) if bundled else expanduser(said.get("path") or model))
    path = path / "config.json" if path.is_dir() else path
    try:
        return from_config(json.loads(path.read_text(encoding="utf-8"), object_hook=_special_floats))
    except OSError as error:
        each = {name: read("model", name, folders) for name in names("model", folders)}
        known = (name for name, said in each.items() if said.get("bundled") or said["shape"])
        raise ValueError(
            f"model={model} is neither a model known here ({', '.join(known)}) nor a folder with a config.json"
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"model={model}: {path} does not say the size of a cache ({why})") from error


def _special_floats(said: dict[str, Any]) -> dict[str, Any] | float:
    """transformers writes an infinite number of a configuration as {"__float__": "Infinity"}."""
    return float(said["__float__"]) if said.keys() == {"__float__"} else said


def _of_yaml(model: str, said: Mapping[str, Any]) -> CacheShape:
    """The shape that a file of conf/model says."""
    if said.get("dtype") not in DTYPES:
        raise ValueError(f"model={model} has a shape, so its dtype must be one of {', '.join(DTYPES)}")
    check_shape(said["shape"])
    shape = dict(said["shape"])
    layers = shape["layers"] = shape.pop("attention_layers", shape["layers"])
    heads, dims = (_repeated(shape[name], layers) for name in ("kv_heads", "head_dim"))
    shape |= {"kv_heads": heads[0], "head_dim": dims[0]}
    own = tuple(zip(heads, dims, dims, strict=True))
    return CacheShape(**shape, dtype=DTYPES[said["dtype"]], own=own if len(set(own)) > 1 else ())


def _repeated(said: int | list[int], layers: int) -> list[int]:
    """A number of every layer: the same, or those of a pattern that repeats."""
    pattern = said if isinstance(said, list) else [said]
    return [pattern[index % len(pattern)] for index in range(layers)]


def check_shape(shape: object) -> None:
    """ValueError unless the field `shape` of a model has the whole numbers that the size of a cache depends on.

    kv_heads and head_dim may be lists of numbers, a pattern that repeats over the layers with keys and values. Of
    models with recurrent layers it may also say how many layers have keys and values, and the states' bytes; of
    others the size of latents.
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
    """The shape that a config.json of transformers says. KeyError for what is missing."""
    config = config.get("text_config", config)
    heads = config["num_attention_heads"]
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    known = None
    if config.get("model_type") in CONFIG_MAPPING:
        known = CONFIG_MAPPING[config["model_type"]].from_dict(config).get_text_config(decoder=True)
    if known is None:
        dim = config.get("head_dim") or config["hidden_size"] // max(heads, 1)  # 0 is refused below
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

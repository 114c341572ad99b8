"""Policies by name: from a slug such as `caote_snapkv` to the composed policy.

A slug is a file of conf/policy/, `caote_` / `fastcaote_` in front of one (the wrapper around that preset's scorer), or
a store with its settings, alone or behind either (see `slugs`).
"""

import dataclasses
import math
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module, resources
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from kvbench import slugs
from kvbench.policies.policy import Budget, Policy

Config = dict[str, Any]
WRAPPERS = {"caote": "kvbench.policies.values.caote.Caote", "fastcaote": "kvbench.policies.values.fastcaote.FastCaote"}
BLOCKS, PROMPT = "kvbench.policies.schedule.Blocks", "kvbench.policies.schedule.Prompt"
BASES = {"h2o": "h2o_norecent"}
"""CAOTE's H2O has no recent window, so a wrapper around `h2o` wraps `h2o_norecent`."""
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}


def preset_names() -> list[str]:
    """Every preset that has a file in conf/policy/, sorted."""
    folder = resources.files("kvbench.conf") / "policy"
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


def policy_config(slug: str) -> Config:
    """The composed tree of parts (`_target_` and fields) of a slug; ValueError, naming close matches, if unknown."""
    names = preset_names()
    if slug in names:
        return {**read_preset(slug), "name": slug}
    stored = slugs.parse(slug)
    if stored is not None:
        return _with_store(slug, stored)
    wrapper, _, base = slug.partition("_")
    if wrapper in WRAPPERS and base in names:
        config = policy_config(BASES.get(base, base))
        if config["value"] is not None:
            raise ValueError(f"policy {slug!r} would wrap {base!r}, which is value-aware already")
        config |= {"value": {"_target_": WRAPPERS[wrapper]}, "name": slug}
        if not needs_whole_prompt(config):
            config["schedule"] = {"_target_": BLOCKS, "size": 128, "decode": "evict"}
        return config
    close = get_close_matches(base if wrapper in WRAPPERS else slug, names, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise ValueError(
        f"policy {slug!r} does not exist{hint} (allowed: {', '.join(names)}, and caote_ or fastcaote_ before any that "
        "scores)"
    )


def _with_store(slug: str, stored: slugs.StoreSlug) -> Config:
    """The tree of a store's slug; an eviction in front of it stops once decoding begins, so that groups stay whole."""
    config = read_preset(stored.store)
    config["store"] |= stored.fields
    if stored.eviction:
        store, config = config["store"], policy_config(stored.eviction)
        if config["scorer"] is None and not config.get("filter"):
            raise ValueError(f"policy {slug!r} would store what {stored.eviction!r} keeps, but that evicts nothing")
        config["store"] = store
        config["schedule"]["decode"] = "grow"
    return {**config, "name": slug}


def needs_whole_prompt(config: Config) -> bool:
    """Whether a part of the tree cannot work block by block."""
    if config["scorer"] is None:
        return False
    scorer, allocator = part_class(config["scorer"]["_target_"]), part_class(config["allocator"]["_target_"])
    return bool(scorer.whole_prompt or allocator.needs_statistics)


def read_preset(slug: str) -> Config:
    """The tree of conf/policy/<slug>.yaml; a `defaults` list of other presets is merged in first, as Hydra does."""
    text = (resources.files("kvbench.conf") / "policy" / f"{slug}.yaml").read_text(encoding="utf-8")
    own = yaml.safe_load(text)
    config: Config = {}
    for base in own.pop("defaults", []):
        if base != "_self_":
            merge(config, read_preset(base))
    return merge(config, own)


def merge(config: Config, other: Config) -> Config:
    """Take `other` into `config`, part by part and field by field; returns `config`."""
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            merge(config[key], value)
        else:
            config[key] = value
    return config


def part_class(target: str) -> Any:  # noqa: ANN401
    """The class a `_target_` names."""
    module, _, name = target.rpartition(".")
    return getattr(import_module(module), name)


def build(config: Any) -> Any:  # noqa: ANN401
    """The object a config tree describes. ValueError names a field its part does not have."""
    if not isinstance(config, Mapping):
        return config
    cls = part_class(config["_target_"])
    given = {k: build(v) for k, v in config.items() if k != "_target_"}
    allowed = [f.name for f in dataclasses.fields(cls)]
    for field in given:
        if field not in allowed:
            raise ValueError(f"{cls.__name__} has no field {field!r} (allowed: {', '.join(allowed) or 'none'})")
    check_kinds(cls, given)
    return cls(**given)


def check_kinds(cls: type, given: Mapping[str, Any]) -> None:
    """ValueError for a plain value of another kind than its field declares; the parts check the rest themselves."""
    hints = get_type_hints(cls)
    for field, value in given.items():
        hint = hints[field]
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if all(kind in KINDS for kind in kinds):
            if not any(_is_a(value, kind) for kind in kinds):
                raise ValueError(f"{field} must be {' or '.join(KINDS[kind] for kind in kinds)}, got {value!r}")
        elif all(isinstance(kind, type) for kind in kinds) and not isinstance(value, tuple(kinds)):
            raise ValueError(f"{field}={value} is not a part: choose a policy that has it, then set fields of it")


def _is_a(value: Any, kind: type) -> bool:  # noqa: ANN401
    """Whether a value may stand where `kind` is declared: a whole number may for a number, but true is no number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def build_policy(config: Mapping[str, Any], budget: Budget) -> Policy:
    """The policy of a composed tree with its budget; ValueError for a meaningless combination or budget."""
    policy = build({**config, "budget": budget if config.get("scorer") or config.get("filter") else None})
    if not isinstance(policy, Policy):
        raise ValueError(f"_target_={config['_target_']} is not a policy")
    return policy


def place(config: Config, field: str, value: Any) -> None:  # noqa: ANN401
    """Set a field in the one part of the tree that has it; `part.field` names the part where two have it."""
    part, _, name = field.rpartition(".")
    parts: dict[str, Config] = {k: v for k, v in config.items() if isinstance(v, dict)} | {"": config}
    homes = [k for k, v in parts.items() if any(f.name == name for f in dataclasses.fields(part_class(v["_target_"])))]
    if part:
        homes = [home for home in homes if home == part]
    elif len(homes) > 1:  # a field that takes another part's value while unset is not meant by its bare name
        homes = [h for h in homes if name not in getattr(part_class(parts[h]["_target_"]), "inherits", ())]
    if not homes:
        known = sorted(
            {f.name for v in parts.values() for f in dataclasses.fields(part_class(v["_target_"]))} - set(parts)
        )
        raise ValueError(f"policy {config.get('name')} has no field {field!r} (allowed: {', '.join(known)})")
    if len(homes) > 1:
        raise ValueError(
            f"field {field!r} exists in {' and '.join(homes)}: write {homes[0]}.{name} or {homes[1]}.{name}"
        )
    parts[homes[0]][name] = value


def make_policy(
    slug: str,
    budget: Budget = None,
    *,
    schedule: str | None = None,
    block: float | None = None,
    decode: str | None = None,
    **fields: Any,  # noqa: ANN401
) -> Policy:
    """The policy of a slug: `make_policy("caote_snapkv", budget=2048)`.

    budget: tokens per KV head per layer on average (int), or a share of the prompt (float below 1). schedule: `prompt`
    or `blocks`; block: tokens per block, inf allowed (128 where a preset is switched to blocks); decode: `evict` or
    `grow`; fields go to the part that has them (`window=16`, `**{"scorer.window": 16}` where two parts do).
    Raises ValueError for anything unknown or meaningless.
    """
    config = scheduled(policy_config(slug), schedule, block, decode)
    for field, value in fields.items():
        place(config, field, value)
    return build_policy(config, budget)


def scheduled(config: Config, schedule: object = None, block: object = None, decode: object = None) -> Config:
    """The tree with another schedule, arguments as for `make_policy`, None: its own. Raises ValueError."""
    own = {"_target_": PROMPT, "decode": "evict", **(config.get("schedule") or {})}  # as a policy without one has it
    config = {**config, "schedule": own}
    if schedule not in (None, "prompt", "blocks"):
        raise ValueError(f"schedule must be prompt or blocks, got {schedule!r}")
    if schedule == "prompt" and block is not None:
        raise ValueError(f"block={block} has no meaning with schedule=prompt")
    wants_blocks = schedule == "blocks" or (schedule is None and block is not None)
    if wants_blocks and config["schedule"]["_target_"] != BLOCKS:
        config["schedule"] = {**config["schedule"], "_target_": BLOCKS}
    if schedule == "prompt" and config["schedule"]["_target_"] != PROMPT:
        config["schedule"] = {"_target_": PROMPT, "decode": config["schedule"]["decode"]}
    if block is not None:
        config["schedule"]["size"] = math.inf if block == "inf" else block
    if decode is not None:
        config["schedule"]["decode"] = decode
    return config

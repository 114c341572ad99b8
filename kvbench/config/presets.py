"""Policies by name: from a slug such as `caote_snapkv` to the composed policy.

A slug is a file of conf/policy/, a wrapper of conf/wrapper/ in front of one (`caote_knorm`), or a store with its
settings, alone or behind either (see `slugs`).
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.config import slugs
from kvbench.config.tree import Config, build, field_names, find, names, part_class, read
from kvbench.errors import ConfigError
from kvbench.policies.allocators.allocator import Allocator, JointAllocator, StatisticAllocator
from kvbench.policies.policy import Budget, Policy
from kvbench.terminal.close import close_names

SCHEDULE = ("schedule", "block", "decode", "every", "protect")
"""The fields of a run that give its policy another schedule, as `scheduled` takes them."""
BLOCKS, PROMPT = "kvbench.policies.schedule.Blocks", "kvbench.policies.schedule.Prompt"


def preset_names() -> list[str]:
    """Every preset that has a file in conf/policy/, sorted."""
    return list(names("policy"))


def policy_config(slug: str, folders: Sequence[Path] = ()) -> Config:
    """The composed tree of parts (`_target_` and fields) of a slug; ValueError, naming close matches, if unknown.

    folders: searched before conf/, each with a folder `policy` or `wrapper` of its own, as of --config-dir.
    """
    if find("policy", slug, folders):
        return {**read("policy", slug, folders), "name": slug}
    if stored := slugs.parse(slug, folders):
        return {**_with_store(slug, stored, folders), "name": slug}
    wrapper, base = slugs.wrapped(slug, folders) or ("", slug)
    if wrapper and _exists(base, folders):
        return {**_with_wrapper(slug, wrapper, base, folders), "name": slug}
    known = names("policy", folders)
    close = close_names(base, known)
    hint = f"; did you mean {' or '.join(close)}?" if close else ";"
    wrappers = " or ".join(f"{name}_" for name in names("wrapper", folders))
    raise ValueError(
        f"policy {slug!r} does not exist{hint} `python -m kvbench --help` lists all {len(known)}, and {wrappers} may "
        "stand before any that scores"
    )


def _exists(slug: str, folders: Sequence[Path]) -> bool:
    """Whether a slug is a file of conf/policy/, behind wrappers or not."""
    if find("policy", slug, folders):
        return True
    parts = slugs.wrapped(slug, folders)
    return parts is not None and _exists(parts[1], folders)


def _with_wrapper(slug: str, wrapper: str, base: str, folders: Sequence[Path]) -> Config:
    """The tree of a policy with the wrapper's parts, on its schedule unless a part needs the whole prompt.

    "${allocator}" in a wrapper's part is the policy's own allocator, and so for every part.
    """
    config, added = policy_config(base, folders), read("wrapper", wrapper, folders)
    if added.get("value") and config.get("value"):
        raise ValueError(f"policy {slug!r} would wrap {base!r}, which is value-aware already")
    schedule = added.pop("schedule", None)
    if schedule and not needs_whole_prompt(config):
        config["schedule"] = {**_decoding(config.get("schedule") or {}), **schedule}
    return {**config, **_filled(added, config)}


def _filled(tree: Config, config: Config) -> Config:
    """A wrapper's parts, with those of the policy where they name them."""
    own = {f"${{{name}}}": part for name, part in config.items()}
    filled = {key: _filled(value, config) if isinstance(value, dict) else value for key, value in tree.items()}
    return {key: own.get(value, value) if isinstance(value, str) else value for key, value in filled.items()}


def _with_store(slug: str, stored: slugs.StoreSlug, folders: Sequence[Path]) -> Config:
    """The tree of a store's slug; an eviction in front of it stops once decoding begins, so that groups stay whole."""
    config = read("policy", stored.store, folders)
    config["store"] |= stored.fields
    if stored.eviction:
        store, config = config["store"], policy_config(stored.eviction, folders)
        if not (config.get("scorer") or config.get("pre_pass")):
            raise ValueError(f"policy {slug!r} would store what {stored.eviction!r} keeps, but that evicts nothing")
        config = scheduled({**config, "store": store}, decode="grow")
    return config


def needs_whole_prompt(config: Config) -> bool:
    """Whether a part of the tree cannot work block by block."""
    if not config.get("scorer"):
        return False
    allocator = part_class(config["allocator"]) if config.get("allocator") else Allocator
    return issubclass(allocator, StatisticAllocator | JointAllocator) or build(config["scorer"]).needs.whole_prompt


def build_policy(config: Mapping[str, Any], budget: Budget) -> Policy:
    """The policy of a composed tree with its budget; ValueError for a meaningless combination or budget."""
    counts = any(config.get(part) for part in ("scorer", "pre_pass", "press", "reader"))
    policy = build({**config, "budget": budget if counts else None})
    if not isinstance(policy, Policy):
        raise ConfigError("_target_", config.get("_target_"), why="is not a policy")
    return policy


def _inherits(part: Config, name: str) -> bool:
    """Whether a field of a part takes another part's value while unset."""
    field = getattr(part_class(part), "__dataclass_fields__", {}).get(name)
    return field is not None and bool(field.metadata.get("inherits"))


def place(config: Config, field: str, value: Any) -> None:  # noqa: ANN401
    """Set a field in the one part of the tree that has it; `part.field` names the part where two have it."""
    part, _, name = field.rpartition(".")
    parts: dict[str, Config] = {k: v for k, v in config.items() if isinstance(v, dict)} | {"": config}
    homes = [home for home, tree in parts.items() if name in field_names(tree)]
    if part:
        homes = [home for home in homes if home == part]
    elif len(homes) > 1:  # a field that takes another part's value while unset is not meant by its bare name
        homes = [home for home in homes if not _inherits(parts[home], name)]
    if not homes:
        known = sorted({known for tree in parts.values() for known in field_names(tree)} - set(parts))
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
    config_dir: str | Path | None = None,
    **fields: Any,  # noqa: ANN401
) -> Policy:
    """The policy of a slug: `make_policy("caote_snapkv", budget=2048)`.

    budget: tokens per KV head per layer on average (int), or a share of the prompt (float below 1). schedule: `prompt`
    or `blocks`; block: tokens per block, inf allowed (128 where a preset is switched to blocks); decode: `evict` or
    `grow`; config_dir: a folder of policies of one's own, `policy/mine.yaml`; fields go to the part that has them
    (`window=16`, `**{"scorer.window": 16}` where two parts do).
    Raises ValueError for anything unknown or meaningless.
    """
    folders = [Path(config_dir).expanduser()] if config_dir else []
    config = scheduled(policy_config(slug, folders), schedule, block, decode)
    for field, value in fields.items():
        place(config, field, value)
    return build_policy(config, budget)


def _decoding(schedule: Mapping[str, Any]) -> Config:
    """Of the fields of a schedule those about decoding."""
    return {name: schedule[name] for name in ("decode", "every", "protect") if name in schedule}


def scheduled(
    config: Config,
    schedule: object = None,
    block: object = None,
    decode: object = None,
    every: object = None,
    protect: object = None,
) -> Config:
    """The tree with another schedule, None: its own; every, protect: see `Schedule`. Raises ValueError."""
    own = {"_target_": PROMPT, "decode": "evict", **(config.get("schedule") or {})}  # as a policy without one has it
    config = {**config, "schedule": own}
    if schedule not in (None, "prompt", "blocks"):
        raise ConfigError("schedule", schedule, "prompt or blocks")
    if schedule == "prompt" and block is not None:
        raise ConfigError("block", block, why="has no meaning with schedule=prompt")
    if decode not in (None, "evict", "grow"):
        raise ConfigError("decode", decode, "evict or grow")
    wants_blocks = schedule == "blocks" or (schedule is None and block is not None)
    if wants_blocks and config["schedule"]["_target_"] != BLOCKS:
        config["schedule"] = {**config["schedule"], "_target_": BLOCKS}
    if schedule == "prompt" and config["schedule"]["_target_"] != PROMPT:
        config["schedule"] = {"_target_": PROMPT, **_decoding(config["schedule"])}
    if block is not None:
        if block != "inf" and (isinstance(block, bool) or not isinstance(block, int | float)):
            raise ConfigError("block", block, "a number of tokens >= 1 or inf")
        config["schedule"]["size"] = math.inf if block == "inf" else block
    if decode == "grow":  # nothing returns to the budget, so nothing of how is left
        config["schedule"] = {k: v for k, v in config["schedule"].items() if k not in ("every", "protect")}
    if config.get("scorer", "?") is None and protect in ("prompt", "none"):
        protect = None  # nothing is evicted: `full` beside others is one run, whatever they protect
    given = {"decode": decode, "every": every, "protect": protect}
    config["schedule"] |= {name: value for name, value in given.items() if value is not None}
    return config

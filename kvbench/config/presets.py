"""Policies, models and tasks by name, also those without a file.

The name of a policy is a file of conf/policy/, or is composed of several files (`composed`):
- `caote_knorm`: a wrapper of conf/wrapper/ before a policy;
- `kivi_g32_r128`, `snapkv_kivi_g32`: a policy that only stores, with settings of its store, alone or behind a policy;
- `kvpress/KnormPress`: a policy with names of its own (`named`).
Policies are imported inside functions, because a command line that names none need not wait for torch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin, get_type_hints

from kvbench.config.compose import Config, find, load, names, read, resolved
from kvbench.config.folders import own_folders
from kvbench.config.parts import build, field_names, part_class
from kvbench.errors import ConfigError, UsageError, as_python, instead, unknown

if TYPE_CHECKING:
    from kvbench.policies.policy import Budget, Policy
    from kvbench.policies.stores.store import Store

SCHEDULE = ("schedule", "block", "decode", "every", "protect")
"""The fields of a run that change its policy's schedule, in the order of `scheduled`."""
BLOCKS, PROMPT = "kvbench.policies.schedule.Blocks", "kvbench.policies.schedule.Prompt"
METHOD = ("scorer", "pre_pass", "reader")
"""The parts that use a budget."""
UNIFORM = "kvbench.policies.allocators.uniform.Uniform"
GLOBAL = "kvbench.policies.allocators.global_threshold.GlobalThreshold"


def preset_names() -> list[str]:
    """The sorted names of all files in conf/policy/."""
    return list(names("policy"))


def policy_config(slug: str, folders: Sequence[Path] = ()) -> Config:
    """The configuration of a policy's name with the name. Raises UsageError if it is unknown."""
    return {**named_config("policy", slug, folders), "name": slug}


def composed(slug: str, folders: Sequence[Path] = ()) -> Config | None:
    """The configuration of a name that has no file; None if the name is not composed of known ones."""
    suite, _, own = slug.partition("/")
    if own and find("policy", suite, folders) is not None:
        config = read("policy", suite, folders)
        named = getattr(part_class(config), "named", None) if config.get("_target_") else None
        return None if named is None else {**config, **named(own)}
    words = slug.split("_")
    for first in range(len(words)):
        for last in range(len(words), first, -1):
            store = store_of("_".join(words[first:last]), folders)
            if store is not None:
                return _with_store(slug, "_".join(words[:first]), "_".join(words[first:last]), words[last:], folders)
    wrapper = max((name for name in names("wrapper", folders) if slug.startswith(f"{name}_")), key=len, default="")
    base = slug.removeprefix(f"{wrapper}_")
    if wrapper and (find("policy", base, folders) or composed(base, folders) is not None):
        return _with_wrapper(slug, wrapper, policy_config(base, folders), folders)
    return None


def _with_wrapper(slug: str, wrapper: str, config: Config, folders: Sequence[Path]) -> Config:
    """A policy with the parts of a wrapper, and with its schedule unless a part needs the whole prompt."""
    config = resolved({"policy": config})["policy"]
    added = read("wrapper", wrapper, folders)
    _check_wrapped(slug, wrapper, added, config)
    schedule, own = added.pop("schedule", {}), config.get("schedule") or {}
    if "_target_" not in schedule:  # only how it evicts while decoding, if it does
        config["schedule"] = {**own, **schedule} if own.get("decode", "evict") == "evict" else own
    elif not needs_whole_prompt(config):
        config["schedule"] = _moved(own, schedule["_target_"]) | schedule
    return {**config, **_filled(added, {"allocator": {"_target_": UNIFORM}, **config})}


def _check_wrapped(slug: str, wrapper: str, added: Config, config: Config) -> None:
    """Raise UsageError if a wrapper has nothing to change, or would remove a part that makes the policy what it is."""
    name, wrong = config["name"], f"policy={slug} is not allowed: "
    if not config.get("scorer"):
        raise UsageError(f"{wrong}{name} has no scorer, so {wrapper}_ has nothing to change")
    if added.get("value") and config.get("value"):
        raise UsageError(f"{wrong}{name} is value-aware already")
    if added.get("pre_pass") and config.get("pre_pass"):
        raise UsageError(f"{wrong}{name} has a pre-pass already, which {wrapper}_ would replace")
    if added.get("selection") and config.get("selection"):
        kind = part_class(config["selection"]).__name__
        raise UsageError(f"{wrong}{name} selects tokens by {kind} already, which {wrapper}_ would replace")
    allocator, own = added.get("allocator") or {}, config.get("allocator") or {"_target_": UNIFORM}
    if allocator and "${allocator}" not in allocator.values() and own["_target_"] not in (UNIFORM, GLOBAL):
        kind = part_class(own).__name__
        raise UsageError(f"{wrong}{name} divides its budget by {kind}, which {wrapper}_ would replace")


def _filled(tree: Config, config: Config) -> Config:
    """The parts of a wrapper, with the policy's allocator in place of "${allocator}"."""
    own = {f"${{{name}}}": part for name, part in config.items()}
    filled = {key: _filled(value, config) if isinstance(value, dict) else value for key, value in tree.items()}
    return {key: own.get(value, value) if isinstance(value, str) else value for key, value in filled.items()}


def _with_store(slug: str, eviction: str, name: str, settings: Sequence[str], folders: Sequence[Path]) -> Config:
    """A policy that stores, behind an eviction ("": none), whose schedule stays: the store may refuse it."""
    config = read("policy", name, folders)
    store = part_class(config["store"])
    config["store"] |= dict(_setting(slug, word, name, store) for word in settings)
    if not eviction:
        return config
    before = policy_config(eviction, folders)
    if not (before.get("scorer") or before.get("pre_pass")):
        raise UsageError(f"policy={slug} is not allowed: {eviction} evicts nothing")
    return {**before, "store": config["store"]}


def store_of(name: str, folders: Sequence[Path] = ()) -> type[Store] | None:
    """The class of the store of a preset that only stores (`kivi`); None for other presets and names."""
    if find("policy", name, folders) is None:
        return None
    from kvbench.policies.stores.dense import Dense

    config = read("policy", name, folders)
    if config.get("scorer") or config.get("pre_pass") or not config.get("store"):
        return None
    store: type[Store] = part_class(config["store"])
    return None if store is Dense else store


def _setting(slug: str, word: str, name: str, store: type[Store]) -> tuple[str, Any]:
    """`g32` -> (group, 32), by the store's `slug_letters`."""
    hints = get_type_hints(store)
    for letters, field in store.slug_letters.items():
        value = _value(word.removeprefix(letters), hints[field]) if word.startswith(letters) else None
        if value is not None:
            return field, value
    allowed = ", ".join(f"{letters}... ({field})" for letters, field in store.slug_letters.items()) or "none"
    raise UsageError(f"policy={slug} is not allowed: {name} has no setting {word} (allowed: {allowed})")


def _value(text: str, hint: Any) -> Any:  # noqa: ANN401 - a type and a value of it
    """`text` as a value of a field: `32`, `0.6`, `0-1` or `none` for a sequence; None if it is not one."""
    if get_origin(hint) is not None and issubclass(get_origin(hint), Sequence):
        if re.fullmatch(r"none|\d+(-\d+)*", text):
            return [int(number) for number in text.split("-") if number != "none"]
    elif hint is float:
        return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None
    return int(text) if re.fullmatch(r"\d+", text) else None


def needs_whole_prompt(config: Config) -> bool:
    """Whether a part of the policy cannot work block by block."""
    if not config.get("scorer"):
        return False
    from kvbench.policies.allocators.allocator import Allocator, JointAllocator, StatisticAllocator

    allocator = part_class(config["allocator"]) if config.get("allocator") else Allocator
    return issubclass(allocator, StatisticAllocator | JointAllocator) or build(config["scorer"]).needs.whole_prompt


def build_policy(config: Mapping[str, Any], budget: Budget) -> Policy:
    """The policy of a configuration with its budget. Raises ConfigError for a combination that cannot work."""
    from kvbench.policies.policy import Policy

    generates = getattr(part_class(config), "generator", None) if "_target_" in config else None
    counts = generates is not None or any(config.get(part) for part in METHOD)
    policy = build({**config, "budget": budget if counts else None})
    if not isinstance(policy, Policy):
        raise ConfigError("_target_", config.get("_target_"), why="is not a policy")
    return policy


def check_method(preset: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise ConfigError if a part that makes a preset what it is was removed: it would keep every token, as `full`."""
    for part in METHOD:
        if preset.get(part) and not config.get(part):
            why = "is not allowed: without it the policy is another one, so choose that by name, such as policy=full"
            raise ConfigError(f"policy.{part}", None, why=why)


def _inherits(part: Config, name: str) -> bool:
    """Whether a field of a part takes another part's value while unset."""
    field = getattr(part_class(part), "__dataclass_fields__", {}).get(name)
    return field is not None and bool(field.metadata.get("inherits"))


def place(config: Config, field: str, value: Any) -> None:  # noqa: ANN401
    """Set a field in the part that has it; `part.field` names the part if two have it."""
    part, _, name = field.rpartition(".")
    parts: dict[str, Config] = {k: v for k, v in config.items() if isinstance(v, dict)} | {"": config}
    homes = [home for home, tree in parts.items() if name in field_names(tree)]
    if part:
        homes = [home for home in homes if home == part]
    elif len(homes) > 1:  # a field that takes another part's value while unset is not meant by its bare name
        homes = [home for home in homes if not _inherits(parts[home], name)]
    if not homes:
        known = sorted({known for tree in parts.values() for known in field_names(tree)} - set(parts))
        raise UsageError(f"policy {config.get('name')} has no field {field!r}{instead(name, known, noun='field')}")
    if len(homes) > 1:
        raise UsageError(f"{field!r} exists in {' and '.join(homes)}: write {homes[0]}.{name} or {homes[1]}.{name}")
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
    """The policy of a name: `make_policy("caote_snapkv", budget=2048)`.

    budget: tokens per KV head per layer on average (int), or a share of the prompt (float below 1). schedule: `prompt`
    or `blocks`; block: tokens per block, inf allowed (128 where a preset is switched to blocks); decode: `evict` or
    `grow`; config_dir: a folder with your policies, `policy/mine.yaml`; fields go to the part that has them
    (`window=16`, `**{"scorer.window": 16}` where two parts do).
    Raises ValueError for an unknown name or field and for a wrong value.
    """
    if not isinstance(slug, str):
        raise ConfigError("policy", slug if slug is None else type(slug), "a name")
    folders = own_folders(config_dir)
    preset, budget = scheduled(policy_config(slug, folders), schedule, as_python(block), decode), as_python(budget)
    config = dict(preset)
    for field, value in fields.items():
        place(config, field, as_python(value))
    check_method(preset, config)
    return build_policy(resolved({"policy": config, "budget": budget})["policy"], budget)


def _moved(schedule: Mapping[str, Any], target: str) -> Config:
    """A schedule as another class, without the fields that only its own class has."""
    gone = {*field_names(schedule)} - {*field_names({"_target_": target})}
    return {name: value for name, value in schedule.items() if name not in gone} | {"_target_": target}


def scheduled(
    config: Config,
    schedule: object = None,
    block: object = None,
    decode: object = None,
    every: object = None,
    protect: object = None,
) -> Config:
    """The configuration with another schedule; None: the policy's own; every, protect: see `Schedule`."""
    own = {"_target_": PROMPT, "decode": "evict", **(config.get("schedule") or {})}  # the default of a policy
    config = {**config, "schedule": own}
    if schedule not in (None, "prompt", "blocks"):
        raise ConfigError("schedule", schedule, "prompt or blocks")
    if schedule == "prompt" and block is not None:
        raise ConfigError("block", block, why="has no meaning with schedule=prompt")
    if decode not in (None, "evict", "grow", "threshold", "share"):
        raise ConfigError("decode", decode, "evict, grow, threshold or share")
    wants_blocks = schedule == "blocks" or (schedule is None and block is not None)
    if wants_blocks or schedule == "prompt":
        config["schedule"] = own = _moved(own, BLOCKS if wants_blocks else PROMPT)
    if block is not None:
        if block != "inf" and (isinstance(block, bool) or not isinstance(block, int | float)):
            raise ConfigError("block", block, "a number of tokens >= 1 or inf")
        own["size"] = math.inf if block == "inf" else block
    if decode in ("grow", "threshold"):  # no token makes room for another, so `every` and `protect` have no meaning
        config["schedule"] = own = {k: v for k, v in own.items() if k not in ("every", "protect")}
    if config.get("scorer", "?") is None and protect is not None:
        from kvbench.policies.protections import PROTECTIONS

        protect = None if protect in PROTECTIONS else protect  # nothing is evicted: `full` is one run for all values
    given = {"decode": decode, "every": every, "protect": protect}
    own |= {name: value for name, value in given.items() if value is not None}
    return config


def composed_config(group: str, name: str, folders: Sequence[Path] = ()) -> Config | None:
    """The configuration of a composed name: `model=/folder`, `task=lm_eval/gsm8k`, `policy=caote_knorm`; else None.

    folders: searched before conf/ for the files of its parts.
    """
    if group == "model":
        path = os.path.expanduser(name)
        return {**read("model", "hub"), "path": path} if path.startswith(("/", ".")) else None
    if group == "task":
        suite, _, own = name.partition("/")
        file = find("task", suite, folders)
        if not own or file is None or "_target_" not in load(file):
            return None
        config = read("task", suite, folders)
        field = getattr(part_class(config), "named_by", None)  # the field for names of a suite's own
        return None if field is None else {**config, field: own, "name": name.replace("/", "_")}
    found = composed(name, folders)
    return None if found is None else {key: value for key, value in found.items() if key != "name"}


def named_config(group: str, name: str, folders: Sequence[Path] = ()) -> Config:
    """The configuration of `group=name`, of a file or composed. Raises UsageError if there is none."""
    found = None if find(group, name, folders) else composed_config(group, name, folders)
    if found is None and group == "policy" and not find(group, name, folders):
        more = "; prefixes such as ada_ and caote_ can be put before a policy that scores"
        raise unknown(group, name, names(group, folders), more)
    return read(group, name, folders) if found is None else found

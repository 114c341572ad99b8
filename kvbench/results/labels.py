"""Names of runs: model, policy and task are the names of presets; fields that differ have separate columns.

Titles and legends, which have no columns, combine name and fields.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from kvbench.terminal.escapes import visible

NAMED = ("model", "policy", "task")
_LABELS = {"policy": "policy", "task": "task", "model": "model", "generation": "model"}
"""The label that contains a field of the identity. The model's also has the dtype; other fields follow the policy's."""
POLICY = "kvbench.policies.policy.Policy"
"""The class of policies that kvbench computes."""
_SCHEDULE = ("policy.schedule", "policy.schedule.size", "policy.schedule.decode", "policy.schedule.every")
_SILENT = (*_SCHEDULE, "budget", "code", "task.name")  # have a separate column, or are the name
_LONGEST = 40  # characters of a value; of a longer value, the end is shown, where paths differ


@dataclass(frozen=True)
class Naming:
    """The names of a run's presets.

    changed: fields that differ from the presets, such as "policy.scorer.window". reads: for given texts, the text in
    place of the schedule ("m=4", or "" without eviction); None if answers are generated.
    """

    policy: str
    model: str
    task: str
    changed: tuple[str, ...] = ()
    reads: str | None = None

    def __post_init__(self) -> None:
        """Names are shown in terminals, tables and figures: see `visible`."""
        for name in NAMED:
            if isinstance(text := getattr(self, name), str):  # a file may hold anything
                object.__setattr__(self, name, visible(text))


def names(naming: Naming, identity: Mapping[str, Any], also: Collection[str] = ()) -> dict[str, str]:
    """The labels of a run for titles and legends: "snapkv(scorer.window=16)", "pocket", "niah(lengths=[512])".

    also: further fields to show.
    """
    fields = flat(identity)
    labels = {}
    for name in NAMED:
        shown = [k for k in fields if k in {*naming.changed, *also} and label_of(k) == name]
        text = ", ".join(f"{k.partition('.')[2] or k}={text_of(fields[k])}" for k in shown if k not in _SILENT)
        labels[name] = getattr(naming, name) + (f"({text})" if text else "")
    if keeps_all(identity) and naming.policy != "full":
        labels["policy"] += " = full"
    if reads_by_oracle(identity):
        labels["policy"] += " (upper bound)"
    return labels


def label_of(key: str) -> str:
    """The label ("model", "policy", "task") that contains a field with this dotted name; "" if none does."""
    return "model" if key == "dtype" else _LABELS.get(_root(key), "")


def reads_by_oracle(identity: Mapping[str, Any]) -> bool:
    """Whether sparse attention selects tokens by their true attention: an upper bound, not a method."""
    reader = identity["policy"].get("reader") or {}
    return str(reader.get("class", "")).rpartition(".")[2].startswith("Oracle")


def evicts(identity: Mapping[str, Any]) -> bool:
    """Whether the policy keeps fewer tokens than it has seen."""
    policy = identity["policy"]
    scored = identity["budget"] is not None or policy.get("scorer") is not None
    return scored and (policy.get("reader") is None or policy.get("scorer") is not None)


def keeps_all(identity: Mapping[str, Any]) -> bool:
    """Whether the run is one of the full cache, whatever its name: nothing is evicted or quantized."""
    policy = identity["policy"]
    others = any(policy.get(part) is not None for part in ("pre_pass", "reader"))
    own = str(policy.get("class", POLICY)).split(".")[-1] == "Policy" and policy.get("scorer", "") is None
    return own and not others and policy["store"]["class"].split(".")[-1] == "Dense"


def compressed(identity: Mapping[str, Any]) -> str:
    """What the policy compressed: the "prompt", or the "context" before its question."""
    return str(identity.get("compress", "prompt"))


def schedule(identity: Mapping[str, Any]) -> str:
    """When a policy evicts from the prompt: "prompt", "one block", "blocks of 128"."""
    size = identity["policy"]["schedule"].get("size")
    if own := identity["policy"].get("moments"):
        return str(own[0])
    return "prompt" if size is None else "one block" if size == inf else f"blocks of {size:g}"


def briefly(identity: Mapping[str, Any]) -> str:
    """What a policy evicts from, and when: "whole prompt", "blocks of 128", "whole context", "context in one block"."""
    what, when = compressed(identity), schedule(identity)
    if when == "prompt":
        return f"whole {what}"
    return when if what == "prompt" or when == "decoding" else f"{what} in {when}"


def moments(identity: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """When a policy evicts from the prompt ("prompt", "blocks of 128") and while decoding ("evict every 128", "grow").

    None if nothing is evicted, or if the run does not record it.
    """
    part = identity["policy"].get("schedule")
    if part is None or not evicts(identity):
        return None, None
    if own := identity["policy"].get("moments"):
        return str(own[0]), str(own[1])
    every = part.get("every", 1)
    return schedule(identity), str(part["decode"]) if every == 1 else f"{part['decode']} every {every}"


def usual(seen: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The most frequent schedule and decoding rule; of equally frequent ones the first by name."""
    schedules, decodes = (sorted(moment[place] for moment in seen) for place in (0, 1))
    return max(schedules, key=schedules.count, default=""), max(decodes, key=decodes.count, default="")


def in_words(moment: str) -> str:
    """A schedule or a decoding rule, as written by `moments` or `briefly`, as a phrase."""
    what, at = ("context", moment.removeprefix("context in ")) if "context" in moment else ("prompt", moment)
    known = {
        "prompt": "evicted after the whole prompt",
        f"whole {what}": f"evicted after the whole {what}",
        "one block": f"evicted after the whole {what}, as one block",
        "evict": "one token evicted for each decoded one",
        "grow": "all decoded tokens kept",
        "decoding": "prompt and answer evicted while decoding",
        "press": "decoded tokens evicted by the press",
        "threshold": "decoded tokens evicted below the threshold",
        "share": "decoding returns to the budget's share of all tokens seen so far",
    }
    if at.startswith("m="):
        return f"evicted after every {at.removeprefix('m=')} scored tokens"
    if at.startswith("evict every "):
        many = at.removeprefix("evict every ")
        return f"{many} tokens evicted when the budget is exceeded by {many}"
    words = known.get(at, f"evicted after {at.replace('blocks', 'every block')} tokens of the {what}")
    return f"{words}, before its question" if what == "context" else words


def natural(text: str) -> tuple[tuple[int, str], ...]:
    """A key that sorts numbers in names by value: seed=2 before seed=10."""
    return tuple((int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", text))


def budget_order(budget: float | None) -> tuple[bool, float]:
    """A key that sorts budgets: none (the full cache), then by number (shares of the prompt before tokens)."""
    return budget is not None, float(budget or 0)


def differing(rows: Sequence[tuple[Naming, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """For each run, the fields (dotted names) that differ from its presets, or between these runs.

    Fields of policy, task and model are compared between runs of the same policy, task or model. Schedule, budget and
    names are left out; "code" is included only if two runs differ in nothing else.
    """
    fields = [flat(identity) for _, identity in rows]
    shown: list[set[str]] = [set(naming.changed) for naming, _ in rows]
    for label in (*NAMED, ""):
        own = [{k: _key(v) for k, v in f.items() if _LABELS.get(_root(k), "") == label} for f in fields]
        for members in _equal([getattr(naming, label, "") for naming, _ in rows]):
            for key in {key for row in members for key in own[row]}:
                having = [row for row in members if key in own[row]]
                if len({own[row][key] for row in having}) > 1:
                    for row in having:
                        shown[row].add(key)
    shown = [keys.difference(_SILENT) for keys in shown]
    presets = [[getattr(naming, name) for name in NAMED] for naming, _ in rows]
    for members in _equal([_key({**f, "code": None, "presets": p}) for f, p in zip(fields, presets, strict=True)]):
        if len({_key(fields[row].get("code")) for row in members}) > 1:
            for row in members:
                shown[row].add("code")
    return [{k: v for k, v in f.items() if k in keys} for f, keys in zip(fields, shown, strict=True)]


def flat(described: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A nested description as fields with dotted names; the value of a part is the short name of its class."""
    found: dict[str, Any] = {}
    for key, value in described.items():
        name = f"{above}.{key}" if above else key
        if isinstance(value, Mapping) and "class" in value:
            of = str(value["class"])
            found[name] = of.rpartition(".")[2] if of.startswith(("kvbench.", "kvpress.")) else of
            found |= flat({k: v for k, v in value.items() if k != "class"}, name)
        elif isinstance(value, Mapping) and value:
            found |= flat(value, name)
        else:
            found[name] = value
    return found


def text_of(value: object) -> str:
    """A field's value in a label or a table."""
    is_plain = isinstance(value, str) and value.isprintable()
    text = str(value) if is_plain else json.dumps(value, separators=(",", ":"))
    return text if len(text) <= _LONGEST else f"...{text[-_LONGEST:]}"


def _key(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _root(key: str) -> str:
    return key.partition(".")[0]


def _equal(keys: Sequence[str]) -> list[list[int]]:
    """Groups of the indices of equal keys."""
    members: defaultdict[str, list[int]] = defaultdict(list)
    for row, key in enumerate(keys):
        members[key].append(row)
    return list(members.values())

"""Names of runs: model, policy and task are the presets' names; fields that differ are told apart from them.

Tables have a column for every field that differs. Titles and legends, which have no columns, combine name and fields.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

DENSE = "kvbench.policies.stores.dense.Dense"
NAMED = ("model", "policy", "task")
HOMES = {"policy": "policy", "task": "task", "model": "model", "generation": "model"}
"""Which label combines a field of the identity with the name; other fields follow the policy's label."""
WHEN = ("policy.schedule", "policy.schedule.size", "policy.schedule.decode", "policy.schedule.every")
_SILENT = (*WHEN, "budget", "code", "task.name")  # have a column of their own, or are the name
_LONGEST = 40  # characters of a value; of a longer one the end is shown, which tells paths apart


@dataclass(frozen=True)
class Naming:
    """The names of a run's presets.

    changed: fields that differ from the presets, such as "policy.scorer.window". reads: what stands for the schedule
    where given texts are scored ("m=4"), "" where nothing is evicted then, None where answers are generated.
    """

    policy: str
    model: str
    task: str
    changed: tuple[str, ...] = ()
    reads: str | None = None


def names(naming: Naming, identity: Mapping[str, Any], also: Collection[str] = ()) -> dict[str, str]:
    """The labels of a run for titles and legends: "snapkv(scorer.window=16)", "pocket", "niah(lengths=[512])".

    also: fields to show although they are the preset's.
    """
    fields = flat(identity)
    labels = {}
    for name in NAMED:
        shown = [k for k in fields if k in {*naming.changed, *also} and HOMES.get(_root(k)) == name]
        text = ", ".join(f"{k.partition('.')[2]}={text_of(fields[k])}" for k in shown if k not in _SILENT)
        labels[name] = getattr(naming, name) + (f"({text})" if text else "")
    if keeps_all(identity) and naming.policy != "full":
        labels["policy"] += " = full"
    if reads_by_oracle(identity):
        labels["policy"] += " (upper bound)"
    return labels


def reads_by_oracle(identity: Mapping[str, Any]) -> bool:
    """Whether a policy chooses what to read by the attention itself: an upper bound, no method."""
    reader = identity["policy"].get("reader") or {}
    return str(reader.get("class", "")).rpartition(".")[2].startswith("Oracle")


def evicts(identity: Mapping[str, Any]) -> bool:
    """Whether the policy keeps fewer tokens than it has seen."""
    policy = identity["policy"]
    scored = identity["budget"] is not None or policy.get("scorer") is not None
    return scored and (policy.get("reader") is None or policy.get("scorer") is not None)


def keeps_all(identity: Mapping[str, Any]) -> bool:
    """Whether the run is one of the full cache, whatever its name: nothing is evicted, tokens are stored as made."""
    policy = identity["policy"]
    read = policy.get("pre_pass") or policy.get("filter") or policy.get("reader")  # filter: in results of old versions
    whole = policy.get("scorer", "?") is None and read is None and policy.get("press") is None
    return whole and policy["store"]["class"] == DENSE


def compressed(identity: Mapping[str, Any]) -> str:
    """What the policy compressed: the prompt, or the context before its question."""
    return str(identity.get("compress", "prompt"))  # absent in results of old versions


def schedule(identity: Mapping[str, Any]) -> str:
    """When a policy evicts from the prompt: "prompt", "one block", "blocks of 128"."""
    size = identity["policy"]["schedule"].get("size")
    return "prompt" if size is None else "one block" if size == inf else f"blocks of {size:g}"


def briefly(identity: Mapping[str, Any]) -> str:
    """What a policy evicts from, and when: "whole prompt", "blocks of 128", "whole context", "context in one block"."""
    what, when = compressed(identity), schedule(identity)
    if when == "prompt":
        return f"whole {what}"
    return when if what == "prompt" else f"{what} in {when}"


def moments(identity: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """When a policy evicts from the prompt ("prompt", "blocks of 128") and while decoding ("evict every 128", "grow").

    None where nothing is evicted, or where the run does not record it.
    """
    part = identity["policy"].get("schedule")
    if part is None or not evicts(identity):
        return None, None
    every = part.get("every", 1)  # absent in results of old versions
    return schedule(identity), str(part["decode"]) if every == 1 else f"{part['decode']} every {every}"


def parted(name: str) -> tuple[str, str]:
    """Name and schedule of a policy from a label of an old version: "snapkv(kernel=5) (blocks of 128, evict)"."""
    found = re.search(r" \(([^()]*)\)(?= = full$|$)", name)
    return name.partition("(")[0].strip(), "" if found is None else found[1]


def usual(seen: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The most frequent schedule and decoding rule; of equally frequent ones the first by name."""
    schedules, decodes = (sorted(moment[place] for moment in seen) for place in (0, 1))
    return max(schedules, key=schedules.count, default=""), max(decodes, key=decodes.count, default="")


def in_words(moment: str) -> str:
    """A schedule or a decoding rule, as `moments` or `briefly` writes it, as a phrase."""
    what, at = ("context", moment.removeprefix("context in ")) if "context" in moment else ("prompt", moment)
    known = {
        "prompt": "evicted once the whole prompt is in",
        f"whole {what}": f"evicted once the whole {what} is in",
        "one block": f"evicted once the whole {what} is in, as one block",
        "evict": "one token evicted for each decoded one",
        "grow": "decoded tokens all kept",
    }
    if at.startswith("m="):
        return f"evicted after every {at.removeprefix('m=')} scored tokens"
    if at.startswith("evict every "):
        many = at.removeprefix("evict every ")
        return f"{many} tokens evicted once {many} are held beyond the budget"
    words = known.get(at, f"evicted after {at.replace('blocks', 'every block')} tokens of the {what}")
    return f"{words}, before its question" if what == "context" else words


def natural(text: str) -> tuple[tuple[int, str], ...]:
    """A key that sorts numbers in names by value: seed=2 before seed=10."""
    return tuple((int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", text))


def budget_order(budget: float | None) -> tuple[bool, float]:
    """A key that sorts budgets: none (the full cache), then by number (shares of the prompt before tokens)."""
    return budget is not None, float(budget or 0)


def differing(rows: Sequence[tuple[Naming, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """For each run, the fields (dotted names) that set it apart: from its presets, or from another run of these.

    Fields of policy, task and model are compared between runs of the same policy, task or model. Schedule, budget and
    names are left out; "code" is included only where two runs differ in nothing else.
    """
    fields = [flat(identity) for _, identity in rows]
    shown: list[set[str]] = [set(naming.changed) for naming, _ in rows]
    for home in (*NAMED, ""):
        own = [{k: _key(v) for k, v in f.items() if HOMES.get(_root(k), "") == home} for f in fields]
        for members in _alike([getattr(naming, home, "") for naming, _ in rows]):
            values: defaultdict[str, set[str]] = defaultdict(set)
            for key, value in (pair for row in members for pair in own[row].items()):
                values[key].add(value)
            for row in members:
                shown[row] |= {key for key in own[row] if len(values[key]) > 1}
    shown = [keys.difference(_SILENT) for keys in shown]
    presets = [[getattr(naming, name) for name in NAMED] for naming, _ in rows]
    for members in _alike([_key({**f, "code": None, "presets": p}) for f, p in zip(fields, presets, strict=True)]):
        if len({_key(fields[row].get("code")) for row in members}) > 1:
            for row in members:
                shown[row].add("code")
    return [{k: v for k, v in f.items() if k in keys} for f, keys in zip(fields, shown, strict=True)]


def flat(described: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A described part as fields with dotted names; a part of its own stands there by its class, which is shortened."""
    found: dict[str, Any] = {}
    for key, value in described.items():
        name = f"{above}.{key}" if above else key
        if isinstance(value, Mapping) and "class" in value:
            found[name] = _class(str(value["class"]))
            found |= flat({k: v for k, v in value.items() if k != "class"}, name)
        elif isinstance(value, Mapping) and value:
            found |= flat(value, name)
        else:
            found[name] = value
    return found


def text_of(value: object) -> str:
    """A field's value in a label or a table."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return text if len(text) <= _LONGEST else f"...{text[-_LONGEST:]}"


def _class(name: str) -> str:
    return name.rpartition(".")[2] if name.startswith(("kvbench.", "kvpress.")) else name


def _key(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _root(key: str) -> str:
    return key.partition(".")[0]


def _alike(keys: Sequence[str]) -> list[list[int]]:
    """The rows with equal keys, together."""
    members: defaultdict[str, list[int]] = defaultdict(list)
    for row, key in enumerate(keys):
        members[key].append(row)
    return list(members.values())

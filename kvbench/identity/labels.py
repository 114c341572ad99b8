"""What tables call a run: its preset, the fields that are not the preset's, and those that differ between rows."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

DENSE = "kvbench.policies.stores.dense.Dense"
HOMES = {"policy": "policy", "task": "task", "model": "model", "generation": "model"}
"""In whose label a part of the identity is told; what has no label of its own becomes a column."""
_ELSEWHERE = ("budget", "code")  # a column of its own; told only where nothing else differs
_WHEN = ("policy.schedule", "policy.schedule.size", "policy.schedule.decode", "policy.schedule.every")
"""Fields told behind the name, in words."""
_LONGEST = 40  # characters of a value: of a longer one the end, which tells paths apart


@dataclass(frozen=True)
class Naming:
    """What a run's labels are made of.

    policy, model, task: presets' names. changed: fields that are not as the presets have them, such as
    "policy.scorer.window". reads: what stands for the schedule where given texts are scored ("m=4"), "" where nothing
    does, None where answers are generated.
    """

    policy: str
    model: str
    task: str
    changed: tuple[str, ...] = ()
    reads: str | None = None


def names(naming: Naming, identity: Mapping[str, Any], also: Collection[str] = ()) -> dict[str, str]:
    """The labels of one run: policy, model, task. also: fields to show though they are the preset's."""
    fields = flat(identity)
    shown = [key for key in fields if key in naming.changed or key in also]
    named = {name: getattr(naming, name) for name in ("policy", "model", "task")}
    for name in named:
        told = [key for key in shown if HOMES.get(_root(key)) == name and key not in (*_WHEN, "task.name")]
        if told:
            named[name] += f"({', '.join(f'{_below(key)}={_text(fields[key])}' for key in told)})"
    when = _when(identity, shown if evicts(identity) else also) if naming.reads is None else naming.reads
    named["policy"] += f" ({when})" if when else ""
    if keeps_all(identity) and naming.policy != "full":
        named["policy"] += " = full"
    return named


def evicts(identity: Mapping[str, Any]) -> bool:
    """Whether the policy keeps fewer tokens than it has seen."""
    return identity["budget"] is not None or identity["policy"].get("scorer") is not None


def keeps_all(identity: Mapping[str, Any]) -> bool:
    """Whether what ran is the full cache, whatever its name: nothing is evicted, and tokens are stored as made."""
    policy = identity["policy"]
    read = policy.get("pre_pass") or policy.get("filter")  # as older versions say it
    whole = policy.get("scorer", "?") is None and read is None and policy.get("press") is None
    return whole and policy["store"]["class"] == DENSE


def compressed(identity: Mapping[str, Any]) -> str:
    """What the policy compressed: the prompt, or the context before its question; older runs do not say."""
    return str(identity.get("compress", "prompt"))


def schedule(identity: Mapping[str, Any]) -> str:
    """When a policy evicts from the prompt."""
    size = identity["policy"]["schedule"].get("size")
    return "prompt" if size is None else "one block" if size == inf else f"blocks of {size:g}"


def briefly(identity: Mapping[str, Any]) -> str:
    """What a policy evicts from, and when: "whole prompt", "blocks of 128", "whole context", "context in one block"."""
    what, words = compressed(identity), schedule(identity)
    if words == "prompt":
        return f"whole {what}"
    return words if what == "prompt" else f"{what} in {words}"


def moments(identity: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """When a policy evicts from the prompt ("prompt", "blocks of 128"), and how decoding does ("evict every 128").

    None where it does not evict, or does not say.
    """
    part = identity["policy"].get("schedule")
    return (schedule(identity), _decoding(part)) if part is not None and evicts(identity) else (None, None)


def _decoding(part: Mapping[str, Any]) -> str:
    """What decoding does under a schedule; older runs do not say how often."""
    every = part.get("every", 1)
    return str(part["decode"]) if every == 1 else f"{part['decode']} every {every}"


def when(naming: Naming | None, identity: Mapping[str, Any]) -> str:
    """Schedule and decoding rule, "blocks of 128, evict", or "m=4" where given texts are scored.

    Only rows that share it are comparable. "" where nothing is evicted, or the run does not say when.
    """
    if naming is not None and naming.reads is not None:
        return naming.reads
    decode = moments(identity)[1]
    return "" if decode is None else f"{briefly(identity)}, {decode}"


def parted(name: str) -> tuple[str, str]:
    """A policy's label without the words on when it evicts, and these: ("snapkv", "blocks of 128, evict")."""
    found = re.search(r" \(([^()]*)\)(?= = full$|$)", name)
    return (name, "") if found is None else (name[: found.start()] + name[found.end() :], found[1])


def usual(moments_seen: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The schedule and the decoding rule that most have; of equally many the first by name, "" where there is none."""
    schedules, decodes = (sorted(moment[place] for moment in moments_seen) for place in (0, 1))
    return max(schedules, key=schedules.count, default=""), max(decodes, key=decodes.count, default="")


def in_words(moment: str) -> str:
    """A schedule or a decoding rule in words, as `moments` or `briefly` tells it."""
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
    """Sorts names as people do: seed=2 before seed=10."""
    return tuple((int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", text))


def budget_order(budget: float | None) -> tuple[bool, float]:
    """Sorts budgets as numbers: none (the full cache first), shares of the prompt, tokens."""
    return budget is not None, float(budget or 0)


def differing(rows: Sequence[tuple[Naming, Mapping[str, Any]]]) -> list[set[str]]:
    """For every row of a table the fields in which it differs from another one, beyond the presets' names and budgets.

    Fields of policy, task and model are compared between the rows that name the same one, the schedule between all
    that evict. "code" is among them where two rows have nothing else that tells them apart.
    """
    fields = [flat(identity) for _, identity in rows]
    found: list[set[str]] = [set() for _ in rows]
    for home in ("policy", "task", "model", ""):
        own = [{k: _key(v) for k, v in f.items() if HOMES.get(_root(k), "") == home} for f in fields]
        for members in _alike([getattr(naming, home, "") for naming, _ in rows]):
            values: defaultdict[str, set[str]] = defaultdict(set)
            for key, value in (pair for row in members for pair in own[row].items()):
                values[key].add(value)
            for row in members:
                found[row] |= {key for key in own[row] if len(values[key]) > 1 and key not in _ELSEWHERE}
    timed = [row for row, (naming, identity) in enumerate(rows) if evicts(identity) and naming.reads is None]
    if any(_WHEN[0] in rows[row][0].changed for row in timed) or len({schedule(rows[row][1]) for row in timed}) > 1:
        for row in timed:
            found[row].add(_WHEN[0])
    presets = [[naming.policy, naming.task, naming.model] for naming, _ in rows]
    rest = [_key({**f, "code": None, "presets": p}) for f, p in zip(fields, presets, strict=True)]
    for members in _alike(rest):
        if len({_key(fields[row].get("code")) for row in members}) > 1:
            for row in members:
                found[row].add("code")
    return found


def columns(identity: Mapping[str, Any], keys: Iterable[str]) -> dict[str, str]:
    """Those of the fields that no label tells, as text by name."""
    fields = flat(identity)
    return {key: _text(fields[key]) for key in sorted(keys) if key in fields and _root(key) not in HOMES}


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


def _class(name: str) -> str:
    return name.rpartition(".")[2] if name.startswith(("kvbench.", "kvpress.")) else name


def _when(identity: Mapping[str, Any], shown: Collection[str]) -> str:
    """What is compressed where that is the context alone, the schedule where it is to be shown, the decoding rule."""
    words = ["compress=context"] if compressed(identity) == "context" and not keeps_all(identity) else []
    words += [schedule(identity)] if {"policy.schedule", "policy.schedule.size"} & set(shown) else []
    if "schedule" in identity["policy"] and (evicts(identity) or {*_WHEN[2:]} & set(shown)):
        words.append(_decoding(identity["policy"]["schedule"]))
    return ", ".join(words)


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return text if len(text) <= _LONGEST else f"...{text[-_LONGEST:]}"


def _key(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _root(key: str) -> str:
    return key.partition(".")[0]


def _below(key: str) -> str:
    return key.partition(".")[2]


def _alike(names: Sequence[str]) -> list[list[int]]:
    """The rows of the same name, together."""
    members: defaultdict[str, list[int]] = defaultdict(list)
    for row, name in enumerate(names):
        members[name].append(row)
    return list(members.values())

"""Labels of runs: names of presets with the fields that differ."""

import copy
from typing import Any

import pytest

from kvbench.results.labels import Naming, differing, keeps_all, names

PARTS = "kvbench.policies"
IDENTITY: dict[str, Any] = {
    "version": 2,
    "model": {"sha256": "abc"},
    "dtype": "float32",
    "policy": {
        "class": f"{PARTS}.policy.Policy",
        "scorer": {"class": f"{PARTS}.scorers.snapkv.SnapKV", "window": 32, "kernel": 7},
        "value": None,
        "filter": None,
        "store": {"class": f"{PARTS}.stores.dense.Dense"},
        "schedule": {"class": f"{PARTS}.schedule.Prompt", "decode": "grow", "late": False},
    },
    "budget": 64,
    "task": {"class": "kvbench.tasks.niah.Niah", "name": "niah", "lengths": [2048]},
    "seed": 0,
    "generation": {"decoding": "greedy", "max_prompt_tokens": None},
    "code": "c0de",
}


def ran(**fields: object) -> dict[str, Any]:
    """The identity with fields set by their dotted names, written with __ for the dot."""
    identity = copy.deepcopy(IDENTITY)
    for name, value in fields.items():
        *above, last = name.split("__")
        part = identity
        for key in above:
            part = part[key]
        part[last] = value
    return identity


def naming(*changed: str, policy: str = "snapkv", reads: str | None = None) -> Naming:
    return Naming(policy, "pocket", "niah", changed, reads)


def labels(*rows: tuple[Naming, dict[str, Any]]) -> list[str]:
    """The labels of policies that stand in one table."""
    return [names(n, i, shown)["policy"] for (n, i), shown in zip(rows, differing(rows), strict=True)]


BLOCKS = {"class": f"{PARTS}.schedule.Blocks", "size": 128, "decode": "evict", "order": "evict_then_attend"}


@pytest.mark.parametrize(
    ("named", "identity", "expected"),
    [
        (naming(), ran(), ("snapkv", "pocket", "niah")),
        (
            naming("policy.scorer.window", "task.lengths"),
            ran(policy__scorer__window=16, task__lengths=[512]),
            ("snapkv(scorer.window=16)", "pocket", "niah(lengths=[512])"),
        ),
        (naming("policy.value", policy="caote"), ran(), ("caote(value=null)", "pocket", "niah")),
        (
            naming("policy.scorer"),  # another module's class is not taken for ours
            ran(policy__scorer={"class": "mine.SnapKV"}),
            ("snapkv(scorer=mine.SnapKV)", "pocket", "niah"),
        ),
        (
            naming("policy.schedule", "policy.schedule.size", "policy.schedule.decode", "policy.schedule.order"),
            ran(policy__schedule=BLOCKS),  # when it evicts has columns of its own
            ("snapkv(schedule.order=evict_then_attend)", "pocket", "niah"),
        ),
        (
            naming("generation.max_prompt_tokens"),
            ran(generation__max_prompt_tokens=512),
            ("snapkv", "pocket(max_prompt_tokens=512)", "niah"),
        ),
        (
            naming("policy.scorer"),
            ran(policy__scorer=None, budget=None),
            ("snapkv(scorer=null) = full", "pocket", "niah"),
        ),
    ],
)
def test_a_label_combines_the_name_with_the_fields_that_are_not_the_presets(
    named: Naming, identity: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    assert names(named, identity) == dict(zip(("policy", "model", "task"), expected, strict=True))


def test_a_policy_with_a_pre_pass_is_not_the_full_cache() -> None:
    assert keeps_all(ran(policy__scorer=None))
    assert not keeps_all(ran(policy__scorer=None, policy__pre_pass={"class": "GemFilter"}))


def test_rows_that_differ_in_a_field_all_show_it_the_presets_value_too() -> None:
    narrow = naming("policy.scorer.window"), ran(policy__scorer__window=16)
    tova = naming(policy="tova"), ran(policy__scorer={"class": "TOVA"}, policy__schedule=BLOCKS)
    assert labels((naming(), ran()), narrow, tova) == ["snapkv(scorer.window=32)", "snapkv(scorer.window=16)", "tova"]
    assert differing([(naming(), ran()), (naming(), ran(seed=1))]) == [{"seed": 0}, {"seed": 1}]
    assert differing([(naming(), ran()), (naming(), ran(code="n3w"))]) == [{"code": "c0de"}, {"code": "n3w"}]
    assert differing([(naming(), ran()), (naming(), ran(code="n3w", seed=1))]) == [{"seed": 0}, {"seed": 1}]

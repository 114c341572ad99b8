"""The same variants through kvpress, one run after the other, and through the engine as rows.

Like with like: only policies that both have, brought to the same sets (kvpress's pooling and its one set per layer for
TOVA), at the same budgets, after the whole prompt, growing afterwards. Equal answers show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvbench.engine.sequence import Request
from kvbench.policies.policy import Policy
from kvbench.terminal.errors import UsageError
from kvbench.tools.bench import rivals
from kvbench.tools.bench.cost import Cost, together
from kvbench.tools.bench.generation import Run
from kvbench.tools.bench.journal import Record
from kvbench.tools.bench.providers import ours, random_ids

LIKE: Mapping[str, Mapping[str, Any]] = {
    "streamingllm": {},
    "snapkv": {"pool": "avg"},
    "tova": {"granularity": "layer"},
    "knorm": {},
    "ada_snapkv": {"pool": "avg"},
}
"""Policies kvpress has too, and the fields with which ours keep what its presses keep (TOVA's keeps the last token)."""
USUAL = tuple(f"kvpress_{slug}" for slug in LIKE)


@dataclass(frozen=True)
class Pressed:
    """A variant of both: the rival's name, and our policy at its budget."""

    rival: str
    policy: Policy


def variants(names: Sequence[str], budgets: Sequence[int]) -> list[Pressed]:
    """Every one of these rivals at every budget, the smallest budgets first."""
    return [Pressed(name, _ours(name, budget)) for budget in budgets for name in names]


def _ours(name: str, budget: int) -> Policy:
    slug = name.removeprefix("kvpress_")
    policy = ours(slug, budget, schedule="prompt", decode="grow", **LIKE[slug]).policy
    assert policy is not None
    return policy


def chosen(asked: list[str] | None, policies: Sequence[str] | None) -> tuple[list[str], str]:
    """The rivals to run, of these policies only if any are named, and the sentence that says why there are none.

    UsageError for one that prunes no prompt. No sentence where none was asked for.
    """
    for name in asked or ():
        if name not in USUAL:
            raise UsageError(f"rivals={name} is not one of the sweep's, choose from {', '.join(USUAL)} or rivals=none")
    if asked == []:
        return [], ""
    wanted = [name for name in USUAL if policies is None or name.removeprefix("kvpress_") in policies]
    if not wanted:
        return [], f"kvpress has none of {', '.join(policies or ())}"
    present, _ = rivals.chosen(asked or wanted, ())
    return present, "" if present else f"kvpress is not installed: pip install {rivals.KVPRESS}"


def one_round(model: PreTrainedModel, pairs: Sequence[Pressed], length: int, new: int, warm_up: int) -> Record:
    """Every variant of one prompt both ways, half of the runs of kvpress before the rows and half after.

    warm_up: prompt tokens of the untimed runs before them.
    """
    ids, half = random_ids(model, 1, length), len(pairs) // 2
    policies = [pair.policy for pair in pairs]
    one_by_one(model, ids[:, :warm_up], pairs, 2)
    together(model, Request(ids[:, :warm_up], 2), policies)
    before = one_by_one(model, ids, pairs[:half], new)
    rows = together(model, Request(ids, new), policies)
    theirs = before + one_by_one(model, ids, pairs[half:], new)
    return {
        "kvpress_runs": theirs.figures(),
        "rows": rows.figures(),
        "variants": len(pairs),
        "equal_answers": theirs.equal_answers(rows),
    }


def one_by_one(model: PreTrainedModel, ids: Tensor, pairs: Sequence[Pressed], new: int) -> Cost:
    """kvpress's runs of a prompt [1,T], one after the other."""
    cost = Cost(0.0, 0.0, 0, [])
    for pair in pairs:
        assert isinstance(pair.policy.budget, int)
        run = Run(model, rivals.provider(pair.rival, min(pair.policy.budget, ids.shape[1] - 1), ids.shape[1]), ids)
        prefill, decode, tokens = run.prefill(), 0.0, []
        tokens.append(int(run.token))
        for _ in range(new - 1):
            decode += sum(run.decode(1))
            tokens.append(int(run.token))
        cost += Cost(prefill, decode, run.held_bytes, [tokens])
    return cost

"""A protection of one's own, docs/examples/newest_turn.py: its tokens stay in prompts, turns and recorded steps."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from kv_models import prompt, tiny
from kv_runs import ended, finish, kept_now
from op_tape import Tape, record

from kvbench import make_policy
from kvbench.cache.attend.triton import TritonBackend
from kvbench.cache.hook import prepare
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.sequence import LiveSequence, Request, script_of
from kvbench.policies.policy import Policy
from kvbench.policies.schedule import Prompt

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))

from newest_turn import NewestTurn

TURNS, NEW = (56, 21), 12
TURN = {*range(56, 77)}


def protecting(slug: str, budget: int, **fields: object) -> Policy:
    policy = make_policy(slug, budget, **fields)
    return replace(policy, schedule=replace(policy.schedule, protect=NewestTurn()))


def conversation(turns: tuple[int, ...] = TURNS) -> Request:
    return Request(script_of(torch.tensor([prompt(sum(turns))]), turns=turns), NEW)


def heads(row: LiveSequence) -> list[set[int]]:
    assert row.error is None
    assert row.cache is not None
    return [{*head} for layers in kept_now(row.cache) for layer in layers for head in layer]


@pytest.mark.parametrize("slug", ["knorm", "h2o", "tova", "ada_snapkv", "cake"])
def test_the_newest_turn_is_held_by_every_head(slug: str) -> None:
    fields = {"scorer.window": 8} if slug in ("ada_snapkv", "cake") else {}
    plain, own = ended(
        prepare(tiny()), [conversation()], [make_policy(slug, 60, **fields), protecting(slug, 60, **fields)]
    )
    assert all(head >= TURN for head in heads(own))
    assert slug in ("h2o", "cake") or not all(head >= TURN for head in heads(plain))


def test_sequences_with_turns_of_their_own_share_steps_on_both_backends_and_recorded() -> None:
    model, policies, found = prepare(tiny(dtype=torch.float32)), [protecting("knorm", n) for n in (40, 55)], []
    for graph in (None, False, True):
        with (
            nullcontext() if graph is None else patch("kvbench.cache.attend.backend_of", lambda like: TritonBackend()),
            patch("torch.cuda.CUDAGraph", Tape),
            patch("torch.cuda.graph", record),
        ):
            before, flight = Tape.replays, DecodeBatch(model, cuda_graph=bool(graph))
            rows = [flight.admit([conversation((60 + n, 21))], [policy])[0][0] for n, policy in enumerate(policies)]
            finish(flight)
            assert (Tape.replays > before) == bool(graph)
        found.append([(row.tokens, heads(row)) for row in rows])
        for n, row in enumerate(rows):
            assert all({*range(60 + n, 81 + n)} <= head for head in heads(row))
    assert found[0] == found[1] == found[2]


def test_a_turn_without_room_is_refused() -> None:
    (row,) = DecodeBatch(prepare(tiny())).admit([conversation()], [protecting("knorm", 20)])[0]
    assert "a turn of 21 tokens, 0 first and 0 newest tokens exceed the budget of 20" in str(row.error)


def test_what_a_protection_of_ones_own_refuses() -> None:
    class Idle(NewestTurn):
        no_effect = ("grow",)

    class Single(NewestTurn):
        single = True

    with pytest.raises(ValueError, match=r"protect=.*Idle.* need decode=evict: they have no effect with decode=grow"):
        Prompt(decode="grow", protect=Idle())
    with pytest.raises(ValueError, match="keeps single tokens in every layer, which paged_knorm does not support"):
        make_policy("paged_knorm", 64, **{"schedule.protect": Single()})

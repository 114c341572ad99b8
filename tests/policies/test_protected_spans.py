"""protect=span: the parts of a prompt that a task names stay, inside the budget."""

from dataclasses import replace

import pytest
import torch
from kv_models import prompt, tiny
from kv_runs import assert_alone, ended

from kvbench import make_policy
from kvbench.engine.generate import generate_tokens
from kvbench.engine.sequence import Request, script_of
from kvbench.errors import ConfigError
from kvbench.policies.policy import Policy
from kvbench.run.run import build_run
from kvbench.run.run_config import run_config


def test_parts_that_a_task_names_stay_in_prompt_and_decoding() -> None:
    model, spans = tiny(), ((10, 16), (30, 33))
    model.set_attn_implementation("kvbench")
    ids, stays = torch.tensor([prompt(60)]), {*range(10, 16), *range(30, 33)}
    for slug in ("knorm", "h2o", "snapkv", "ada_snapkv", "caote_tova", "chunkkv_snapkv"):
        for how in ({"decode": "grow"}, {"decode": "evict"}):
            fields = how if "snapkv" not in slug else how | {"scorer.window": 4}
            held = {}
            for protect in ("none", "span"):
                policy = make_policy(slug, 20, **fields)
                policy = replace(policy, schedule=replace(policy.schedule, protect=protect))
                run = generate_tokens(model, ids, policy, max_new_tokens=9, protected=spans)
                positions = [head for layer in run.cache.attention_layers for head in layer.positions[0].tolist()]
                held[protect] = [stays <= set(head) for head in positions]
                assert int(run.cache.kept_tokens().sum()) == 2 * 2 * (20 + 8 * (how["decode"] == "grow"))
            assert all(held["span"]), slug
            assert not all(held["none"]), slug


def test_sequences_of_a_batch_keep_their_own_parts() -> None:
    model, ids = tiny(), torch.tensor([prompt(60)])
    model.set_attn_implementation("kvbench")
    policies = [make_policy("h2o", 20), make_policy("h2o", 20)]
    policies[1] = replace(policies[1], schedule=replace(policies[1].schedule, protect="span"))
    for row in ended(model, [Request(script_of(ids), 9, protected=((10, 16),))], policies):
        assert_alone(model, row)


def test_parts_that_cannot_stay_are_refused_in_a_sentence() -> None:
    model, ids = tiny(), torch.tensor([prompt(60)])
    model.set_attn_implementation("kvbench")

    def protecting(slug: str, budget: int) -> Policy:
        policy = make_policy(slug, budget, decode="grow")
        return replace(policy, schedule=replace(policy.schedule, protect="span"))

    for slug, spans, words in (
        ("knorm", ((0, 21),), "protect=span keeps 21 tokens of the prompt"),
        ("snapkv", ((0, 10),), "always keeps the newest 32"),
        ("knorm", (), "this prompt has none"),
    ):
        with pytest.raises(ValueError, match=words):
            generate_tokens(
                model, ids, protecting(slug, 40 if slug == "snapkv" else 20), max_new_tokens=1, protected=spans
            )
    for slug, budget in (("cake", 64), ("paged_knorm", 64), ("finch", 64)):
        with pytest.raises(ValueError, match="protect=span keeps single tokens in every layer"):
            protecting(slug, budget)
    with pytest.raises(ConfigError, match="task niah names none: use task=instructions"):
        build_run(run_config("pocket", "snapkv", "niah", budget=64, protect="span"))

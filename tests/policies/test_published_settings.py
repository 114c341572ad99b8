"""Settings that papers publish: defaults of parts, CAKE's temperatures and ablations in conf/."""

import pytest
from command_lines import grids_of

from kvbench import make_policy
from kvbench.policies.allocators.cake import P2A
from kvbench.policies.allocators.pyramid import Pyramid
from kvbench.policies.allocators.random import Random
from kvbench.policies.allocators.uniform import Uniform
from kvbench.policies.scorers.cake import Cake
from kvbench.policies.scorers.lagkv import LagKV
from kvbench.policies.scorers.rkv import RKV
from kvbench.policies.scorers.scorer import Scorer
from kvbench.policies.scorers.snapkv import SnapKV

PUBLISHED = {
    ("llama31_8b_instruct", 128): (1.6, 0.6),
    ("llama31_8b_instruct", 1024): (1.6, 0.4),
    ("llama2_7b_chat", 128): (0.9, 2.3),
    ("llama2_7b_chat", 1024): (1.9, 1.8),
    ("llama2_13b_chat", 128): (1.8, 2.0),
    ("llama2_13b_chat", 1024): (0.5, 0.4),
    ("mistral_7b_instruct_v03", 128): (1.0, 0.8),
    ("mistral_7b_instruct_v03", 1024): (0.8, 0.5),
    ("qwen25_7b_instruct", 128): (0.4, 0.6),
    ("qwen25_7b_instruct", 1024): (1.5, 0.6),
}
ABLATIONS = {
    "cake_alloc_uniform": ("mean_var", Uniform()),
    "cake_alloc_pyramid": ("mean_var", Pyramid(beta=20.0)),
    "cake_alloc_random": ("mean_var", Random(seed=0)),
    "cake_ind_mean": ("mean", P2A()),
    "cake_ind_var": ("var", P2A()),
    "cake_ind_mean_times_var": ("product", P2A()),
    "cake_alloc_uniform_ind_mean": ("mean", Uniform()),
    "cake_alloc_h_ind_mean": ("mean", P2A(tau2=float("inf"))),
}


@pytest.mark.parametrize(
    ("slug", "part", "fields"),
    [
        ("snapkv", SnapKV(), {"window": 32, "kernel": 7, "pool": "max"}),
        ("lagkv", LagKV(), {"lag": 128, "sinks": 4}),
        ("rkv", RKV(), {"window": 8, "kernel": 7, "lam": None}),
    ],
)
def test_a_part_without_arguments_has_the_published_settings(
    slug: str, part: Scorer, fields: dict[str, object]
) -> None:
    assert {name: vars(part)[name] for name in fields} == fields
    assert make_policy(slug, 64).scorer == part


@pytest.mark.parametrize("table", ["table5", "table6", "table7", "table8", "table9"])
def test_published_temperatures_belong_to_a_model_and_a_budget(table: str) -> None:
    """And to nothing else: where the authors publish none, the experiment sets none."""
    for sweep in grids_of(f"cake/{table}"):
        pairs = {(model, int(budget)) for model in sweep["model"] for budget in sweep.get("budget", ())}
        given = [
            float(sweep[f"policy.allocator.{tau}"][0]) for tau in ("tau1", "tau2") if f"policy.allocator.{tau}" in sweep
        ]
        if sweep["policy"] == ("cake",) and given:
            assert [tuple(given)] == [PUBLISHED[pair] for pair in pairs]
        else:
            assert not given
            assert sweep["policy"] != ("cake",) or not pairs & set(PUBLISHED)


@pytest.mark.parametrize("slug", list(ABLATIONS))
def test_an_ablation_differs_from_cake_in_what_its_name_says(slug: str) -> None:
    indicator, allocator = ABLATIONS[slug]
    policy, cake = make_policy(slug, 128), make_policy("cake", 128)
    assert isinstance(policy.scorer, Cake)
    assert policy.scorer.indicator == indicator
    assert policy.allocator == allocator
    assert (policy.merger, policy.store, policy.schedule, policy.value) == (
        cake.merger,
        cake.store,
        cake.schedule,
        cake.value,
    )

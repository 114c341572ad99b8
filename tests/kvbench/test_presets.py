"""Policies by name: what the presets of CAOTE's study are made of, and what cannot be made."""

import math
from dataclasses import replace
from typing import Any

import pytest

from kvbench import make_policy
from kvbench.policies.allocators.ada import Ada
from kvbench.policies.allocators.uniform import Uniform
from kvbench.policies.policy import layer_budgets
from kvbench.policies.schedule import Blocks, Prompt
from kvbench.policies.scorers.snapkv import SnapKV
from kvbench.policies.values.caote import Caote
from kvbench.policies.values.fastcaote import FastCaote
from kvbench.run.run import build_run
from kvbench.run.run_config import run_config

BASES = ["random", "knorm", "streamingllm", "local_window", "h2o", "h2o_norecent", "tova", "snapkv"]
WRAPPED = [f"{wrapper}_{base}" for wrapper in ("caote", "fastcaote") for base in ("h2o", "tova", "snapkv", "knorm")]


@pytest.mark.parametrize("slug", WRAPPED)
def test_wrappers_default_to_blocks_of_128_and_evict_while_decoding(slug: str) -> None:
    policy = make_policy(slug, 64)
    assert policy.schedule == Blocks(decode="evict", order="attend_then_evict", size=128)
    assert type(policy.value) is (FastCaote if slug.startswith("fast") else Caote)
    assert policy.value == type(policy.value)(gqa="alpha_mean", norm_domain="all", f_norm="auto", eps=1e-6)


def test_a_wrapper_may_take_a_part_of_the_policy_into_its_own() -> None:
    own = make_policy("cake_alloc_pyramid", 64).allocator
    assert make_policy("ada_cake_alloc_pyramid", 64).allocator == Ada(base=own)
    assert own != Uniform()


@pytest.mark.parametrize("slug", BASES)
def test_bases_default_to_the_whole_prompt_and_only_snapkv_grows(slug: str) -> None:
    policy = make_policy(slug, 64)
    assert policy.schedule == Prompt(decode="grow" if slug == "snapkv" else "evict", order="attend_then_evict")
    assert policy.granularity == "kv_head"
    assert policy.value is None


WITH_STORE = ["fp8", "int8", "int4", "nvfp4", "fp8_per_token_head", "turboquant", "think", "kivi", "ott", "zipcache"]


@pytest.mark.parametrize("store", WITH_STORE)
def test_a_store_s_suffix_keeps_the_schedule_of_the_policy_or_is_refused(store: str) -> None:
    """No suffix, prefix or new block size drops a field of the schedule (every, protect, rerotate, order)."""
    for slug in ("random_attention", "rkv", "h2o", "cake", "finch", "caote_rkv", "snapkv", "caote_finch", "tova"):
        policy = make_policy(slug, 256)
        if policy.schedule.decode == "grow" or store in WITH_STORE[:6]:
            assert make_policy(f"{slug}_{store}", 256).schedule == policy.schedule
        else:
            with pytest.raises(ValueError, match="no single token can be evicted: use decode=grow"):
                make_policy(f"{slug}_{store}", 256)
            assert make_policy(f"{slug}_{store}", 256, decode="grow").schedule == replace(
                policy.schedule, decode="grow", every=1, protect="none"
            )
    assert make_policy("caote_finch", 256).schedule.rerotate
    assert make_policy("finch_chunks", 256, schedule="prompt").schedule == make_policy("finch", 256).schedule
    own = {"order": "evict_then_attend"}
    assert make_policy("caote_tova", 256, schedule="prompt", **own).schedule.order == "evict_then_attend"


def test_a_field_goes_to_the_part_that_has_it() -> None:
    dotted: dict[str, Any] = {"scorer.kernel": 3}
    policy = make_policy("caote_snapkv", 64, window=8, gqa="group_l2", granularity="layer", **dotted)
    assert policy.scorer == SnapKV(window=8, kernel=3)
    assert policy.value == Caote(gqa="group_l2")
    assert policy.granularity == "layer"


@pytest.mark.parametrize(
    ("budget", "length", "budgets"),
    [
        (64, None, [64, 64, 64]),
        (0.5, 100, [50, 50, 50]),
        (0.25, 30, [8, 7, 7]),  # 22.5 rounds to 22
        (0.61, 37, [23, 23, 22]),  # 67.71 rounds to 68
        (0.05, 21, [1, 1, 1]),  # 3.15 rounds to 3
    ],
)
def test_a_share_is_dealt_evenly_and_the_first_layers_get_one_more(
    budget: float, length: int | None, budgets: list[int]
) -> None:
    assert layer_budgets(make_policy("tova", budget), 3, length) == budgets


@pytest.mark.parametrize("budget", [0, -3, 1.0, 1.5, 0.0, -0.2, math.nan, math.inf, True, "many", None])
def test_meaningless_budgets_are_refused(budget: Any) -> None:
    with pytest.raises(ValueError, match="budget"):
        make_policy("tova", budget)


def test_a_share_that_leaves_less_than_the_window_is_refused_once_the_length_is_known() -> None:
    with pytest.raises(ValueError, match=r"budget of 10 tokens.*too small for snapkv: it must be at least 32"):
        layer_budgets(make_policy("snapkv", 0.1), 4, 100)


@pytest.mark.parametrize(
    ("slug", "part"), [("snapkv", "scorer"), ("caote_h2o", "scorer"), ("h2o_fp8", "scorer"), ("quest", "reader")]
)
def test_a_preset_without_the_part_that_uses_its_budget_is_refused(slug: str, part: str) -> None:
    sentence = f"policy.{part}=null is not allowed: without it the policy is another one"
    with pytest.raises(ValueError, match=sentence):
        make_policy(slug, 64, **{part: None})
    with pytest.raises(ValueError, match=sentence):
        build_run(run_config("pocket", slug, **{f"policy.{part}": None}))

"""Error messages of parts with a wrong field, and of policies whose parts contradict each other."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from kv_presets import INCOMPLETE
from torch import Tensor

from kvbench import make_policy, preset_names
from kvbench.policies.checks import choice, number, whole_number
from kvbench.policies.needs import Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.policy import Policy
from kvbench.policies.scorers.scorer import Scorer


def test_a_choice_names_all_that_a_field_may_be() -> None:
    choice("pool", "avg", "max", "avg", "none")
    choice("bits", 4, 2, 4, 8)
    with pytest.raises(ValueError, match=r"^pool must be max, avg or none, got 'sum'$"):
        choice("pool", "sum", "max", "avg", "none")
    with pytest.raises(ValueError, match=r"^norm must be l1 or l2, got 'l3'$"):
        choice("norm", "l3", "l1", "l2")
    with pytest.raises(ValueError, match=r"^bits must be 2, 4 or 8, got 3$"):
        choice("bits", 3, 2, 4, 8)


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (-1, "-1"), (1.0, "1.0"), (True, "true"), ("1", "'1'"), (None, "null")]
)
def test_a_whole_number_is_neither_smaller_nor_a_float_nor_true(value: object, shown: str) -> None:
    whole_number("m", 1, 1)
    with pytest.raises(ValueError, match=f"^m must be a whole number of at least 1, got {shown}$"):
        whole_number("m", value, 1)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(-0.1, "-0.1"), (1.1, "1.1"), (math.nan, "nan"), (True, "true"), ("0.5", "'0.5'"), (None, "null")],
)
def test_a_number_lies_between_its_ends(value: object, shown: str) -> None:
    number("beta", 0, 0, 1)
    number("beta", 1.0, 0, 1)
    with pytest.raises(ValueError, match=f"^beta must be a number from 0 to 1, got {shown}$"):
        number("beta", value, 0, 1)


def test_a_number_is_finite_and_may_have_an_end_it_does_not_reach() -> None:
    number("gamma", 1e9, 0)
    number("share", 0.999, 0, below=1)
    with pytest.raises(ValueError, match=r"^gamma must be a number of at least 0, got inf$"):
        number("gamma", math.inf, 0)
    with pytest.raises(ValueError, match=r"^share must be a number of at least 0 and below 1, got 1.0$"):
        number("share", 1.0, 0, below=1)


@dataclass(frozen=True)
class Backwards(Scorer):
    def protects(self, budget: int) -> Protected:
        return Protected(newest=-3)

    def score(self, observation: Observation, state: State) -> Tensor:
        return -observation.positions.float()


def test_a_scorer_cannot_protect_fewer_tokens_than_none() -> None:
    with pytest.raises(ValueError, match=r"newest tokens that mine's scorer protects must be .* at least 0, got -3"):
        Policy(scorer=Backwards(), budget=16, name="mine")


def named_choices() -> Iterator[tuple[Any, str, tuple[object, ...]]]:
    """One part of every class that presets are made of, with each of its fields of named values."""
    parts = {}
    for policy in (make_policy(slug, 128) for slug in preset_names() if not slug.startswith(INCOMPLETE)):
        parts |= {type(part): part for part in (policy, *vars(policy).values()) if is_dataclass(part)}
    for part in parts.values():
        for name, hint in get_type_hints(type(part)).items():
            if get_origin(hint) is Literal:
                yield part, name, get_args(hint)


@pytest.mark.parametrize(("part", "name", "allowed"), list(named_choices()), ids=str)
def test_a_field_of_named_values_refuses_any_other(part: Any, name: str, allowed: tuple[object, ...]) -> None:
    words = " or ".join(", ".join(map(str, allowed)).rsplit(", ", 1))
    with pytest.raises(ValueError, match=f"^{name} must be {words}, got 'other'$"):
        replace(part, **{name: "other"})


D2O_SHARES = {"_target_": "kvbench.policies.allocators.d2o.InverseVariance"}
CAM = {"_target_": "kvbench.policies.mergers.cam.CaM"}


@pytest.mark.parametrize(
    ("slug", "fields", "sentence"),
    [
        # values of fields
        ("cam", {"sinks": -1}, "sinks must be 'half' or a number of tokens >= 0, got -1"),
        ("cake", {"allocator.window": 1}, "window must be at least 2 queries"),
        ("cake", {"kernel": 4}, "kernel must be an odd number"),
        ("cake", {"decode_rule": "none"}, "decode=grow"),
        ("cake", {"stats_dtype": "model"}, "exists in scorer and allocator"),
        ("cake", {"tau1": 0.0}, "tau1 must be a temperature above 0, got 0.0"),
        ("d2o", {"recent": "half"}, "recent must be 'share' or a number of tokens >= 1, got 'half'"),
        ("gear", {"outlier_ratio": 1.0}, "outlier_ratio must be a number of at least 0 and below 1, got 1.0"),
        ("h2o", {"recent": True}, "recent must be 'half' or a number of tokens >= 0, got true"),
        ("headkv_r", {}, "importance= must be the path of a JSON file"),
        ("kivi", {"group": 32, "residual": 100}, "residual=100 must be 0 or a multiple of group=32"),
        ("kvec", {"extended": 8}, "extended must be a whole number of at least 16, got 8"),
        ("leverage", {"epsilon": 0}, "epsilon must be a number of at least 1e-12, got 0"),
        ("oracle_topp", {"mass": 1.5}, "mass"),
        ("ott", {"skip_layers": [0, "1"]}, "skip_layers must be a whole number of at least 0, got '1'"),
        ("pyramidkv", {"beta": 0.5}, "beta must be a number of at least 1, got 0.5"),
        ("roco", {"block_share": 1.5}, "block_share must be a number of at least 0 and below 1, got 1.5"),
        ("zipcache", {"bits": 8}, "bits must be 2 or 4 for zipcache"),
        ("snapkv", {"kernel": 4}, "kernel must be an odd number of tokens, got 4"),
        ("snapkv", {"window": 0}, "window must be at least 1 query, or 0 with the pre-pass Lookahead, as in laq"),
        ("laq", {"tokens": 0}, r"pre_pass\.tokens must be a whole number of at least 1, got 0"),
        ("laq", {"draft": "model"}, r"pre_pass\.draft must be evicted or full, got 'model'"),
        ("paged_h2o", {"heads": "all"}, r"selection\.heads must be layer, own or model, got 'all'"),
        ("paged_h2o", {"selection.length": 32}, r"selection\.length=32 differs from the 16 slots of store\.page"),
        ("rocketkv", {"max_new": 0}, r"reader\.max_new must be a whole number of at least 1, got 0"),
        ("threshold_knorm", {}, r"allocator\.tau must be the least score of a token that stays, .* got null"),
        ("threshold_knorm", {"tau": -3.0, "matched": "heads"}, "matched must be none, uniform or global, got 'heads'"),
        ("threshold_knorm", {"keep": 0.3}, "keep=0.3 needs percentiles of scores, which only a gate's file has"),
        ("tova", {"scorer.window": 3}, "policy tova has no field 'scorer.window'"),
        # fields and parts that exclude each other
        ("caote_caote_h2o", {}, "caote_h2o is value-aware already"),
        ("caote_kvec", {}, "kvec gives the tokens that it always keeps an infinite score.*use scorer.preserve=literal"),
        ("ada_cake", {}, "ada wraps allocators that share over layers by rule"),
        ("ada_snapkv_gear", {}, "gear's value groups span all KV heads"),
        ("ada_snapkv_kcvc", {"group": None}, "kcvc with group=null cannot hold: set a group"),
        ("caote_cam", {}, "ranks tokens by position"),
        ("caote_full", {}, "full has no scorer, so caote_ has nothing to change"),
        ("fair_quest", {}, "quest has no scorer"),
        ("threshold_pyramidkv", {"tau": 1.0}, "divides its budget by Pyramid, which threshold_ would replace"),
        ("chunkkv_fair_knorm", {}, "selects tokens by Fair already"),
        ("lookahead_laq", {}, "has a pre-pass already"),
        ("lookahead_kvzip", {}, "already has a pre-pass"),
        ("lookahead_h2o", {}, "its scorer has none that ends the prompt: use a scorer with window="),
        ("lookahead_full", {}, "full has no scorer, so lookahead_ has nothing to change"),
        ("lookahead_cake", {}, "allocators that read each layer's statistics"),
        ("fair_lookahead_snapkv", {}, "without lookahead"),
        ("fair_cake", {}, "its layers share the budget by a statistic: use an allocator without statistics"),
        ("critical_mass_knorm", {}, "its scorer KNorm has none"),
        *((f"threshold_{s}", {"tau": 0.5}, "another score when other tokens") for s in ("keydiff", "h2o", "snapkv")),
        ("critical_threshold_knorm", {"tau": -1.0}, "its Critical gives a token another score when other tokens come"),
        ("paged_ada_snapkv", {}, "its allocator Ada gives them different budgets"),
        ("paged_cake", {}, "its allocator P2A gives them different budgets"),
        ("paged_pyramidkv", {"heads": "model"}, "of all layers, and its allocator Pyramid gives them different"),
        ("caote_knorm", {"gqa": "group_l2"}, "scores KV heads, not query heads"),
        ("d2o", {"merge": "average", "weight": "sim_mean"}, "cannot be combined with weight=sim_mean"),
        ("d2o", {"norm": "head_minmax", "allocation": "reciprocal"}, "norm=head_minmax compares heads"),
        ("p2a_tova", {"window": None}, r"allocator\.window=32"),
        ("snapkv", {"allocator": D2O_SHARES}, "reads attention_sum, which its scorer SnapKV does not keep"),
        ("snapkv", {"merger": CAM}, "merger of snapkv reads attention_sum"),
        ("snapkv_kivi", {"decode": "evict"}, "no single token can be evicted: use decode=grow"),
        ("snapkv_ott", {"pool_scope": "layer"}, "heads cannot share traced ones: use pool_scope=head"),
        # schedules
        ("tova", {"schedule": "prompt", "block": 8}, "block=8 has no meaning with schedule=prompt"),
        ("fair_snapkv", {"schedule": "blocks"}, "which must be one block .*: use schedule=prompt"),
        ("finch", {"decode": "evict", "late": True}, "evicts before the first token is decoded and does not support"),
        ("lookahead_caote_snapkv", {"schedule": "blocks"}, "use schedule=prompt"),
        ("paged_h2o", {"every": 8}, "every must be a multiple of 16, because pages leave whole, got 8"),
        ("paged_h2o", {"heads": "model", "unit": "token", "every": 1}, "every must be 2 or more: one set"),
        ("rocketkv", {"decode": "evict"}, "evicts prompt tokens before sparse attention reads the rest"),
        ("snapkv", {"decode": "threshold"}, "decode=threshold needs the allocator Threshold: snapkv has a budget"),
        ("threshold_kvzip", {"tau": 0.1, "decode": "threshold"}, "needs scores of decoded tokens"),
        ("threshold_knorm", {"tau": -3.0, "decode": "evict"}, "needs a budget, which a threshold replaces"),
        (
            *("threshold_knorm", {"tau": -3.0, "decode": "threshold", "matched": "uniform"}),
            "decode=threshold cannot be combined with matched=uniform: use grow",
        ),
        ("cake", {"schedule": "blocks"}, "use schedule=prompt and order=attend_then_evict"),
        ("compactor", {"schedule": "blocks"}, "compactor needs the whole prompt and does not support schedule=blocks"),
        ("d2o", {"block": 32}, "needs statistics of all layers"),
        ("h2o", {"late": True, "block": 16}, "so it needs schedule=prompt"),
        ("h2o", {"late": True, "decode": "grow"}, "late=true evicts after the first decoded token"),
        ("kvec", {"schedule": "blocks"}, "needs the whole prompt"),
        ("sirllm", {"block": 16}, "needs the whole prompt"),
        ("sirllm", {"late": True}, "late=true and allocators that read each layer's statistics"),
        ("sirllm", {"order": "evict_then_attend"}, "scores a prompt after all layers have processed it"),
    ],
)  # fmt: skip
def test_a_policy_without_a_meaning_is_refused_when_it_is_built(
    slug: str, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        make_policy(slug, 64, **fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("slug", "least"),
    [
        *(("streamingllm", 4), ("d2o", 6), ("roco", 14), ("defensivekv", 33)),
        *((slug, 32) for slug in ("snapkv", "cake", "p2a_snapkv", "p2a_h2o", "p2a_tova", "pyramidkv")),
    ],
)
def test_a_budget_below_what_is_always_kept_is_refused(slug: str, least: int) -> None:
    make_policy(slug, least)
    with pytest.raises(ValueError, match=f"{least - 1} tokens .* too small for {slug}: it must be at least {least}"):
        make_policy(slug, least - 1)

"""Rows: whatever shares its prompt and its steps with others gives what it gives alone."""

from collections.abc import Callable, Sequence
from math import exp, inf, log, nan
from typing import Any
from unittest import mock

import pytest
import torch
from kv_models import FAMILIES, CodePoints, prompt, tiny
from kv_presets import COMPOSED, INCOMPLETE, STORES, evicting, kinds, protecting, reading
from kv_runs import assert_alone, ended

from kvbench import make_policy, preset_names
from kvbench.cache import eviction as evict_module
from kvbench.cache import group as group_module
from kvbench.cache.cache import BudgetError
from kvbench.cache.hook import prepare
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.generate import generate_tokens
from kvbench.engine.scores import joined, score, summary
from kvbench.engine.sequence import Request, script_of
from kvbench.policies.policy import Policy
from kvbench.policies.scorers import pooling

BUDGETS = (40, 56)
NEW = 12
OWN: dict[str, dict[str, Any]] = {"gemfilter": {"layer": 1}, **COMPOSED, **STORES}
"""Presets with fields of their own, for small models and budgets."""
OTHERS: list[tuple[str, dict[str, Any]]] = [
    *((slug, {"late": True, "decode": "evict"}) for slug in ("h2o", "d2o", "snapkv")),
    ("cam", {"store": {"_target_": "kvbench.policies.stores.ragged.Ragged"}}),
    ("d2o", {"tau_scope": "layer", "similarity": "separate"}),
    ("cake", {"cascading": False}),
    ("kvec", {"decode": "evict", "window": 2, "extended": 4}),
    ("kcvc", {"group": None, "residual": 8}),
]
"""Fields that are no preset."""
EVERY = [s for s in preset_names() if not s.startswith(INCOMPLETE) and s not in ("d2o_released", "vase", *protecting())]


def variants(slugs: Sequence[str], **fields: Any) -> list[Policy]:
    """Every policy at two budgets; those that keep everything once."""
    found = []
    for slug in slugs:
        if slug in evicting() or (slug in OWN and slug not in STORES):
            found += [make_policy(slug, budget, **OWN.get(slug, fields)) for budget in BUDGETS]
        else:
            found.append(make_policy(slug, BUDGETS[0], **STORES.get(slug, {})))
    return found


def asked(length: int, seed: int, **fields: Any) -> Request:
    given = {"max_new_tokens": NEW, "encoder": CodePoints(), "question": length - 6, **fields}
    return Request(script_of(torch.tensor([prompt(length, seed)])), **given)


def test_a_preset_of_every_kind_is_equal_alone_and_in_a_batch() -> None:
    model = prepare(tiny("llama"))
    requests = [asked(60, 1, max_new_tokens=4), asked(33, 3, max_new_tokens=3)]
    slugs = [*kinds(), *reading(), "full", *OWN]
    policies = [variants([slug])[-(place % 2)] for place, slug in enumerate(slugs)]
    policies += [make_policy(slug, BUDGETS[0], **fields) for slug, fields in OTHERS]
    for row in ended(model, requests, policies):
        assert_alone(model, row)


@pytest.mark.slow("runs every preset")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_preset_is_equal_alone_and_beside_other_prompts(family: str) -> None:
    model = prepare(tiny(family))
    windowed = getattr(model.config, "sliding_window", None)  # which refuses keys that move
    every = [slug for slug in EVERY if not (windowed and make_policy(slug, 40).schedule.rerotate)]
    requests = [asked(90, 1), asked(71, 2, max_new_tokens=5), asked(33, 3), asked(130, 4), asked(17, 5)]
    for row in ended(model, requests, variants(every)):
        assert_alone(model, row)


def test_rows_end_by_themselves() -> None:
    """By an EOS, by a stop, at their own length; the others go on."""
    model = prepare(tiny("qwen3"))
    policies = variants(("full", "tova", "knorm", "h2o"))
    first = generate_tokens(model, asked(60, 4).prompt, policies[1], max_new_tokens=NEW).tokens[0]
    requests = [
        asked(60, 4, eos_token_ids=(first[3],)),
        asked(60, 4, eos_token_ids=(first[0],), min_new_tokens=2),
        asked(80, 5, stop=lambda tokens: len(tokens) == 3),
        asked(50, 6, max_new_tokens=1),
    ]
    for row in ended(model, requests, policies):
        assert_alone(model, row)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_sixteen_bits_too_a_prompt_is_the_same_whoever_else_reads_it(dtype: torch.dtype) -> None:
    """Attention out of rows that are summed up anyway (H2O's, RoCo's) rounds its 16 bits otherwise than PyTorch's."""
    model = prepare(tiny("llama", layers=3, dtype=dtype))
    policies = variants(("full", "snapkv", "knorm", "cake", "h2o", "roco"), schedule="prompt")
    for row in DecodeBatch(model).admit([asked(200, 1)], policies)[0]:
        alone = generate_tokens(model, row.request.prompt, row.policy, max_new_tokens=1).cache
        for mine, its in zip(row.cache.layers, alone.layers, strict=True):
            for name in ("positions", "keys", "values"):
                assert torch.equal(getattr(mine, name), getattr(its, name)), f"{row.policy.name}: {name}"


@pytest.mark.parametrize("where", ["prompt", "decode"])
def test_a_broken_promise_ends_its_own_rows(where: str) -> None:
    model = prepare(tiny("llama"))
    policies = [make_policy("tova", 40), make_policy("snapkv", 40, decode="evict"), make_policy("knorm", 40)]
    excess, release = evict_module.excess_of, group_module.GroupRows.release

    def too_few(step: Any) -> int:
        """SnapKV keeps too much of the prompt."""
        return excess(step) if step.policy is not policies[1] else 0

    def none(rows: Any, slots: torch.Tensor) -> None:
        """SnapKV keeps every decoded token."""
        if rows.policy is not policies[1]:
            release(rows, slots)

    parts = {"prompt": (evict_module, "excess_of", too_few), "decode": (group_module.GroupRows, "release", none)}
    with mock.patch.object(*parts[where]):
        first = ended(model, [asked(64, 1)], policies)
    assert isinstance(first[1].error, BudgetError)
    assert "promised at most" in str(first[1].error)
    assert_alone(model, first[0])
    assert_alone(model, first[2])


def _one(logits: torch.Tensor, value: float) -> None:
    logits[..., 7] = value


BROKEN: dict[str, Callable[[torch.Tensor], object]] = {
    "one is NaN": lambda logits: _one(logits, nan),
    "one is infinite": lambda logits: _one(logits, inf),
    "all are NaN": lambda logits: logits.fill_(nan),
    "all are infinite": lambda logits: logits.fill_(inf),
    "all are masked": lambda logits: logits.fill_(-inf),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=list(BROKEN))
def test_logits_that_are_no_numbers_end_every_row_that_has_them(broken: Callable[[torch.Tensor], object]) -> None:
    model = prepare(tiny("llama"))
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: (broken(logits.data), None)[1])
    (row,) = DecodeBatch(model).admit([asked(64, 1)], [make_policy("full")])[0]
    assert isinstance(row.error, FloatingPointError)
    with pytest.raises(FloatingPointError, match="not numbers"):
        generate_tokens(model, asked(64, 1).prompt, make_policy("full"), max_new_tokens=2)
    logits = torch.zeros(1, 9)
    broken(logits)
    with pytest.raises(FloatingPointError, match="not numbers"):
        joined([score(logits, torch.tensor([3]))])


def test_masked_logits_are_numbers() -> None:
    """A model may mask tokens with -inf: they are never chosen, and the others are as likely as without the mask."""
    model = prepare(tiny("llama"))
    plain = generate_tokens(model, asked(64, 1).prompt, make_policy("full"), max_new_tokens=4)
    first = plain.tokens[0][0]
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: _only(logits.data, first))
    masked = generate_tokens(model, asked(64, 1).prompt, make_policy("full"), max_new_tokens=4)
    assert masked.tokens[0] == [first] * 4
    logits = torch.tensor([[0.0, -inf, 1.0]])
    logprobs, greedy = joined([score(logits, torch.tensor([2]))])
    assert logprobs.tolist() == pytest.approx([1 - log(1 + exp(1))])
    assert greedy.tolist() == [True]
    logprobs, _ = joined([score(logits, torch.tensor([1]))])
    assert logprobs.tolist() == [-inf]
    with pytest.raises(FloatingPointError, match="probability 0"):
        summary(-logprobs, 1, None, [])


def _only(logits: torch.Tensor, token: int) -> None:
    kept = logits[..., token].clone()
    logits.fill_(-inf)
    logits[..., token] = kept


@pytest.mark.parametrize(("slug", "part"), [("snapkv", "scorers.snapkv"), ("cake", "scorers.cake")])
def test_a_prompt_is_scored_once_for_all_budgets(slug: str, part: str) -> None:
    model = prepare(tiny("llama"))
    policies = [make_policy(slug, budget) for budget in (40, 48, 56)]
    smooth = f"kvbench.policies.{part}.smooth"
    with mock.patch(smooth, side_effect=pooling.smooth) as scored:
        rows = DecodeBatch(model).admit([asked(90, 3)], policies)[0]
    assert [row.error for row in rows] == [None] * 3
    layers = model.config.num_hidden_layers
    assert scored.call_count == (layers if slug == "cake" else 1)  # whose layers are measured one by one

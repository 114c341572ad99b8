"""A context compressed before its question: sets and answers against transformers' own cache, cut by hand."""

from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from kv_models import prompt, tiny
from kv_runs import assert_alone, finish, kept_now
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from kvbench import make_policy
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.generate import Generation, generate_tokens
from kvbench.engine.sequence import Request, script_of
from kvbench.policies.policy import Policy

CONTEXT, QUESTION, NEW, BUDGET, WINDOW = 45, 15, 6, 16, 8
IDS = torch.tensor([prompt(CONTEXT + QUESTION)])
SMALL: dict[str, Any] = {"window": WINDOW}


@cache
def model(attention: str = "kvbench", family: str = "llama") -> PreTrainedModel:
    made = tiny(family)
    made.set_attn_implementation(attention)
    return made


def asked(policy: Policy, **given: Any) -> Generation:
    return generate_tokens(model(), IDS, policy, **{"max_new_tokens": NEW, "context_tokens": CONTEXT, **given})


# --- the four methods by hand, on transformers' own attention and cache ----------------------------------------------


def _snapkv(attention: Tensor, keys: Tensor) -> Tensor:
    """Attention [H_q,T,T]: the window's queries summed, averaged over the group, max-pooled, the window itself kept."""
    sums = attention[:, -WINDOW:, :-WINDOW].sum(1).view(len(keys), -1, CONTEXT - WINDOW).mean(1)
    return F.pad(F.max_pool1d(sums, 7, stride=1, padding=3), (0, WINDOW), value=float("inf"))


def _tova(attention: Tensor, keys: Tensor) -> Tensor:
    return attention[:, -1].view(len(keys), -1, CONTEXT).mean(1)


def _knorm(attention: Tensor, keys: Tensor) -> Tensor:
    return -keys.norm(dim=-1)


Scores = Callable[[Tensor, Tensor], Tensor]
BY_HAND: dict[str, tuple[Scores, dict[str, Any]]] = {
    "snapkv": (_snapkv, SMALL),
    "tova": (_tova, {}),
    "knorm": (_knorm, {}),
}


@torch.inference_mode()
def by_hand(scores: Scores, family: str) -> tuple[list[list[list[int]]], list[int]]:
    """Positions kept of the context, and the answer: a cache of transformers, cut to what scores best, then asked."""
    eager, full = model("eager", family), DynamicCache()
    attentions = eager(IDS[:, :CONTEXT], past_key_values=full, output_attentions=True).attentions
    kept = []
    for layer, attention in zip(full.layers, attentions, strict=True):
        ranked = scores(attention[0], layer.keys[0]).sort(descending=True, stable=True).indices  # ties: the earlier
        best = ranked[:, :BUDGET].sort().values  # [H_kv,budget]
        taken = best[None, :, :, None].expand(-1, -1, -1, layer.keys.shape[-1])
        layer.keys, layer.values = layer.keys.gather(2, taken), layer.values.gather(2, taken)
        kept.append(best.tolist())
    tokens, fed, at = [], IDS[:, CONTEXT:], CONTEXT
    for _ in range(NEW):
        positions = torch.arange(at, at + fed.shape[1])[None]  # the true ones, whatever the cache holds
        before = BUDGET + at - CONTEXT
        seen = torch.ones(fed.shape[1], before + fed.shape[1], dtype=torch.bool).tril(before)
        mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)[None, None]
        logits = eager(fed, past_key_values=full, position_ids=positions, attention_mask=mask).logits
        at, fed = at + fed.shape[1], logits[:, -1:].argmax(-1)
        tokens.append(int(fed))
    return kept, tokens


@pytest.mark.parametrize(("slug", "family"), [("snapkv", "qwen3"), ("tova", "llama"), ("knorm", "qwen3")])
def test_sets_and_answers_are_those_of_a_cache_cut_by_hand_before_the_question_was_read(slug: str, family: str) -> None:
    scores, fields = BY_HAND[slug]
    kept, answer = by_hand(scores, family)
    policy = make_policy(slug, BUDGET, decode="grow", **fields)
    done = generate_tokens(model(family=family), IDS, policy, max_new_tokens=NEW, context_tokens=CONTEXT)
    later = list(range(CONTEXT, CONTEXT + QUESTION + NEW - 1))  # the last token is never stored
    assert kept_now(done.cache)[0] == [[(*head, *later) for head in layer] for layer in kept]
    assert done.tokens == [answer]


# --- every other policy: the question's tokens are decoded ones ------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "full": {},
    "h2o": {},
    "tova": {},
    "snapkv": SMALL,
    "ada_snapkv": SMALL,
    "caote_snapkv": SMALL,
    "cake": SMALL,
    "kvec": {"window": WINDOW, "extended": 12},
    "d2o": {},
    "sirllm": {},
    "kivi": {},
    "zipcache": {},
}


def test_gemfilter_chooses_among_the_contexts_tokens_and_reads_the_question_after_them() -> None:
    done = asked(make_policy("gemfilter", BUDGET, layer=1))
    assert done.cache.seen == BUDGET + QUESTION + NEW - 1
    chosen = generate_tokens(model(), IDS[:, :CONTEXT], make_policy("gemfilter", BUDGET, layer=1), max_new_tokens=1)
    assert chosen.cache.seen == BUDGET
    assert torch.equal(done.cache.layers[0].keys[:, :, :BUDGET], chosen.cache.layers[0].keys[:, :, :BUDGET])


# --- rows: one reading of the context for all policies ----------------------------------------------------------------


def test_questions_on_one_context_are_equal_alone() -> None:
    policies = [make_policy(slug, BUDGET, **fields) for slug, fields in PRESETS.items()]
    policies += [make_policy("gemfilter", BUDGET, layer=1), make_policy("snapkv", 24, **SMALL)]
    other = torch.cat([IDS[:, :CONTEXT], IDS[:, CONTEXT + 4 :].flip(-1)], dim=1)
    running = DecodeBatch(model())
    before = running.admit([Request(script_of(torch.tensor([prompt(50, seed=3)])), NEW)], policies[:3])[
        0
    ]  # in flight already
    running.step()
    requests = [Request(script_of(ids, CONTEXT), new) for ids, new in ((IDS, NEW), (other, 1), (other, NEW + 2))]
    found = running.admit(requests, policies)
    finish(running)
    for row in chain(before, *found):
        assert_alone(model(), row)


def test_a_policy_that_cannot_compress_a_context_ends_its_own_row() -> None:
    policies = [make_policy("d2o_released", BUDGET), make_policy("tova", BUDGET)]
    late, tova = DecodeBatch(model()).admit([Request(script_of(IDS, CONTEXT), 1)], policies)[0]
    assert isinstance(late.error, ValueError)
    assert "late=true" in str(late.error)
    assert tova.error is None
    assert tova.tokens == asked(policies[1], max_new_tokens=1).tokens[0]
